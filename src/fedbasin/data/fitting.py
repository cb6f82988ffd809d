"""Fitting an encoding: types, means, deviations and categories, from training rows alone.

`from_table` fits the encoding before clients hold any rows out. Means and deviations of numbers,
and shares of true flags, are then fitted again without the rows that are held out (`refitted`).
Which categories there are, and so what a column becomes, stays.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fedbasin.data.dataset import DataError, Rows, Splits
from fedbasin.data.encoding import (
    Category,
    Column,
    Encoding,
    Flag,
    Missing,
    Number,
    known_numbers,
    refuse_gaps,
)
from fedbasin.data.table import NUMBER, Table, first_odd

_DATE = r"^\s*(\d{4}-\d{1,2}-\d{1,2}|\d{1,2}[./]\d{1,2}[./]\d{4})([T ]\d{1,2}:\d{2}.*)?\s*$"


def fit_column(
    table: Table,
    name: str,
    is_train: NDArray[np.bool_],
    *,
    missing: Missing = "mean",
    most_categories: int = 100,
) -> Column:
    """Find out how a column becomes numbers.

    Args:
        table: of training rows, and of others that are only looked at for values that no row may
            have.
        name: the column.
        is_train: the rows whose values count.
        missing: what becomes of missing values.
        most_categories: a column of more categories is refused.
    """
    kind = table.kind(name)
    if kind == "date":
        raise DataError(
            f"column {name!r} holds dates or times, which are no numbers: leave it out with "
            f"drop=[{name!r}], turn it into a number (such as days since some day), or name it as "
            "time= to split by it"
        )
    if kind == "other":
        raise DataError(
            f"column {name!r} holds {table.column(name).type}, one number or text a row is wanted: "
            f"leave it out with drop=[{name!r}]"
        )
    if kind == "empty":
        raise _no_values(name)
    if kind in ("text", "category"):
        return _fit_category(table, name, is_train, missing, most_categories)
    values = known_numbers(table, name)
    gone = np.isnan(values)
    if missing == "refuse":
        refuse_gaps(table, name, gone)
    known = values[is_train & ~gone].astype(np.float64)
    if not len(known):
        raise _no_values(name)
    indicator = missing == "indicator" and bool(gone[is_train].any())
    mean = float(known.mean())
    if kind == "flag":
        return Flag(name, mean, indicator)
    # Rounding can leave a tiny deviation of equal numbers, which would blow up to 1.
    constant = known.min() == known.max()
    return Number(name, mean, 1.0 if constant else float(known.std()) or 1.0, indicator)


def refuse_numbers_in_text(table: Table, name: str) -> None:
    """Refuse a column of text that is mostly numbers: some value was meant to be one."""
    column = table.column(name)
    fits = pc.match_substring_regex(column, NUMBER)
    count = pc.sum(fits).as_py() or 0
    known = len(column) - column.null_count
    if not known / 2 < count < known:
        return
    row = first_odd(column)
    raise DataError(
        f"column {name!r}, {table.place(row)}: {column[row].as_py()!r:.60} is text in a column of "
        f"numbers ({count:,} of {known:,} values): correct it or leave it empty; for categories "
        "give the column as such (pandas: astype('category'))"
    )


def refuse_dates_in_text(table: Table, name: str) -> None:
    """Refuse a column of text that is dates, as pandas reads them from a CSV file."""
    column = table.column(name)
    if pc.all(pc.match_substring_regex(column, _DATE)).as_py():
        raise DataError(
            f"column {name!r} holds dates as text, such as {_first(column)!r:.30}: leave it out "
            f"with drop=[{name!r}], or turn it into a number (such as days since some day); for "
            "categories give the column as such (pandas: astype('category'))"
        )


def _first(column: pa.ChunkedArray) -> str:
    return str(column.drop_null()[0].as_py())


def _no_values(name: str) -> DataError:
    return DataError(
        f"column {name!r} has no values in the training rows: leave it out with drop=[{name!r}]"
    )


def _fit_category(
    table: Table, name: str, is_train: NDArray[np.bool_], missing: Missing, most: int
) -> Category:
    """List the values of training rows."""
    if table.kind(name) == "text":
        refuse_numbers_in_text(table, name)
        refuse_dates_in_text(table, name)
    column = table.column(name)
    if missing == "refuse":
        refuse_gaps(table, name, column.is_null().to_numpy())
    found = pc.unique(column.filter(pa.array(is_train))).to_pylist()
    values = sorted(value for value in found if value is not None)
    if not values:
        raise _no_values(name)
    if len(values) > most:
        raise DataError(
            f"column {name!r} has {len(values):,} categories, such as {values[0]!r:.30}, and "
            f"most_categories is {most}: leave it out with drop=[{name!r}], join rare values, or "
            f"set most_categories={len(values)}"
        )
    return Category(name, tuple(values), missing=None in found)


def refitted(
    encoding: Encoding, splits: Splits, used: NDArray[np.bool_]
) -> tuple[Encoding, Splits]:
    """Fit numbers and flags on some of the training rows, and encode all rows accordingly.

    Args:
        encoding: how the rows are encoded.
        splits: the rows.
        used: which of the training rows to fit on, [n].
    """
    train, proxy, test = splits.train, splits.proxy, splits.test
    written = [
        None if rows is None else np.array(rows.inputs, order="C") for rows in (train, proxy, test)
    ]
    columns = list(encoding.columns)
    number = -1
    for place, (column, at) in enumerate(zip(columns, encoding.starts, strict=True)):
        if isinstance(column, Category):
            continue
        number += 1
        known = used if train.missing is None else used & ~train.missing[:, number]
        if not known.any():
            continue
        new = columns[place] = _fitted(column, train.inputs[known, at].astype(np.float64))
        for rows, array in zip((train, proxy, test), written, strict=True):
            if rows is not None and array is not None:
                gone = None if rows.missing is None else rows.missing[:, number]
                array[:, at] = _encoded(column, new, rows.inputs[:, at], gone)
    made = [
        None if rows is None or array is None else _with(rows, array)
        for rows, array in zip((train, proxy, test), written, strict=True)
    ]
    assert made[0] is not None and made[2] is not None
    return replace(encoding, columns=tuple(columns)), Splits(made[0], made[1], made[2])


def _fitted(column: Number | Flag, values: NDArray[np.float64]) -> Number | Flag:
    """Return the column as fitted on encoded values that are known."""
    middle = float(values.mean())
    if isinstance(column, Flag):
        return replace(column, mean=middle)
    constant = values.min() == values.max()
    spread = 1.0 if constant else column.std * float(values.std()) or 1.0
    return replace(column, mean=column.mean + column.std * middle, std=spread)


def _encoded(
    old: Number | Flag,
    new: Number | Flag,
    values: NDArray[np.float32],
    gone: NDArray[np.bool_] | None,
) -> NDArray[np.float64]:
    """Turn what the old column encoded into what the new one encodes."""
    if isinstance(old, Number) and isinstance(new, Number):
        made = (values.astype(np.float64) * old.std + (old.mean - new.mean)) / new.std
        fill = 0.0
    else:
        made = values.astype(np.float64)
        fill = new.mean
    return made if gone is None else np.where(gone, fill, made)


def _with(rows: Rows, inputs: NDArray[np.float32]) -> Rows:
    inputs.flags.writeable = False
    return replace(rows, inputs=inputs)
