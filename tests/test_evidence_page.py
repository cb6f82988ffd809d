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


def test_what_the_head_says_of_all_problems_is_what_the_overview_shows():
    text = (ROOT / "docs" / "methods" / "evidence.md").read_text(encoding="utf-8")
    head = text.partition("## Which method should I take?")[2].partition("\n## ")[0]
    rows = {}
    for row in tuned.overview().splitlines()[2:]:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        rows[cells[0].strip("`")] = cells[1:]
    better = {method for method, cells in rows.items() if all(c.startswith("**") for c in cells)}
    lines = head.splitlines()
    (three,) = [line for line in lines if "These three are" in line]
    assert set(re.findall(r"`(\w+)`", three)) == better
    (none,) = [line for line in lines if line.startswith("5. ")]
    for method in re.findall(r"`(\w+)`", none):
        assert not any(cell.startswith("**") for cell in rows[method])


def test_no_sentence_stands_twice():
    text = (ROOT / "docs" / "methods" / "evidence.md").read_text(encoding="utf-8")
    prose = [line for line in text.splitlines() if len(line) > 60 and not line.startswith("|")]
    assert len(prose) == len(set(prose))


def test_marks_of_the_averages_follow_the_direction_of_the_metric():
    gap = tuned.Difference(5, -0.02, 5, -0.03, -0.01, 0.001, 0.01)
    assert tuned.marked(gap, tuned.Headline()).startswith("_")
    lower = tuned.Headline("rmse", higher_is_better=False, unit="")
    assert tuned.marked(gap, lower) == f"**{tuned.MINUS}0.0200**"
    assert not tuned.marked(tuned.replace(gap, holm=0.2), lower).startswith("*")
