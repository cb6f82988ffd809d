"""A user's own table, or one table of each site, as a `Dataset`."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fedbasin.data.coding import Coded, coded, missing_rows, refuse_missing
from fedbasin.data.dataset import DataError, Dataset
from fedbasin.data.encoding import Categories, Category, Column, Encoding, Missing
from fedbasin.data.fitting import fit_column
from fedbasin.data.holdout import Holdout, Plan, TestBy, check_share, plan
from fedbasin.data.naming import finished
from fedbasin.data.table import KIND_NAMES, Table, joined, open_table
from fedbasin.data.targets import Classes, Labels, labels_of, several_labels

_log = logging.getLogger("fedbasin")


@dataclass(frozen=True)
class _Recipe:
    """The arguments that `from_table` and `from_clients` share."""

    targets: tuple[str, ...]
    client: str | None
    features: tuple[str, ...] | None
    drop: tuple[str, ...]
    categories: Categories
    missing: Missing
    missing_target: str
    most_categories: int
    classes: Classes
    test_by: TestBy
    time: tuple[str, ...]
    encoding: Encoding | None

    def __post_init__(self) -> None:
        """Check the arguments against each other."""
        for name, value, known in (
            ("categories", self.categories, get_args(Categories)),
            ("missing", self.missing, get_args(Missing)),
            ("missing_target", self.missing_target, ("refuse", "drop")),
        ):
            if value not in known:
                raise DataError(f"{name} is {value!r}: available: {', '.join(known)}")
        if not self.targets:
            raise DataError("target is empty: name the column to predict")
        if self.client in self.targets:
            raise DataError(f"{self.client!r} is both target and client: name two columns")
        if self.most_categories < 1:
            raise DataError(f"most_categories must be 1 or more, got {self.most_categories}")
        if self.encoding is not None and self.encoding.targets != self.targets:
            raise DataError(
                f"target is {list(self.targets)} and the encoding was made for "
                f"{list(self.encoding.targets)}: name the same"
            )


def from_table(
    source: Any,
    target: str | tuple[str, ...],
    client: str | None = None,
    *,
    features: Iterable[str] | None = None,
    drop: Iterable[str] = (),
    categories: Categories = "onehot",
    missing: Missing = "mean",
    missing_target: str = "refuse",
    most_categories: int = 100,
    classes: Classes = None,
    test: Any = 0.2,
    test_by: TestBy = "rows",
    time: str | tuple[str, ...] | None = None,
    encoding: Encoding | None = None,
    name: str | None = None,
) -> Dataset:
    """Make a dataset of a table.

    Numbers are standardised, text and categories become one-hot columns; both are fitted on
    training rows alone (`Encoding`). A run in which clients hold rows out fits the numbers again
    without these. Errors count rows from 0, the first row of data.

    Args:
        source: a frame of pandas, polars or pyarrow; the path of a CSV file, a parquet file or a
            folder of parquet files; or a list of dicts.
        target: the column to predict, or several: (time, event) of a survival table, 0/1 columns.
        client: the column that names the client of each row; None without one.
        features: the columns to learn from; by default all but target, client, time and `drop`.
        drop: columns to leave out.
        categories: ``"onehot"``, or ``"index"`` for a network that embeds them (see `Encoding`).
        missing: missing numbers become the training ``"mean"``; ``"indicator"`` adds a 0/1 column
            where training rows have missing ones; ``"refuse"`` refuses missing values.
        missing_target: rows without a target are an error (``"refuse"``), or left out (``"drop"``).
        most_categories: a column of more categories is refused.
        classes: whether the target is classes, or the names of its classes; None for the rule:
            text, true/false and at most 20 whole numbers are classes.
        test: the share of rows, or clients, to hold out; or a separate table of test rows.
        test_by: hold out ``"rows"``, whole ``"clients"``, or the latest rows by ``"time"``.
        time: the column that rows are ordered by, or several, such as (year, month, day).
        encoding: one that another table was fitted with; it is applied instead of fitting.
        name: by default that of the file, or ``"table"``. A hash of the content is added.
    """
    recipe = _Recipe(
        (target,) if isinstance(target, str) else tuple(target),
        client,
        None if features is None else _names(features, "features"),
        _names(drop, "drop"),
        categories,
        missing,
        missing_target,
        most_categories,
        classes,
        test_by,
        () if time is None else (time,) if isinstance(time, str) else tuple(time),
        encoding,
    )
    share = check_share(test, test_by, client is not None, bool(recipe.time))
    known_text = () if encoding is None else encoding.text_columns
    table = open_table(source, text=known_text)
    is_test = None
    if share is None:
        tested = open_table(test, label="the test table", text=known_text or _text_of(table))
        table = joined([table, tested])
        is_test = np.arange(len(table)) >= len(table) - len(tested)
    stem = Path(source).stem if isinstance(source, str | Path) else "table"
    return _made(table, recipe, share, is_test, None, name or stem)


def from_clients(
    sites: Mapping[str, Any],
    target: str | tuple[str, ...],
    *,
    features: Iterable[str] | None = None,
    drop: Iterable[str] = (),
    categories: Categories = "onehot",
    missing: Missing = "mean",
    missing_target: str = "refuse",
    most_categories: int = 100,
    classes: Classes = None,
    test: Any = 0.2,
    test_by: TestBy = "rows",
    time: str | tuple[str, ...] | None = None,
    encoding: Encoding | None = None,
    name: str = "clients",
) -> Dataset:
    """Make a dataset of tables of which each is one client's.

    All must have the same columns. The encoding is fitted on the training rows of all of them.

    Args:
        sites: the table of every client, by the client's name.
        target: the column to predict, or several.
        features: as for `from_table`.
        drop: as for `from_table`.
        categories: as for `from_table`.
        missing: as for `from_table`.
        missing_target: as for `from_table`.
        most_categories: as for `from_table`.
        classes: as for `from_table`.
        test: a share, or a mapping from names of clients to tables of test rows.
        test_by: as for `from_table`.
        time: as for `from_table`.
        encoding: as for `from_table`.
        name: what the dataset is called. A hash of the content is added.
    """
    recipe = _Recipe(
        (target,) if isinstance(target, str) else tuple(target),
        None,
        None if features is None else _names(features, "features"),
        _names(drop, "drop"),
        categories,
        missing,
        missing_target,
        most_categories,
        classes,
        test_by,
        () if time is None else (time,) if isinstance(time, str) else tuple(time),
        encoding,
    )
    if len(sites) < 2:
        raise DataError(f"there is one client ({', '.join(sites)}): a federation needs two")
    with _bare_by_class():  # texts name clients, who may be persons
        return _of_sites(sites, recipe, test, name)


def _of_sites(sites: Mapping[str, Any], recipe: _Recipe, test: Any, name: str) -> Dataset:
    """Open the tables of all clients and make one dataset of them."""
    share = check_share(test, recipe.test_by, True, bool(recipe.time))
    known_text = () if recipe.encoding is None else recipe.encoding.text_columns
    tables = [_site(key, source, known_text) for key, source in sites.items()]
    owners = list(sites)
    trained = sum(len(table) for table in tables)
    is_test = None
    if share is None:
        if not isinstance(test, Mapping):
            raise DataError("test must be a share, or a mapping from clients to tables")
        tables += [_site(key, source, known_text, "test of ") for key, source in test.items()]
        owners += [str(key) for key in test]
        is_test = np.arange(sum(len(table) for table in tables)) >= trained
    names = tuple(dict.fromkeys(owners))
    codes = np.repeat(
        np.array([names.index(owner) for owner in owners]), [len(table) for table in tables]
    )
    return _made(joined(tables), recipe, share, is_test, Coded(names, codes), name)


@contextmanager
def _bare_by_class() -> Iterator[None]:
    """Leave nothing but the class's name in the bare text of a `DataError`."""
    try:
        yield
    except DataError as error:
        raise DataError(str(error)) from error


def _site(key: str, source: Any, text: tuple[str, ...], before: str = "") -> Table:
    """Open the table of a client; whatever is wrong with it names the client."""
    label = f"{before}client {key!r}"
    try:
        return open_table(source, label=label, text=text)
    except DataError as error:
        if label in str(error):
            raise
        raise DataError(f"{label}: {error}") from error


def _names(names: Iterable[str], argument: str) -> tuple[str, ...]:
    """Return names of columns; one string is no list of names."""
    if isinstance(names, str):
        raise DataError(f"{argument} is {names!r}: give a list, [{names!r}]")
    return tuple(names)


def _text_of(table: Table) -> tuple[str, ...]:
    """Return the columns that hold text, so that another CSV file is read alike."""
    return tuple(name for name in table.names if table.kind(name) in ("text", "category"))


def _made(
    table: Table,
    recipe: _Recipe,
    share: float | None,
    is_test: NDArray[np.bool_] | None,
    owners: Coded | None,
    name: str,
) -> Dataset:
    """Choose rows, fit or take the encoding, and fill the arrays."""
    _check_names(table, recipe)
    known = _rows_with_target(table, recipe)
    if known is not None:
        if owners is not None:
            _refuse_emptied(owners, known)
            owners = Coded(owners.names, owners.codes[known])
        is_test = None if is_test is None else is_test[known]
        table = table.only(known)
    labels = _labels(table, recipe)
    if recipe.client is not None:
        owners = _clients(table, recipe.client)
    moment = _moments(table, recipe.time) if recipe.test_by == "time" and is_test is None else None
    holdout = Holdout(share, recipe.test_by, moment, is_test)
    chosen = plan(labels, owners, holdout, f"target {recipe.targets[0]!r}", table.place)
    encoding = recipe.encoding
    if encoding is None:
        encoding = _fitted(table, recipe, chosen)
    encoding.check(table)
    tested = int(chosen.is_test.sum())
    train = np.zeros((len(table) - tested, encoding.width), dtype=np.float32)
    test = np.zeros((tested, encoding.width), dtype=np.float32)
    gaps = encoding.fill(table, ((~chosen.is_test, train), (chosen.is_test, test)))
    missing = _dense(gaps, len(table), encoding)
    fitted = recipe.encoding is None
    return finished(name, "table", chosen, (train, test), encoding, missing, fitted=fitted)


def _dense(
    gaps: Mapping[int, NDArray[np.bool_]], rows: int, encoding: Encoding
) -> NDArray[np.bool_] | None:
    """Return which numbers and flags are missing, [rows, k]; None where none is."""
    if not gaps:
        return None
    numbers = sum(not isinstance(column, Category) for column in encoding.columns)
    missing = np.zeros((rows, numbers), dtype=np.bool_)
    for number, gone in gaps.items():
        missing[:, number] = gone
    return missing


def _check_names(table: Table, recipe: _Recipe) -> None:
    """Refuse names of columns that are not there."""
    roles = (
        ("target", recipe.targets),
        ("client", () if recipe.client is None else (recipe.client,)),
        ("time", recipe.time),
        ("feature", recipe.features or ()),
        ("drop", recipe.drop),
    )
    for role, names in roles:
        for each in names:
            table.check_name(each, role)
        if len(set(names)) < len(names):
            raise DataError(f"{role} names a column twice: {', '.join(names)}")
    given = recipe.features or ()
    leaked = [each for each in recipe.targets if each in given]
    if leaked:
        raise DataError(f"{leaked[0]!r} is both target and feature: leave it out of features")


def _rows_with_target(table: Table, recipe: _Recipe) -> NDArray[np.bool_] | None:
    """Mark the rows that have a target; None where all have one."""
    known = np.ones(len(table), dtype=np.bool_)
    for each in recipe.targets:
        if table.kind(each) == "empty":
            fault = f"target {each!r} has no values: name another column"
            raise DataError(fault, fault)
        known &= ~missing_rows(table.column(each))
    gone = int((~known).sum())
    if not gone:
        return None
    if recipe.missing_target == "refuse":
        names = ", ".join(map(repr, recipe.targets))
        fix = "fill it in, or set missing_target='drop' to leave such rows out"
        refuse_missing(~known, f"target {names}", table.place, fix)
    if not known.any():
        fault = f"no row has a target {recipe.targets[0]!r}: name another column"
        raise DataError(fault, fault)
    _log.warning("left out %d of %d rows, which have no target", gone, len(table))
    return known


def _refuse_emptied(owners: Coded, known: NDArray[np.bool_]) -> None:
    left = np.bincount(owners.codes[known], minlength=len(owners.names))
    if not left.all():
        empty = owners.names[int(left.argmin())]
        raise DataError(f"client {empty!r} has no rows with a target: leave the client out")


def _labels(table: Table, recipe: _Recipe) -> Labels:
    """Return the targets of all rows."""
    if len(recipe.targets) > 1:
        if recipe.classes:
            raise DataError("classes are of one target column, and several are named")
        columns = {each: table.column(each) for each in recipe.targets}
        return several_labels(columns, table.place)
    only = recipe.targets[0]
    classes = recipe.classes
    if recipe.encoding is not None:
        classes = recipe.encoding.classes or False
    return labels_of(table.column(only), classes, f"target {only!r}", table.place)


def _clients(table: Table, name: str) -> Coded:
    """Number the clients that a column names."""
    if table.kind(name) not in ("text", "category", "whole", "flag", "number"):
        fault = f"client {name!r} holds {KIND_NAMES[table.kind(name)]}"
        raise DataError(f"{fault}: give names or whole numbers", f"{fault}: give names")
    column = table.column(name)
    fix = "fill in a name, or remove these rows"
    refuse_missing(missing_rows(column), f"client {name!r}", table.place, fix)
    if table.kind(name) == "number":
        values = table.numbers(name)
        odd = values != np.floor(values)
        if odd.any():
            row = int(odd.argmax())
            where = f"client {name!r}, {table.place(row)}"
            fault = "is no whole number: name a column of names or whole numbers"
            raise DataError(f"{where}: {values[row]} {fault}", f"{where}: the value {fault}")
    return coded(column)


def _moments(table: Table, names: tuple[str, ...]) -> NDArray[np.int64]:
    """Number the moments that columns tell, in their order; the first column counts most."""
    moments = np.zeros(len(table), dtype=np.int64)
    for name in names:
        kind = table.kind(name)
        if kind not in ("date", "whole", "number"):
            fault = (
                f"time {name!r} holds {KIND_NAMES[kind]}, whose order is not that of time: give "
                "dates or numbers"
            )
            raise DataError(fault, fault)
        column = table.column(name)
        fix = "fill it in, or remove the row"
        refuse_missing(missing_rows(column), f"time {name!r}", table.place, fix)
        ranks = np.unique(_as_numbers(column), return_inverse=True)[1]
        # Ranks of pairs stay below the number of rows, so products fit in 64 bits.
        moments = np.unique(moments * (int(ranks.max()) + 1) + ranks, return_inverse=True)[1]
    return moments


def _as_numbers(column: pa.ChunkedArray) -> NDArray[Any]:
    """Return numbers, dates or times as numbers."""
    if pa.types.is_temporal(column.type):
        wide = pa.types.is_date32(column.type) or pa.types.is_time32(column.type)
        column = column.cast(pa.int32() if wide else pa.int64())
    elif pa.types.is_decimal(column.type):
        column = column.cast(pa.float64())
    values: NDArray[Any] = column.to_numpy()
    return values


def _fitted(table: Table, recipe: _Recipe, chosen: Plan) -> Encoding:
    """Fit every feature column on the training rows."""
    roles = {*recipe.targets, *recipe.time, *recipe.drop, recipe.client}
    names = recipe.features or tuple(name for name in table.names if name not in roles)
    if not names:
        raise DataError("no column is left to learn from: drop fewer, or name features")
    columns: list[Column] = []
    with _bare_by_class():  # names that a file has, which may be values where it has no header
        for name in names:
            columns.append(
                fit_column(
                    table,
                    name,
                    ~chosen.is_test,
                    missing=recipe.missing,
                    most_categories=recipe.most_categories,
                )
            )
    used = {*names, *recipe.targets, recipe.client}
    return Encoding(
        tuple(columns),
        recipe.categories,
        recipe.missing,
        recipe.targets,
        chosen.labels.classes,
        recipe.client,
        tuple(name for name in table.names if name not in used),
    )
