"""Values that name something (classes, clients), as numbers from 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fedbasin.core.suggest import nearest
from fedbasin.data.dataset import DataError

Place = Callable[[int], str]


@dataclass(frozen=True, eq=False)
class Coded:
    """What each row is named, as numbers.

    Args:
        names: all names, in order.
        codes: int64 [n], from 0.
    """

    names: tuple[str, ...]
    codes: NDArray[np.int64]

    def first(self, rows: NDArray[np.bool_]) -> Coded:
        """Number the names that occur in the marked rows first; both halves keep their order."""
        used = np.zeros(len(self.names), dtype=np.bool_)
        used[self.codes[rows]] = True
        order = np.concatenate([np.flatnonzero(used), np.flatnonzero(~used)])
        number = np.empty(len(order), dtype=np.int64)
        number[order] = np.arange(len(order))
        return Coded(tuple(self.names[old] for old in order), number[self.codes])


def coded(column: pa.ChunkedArray) -> Coded:
    """Number the values of a column without missing ones, in the order of the values.

    Text is ordered as text, numbers by size. Whole numbers of a floating type are named as whole
    numbers, so that ``1.0`` is ``"1"``.
    """
    found = column.dictionary_encode().combine_chunks()
    if isinstance(found, pa.ChunkedArray):
        found = found.chunk(0)
    values = found.dictionary.to_pylist()
    order = sorted(range(len(values)), key=values.__getitem__)
    number = np.empty(len(values), dtype=np.int64)
    number[order] = np.arange(len(order))
    names = tuple(_name(values[at]) for at in order)
    return Coded(names, number[found.indices.to_numpy(zero_copy_only=False)])


def coded_as(
    column: pa.ChunkedArray, names: Sequence[str], what: str, place: Place
) -> NDArray[np.int64]:
    """Number the values of a column by names that are given.

    Whole numbers that are no names themselves count the names from 0.
    """
    own = coded(column)
    number = {name: at for at, name in enumerate(names)}
    if pa.types.is_integer(column.type) and not set(own.names) <= set(number):
        number = {str(at): at for at in range(len(names))}
    for code, name in enumerate(own.names):
        if name not in number:
            row = int((own.codes == code).argmax())
            where = f"{what}, {place(row)}"
            raise DataError(
                f"{where}: the class {name!r:.40} is not among the classes; "
                f"{nearest(name, list(names)[:20])}",
                f"{where}: the class is not among the classes: correct it, or remove the row",
            )
    table = np.array([number[name] for name in own.names], dtype=np.int64)
    return table[own.codes]


def missing_rows(column: pa.ChunkedArray) -> NDArray[np.bool_]:
    """Mark the rows of a column that have no value; NaN is none."""
    marks: NDArray[np.bool_] = column.is_null(nan_is_null=True).to_numpy()
    return marks


def refuse_missing(gone: NDArray[np.bool_], what: str, place: Place, fix: str) -> None:
    """Refuse missing values, and name the first row that has one."""
    if gone.any():
        missing = f"{what}, {place(int(gone.argmax()))}: the value is missing"
        count = f"({int(gone.sum()):,} such rows)"
        raise DataError(f"{missing} {count}: {fix}", f"{missing}: {fix}")


def distinct(column: pa.ChunkedArray) -> int:
    """Return how many values a column has."""
    return len(pc.unique(column))


def _name(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)
