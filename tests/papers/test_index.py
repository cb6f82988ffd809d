"""The index of the papers names everything they number, and each entry leads somewhere."""

import os
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from fedbasin.analyze import CATALOGUE
from fedbasin.cli.app import app
from fedbasin.papers import PaperError, load_table
from fedbasin.papers.index import Item, _check, indexed_papers, load_index, page, state_of
from fedbasin.papers.results import shipped

ROOT = Path(__file__).parents[2]
NUMBERED = tomllib.loads((ROOT / "tests/papers/numbered.toml").read_text(encoding="utf-8"))
ITEMS = [(paper, item) for paper in indexed_papers() for item in load_index(paper)]
KINDS = "Table|Figure|Lemma|Theorem|Corollary|Proposition|Definition|Assumption|Algorithm"
COMMANDS = typer.main.get_command(app)
# A caption or a statement begins a line: "Table 3:", "**Theorem 1.** (...", "Figure 12. ...".
CAPTION = re.compile(rf"^[\s*<>a-z]*({KINDS})\s+([A-Z]?\.?\d+(?:\.\d+)?)(?=[\s.:*(])", re.M)


def names_of(paper):
    kinds = {kind: numbers for kind, numbers in NUMBERED[paper].items() if kind != "title"}
    return [f"{kind} {number}" for kind, numbers in kinds.items() for number in numbers]


@pytest.mark.parametrize("paper", indexed_papers())
def test_every_numbered_thing_of_a_paper_is_indexed(paper):
    assert sorted(item.name for item in load_index(paper)) == sorted(names_of(paper))


@pytest.mark.parametrize("paper", indexed_papers())
def test_the_list_is_that_of_the_text(paper):
    folder = os.environ.get("FEDBASIN_PAPERS")
    if not folder:
        pytest.skip("FEDBASIN_PAPERS names no folder of the papers' texts")
    texts = [file.read_text(encoding="utf-8") for file in Path(folder).glob("*.txt")]
    (text,) = [t for t in texts if NUMBERED[paper]["title"] in t[:200]]
    found = {f"{kind} {number}" for kind, number in CAPTION.findall(text)}
    tags = re.findall(r"\\tag\{(\d+)\}|\\quad \((\d+)\)|\$?\s*\((\d+)\)$", text, re.M)
    found |= {f"Equation {max(tag)}" for tag in tags if 0 < int(max(tag)) < 20}
    listed = set(names_of(paper))
    assert found <= listed, "in the text and not in the list"
    headless = {name for name in listed - found if not re.search(rf"\b{name}\b", text)}
    unnumbered = {f"Equation {n}" for n in NUMBERED[paper].get("Equation", ())}
    assert headless <= unnumbered, "in the list and not in the text"


@pytest.mark.parametrize(("paper", "item"), ITEMS, ids=lambda x: getattr(x, "name", x))
def test_an_entry_leads_somewhere(paper, item):
    if item.code:
        assert (ROOT / item.code).is_file()
    if item.how:
        command, words = COMMANDS, shlex.split(item.how)[1:]
        while hasattr(command, "commands"):
            assert words[0] in command.commands, item.how
            command = command.commands[words.pop(0)]
        command.make_context(command.name, words)
    if item.how.startswith("fedbasin analyze "):
        assert item.how.split()[2] in CATALOGUE
    for name in re.findall(r"fedbasin analyze (\w+)", item.why):
        assert name in CATALOGUE
    if item.is_shown and item.table and (item.rows, item.columns) == ("*", "*"):
        own = f"{paper}/{item.name.lower().replace(' ', '')}"
        assert item.table == own and load_table(own).title.startswith(item.name)


def test_a_result_of_an_analysis_stands_in_the_page_of_analyses():
    text = (ROOT / "docs" / "analyses.md").read_text(encoding="utf-8")
    results = text.partition("## What the papers found")[2].partition("\n## ")[0]
    for _, item in ITEMS:
        if item.state == "result" and item.how.startswith("fedbasin analyze "):
            assert f"`{item.how.split()[2]}`" in results, item


def test_the_index_page_is_what_the_command_writes():
    written = (ROOT / "docs" / "papers_index.md").read_text(encoding="utf-8")
    assert written == page(shipped()), "run: fedbasin paper index --markdown >docs/papers_index.md"


def test_states_of_tables_are_counted_from_the_lines():
    (table,) = [i for p, i in ITEMS if p == "ima" and i.name == "Table 2"]
    assert state_of(table, shipped()) == "30 of 30 cells run"
    assert state_of(table, []) == "0 of 30 cells run"
    (figure,) = [i for p, i in ITEMS if p == "fedlaw" and i.name == "Figure 16"]
    columns = sum(c.name.startswith("cifar10 ") for c in load_table("fedlaw/table3").columns)
    assert state_of(figure, []) == f"0 of {9 * columns} cells run"


def test_the_list_names_every_table_and_figure():
    shown = CliRunner().invoke(app, ["paper", "list"], env={"COLUMNS": "400"}).output
    for paper, item in ITEMS:
        if item.is_shown:
            assert f"{paper}/{item.name.lower().replace(' ', '')}" in shown
    figure6 = next(line for line in shown.splitlines() if "ima/figure6" in line)
    counts = [cell.strip() for cell in figure6.split("│")]
    assert counts[3:6] == ["224", "224", "48"]  # lines of Table 1 that serve its cells
    assert "appendix that is not at hand" in " ".join(re.sub("[│┃]", " ", shown).split())
    one = CliRunner().invoke(app, ["paper", "index", "wima"], env={"COLUMNS": "300"}).output
    assert "Equation 7" in one and "154 cells run" in one


@pytest.mark.parametrize(
    ("item", "told"),
    [
        (Item("Table 1", "x"), "needs a table or a state"),
        (Item("Table 1", "x", table="ima/table99"), "no table file"),
        (Item("Lemma 1", "x", state="not made"), "needs why"),
        (Item("Figure 1", "x", state="result"), "needs a command"),
    ],
)
def test_an_entry_that_says_nothing_is_refused(item, told):
    with pytest.raises(PaperError, match=told):
        _check(item, "here", [item.name])


def test_an_entry_may_stand_once_only():
    item = Item("Lemma 1", "x", state="code")
    with pytest.raises(PaperError, match="more than once"):
        _check(item, "here", [item.name, item.name])
