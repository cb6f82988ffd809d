"""The papers' tables and figures as data: one TOML file each, checked when it is read.

    [score] [setup] [values]      what holds for every cell
    [[rows]] [[columns]]          name, and what this row or column changes
    [published] [spread]          row = [a number or a mark for each column]

A cell's settings are those of the table, then of its column, then of its row. Its method is that
of the row or of the column, with every ``{name}`` replaced from `values`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources
from typing import Any, Literal

from fedbasin.core.reading import Reader
from fedbasin.core.suggest import nearest

Mark = Literal["unreadable", "figure", "not reported", "diverged"]
MARKS: dict[str, str] = {
    "unreadable": "printed, but lost in our copy of the paper",
    "figure": "drawn, without a number",
    "not reported": "not in the paper",
    "diverged": "the paper says that it did not converge",
}


class PaperError(ValueError):
    """A table that cannot be used: the file, the field and the value at fault."""


@dataclass(frozen=True)
class Score:
    """What a cell's number is.

    Args:
        kind: ``"accuracy"`` of the scored model, ``"accuracy_train"`` of it on all clients' rows
            or ``"accuracy_send"`` of the broadcast one (in percent, mean of the last rounds),
            ``"metric"``: another column of the records (times 100, mean of the last rounds),
            ``"rounds_to_target"``, ``"note"``: a number that the method leaves in the record, or
            ``"other"``: no score of a run; `words` say what it is.
        last: how many rounds are averaged.
        target: the accuracy to reach, in percent.
        note: the name of the note.
        between: first and last round that a note is averaged over.
        metric: the name of the column.
        words: what the number is, where no run is scored.
    """

    kind: Literal[
        "accuracy", "accuracy_train", "accuracy_send", "metric", "rounds_to_target", "note", "other"
    ] = "accuracy"
    last: int = 10
    target: float = 0.0
    note: str = ""
    between: tuple[int, ...] = ()
    metric: str = ""
    words: str = ""

    @property
    def text(self) -> str:
        """The score in words."""
        if self.kind == "other":
            return self.words
        if self.kind == "rounds_to_target":
            mean = f" in the mean of {self.last}" if self.last > 1 else ""
            return f"first round at {self.target:g} %{mean}"
        if self.kind == "note":
            return f"{self.note}, mean of rounds {self.between[0]} to {self.between[1]}"
        if self.kind == "metric":
            when = f"mean of the last {self.last} rounds" if self.last > 1 else "last round"
            return f"{self.metric.replace('_', ' ')} (x 100), {when}"
        which = {"accuracy_send": " of the broadcast model", "accuracy_train": " on clients' rows"}
        return f"accuracy{which.get(self.kind, '')} (%), mean of the last {self.last} rounds"


@dataclass(frozen=True)
class Axis:
    """A row or a column.

    Args:
        name: what it is called on the command line.
        method: an expression, with ``{name}`` where a value goes.
        setup: settings that it changes.
        values: what ``{name}`` stands for.
        over: the row (or column) that gains are measured against.
        cannot: why it cannot be run.
        choice: how settings that the paper leaves open were chosen.
        score: what its numbers are, where not the table's.
        trial_of: the row that this one changes; set for trials alone, whose names are not printed.
    """

    name: str
    method: str = ""
    setup: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    over: str = ""
    cannot: str = ""
    choice: str = ""
    score: Score | None = None
    trial_of: str = ""


@dataclass(frozen=True)
class Trial:
    """A row of the table with something changed: an experiment about why a number differs.

    Args:
        name: what it is called on the command line.
        row: the row it changes.
        columns: the columns it is run in.
        method: the method, where it is another one.
        setup: settings that it changes; ``rounds`` may be fewer than the paper's.
    """

    name: str
    row: str
    columns: tuple[str, ...]
    method: str = ""
    setup: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class About:
    """A text about some cells. No rows or columns means all of them."""

    text: str
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()

    @property
    def cells(self) -> str:
        """The rows and columns it is about, as they are written."""
        axes = (self.rows, self.columns)
        return "; ".join(", ".join(names) for names in axes if names) or "all"

    def covers(self, row: Axis, column: Axis) -> bool:
        """Whether it is about this cell."""
        return matches(self.rows, row.name) and matches(self.columns, column.name)


def matches(patterns: tuple[str, ...], name: str) -> bool:
    """Whether a name fits one of the patterns, or there are none."""
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


@dataclass(frozen=True)
class Finding(About):
    """Why our number differs.

    Args:
        text: the reason.
        rows: the rows it is about.
        columns: the columns it is about.
        shown_by: trials or rows of this table whose result lines show it.
        basis: what it rests on without such lines: ``"argued"`` from code, text or runs whose
            lines were not kept, or ``"open"``: what was tried does not explain it.
    """

    shown_by: tuple[str, ...] = ()
    basis: Literal["argued", "open"] = "argued"


@dataclass(frozen=True)
class Published:
    """A printed number with its spread, or the mark that stands for none.

    Args:
        value: the number.
        spread: the printed ±.
        mark: why there is no number.
        doubted: whether the table says that the number may be another.
    """

    value: float | None
    spread: float | None = None
    mark: str = ""
    doubted: bool = False


@dataclass(frozen=True)
class Table:
    """One table or figure.

    Args:
        title: what it shows.
        seeds: the seeds of a run, as many as the paper's runs.
        score: what its numbers are.
        unit: how accuracies are printed; fractions are read as percent.
        setup: settings of every cell.
        values: what ``{name}`` stands for in every method.
        rows: the rows.
        columns: the columns.
        published: a number or a mark for every cell that the paper shows.
        spread: the printed ±, where there is one.
        claims: what the text says of it where no number is printed.
        notes: how the runs here differ from the paper's.
        findings: reasons for differences.
        trials: the experiments that findings rest on.
        doubts: printed numbers that may not be what the paper prints, and why.
        cannot: why nothing of it can be run.
        measured: our numbers, where another command than ``paper run`` gives them.
        measured_by: that command.
        name: ``"ima/table1"``; from the file's place.
    """

    title: str
    seeds: tuple[int, ...]
    rows: tuple[Axis, ...] = ()
    columns: tuple[Axis, ...] = ()
    score: Score = field(default_factory=Score)
    unit: Literal["percent", "fraction"] = "percent"
    setup: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    published: Mapping[str, Any] = field(default_factory=dict)
    spread: Mapping[str, Any] = field(default_factory=dict)
    claims: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    trials: tuple[Trial, ...] = ()
    doubts: tuple[About, ...] = ()
    cannot: str = ""
    measured: Mapping[str, Any] = field(default_factory=dict)
    measured_by: str = ""
    name: str = ""

    def printed(self, row: Axis, column: Axis) -> Published:
        """Return what the paper prints for a cell; for a trial, for the row it changes."""
        place = self.columns.index(column)
        name = row.trial_of or row.name
        cell = self.published.get(name, ["not reported"] * len(self.columns))[place]
        if isinstance(cell, str):
            return Published(None, None, cell)
        times = 100.0 if self.unit == "fraction" else 1.0
        spread = self.spread[name][place] if name in self.spread else None
        doubted = any(doubt.covers(row, column) for doubt in self.doubts)
        return Published(round(cell * times, 6), spread and round(spread * times, 6), "", doubted)

    def trial_cells(self) -> list[tuple[Axis, Axis]]:
        """Return the trials as rows, each with a column that it is run in."""
        cells = []
        for trial in self.trials:
            of = _named(self.rows, trial.row)
            row = replace(
                of,
                name=trial.name,
                method=trial.method or of.method,
                setup=merged(of.setup, trial.setup),
                over="",
                choice="",
                trial_of=of.name,
            )
            cells += [(row, _named(self.columns, name)) for name in trial.columns]
        return cells

    def score_of(self, row: Axis, column: Axis) -> Score:
        """Return what a cell's number is."""
        return row.score or column.score or self.score

    def baseline(self, row: Axis, column: Axis) -> tuple[Axis, Axis] | None:
        """Return the cell that this one's gain is measured against."""
        if row.over:
            return _named(self.rows, row.over), column
        if column.over:
            return row, _named(self.columns, column.over)
        return None


@dataclass(frozen=True)
class Paper:
    """A paper: what it is, and what its text leaves to its code.

    Args:
        title: its title.
        venue: where it appeared.
        url: where it can be read.
        differences: where the runs here differ from the authors', whichever the table.
        name: its short name; from the folder.
    """

    title: str
    venue: str
    url: str
    differences: tuple[str, ...] = ()
    name: str = ""


def merged(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with changes, section by section."""
    result = deepcopy(dict(settings))
    for key, value in changes.items():
        if isinstance(value, Mapping):
            result[key] = merged(result.get(key, {}), value)
        else:
            result[key] = value
    return result


def _named(axes: Iterable[Axis], name: str) -> Axis:
    return next(axis for axis in axes if axis.name == name)


_NO_TABLES = ("paper.toml", "index.toml")


def paper_names() -> list[str]:
    """Return the short names of the papers."""
    return ["ima", "fedlaw", "wima", "fedcda", "fedwcm", "flamby"]


@cache
def table_names() -> tuple[str, ...]:
    """Return the names of all tables and figures, paper by paper, tables first."""
    tables: list[str] = []
    for paper in paper_names():
        files = [file.name for file in _folder(paper).iterdir() if file.name.endswith(".toml")]
        names = [name.removesuffix(".toml") for name in files if name not in _NO_TABLES]
        order = sorted(
            names, key=lambda n: (n.startswith("fig"), int(re.sub(r"\D", "", n) or 0), n)
        )
        tables += [f"{paper}/{name}" for name in order]
    return tuple(tables)


def _folder(paper: str) -> Any:
    return resources.files("fedbasin.papers") / "tables" / paper


def paper_text(where: str) -> str:
    """Return the text of a file such as ``ima/index.toml``."""
    text: str = (_folder(where.split("/")[0]) / where.split("/")[1]).read_text(encoding="utf-8")
    return text


@cache
def load_paper(name: str) -> Paper:
    """Read the description of a paper."""
    where = f"{name}/paper.toml"
    content = read_toml(paper_text(where), where)
    return Reader(PaperError, where).read(Paper, {**content, "name": name})


@cache
def load_table(name: str) -> Table:
    """Read a table by its name."""
    if name not in table_names():
        raise PaperError(f"no table is called {name!r}; {nearest(name, table_names())}")
    return read_table(paper_text(f"{name}.toml"), name)


def read_table(text: str, name: str) -> Table:
    """Read and check a table's TOML; errors name the file, the field and the value."""
    where = f"{name}.toml"
    table = Reader(PaperError, where).read(Table, {**read_toml(text, where), "name": name})
    _check_scores(table, where)
    _check(table, where)
    return table


def read_toml(text: str, where: str) -> dict[str, Any]:
    """Read TOML; an error names the file."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PaperError(f"{where} is not TOML: {error}") from error


def _check_scores(table: Table, where: str) -> None:
    _check_score(table.score, f"{where}: score")
    for kind, axes in (("rows", table.rows), ("columns", table.columns)):
        for place, axis in enumerate(axes):
            if axis.score is not None:
                _check_score(axis.score, f"{where}: {kind}[{place}].score")


def _check_score(score: Score, where: str) -> None:
    if score.last < 1:
        raise PaperError(f"{where}.last is {score.last}, it must be at least 1")
    if score.kind == "rounds_to_target" and not 0 < score.target <= 100:
        raise PaperError(f"{where}.target is {score.target}, it must be a percentage")
    if score.kind == "note" and (not score.note or len(score.between) != 2):
        raise PaperError(f"{where} needs note = a name and between = [first, last]")
    if (score.kind == "metric") != bool(score.metric):
        raise PaperError(
            f"{where}.metric is {score.metric!r}: name a column of the records where kind is "
            '"metric", and nowhere else'
        )
    if (score.kind == "other") != bool(score.words):
        raise PaperError(
            f"{where}.words is {score.words!r}: say what the number is where kind is "
            '"other", and nowhere else'
        )


def _check(table: Table, where: str) -> None:
    _check_axes("rows", table.rows, where)
    _check_axes("columns", table.columns, where)
    if not table.seeds:
        raise PaperError(f"{where}: seeds is empty")
    for row in table.rows:
        for column in table.columns:
            if row.method and column.method:
                raise PaperError(
                    f"{where}: row {row.name!r} and column {column.name!r} both name a method"
                )
    _check_numbers(table, where)
    for about in (*table.findings, *table.doubts):
        for patterns, axes in ((about.rows, table.rows), (about.columns, table.columns)):
            for pattern in patterns:
                select(axes, pattern, where)
    _check_trials(table, where)


def _check_trials(table: Table, where: str) -> None:
    rows = [row.name for row in table.rows]
    columns = [column.name for column in table.columns]
    names = [*rows, *(trial.name for trial in table.trials)]
    for trial in table.trials:
        here = f"{where}: trial {trial.name!r}"
        if names.count(trial.name) > 1 or re.search(r"[,*?\[\]|]", trial.name):
            raise PaperError(f"{here} must be named once, without , * ? [ ] |")
        if trial.row not in rows:
            raise PaperError(f"{here}.row is not a row; {nearest(trial.row, rows)}")
        if not trial.columns:
            raise PaperError(f"{here}.columns is empty")
        for column in trial.columns:
            if column not in columns:
                raise PaperError(f"{here}.columns: {column!r}; {nearest(column, columns)}")
    for finding in table.findings:
        for name in finding.shown_by:
            if name not in names:
                raise PaperError(
                    f"{where}: findings.shown_by is {name!r}, no trial or row; "
                    f"{nearest(name, names)}"
                )


def _check_axes(kind: str, axes: tuple[Axis, ...], where: str) -> None:
    names = [axis.name for axis in axes]
    if not names:
        raise PaperError(f"{where}: {kind} is empty")
    for axis in axes:
        if not axis.name or re.search(r"[,*?\[\]|]", axis.name) or names.count(axis.name) > 1:
            raise PaperError(
                f"{where}: {kind} name {axis.name!r} must be given once, without , * ? [ ] |"
            )
        if axis.over and (axis.over not in names or axis.over == axis.name):
            raise PaperError(f"{where}: {kind}.over is {axis.over!r}, not another of {names}")


def _check_numbers(table: Table, where: str) -> None:
    names = [row.name for row in table.rows]
    tables = {"published": table.published, "spread": table.spread, "measured": table.measured}
    for kind, cells in tables.items():
        for row, numbers in cells.items():
            here = f"{where}: {kind}.{row!r}"
            if row not in names:
                raise PaperError(f"{here} is not a row; {nearest(row, names)}")
            if not isinstance(numbers, list) or len(numbers) != len(table.columns):
                raise PaperError(
                    f"{here} is {numbers!r}, it must hold {len(table.columns)} cells, one a column"
                )
            for number in numbers:
                if isinstance(number, bool) or not isinstance(number, int | float | str):
                    raise PaperError(f"{here} holds {number!r}, not a number or a mark")
                if isinstance(number, str) and (number not in MARKS or kind != "published"):
                    raise PaperError(f"{here} holds {number!r}; the marks are {', '.join(MARKS)}")


def select(axes: tuple[Axis, ...], patterns: str, what: str) -> list[Axis]:
    """Return the rows or columns that match a comma-separated list of names or patterns."""
    chosen: list[Axis] = []
    for pattern in (part.strip() for part in patterns.split(",")):
        matching = [axis for axis in axes if fnmatchcase(axis.name, pattern)]
        if not matching:
            names = [axis.name for axis in axes]
            raise PaperError(f"{what}: nothing is called {pattern!r}; {nearest(pattern, names)}")
        chosen += [axis for axis in matching if axis not in chosen]
    return [axis for axis in axes if axis in chosen]
