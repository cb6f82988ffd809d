"""Targets of a user's own data: which are classes, and which are numbers.

One column: text, categories, true/false are classes; whole numbers of at most 20 values are
classes, named by their values; other numbers are numbers. Several columns: 0 and 1 alone are labels
(int64), anything else is numbers (float32).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fedbasin.data.coding import Coded, Place, coded, coded_as, distinct
from fedbasin.data.dataset import DataError
from fedbasin.data.table import first_odd

MOST_WHOLE = 20  # values of a whole-number target that are still classes
_MOST_CLASSES = 10_000
Classes = bool | Sequence[str] | None


@dataclass(frozen=True, eq=False)
class Labels:
    """The targets of all rows.

    Args:
        values: int64 or float32, [n] or [n, k], as `Rows` has them.
        classes: the names of classes; empty for targets without classes.
        fixed: whether the names were given, so that training rows need not have all of them.
    """

    values: NDArray[Any]
    classes: tuple[str, ...] = ()
    fixed: bool = False


def labels_of(column: pa.ChunkedArray, classes: Classes, what: str, place: Place) -> Labels:
    """Return a column of targets as classes or as numbers.

    Args:
        column: without missing values; text is a string type.
        classes: whether they are classes, or the names of classes; None for the rule.
        what: how errors call the column.
        place: says where a row stands.
    """
    text = pa.types.is_large_string(column.type) or pa.types.is_string(column.type)
    whole = pa.types.is_integer(column.type)
    flag = pa.types.is_boolean(column.type)
    if not text and not flag and not whole and not _is_float(column.type):
        fix = "which cannot be predicted: turn it into numbers or text"
        raise DataError(f"{what} holds {column.type}, {fix}", f"{what} holds values, {fix}")
    if classes is not None and not isinstance(classes, bool):
        names = tuple(str(name) for name in classes)
        if len(set(names)) < len(names) or not names:
            raise DataError(f"classes must name each class once, got {list(names)!r:.60}")
        return Labels(coded_as(column, names, what, place), names, fixed=True)
    if classes is None:
        classes = text or flag or (whole and distinct(column) <= MOST_WHOLE)
    if not classes:
        if text:
            row = first_odd(column)
            fault = f"{what} holds text, and classes is False"
            where = place(row)
            raise DataError(
                f"{fault} ({where} has {column[row].as_py()!r:.40}): give numbers",
                f"{fault} ({where}): give numbers",
            )
        return Labels(_finite(column, what, place))
    found = coded(column)
    if len(found.names) > _MOST_CLASSES:
        raise DataError(
            f"{what} has {len(found.names):,} classes, such as {found.names[0]!r:.30}; the most is "
            f"{_MOST_CLASSES:,}: name another target, or set classes=False for numbers",
            f"{what} has more than {_MOST_CLASSES:,} classes: name another target",
        )
    return Labels(found.codes, found.names)


def several_labels(columns: dict[str, pa.ChunkedArray], place: Place) -> Labels:
    """Return several columns of targets as one array [n, k]."""
    found = []
    binary = True
    for name, column in columns.items():
        flag = pa.types.is_boolean(column.type)
        if not flag and not pa.types.is_integer(column.type) and not _is_float(column.type):
            row = first_odd(column)
            fault = f"target {name!r} is one of several and holds"
            where = place(row)
            fix = "give numbers, or 0 and 1"
            raise DataError(
                f"{fault} {column.type} ({where} has {column[row].as_py()!r:.40}): {fix}",
                f"{fault} no numbers ({where}): {fix}",
            )
        values = _finite(column, f"target {name!r}", place)
        whole = not _is_float(column.type)
        binary = binary and whole and bool(np.isin(values, (0, 1)).all())
        found.append(values)
    table = np.stack(found, axis=1)
    return Labels(table.astype(np.int64) if binary else table)


def only_trained(labels: Labels, is_test: NDArray[np.bool_], what: str, place: Place) -> Labels:
    """Keep the classes of training rows; a class that only test rows have is refused."""
    if not labels.classes or labels.fixed:
        return labels
    known = Coded(labels.classes, labels.values)
    ordered = known.first(~is_test)
    count = len(np.unique(known.codes[~is_test]))
    alone = np.flatnonzero(ordered.codes >= count)
    if len(alone):
        row = int(alone[0])
        where = f"{what}, {place(row)}"
        name = ordered.names[ordered.codes[row]]
        fix = "add training rows of it, remove these rows, or hold out other rows"
        raise DataError(
            f"{where}: the class {name!r:.40} occurs in test rows only ({len(alone):,} rows here), "
            f"so it cannot be learned: {fix}",
            f"{where}: the class occurs in test rows only, so it cannot be learned: {fix}",
        )
    if count < 2:
        fix = "there is nothing to learn; name another target"
        raise DataError(
            f"{what} has one class, {ordered.names[0]!r:.40}, in all training rows: {fix}",
            f"{what} has one class in all training rows: {fix}",
        )
    return Labels(ordered.codes, ordered.names[:count])


def _is_float(kind: pa.DataType) -> bool:
    return bool(pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def _finite(column: pa.ChunkedArray, what: str, place: Place) -> NDArray[np.float32]:
    """Return targets as float32; what is not finite there is refused."""
    with np.errstate(over="ignore"):  # infinity is refused below, by row
        numbers = column.cast(pa.float64(), safe=False).to_numpy().astype(np.float32)
    bad = ~np.isfinite(numbers)
    if bad.any():
        row = int(bad.argmax())
        where = f"{what}, {place(row)}"
        fault = "is not finite as float32: give another, or remove the row"
        raise DataError(
            f"{where}: the value {column[row].as_py()!r} {fault}", f"{where}: the value {fault}"
        )
    values: NDArray[np.float32] = numbers
    return values
