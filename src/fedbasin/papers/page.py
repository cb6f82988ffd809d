"""docs/papers.md: every table with what was run of it, from the results that ship with fedbasin."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources

from fedbasin.papers.beside import HEADER, Compared, Lines, basis, compare_lines, why
from fedbasin.papers.grid import reason
from fedbasin.papers.results import Result, served
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

_COUNTED = (
    "can run",
    "run at full length",
    "near",
    "of these confirmed",
    "not confirmed",
    "too small",
    "gain",
    "missed",
    "of these shown",
    "argued",
    "open",
    "reduced",
)
_DIRECTIONS = {
    "confirmed": "of these confirmed",
    "not confirmed": "not confirmed",
    "too small to tell": "too small",
}
_HEAD = """\
<!-- Written by `fedbasin paper show --markdown`; a test fails when it is out of date. -->
# The papers' tables, ours beside theirs

Every experiment of the five papers, and two of the benchmark FLamby, is a file in
`src/fedbasin/papers/tables/`: its settings, its grid and the published numbers. `fedbasin paper
run` runs cells of it, `fedbasin paper show` puts the result beside the paper's. A line for each
cell and seed that was run, with its command, commit, device and versions, is in
`src/fedbasin/papers/results/`.

```bash
fedbasin paper list ima/table1       # its rows and columns, what they run, what the paper says
fedbasin paper run ima/table1 --rows "fedavg*" --columns "fmnist cnn dir0.1" --seeds 0 --rounds 0.1
fedbasin paper show ima/table1 --ours
fedbasin paper plot ima/table1       # the same as a picture; paper show --csv for pandas
fedbasin paper config ima/table1 --row fedavg --column "fmnist cnn dir0.1" >cell.toml
fedbasin run cell.toml --set local.weight_decay=0.0       # what does the number depend on?
```

![Ours against the papers', all cells that have a verdict](figures/papers.png)

*Made by `fedbasin paper plot --out docs/figures/papers.png`. A dot is a cell.*

- **ours** is the mean over seeds, ± the standard deviation, without those that diverged; a cell
  with any of these is *missed*. A run of fewer rounds than the paper's is marked *reduced*, one on
  a part of the published data with its share; neither repeats the paper's number, so neither gets a
  verdict.
- **gain** is over the baseline: the row or column that the cell is compared with in its paper.
- **direction** is of the gain: *confirmed* has the sign of the paper's, *not confirmed* the other
  one, *too small to tell* is within the standard deviation of our gain over seeds. With one seed
  there is no deviation, and the sign alone counts.
- **verdict**: *near* is within 3 points of the paper, whatever the direction; *gain* is the
  direction and at least half of the gain (where the paper's method loses, at most double the loss
  too); else *missed*. Rounds to a target are judged by the gain alone.
- The reason of a miss stands below the table. It is *shown* where result lines that ship with
  fedbasin show it (of a trial, below the table's rows, or of other rows), *argued* where it rests
  on code, on the text or on runs whose lines were not kept, *open* where there is none yet or what
  was tried does not explain the number.
- A line serves every cell of its paper with the same settings, seed and score. *run of* names the
  table whose line it is.
- A method that averages late is its base until then: such a cell goes on from the base's run, and
  its line says how many rounds it shares.
"""


def page(results: Sequence[Result]) -> str:
    """Return the whole document."""
    tables = [load_table(name) for name in table_names()]
    lines = [served(table, results) for table in tables]
    blocks = [_HEAD + "".join(f"- *{mark}*: {meaning}.\n" for mark, meaning in MARKS.items())]
    counted = [
        (table.name, _counts(table, its_lines, _grid(table.rows, table.columns)))
        for table, its_lines in zip(tables, lines, strict=True)
    ]
    blocks.append(_overview(counted))
    blocks.append((resources.files("fedbasin.papers") / "in_short.md").read_text(encoding="utf-8"))
    for name in paper_names():
        paper = load_paper(name)
        head = f"## {paper.title}\n\n[{paper.venue}]({paper.url})\n\nWhere the runs differ:\n\n"
        blocks.append(head + "".join(f"- {text}\n" for text in paper.differences))
        for table, its_lines in zip(tables, lines, strict=True):
            if table.name.startswith(f"{name}/"):
                blocks.append("".join(_section(table, its_lines, table.rows, table.columns)))
    return "\n".join(blocks)


def counts_of_table(
    table: Table,
    results: Iterable[Result],
    rows: Sequence[Axis] | None = None,
    columns: Sequence[Axis] | None = None,
) -> Counter[str]:
    """Count the cells of one table, or of some rows and columns."""
    grid = _grid(rows or table.rows, columns or table.columns)
    return _counts(table, served(table, results), grid)


def counts_of(results: Sequence[Result]) -> Counter[str]:
    """Count the cells of all tables."""
    total: Counter[str] = Counter()
    for table in (load_table(name) for name in table_names()):
        total += counts_of_table(table, results)
    return total


def _overview(counted: Sequence[tuple[str, Counter[str]]]) -> str:
    lines = [
        f"| {' | '.join(('table', 'cells', *_COUNTED))} |\n",
        "|---" * (2 + len(_COUNTED)) + "|\n",
    ]
    total: Counter[str] = Counter()
    for name, counts in counted:
        total += counts
        lines.append(_counted(name, counts))
    return "".join([*lines, _counted("**all**", total)])


def _counts(table: Table, lines: Lines, grid: Sequence[tuple[Axis, Axis]]) -> Counter[str]:
    """Count cells; what ran at full length has a verdict, or nothing to compare with."""
    counts: Counter[str] = Counter()
    for cell in compare_lines(table, lines, grid):
        counts["cells"] += 1
        counts["can run"] += not reason(table, cell.row, cell.column)
        if cell.ours and cell.ours.reduced:
            counts["reduced"] += 1
        elif cell.ours:
            counts["run at full length"] += 1
            counts[cell.verdict] += 1
        if cell.verdict == "near" and cell.direction:
            counts[_DIRECTIONS[cell.direction]] += 1
        if cell.verdict == "missed":
            counts["of these shown" if cell.basis == "shown" else cell.basis] += 1
    return counts


def _grid(rows: Sequence[Axis], columns: Sequence[Axis]) -> list[tuple[Axis, Axis]]:
    return [(row, column) for column in columns for row in rows]


def _counted(name: str, counts: Counter[str]) -> str:
    return f"| {' | '.join((name, *(str(counts[key]) for key in ('cells', *_COUNTED))))} |\n"


def sheet(cells: Sequence[Compared], *, only_ours: bool) -> str:
    """Return cells as a CSV file; a number that does not exist is left empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, cells[0].values, lineterminator="\n")
    writer.writeheader()
    writer.writerows(cell.values for cell in cells if cell.ours or not only_ours)
    return text.getvalue()


def section(
    table: Table, results: Iterable[Result], rows: Sequence[Axis], columns: Sequence[Axis]
) -> str:
    """Return one table: its description, and some of its cells."""
    return "".join(_section(table, served(table, results), rows, columns))


def _section(
    table: Table, lines: Lines, rows: Sequence[Axis], columns: Sequence[Axis]
) -> Iterator[str]:
    yield f"### {table.name}\n\n{table.title}. Score: {table.score.text}.\n\n"
    yield from _remarks(table)
    cells = [c for c in compare_lines(table, lines, _grid(rows, columns)) if c.ours]
    yield from _measured(table)
    if not cells:
        yield "" if table.measured else "\nNothing of it has been run yet.\n"
        return
    yield f"\n| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}\n"
    for cell in cells:
        yield f"| {' | '.join(cell.line.cells)} |\n"
    told = findings_of(table, {(cell.row.name, cell.column.name) for cell in cells})
    for finding in told:
        yield f"\n- Found (`{finding.cells}`; {basis(finding, lines)}): {finding.text}\n"
    trials = trials_of(table, lines, rows, columns)
    if trials:
        yield "\nTrials: a row with something changed.\n"
        yield f"\n| trial | of row | {' | '.join(HEADER[1:5])} |\n|{'---|' * 6}\n"
    for cell in trials:
        texts = (cell.row.name, cell.row.trial_of, *cell.line.cells[1:5])
        yield f"| {' | '.join(texts)} |\n"
    used = [result for cell in (*cells, *trials) if cell.ours for result in cell.ours.results]
    yield f"\nRun on {', '.join(sorted({result.device for result in used}))}.\n"


def _measured(table: Table) -> Iterator[str]:
    """Write our numbers that another command gives, beside the paper's."""
    if not table.measured:
        return
    yield f"\nOurs is what `{table.measured_by}` prints.\n"
    yield "\n| row | column | paper | ours |\n|---|---|---|---|\n"
    for row, numbers in table.measured.items():
        printed = table.published[row]
        for column, theirs, ours in zip(table.columns, printed, numbers, strict=True):
            yield f"| {row} | {column.name} | {theirs} | {ours} |\n"


def _remarks(table: Table) -> Iterator[str]:
    """Write what the paper says, how the runs differ, and what cannot be run."""
    for label, texts in (("The paper says", table.claims), ("Here", table.notes)):
        for text in texts:
            yield f"- {label}: {text}\n"
    for doubt in table.doubts:
        yield f"- In doubt (`{doubt.cells}`): {doubt.text}\n"
    for axis in (*table.rows, *table.columns):
        if axis.choice and "+" not in axis.name:
            yield f"- Chosen for {axis.name}: {axis.choice}\n"
    reasons = {reason(table, row, column) for row in table.rows for column in table.columns} - {""}
    for text in sorted(reasons):
        yield f"- Cannot be run: {text}.\n"


def trials_of(
    table: Table, lines: Lines, rows: Sequence[Axis], columns: Sequence[Axis]
) -> list[Compared]:
    """Return the trials of some rows and columns that were run."""
    names = {row.name for row in rows}
    cells = [(r, c) for r, c in table.trial_cells() if r.trial_of in names and c in columns]
    return [cell for cell in compare_lines(table, lines, cells) if cell.ours]


def findings_of(table: Table, cells: set[tuple[str, str]]) -> list[Finding]:
    """Return the findings about these cells, each once."""
    told = dict.fromkeys(
        finding
        for row in table.rows
        for column in table.columns
        if (row.name, column.name) in cells
        for finding in why(table, row, column)
    )
    return list(told)
