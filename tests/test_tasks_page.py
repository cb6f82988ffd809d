"""docs/tasks.md says what the catalogue says: tasks, metrics with direction and unit, needs."""

import ast
import re
from pathlib import Path

import fedbasin.experiment  # noqa: F401  (fills the catalogue)
from fedbasin.core.catalogue import cards
from fedbasin.core.task import Task

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")


def table(header):
    """Return the rows of the table whose header begins so, as lists of cells."""
    below = PAGE.partition(f"| {header} |")[2].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in below]


def names(cell):
    return re.findall(r"`(\w+)", cell)


def test_every_task_has_a_row_with_its_metrics():
    rows = {names(row[0])[0]: row for row in table("task")}
    assert list(rows) == [card.name for card in cards("task")]
    for card in cards("task"):
        usual = card.make.usual_metrics
        assert tuple(names(rows[card.name][4]))[: len(usual)] == usual


def test_every_metric_has_a_row_with_direction_unit_and_tasks():
    found = {}
    for cell, better, unit, tasks in table("metric"):
        for name in names(cell):
            found[name] = (better, unit, tasks)
    assert set(found) == {card.name for card in cards("metric")}
    kinds = {card.name: card.make.kind for card in cards("task")}
    for card in cards("metric"):
        better, unit, tasks = found[card.name]
        assert better == ("higher" if card.make.higher_is_better else "lower"), card.name
        assert unit == card.make.unit, card.name
        fitting = {n for n, k in kinds.items() if not card.make.fits or k in card.make.fits}
        said = (
            set(kinds) if tasks == "all" else {n for n in kinds if n in re.findall(r"\w+", tasks)}
        )
        assert said == fitting, card.name


def test_needs_are_those_of_the_cards_and_of_the_tasks():
    given_by = {"class_counts": "class_labels"}
    rows = {names(row[0])[0]: row for row in table("need")}
    everything = [*cards("method"), *cards("rule")]
    for need, (_, tasks, needing, _) in rows.items():
        assert sorted(names(needing)) == sorted(c.name for c in everything if need in c.needs)
        having = {c.name for c in cards("task") if given_by.get(need, need) in c.make.provides}
        others = {card.name for card in cards("task")} - having
        assert set(names(tasks)) == (others if tasks.startswith("all but") else having)
    provided = {need for card in cards("task") for need in card.make.provides}
    assert provided <= set(rows) and issubclass(cards("task")[0].make, Task)


def test_the_example_on_the_page_is_the_one_that_runs():
    """The code blocks are statements of examples/own_task.py."""
    own = ast.parse((ROOT / "examples" / "own_task.py").read_text(encoding="utf-8"))
    there = {ast.dump(node) for node in own.body}
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    shown = [ast.dump(node) for block in blocks for node in ast.parse(block).body]
    assert len(shown) == 3 and set(shown) <= there
