"""docs/papers.md: every table with what was run of it, from the results that ship with fedbasin."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from fedbasin.papers.beside import HEADER, Compared, compare, lines_of, why
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

_COUNTED = ("can run", "run at full length", "near", "gain", "missed", "reduced")
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

*Made by `fedbasin paper plot --out docs/figures/papers.png`. A dot is a cell; what is
*missed* has its reason below the table where experiments have told one.*

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
    lines = [
        f"| {' | '.join(('table', 'cells', *_COUNTED))} |\n",
        "|---" * (2 + len(_COUNTED)) + "|\n",
    ]
    total: Counter[str] = Counter()
    for table in (load_table(name) for name in table_names()):
        counts = _counts(table, results)
        total += counts
        lines.append(_counted(table.name, counts))
    return "".join([*lines, _counted("**all**", total)])


def _counts(table: Table, results: Sequence[Result]) -> Counter[str]:
    """Count a table's cells; what ran at full length has a verdict, or nothing to compare with."""
    counts: Counter[str] = Counter()
    for cell in compare(table, results, table.rows, table.columns):
        counts["cells"] += 1
        counts["can run"] += not reason(table, cell.row, cell.column)
        if cell.ours and cell.ours.reduced:
            counts["reduced"] += 1
        elif cell.ours:
            counts.update(["run at full length", cell.verdict.partition(",")[0]])
    return counts


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
    for finding in findings_of(table, cells):
        yield f"\n- Found (`{finding.cells}`): {finding.text}\n"
    ran = sorted({each.device for each in mine if (each.row, each.column) in cells})
    yield f"\nRun on {', '.join(ran)}.\n"


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
