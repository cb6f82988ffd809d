"""How the columns of a table become the numbers that a network takes.

An encoding is fitted on training rows (`fedbasin.data.fitting`), kept as JSON, and applied to new
rows. Nothing in the file decides which code runs.

    number     (x - mean) / std; a missing one becomes the mean, which is 0
    flag       false is 0 and true is 1; a missing one becomes the share of true ones
    category   one-hot: a 0/1 column for each value; a value that training rows lack is all zeros
               index: one column of whole numbers, 0 for a value that training rows lack, then 1, 2,
               ... in the order of `values`

Missing categories are a value of their own where training rows have missing ones (the last column,
or the last number); else they are treated as values that training rows lack. An indicator is a
0/1 column behind its number or flag that says whether the value was missing.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fedbasin.core.reading import Reader
from fedbasin.data.coding import refuse_missing
from fedbasin.data.dataset import DataError
from fedbasin.data.table import KIND_NAMES, ColumnKind, Table, first_odd, open_table

Categories = Literal["onehot", "index"]
Missing = Literal["mean", "indicator", "refuse"]
_LARGEST = 64_000_000  # characters of JSON


@dataclass(frozen=True)
class Number:
    """A column of numbers, standardised.

    Args:
        name: of the column.
        mean: of the training rows' known values.
        std: their standard deviation; 1 where all are equal.
        indicator: whether a 0/1 column behind it says which values were missing.
    """

    name: str
    mean: float
    std: float
    indicator: bool = False
    kind: Literal["number"] = "number"

    def __post_init__(self) -> None:
        """Check the fields."""
        if not (math.isfinite(self.mean) and math.isfinite(self.std) and self.std > 0):
            raise ValueError(
                f"column {self.name!r} has mean {self.mean} and std {self.std}: both must be "
                "finite, and std above 0"
            )


@dataclass(frozen=True)
class Flag:
    """A column of true and false, as 1 and 0.

    Args:
        name: of the column.
        mean: the share of true ones among the training rows' known values.
        indicator: whether a 0/1 column behind it says which values were missing.
    """

    name: str
    mean: float
    indicator: bool = False
    kind: Literal["flag"] = "flag"

    def __post_init__(self) -> None:
        """Check the fields."""
        if not 0 <= self.mean <= 1:
            raise ValueError(f"column {self.name!r} has mean {self.mean}: it must be in [0, 1]")


@dataclass(frozen=True)
class Category:
    """A column of categories.

    Args:
        name: of the column.
        values: those of the training rows, in order.
        missing: whether "missing" is one more value.
    """

    name: str
    values: tuple[str, ...]
    missing: bool = False
    kind: Literal["category"] = "category"

    def __post_init__(self) -> None:
        """Check the fields."""
        if len(set(self.values)) < len(self.values):
            raise ValueError(f"column {self.name!r} lists a value twice")
        if not self.values and not self.missing:
            raise ValueError(f"column {self.name!r} lists no values")


Column = Number | Flag | Category
_FITTING: dict[str, tuple[ColumnKind, ...]] = {
    "number": ("number", "whole"),
    "flag": ("flag",),
    "category": ("text", "category"),
}


class IndexColumn(NamedTuple):
    """A column of the array that holds numbers of categories."""

    position: int  # in the array
    name: str  # of the table's column
    size: int  # numbers are 0 .. size - 1


@dataclass(frozen=True)
class Encoding:
    """How a table's columns become one float32 array ``[n, width]``.

    Args:
        columns: the features, in the array's order.
        categories: ``"onehot"``, or ``"index"`` for networks that embed categories: then the
            columns that `index_columns` lists hold whole numbers.
        missing: what becomes of missing numbers: ``"mean"``, ``"indicator"`` or ``"refuse"``.
        targets: the column, or columns, that are predicted.
        classes: the names of the target's classes, in order; empty where it has none.
        client: the column that names the client; None without one.
        ignored: other columns of the table, which new rows may have.
    """

    columns: tuple[Column, ...]
    categories: Categories = "onehot"
    missing: Missing = "mean"
    targets: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    client: str | None = None
    ignored: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check that there are columns and that none is listed twice."""
        if not self.columns:
            raise ValueError("an encoding needs at least one column")
        names = [column.name for column in self.columns]
        if len(set(names)) < len(names):
            raise ValueError("an encoding lists a column twice")

    @property
    def width(self) -> int:
        """Return how many numbers a row becomes."""
        return sum(len(_names_of(column, self.categories)) for column in self.columns)

    @property
    def names(self) -> tuple[str, ...]:
        """Return a name for each of these numbers, such as ``"age"`` and ``"sex=f"``."""
        return tuple(name for column in self.columns for name in _names_of(column, self.categories))

    @property
    def starts(self) -> tuple[int, ...]:
        """Return where in the array each column begins."""
        widths = [len(_names_of(column, self.categories)) for column in self.columns]
        return tuple(sum(widths[:place]) for place in range(len(widths)))

    @property
    def index_columns(self) -> tuple[IndexColumn, ...]:
        """Return the columns to embed, and how many numbers each can hold; none with one-hot."""
        if self.categories == "onehot":
            return ()
        found = []
        at = 0
        for column in self.columns:
            if isinstance(column, Category):
                size = 1 + len(column.values) + column.missing
                found.append(IndexColumn(at, column.name, size))
            at += len(_names_of(column, self.categories))
        return tuple(found)

    def apply(self, source: Any) -> NDArray[np.float32]:
        """Return new rows as the array that networks of this encoding take.

        Args:
            source: a table of any kind that `from_table` takes. Target and client columns may be
                there, or not; other columns that the encoding does not know are refused.
        """
        table = source if isinstance(source, Table) else open_table(source, text=self.text_columns)
        self.check(table)
        result = np.zeros((len(table), self.width), dtype=np.float32)
        self.fill(table, ((np.ones(len(table), dtype=np.bool_), result),))
        return result

    @property
    def text_columns(self) -> tuple[str, ...]:
        """Return the columns that hold text, whatever it looks like in a CSV file."""
        return tuple(column.name for column in self.columns if isinstance(column, Category))

    def check(self, table: Table) -> None:
        """Refuse a table that lacks a column, has one that is not known, or one of another type."""
        for column in self.columns:
            table.check_name(column.name, "the encoding's column")
            kind = table.kind(column.name)
            if kind not in (*_FITTING[column.kind], "empty"):
                raise _other_kind(table, column, kind)
        known = {*(column.name for column in self.columns), *self.targets, *self.ignored}
        more = [name for name in table.names if name not in known and name != self.client]
        if more:
            place = table.names.index(more[0]) + 1
            raise DataError(
                f"column {more[0]!r} is not known to the encoding: remove it from the table",
                f"column number {place} is not known to the encoding: remove it from the table",
            )

    def fill(
        self, table: Table, into: tuple[tuple[NDArray[np.bool_], NDArray[np.float32]], ...]
    ) -> dict[int, NDArray[np.bool_]]:
        """Write rows into arrays that hold zeros, one column of the table at a time.

        Args:
            table: what to read.
            into: which rows go to an array, and the array.

        Returns:
            Which rows [n] of the table lack a value, by the number of the column among those of
            numbers and flags; columns that lack none are left out.
        """
        at = 0
        number = 0
        gaps: dict[int, NDArray[np.bool_]] = {}
        for column in self.columns:
            if isinstance(column, Category):
                codes = self._codes(table, column)
                for rows, array in into:
                    _write_codes(codes[rows], array, at, self.categories)
            else:
                values = self._numbers(table, column)
                for rows, array in into:
                    _write_numbers(values[rows], array, at, column)
                gone = np.isnan(values)
                if gone.any():
                    gaps[number] = gone
                number += 1
            at += len(_names_of(column, self.categories))
        return gaps

    def _numbers(self, table: Table, column: Number | Flag) -> NDArray[Any]:
        """Read a column of numbers; infinity is refused, and NaN where the rule says so."""
        values = known_numbers(table, column.name)
        if self.missing == "refuse":
            refuse_gaps(table, column.name, np.isnan(values))
        return values

    def _codes(self, table: Table, column: Category) -> NDArray[np.int32]:
        """Return the number of each row's value: -1 if it is not listed, the last if missing."""
        values = table.column(column.name).cast(pa.large_string())
        gone = values.is_null().to_numpy()
        if self.missing == "refuse":
            refuse_gaps(table, column.name, gone)
        listed = pa.array(column.values, type=pa.large_string())
        found = pc.fill_null(pc.index_in(values, value_set=listed), -1)
        codes: NDArray[np.int32] = found.to_numpy().astype(np.int32)
        if column.missing:
            codes[gone] = len(column.values)
        return codes

    def to_json(self) -> str:
        """Return the encoding as JSON."""
        return json.dumps(asdict(self), ensure_ascii=False, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Encoding:
        """Read an encoding from JSON; anything unexpected is a `DataError`."""
        if len(text) > _LARGEST:
            raise DataError(
                f"an encoding of {len(text):,} characters is refused: the most is {_LARGEST:,}"
            )
        try:
            value = json.loads(text)
            return Reader(ValueError, file="encoding", complete=True).read(cls, value)
        except (ValueError, RecursionError) as error:
            raise DataError(f"this is no encoding: {error}") from error


def known_numbers(table: Table, name: str) -> NDArray[Any]:
    """Read a column of numbers; missing ones are NaN, infinite ones are refused."""
    values = table.numbers(name)
    infinite = np.isinf(values)
    if infinite.any():
        row = int(infinite.argmax())
        where = f"column {name!r}, {table.place(row)}"
        fix = "give a finite number, or none at all"
        raise DataError(
            f"{where}: the value is {values[row]}: {fix}", f"{where}: the value is infinite: {fix}"
        )
    return values


def refuse_gaps(table: Table, name: str, gone: NDArray[np.bool_]) -> None:
    """Refuse missing values of a column to learn from."""
    fix = "fill it in, or set missing='mean' or 'indicator'"
    refuse_missing(gone, f"column {name!r}", table.place, fix)


def _other_kind(table: Table, column: Column, kind: ColumnKind) -> DataError:
    """Return the error of a column that holds another kind of values than the encoding has."""
    wanted = KIND_NAMES[_FITTING[column.kind][0]]
    fault = f"column {column.name!r} holds {KIND_NAMES[kind]} and the encoding has {wanted} there"
    fix = "correct the value, or convert the column"
    values = table.column(column.name)
    row = first_odd(values, flags=column.kind == "flag")
    where = table.place(row)
    return DataError(
        f"{fault} ({where} has {values[row].as_py()!r:.40}): {fix}", f"{fault} ({where}): {fix}"
    )


def _names_of(column: Column, categories: Categories) -> tuple[str, ...]:
    """Name the numbers that a column becomes."""
    if isinstance(column, Category):
        if categories == "index":
            return (column.name,)
        values = tuple(f"{column.name}={value}" for value in column.values)
        return (*values, f"{column.name} missing") if column.missing else values
    return (column.name, f"{column.name} missing") if column.indicator else (column.name,)


def _write_codes(
    codes: NDArray[np.int32], array: NDArray[np.float32], at: int, categories: Categories
) -> None:
    if categories == "index":
        array[:, at] = codes + 1
        return
    listed = np.flatnonzero(codes >= 0)
    array[listed, at + codes[listed]] = 1


def _write_numbers(
    values: NDArray[Any], array: NDArray[np.float32], at: int, column: Number | Flag
) -> None:
    gone = np.isnan(values)
    filled = np.where(gone, column.mean, values.astype(np.float64))
    if isinstance(column, Number):
        filled -= column.mean
        filled /= column.std
    array[:, at] = filled
    if column.indicator:
        array[:, at + 1] = gone
