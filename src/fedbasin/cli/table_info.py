"""`fedbasin data info` of a table file: its columns, its clients, and whether it can be used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table as Grid

from fedbasin.data import Dataset, from_table
from fedbasin.data.coding import distinct, missing_rows
from fedbasin.data.table import KIND_NAMES, Table, open_table

_MOST_CLIENTS = 20  # more clients than this are summarised
_MOST_CLASSES = 8  # more classes than this are not given a column each


def describe_table(path: Path, target: str | None, client: str | None) -> None:
    """Print rows, types, missing values, clients and balance of a table.

    Args:
        path: a CSV or parquet file, or a folder of parquet files.
        target: the column to predict, or several with commas; None describes columns alone.
        client: the column that names each row's client.
    """
    console = Console(soft_wrap=True)
    table = open_table(path)
    targets = [] if target is None else target.split(",")
    console.print(f"{escape(path.name)}: {len(table):,} rows, {len(table.names)} columns")
    console.print(_columns(table, targets, client))
    if target is None:
        console.print("Name what to predict with --target COLUMN to see its balance.")
        return
    only = targets[0] if len(targets) == 1 else tuple(targets)
    dataset = from_table(path, only, client)
    assert dataset.encoding is not None
    console.print(
        f"{len(dataset.train):,} rows to train on, {len(dataset.test):,} held out to score; a row "
        f"becomes {dataset.encoding.width:,} numbers"
    )
    console.print(_balance(dataset))


def _columns(table: Table, targets: list[str], client: str | None) -> Grid:
    """Describe every column, one line each."""
    grid = Grid("column", "role", "holds", "missing", "values")
    for name in table.names:
        column = table.column(name)
        gone = int(missing_rows(column).sum())
        role = "target" if name in targets else "client" if name == client else ""
        grid.add_row(
            escape(name),
            role,
            KIND_NAMES[table.kind(name)],
            f"{gone:,} ({gone / max(len(table), 1):.1%})" if gone else "-",
            escape(_values(table, name)),
        )
    return grid


def _values(table: Table, name: str) -> str:
    """Say what values a column has: a range, or how many different ones."""
    kind = table.kind(name)
    if kind in ("number", "whole"):
        numbers = table.numbers(name)
        known = numbers[~np.isnan(numbers)] if numbers.dtype.kind == "f" else numbers
        return f"{known.min():g} to {known.max():g}" if len(known) else "none"
    if kind in ("text", "category", "flag"):
        column = table.column(name).drop_null()
        examples = ", ".join(str(value.as_py())[:20] for value in column.unique()[:3])
        return f"{distinct(column):,}: {examples}"
    return "-"


def _balance(dataset: Dataset) -> Grid:
    """Count training rows by client, with their classes or the mean of their targets."""
    groups = dataset.train.groups
    names = dataset.group_names if dataset.clients else ("all rows",)
    owner = groups if dataset.clients and groups is not None else np.zeros(len(dataset.train), int)
    rows = np.bincount(owner, minlength=len(names))
    if dataset.classes:
        classes = len(dataset.classes)
        pairs = owner * classes + dataset.train.labels
        counts = np.bincount(pairs, minlength=len(names) * classes).reshape(len(names), classes)
        titles = [f"{name:.20}" for name in dataset.classes]
        cells = [[f"{count:,}" for count in line] for line in counts.tolist()]
    else:
        labels = dataset.train.labels.reshape(len(dataset.train), -1)
        sums = [np.bincount(owner, column, minlength=len(names)) for column in labels.T]
        titles = [f"mean of {name}" for name in _target_names(dataset)]
        means = np.stack(sums, axis=1) / np.maximum(rows, 1)[:, None]
        cells = [[f"{mean:.4g}" for mean in line] for line in means.tolist()]
    if len(titles) > _MOST_CLASSES:
        titles, cells = ["classes held"], [[str((line > 0).sum())] for line in counts]
    return _by_client(names, rows.tolist(), titles, cells)


def _target_names(dataset: Dataset) -> tuple[str, ...]:
    assert dataset.encoding is not None
    return dataset.encoding.targets


def _by_client(
    names: tuple[str, ...], rows: list[int], titles: list[str], cells: list[list[str]]
) -> Grid:
    """List clients by their training rows, the largest first; leave out the middle of many."""
    order = sorted((at for at in range(len(names)) if rows[at]), key=lambda at: -rows[at])
    grid = Grid("client", "training rows", *map(escape, titles), title=f"{len(order):,} clients")
    if len(names) == 1:
        grid.title = None
    half = _MOST_CLIENTS // 2
    shown = order if len(order) <= _MOST_CLIENTS else [*order[:half], None, *order[-half:]]
    for at in shown:
        if at is None:
            grid.add_row("...", f"{len(order) - 2 * half:,} more", *("" for _ in titles))
        else:
            grid.add_row(escape(names[at]), f"{rows[at]:,}", *map(escape, cells[at]))
    return grid
