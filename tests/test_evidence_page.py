"""docs/methods/evidence.md says what its lines say, and the lines keep the rules of a fair test."""

import importlib.util
import math
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("tuned", ROOT / "benchmarks/evidence/tuned.py")
tuned = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(tuned)
FILES = sorted((ROOT / "benchmarks" / "evidence" / "results").glob("tuned_*.jsonl"))


def test_the_tables_of_the_page_are_made_from_the_lines():
    text = (ROOT / "docs" / "methods" / "evidence.md").read_text(encoding="utf-8")
    assert tuned.with_tables(text) == text
    for file in FILES:
        assert f"<!-- {file.stem.removeprefix('tuned_')} -->" in text


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_method_had_the_same_budget_and_was_chosen_on_held_out_rows(file):
    lines = tuned.read([file])
    methods = {line["method"] for line in lines}
    assert "fedavg" in methods
    for method in methods:
        trials = {n["setting"]: n for n in lines if n["method"] == method and n["kind"] == "trial"}
        final = [n for n in lines if n["method"] == method and n["kind"] == "final"]
        assert sorted(trials) == list(range(len(trials))) and len(trials) == 8
        assert {trial["scored_on"] for trial in trials.values()} == {"held_out"}
        assert all(len(trial["scores"]) == 2 for trial in trials.values())
        sign = 1 if final[0]["higher_is_better"] else -1
        best = max(
            trials,
            key=lambda n: -math.inf if trials[n]["score"] is None else sign * trials[n]["score"],
        )
        assert {line["setting"] for line in final} == {best}
        assert sorted(line["seed"] for line in final) == [0, 1, 2, 3, 4]


def test_the_numbers_of_the_head_stand_in_the_table():
    text = (ROOT / "docs" / "methods" / "evidence.md").read_text(encoding="utf-8")
    head = text.partition("## Which method should I take?")[2].partition("\n## ")[0]
    rows = {}
    for row in text.partition("<!-- fmnist -->")[2].partition("<!-- end")[0].splitlines():
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        if cells[0].startswith("`"):
            rows[cells[0].strip("`")] = cells
    said = re.findall(r"`(\w+)` \(([+\N{MINUS SIGN}]\d+\.\d)\)", head)
    assert len(said) >= 6
    for method, gain in said:
        shown = rows[method][2].split()[0].replace("\N{MINUS SIGN}", "-")
        assert float(gain.replace("\N{MINUS SIGN}", "-")) == pytest.approx(float(shown), abs=0.051)


def test_what_uniform_weights_give_is_what_their_lines_say(capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "evidence"))
    import uniform

    monkeypatch.setattr("sys.argv", ["uniform.py"])
    uniform.main()
    said = capsys.readouterr().out
    mean, low, high = (
        f"{float(word.replace(chr(0x2212), '-')):+.1f}"
        for word in re.search(r": (\S+) \[(\S+), (\S+)\]", said).groups()
    )
    text = (ROOT / "docs" / "methods" / "evidence.md").read_text(encoding="utf-8")
    assert f"is {mean} [{low}, {high}] over `fedavg`" in text and f"{mean[1:]} points here" in text
