"""The results of an analysis as plain numbers, in one JSON form for figures and pages.

An `Analysis` holds panels of four kinds: `Lines`, `Grid`, `Bars` and `Table`. Nothing here knows
tensors or a drawing library. A number that does not exist is NaN in Python and null in JSON;
docs/analyses.md describes the form.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, get_args, get_origin

from fedbasin.core.expressions import fit, is_fit
from fedbasin.core.reading import Reader

FORM = 1  # raised when a reader of the old form would misread the new one
_DIGITS = 7  # what a float32 holds; the CSV file has all of them
Numbers = tuple[float, ...]
Cell = float | int | str | None


class FigureDataError(ValueError):
    """An analysis file that cannot be used, with the place and the reason."""


@dataclass(frozen=True)
class Line:
    """A named curve; `low` and `high`, where given, bound a band around it."""

    name: str
    x: Numbers
    y: Numbers
    low: Numbers = ()
    high: Numbers = ()

    def __post_init__(self) -> None:
        _equal(f"line {self.name!r}", x=len(self.x), y=len(self.y))
        for name in ("low", "high"):
            if getattr(self, name):
                _equal(f"line {self.name!r}", x=len(self.x), **{name: len(getattr(self, name))})


@dataclass(frozen=True)
class Mark:
    """A named point of a panel."""

    name: str
    x: float
    y: float


@dataclass(frozen=True)
class Lines:
    """Curves over one axis."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Line, ...]
    marks: tuple[Mark, ...] = ()
    log_y: bool = False
    kind: Literal["lines"] = "lines"


@dataclass(frozen=True)
class Grid:
    """A value for each point of a rectangle: `values[j][i]` lies at (`x[i]`, `y[j]`)."""

    title: str
    x_label: str
    y_label: str
    value_label: str
    x: Numbers
    y: Numbers
    values: tuple[Numbers, ...]
    marks: tuple[Mark, ...] = ()
    paths: tuple[Line, ...] = ()
    kind: Literal["grid"] = "grid"

    def __post_init__(self) -> None:
        _equal(f"grid {self.title!r}", y=len(self.y), rows=len(self.values))
        for row in self.values:
            _equal(f"grid {self.title!r}", x=len(self.x), columns=len(row))


@dataclass(frozen=True)
class BarSeries:
    """One bar in each category."""

    name: str
    values: Numbers


@dataclass(frozen=True)
class Bars:
    """Named amounts, side by side in each category."""

    title: str
    x_label: str
    y_label: str
    categories: tuple[str, ...]
    series: tuple[BarSeries, ...]
    kind: Literal["bars"] = "bars"

    def __post_init__(self) -> None:
        for one in self.series:
            _equal(f"bars {one.name!r}", categories=len(self.categories), values=len(one.values))


@dataclass(frozen=True)
class Table:
    """Rows of text and numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    kind: Literal["table"] = "table"

    def __post_init__(self) -> None:
        for row in self.rows:
            _equal(f"table {self.title!r}", columns=len(self.columns), cells=len(row))


Panel = Lines | Grid | Bars | Table


@dataclass(frozen=True)
class Analysis:
    """A finished analysis.

    Args:
        name: what ``fedbasin analyze`` calls it.
        title: what it shows, in a line.
        source: the paper and figure it follows.
        runs: names of the runs it was made from.
        panels: the results.
        notes: what a reader must know: rows used, choices made, what is a reconstruction.
    """

    name: str
    title: str
    source: str
    runs: tuple[str, ...]
    panels: tuple[Panel, ...]
    notes: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Write the analysis; numbers keep seven digits."""
        return json.dumps({"form": FORM, **_plain(self)}, indent=1) + "\n"

    def to_csv(self) -> str:
        """Write every number in one long table: panel, series, x, y, value."""
        out = io.StringIO()
        writer = csv.writer(out)
        writer.writerow(["panel", "series", "x", "y", "value"])
        for panel in self.panels:
            writer.writerows([panel.title, *row] for row in _long(panel))
        return out.getvalue()

    @classmethod
    def from_json(cls, text: str) -> Analysis:
        """Read an analysis back; whatever does not fit the form is an error that says where."""
        try:
            content = json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            raise FigureDataError(f"not JSON: {error}") from error
        if not isinstance(content, dict) or content.pop("form", None) != FORM:
            raise FigureDataError(f"not an analysis of form {FORM}; make it again")
        return _READER.read(cls, content, "analysis")


def _long(panel: Panel) -> Iterator[tuple[Cell, ...]]:
    """Yield (series, x, y, value) of every number of a panel."""
    if isinstance(panel, Lines):
        for line in panel.series:
            yield from ((line.name, x, None, y) for x, y in zip(line.x, line.y, strict=True))
    elif isinstance(panel, Grid):
        for y, row in zip(panel.y, panel.values, strict=True):
            yield from ((panel.value_label, x, y, v) for x, v in zip(panel.x, row, strict=True))
        for line in panel.paths:
            yield from ((line.name, x, y, None) for x, y in zip(line.x, line.y, strict=True))
    elif isinstance(panel, Bars):
        for one in panel.series:
            pairs = zip(panel.categories, one.values, strict=True)
            yield from ((one.name, category, None, value) for category, value in pairs)
    else:
        for first, *cells in panel.rows:
            named = zip(panel.columns[1:], cells, strict=True)
            yield from ((first, column, None, cell) for column, cell in named)
    if isinstance(panel, Lines | Grid):
        yield from ((mark.name, mark.x, mark.y, None) for mark in panel.marks)


def _equal(what: str, **lengths: int) -> None:
    if len(set(lengths.values())) > 1:
        said = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise FigureDataError(f"{what} has unequal lengths: {said}")


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON; a missing number is null")


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    return value


def _read_plain(value: Any, wanted: Any, place: str) -> Any:
    """Return a number, a text or a list of these; null stands for a number that does not exist."""
    if wanted is float and value is None:
        return math.nan
    if get_origin(wanted) is tuple and isinstance(value, list):
        item = get_args(wanted)[0]
        return tuple(_read_plain(one, item, f"{place}[{i}]") for i, one in enumerate(value))
    if not is_fit(value, wanted):
        raise FigureDataError(f"{place} is {value!r:.40}, which does not fit the form")
    return fit(value, wanted)


_READER = Reader(FigureDataError, complete=True, read_plain=_read_plain)
