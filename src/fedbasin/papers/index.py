"""docs/papers_index.md: each numbered thing of the five papers, how it is made here, and its state.

Where a table file repeats it, the state is counted from the result lines; elsewhere index.toml of
the paper says it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from fedbasin.core.reading import Reader
from fedbasin.papers.grid import reason
from fedbasin.papers.page import counts_of_table
from fedbasin.papers.results import Result
from fedbasin.papers.tables import (
    PaperError,
    load_paper,
    load_table,
    paper_names,
    paper_text,
    read_toml,
    select,
    table_names,
)

State = Literal["", "result", "command", "code", "reconstruction", "nothing to run", "not made"]
STATES = {
    "result": "a command makes it from runs, and [analyses](analyses.md) or "
    "[papers](papers.md) has what came out",
    "command": "a command makes it from runs; no result is kept here",
    "code": "it stands in the code, tested",
    "reconstruction": "the paper's formula is not in the text at hand; ours agrees with what the "
    "text says of it",
    "nothing to run": "an assumption, a step of a proof, a drawing",
    "not made": "not here, with the reason",
}


@dataclass(frozen=True)
class Item:
    """A numbered table, figure, equation, theorem or algorithm of a paper.

    Args:
        name: as the paper numbers it, such as ``"Figure 4"``.
        what: what it shows or says.
        table: the table file that repeats it.
        rows: the rows of that file that it is about; all by default.
        columns: the columns of that file.
        command: what makes it, or shows it.
        code: the file that is it, from the root of the repository.
        state: where it stands; of a table file it is counted.
        why: the reason, or what else a reader must know.
    """

    name: str
    what: str
    table: str = ""
    rows: str = "*"
    columns: str = "*"
    command: str = ""
    code: str = ""
    state: State = ""
    why: str = ""

    @property
    def is_shown(self) -> bool:
        """Whether it is a table or a figure."""
        return self.name.startswith(("Table", "Figure"))

    @property
    def how(self) -> str:
        """The command for it."""
        return self.command or (f"fedbasin paper run {self.table}" if self._can_run else "")

    @property
    def _can_run(self) -> bool:
        return bool(self.table) and not load_table(self.table).cannot


@dataclass(frozen=True)
class Index:
    """The numbered things of one paper."""

    items: tuple[Item, ...]


def indexed_papers() -> list[str]:
    """Return the short names of the papers that are indexed: all but the benchmark."""
    return [name for name in paper_names() if name != "flamby"]


@cache
def load_index(paper: str) -> tuple[Item, ...]:
    """Read what a paper numbers."""
    if paper not in indexed_papers():
        raise PaperError(f"{paper!r} is no indexed paper: {', '.join(indexed_papers())}")
    where = f"{paper}/index.toml"
    items = Reader(PaperError, where).read(Index, read_toml(paper_text(where), where)).items
    for place, item in enumerate(items):
        _check(item, f"{where}: items[{place}]", [one.name for one in items])
    return items


def _check(item: Item, where: str, names: Sequence[str]) -> None:
    if names.count(item.name) > 1:
        raise PaperError(f"{where}: {item.name} is there more than once")
    if item.table and item.table not in table_names():
        raise PaperError(f"{where}.table is {item.table!r}, no table file")
    if not item.table and not item.state:
        raise PaperError(f"{where}: {item.name} needs a table or a state")
    if item.state in ("nothing to run", "not made") and not item.why:
        raise PaperError(f"{where}: {item.name} is {item.state!r} and needs why")
    if item.state in ("result", "command") and not item.command:
        raise PaperError(f"{where}: {item.name} is {item.state!r} and needs a command")


def state_of(item: Item, results: Sequence[Result]) -> str:
    """Say where an item stands; a table file's cells are counted."""
    if not item.table or item.state:
        return item.state
    table = load_table(item.table)
    if table.cannot:
        return f"cannot be run: {table.cannot}"
    rows = select(table.rows, item.rows, item.name)
    columns = select(table.columns, item.columns, item.name)
    counts = counts_of_table(table, results, rows, columns)
    told = f"{counts['run at full length']} of {counts['cells']} cells run"
    if counts["reduced"]:
        told += f", {counts['reduced']} reduced"
    barred = {reason(table, row, column) for row in rows for column in columns} - {""}
    return "; ".join([told, *(f"some cannot be run: {why}" for why in sorted(barred))])


def page(results: Sequence[Result]) -> str:
    """Return docs/papers_index.md."""
    return "".join(_page(results))


def _page(results: Sequence[Result]) -> Iterator[str]:
    yield (
        "<!-- Written by `fedbasin paper index --markdown`; a test fails when it is out of date. "
        "-->\n# Each numbered thing of the five papers\n\n"
        "Tables, figures, equations, theorems and algorithms as the papers number them, with the "
        "command\nfor each and where it stands. `RUN` and `OTHER` are run folders; what an "
        "analysis needs of a run\nis in [analyses](analyses.md). Cells of tables are counted in "
        "[papers](papers.md).\n\n"
    )
    yield from (f"- *{state}*: {meaning}.\n" for state, meaning in STATES.items())
    for name in indexed_papers():
        paper = load_paper(name)
        yield f"\n## {paper.title}\n\n[{paper.venue}]({paper.url})\n\n"
        yield "| | what | command | code | state |\n|---|---|---|---|---|\n"
        for item in load_index(name):
            yield f"| {' | '.join(_cells(item, results))} |\n"


def _cells(item: Item, results: Sequence[Result]) -> tuple[str, ...]:
    state = state_of(item, results)
    told = f"{state}: {item.why}" if item.why else state
    link = f"[{item.code.split('/')[-1]}](../{item.code})" if item.code else ""
    return item.name, item.what, f"`{item.how}`" if item.how else "", link, told
