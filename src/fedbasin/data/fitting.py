"""Fitting an encoding: types, means, deviations and categories, from training rows alone."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fedbasin.data.dataset import DataError
from fedbasin.data.encoding import (
    Category,
    Column,
    Flag,
    Missing,
    Number,
    known_numbers,
    refuse_missing,
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
        refuse_missing(table, name, gone)
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
        refuse_missing(table, name, column.is_null().to_numpy())
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
