"""docs/papers.md: every table with what was run of it, from the results that ship with fedbasin."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fedbasin.papers.beside import HEADER, lines_of, why
from fedbasin.papers.grid import reason
from fedbasin.papers.results import Result, fresh
from fedbasin.papers.tables import (
    MARKS,
    Axis,
    Finding,
    Table,
    load_paper,
    load_table,
    paper_names,
    table_names,
)

_HEAD = """\
<!-- Written by `fedbasin paper show --markdown`; a test fails when it is out of date. -->
# The papers' tables, ours beside theirs

Every experiment of the five papers is a file in `src/fedbasin/papers/tables/`: its settings, its
grid and the published numbers. `fedbasin paper run` runs cells of it, `fedbasin paper show` puts
the result beside the paper's. A line for each cell and seed that was run, with its command, commit,
device and versions, is in `src/fedbasin/papers/results/`.

```bash
fedbasin paper list ima/table1       # its rows and columns, what they run, what the paper says
fedbasin paper run ima/table1 --rows "fedavg*" --columns "fmnist cnn dir0.1" --seeds 0 --rounds 0.1
fedbasin paper show ima/table1 --ours
fedbasin paper config ima/table1 --row fedavg --column "fmnist cnn dir0.1" >cell.toml
fedbasin run cell.toml --set local.weight_decay=0.0       # what does the number depend on?
```

- **ours** is the mean over seeds, ± the standard deviation, without those that diverged; a cell
  with any of these is *missed*. A run of fewer rounds than the paper's is marked *reduced*, one on
  a part of the published data with its share; neither repeats the paper's number, so neither gets a
  verdict.
- **gain** is over the baseline: the row or column that the cell is compared with in its paper.
- **verdict**: *near* is within 3 points of the paper; *gain* is the direction and at least half of
  the gain (where the paper's method loses, at most double the loss too); else *missed*. Rounds to a
  target are judged by the gain alone.
- A method that averages late is its base until then: such a cell goes on from the base's run, and
  its line says how many rounds it shares.
"""


def page(results: Sequence[Result]) -> str:
    """Return the whole document."""
    blocks = [_HEAD + "".join(f"- *{mark}*: {meaning}.\n" for mark, meaning in MARKS.items())]
    blocks += [_overview(results)]
    for name in paper_names():
        paper = load_paper(name)
        head = f"## {paper.title}\n\n[{paper.venue}]({paper.url})\n\nWhere the runs differ:\n\n"
        blocks.append(head + "".join(f"- {text}\n" for text in paper.differences))
        for table in (load_table(each) for each in table_names()):
            if table.name.startswith(f"{name}/"):
                blocks.append(section(table, results, table.rows, table.columns))
    return "\n".join(blocks)


def _overview(results: Sequence[Result]) -> str:
    lines = ["| table | cells | can run | run here, full length | near or gain | missed |\n"]
    lines.append("|---|---|---|---|---|---|\n")
    for table in (load_table(name) for name in table_names()):
        reasons = [reason(table, row, column) for row in table.rows for column in table.columns]
        compared = [x for x in lines_of(table, results, table.rows, table.columns) if x.ours != "-"]
        full = [line for line in compared if "reduced" not in line.ours]
        good = sum(line.verdict in ("near", "gain") for line in full)
        missed = sum(line.verdict.startswith("missed") for line in full)
        able = sum(not text for text in reasons)
        counts = f"{len(reasons)} | {able} | {len(full)} | {good} | {missed}"
        lines.append(f"| {table.name} | {counts} |\n")
    return "".join(lines)


def section(
    table: Table, results: Iterable[Result], rows: Sequence[Axis], columns: Sequence[Axis]
) -> str:
    """Return one table: what is to know about it, and some of its cells."""
    return "".join(_section(table, results, rows, columns))


def _section(
    table: Table, results: Iterable[Result], rows: Sequence[Axis], columns: Sequence[Axis]
) -> Iterator[str]:
    yield f"### {table.name}\n\n{table.title}. Score: {table.score.text}.\n\n"
    for label, texts in (("The paper says", table.claims), ("Here", table.notes)):
        for text in texts:
            yield f"- {label}: {text}\n"
    for axis in (*table.rows, *table.columns):
        if axis.choice and "+" not in axis.name:
            yield f"- Chosen for {axis.name}: {axis.choice}\n"
    reasons = {reason(table, row, column) for row in table.rows for column in table.columns} - {""}
    for text in sorted(reasons):
        yield f"- Cannot be run: {text}.\n"
    mine = fresh(table, results)
    lines = [x for x in lines_of(table, mine, rows, columns) if x.ours != "-"]
    if not lines:
        yield "\nNothing of it has been run yet.\n"
        return
    yield f"\n| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}\n"
    for line in lines:
        yield f"| {' | '.join(line.cells)} |\n"
    cells = {(line.row, line.column) for line in lines}
    for finding in found(table, cells):
        yield f"\n- Found (`{finding.cells}`): {finding.text}\n"
    ran = sorted({each.device for each in mine if (each.row, each.column) in cells})
    yield f"\nRun on {', '.join(ran)}.\n"


def found(table: Table, cells: set[tuple[str, str]]) -> list[Finding]:
    """Return the findings that speak of these cells, each once."""
    told = dict.fromkeys(
        finding
        for row in table.rows
        for column in table.columns
        if (row.name, column.name) in cells
        for finding in why(table, row, column)
    )
    return list(told)
