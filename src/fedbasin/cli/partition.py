"""``fedbasin partition``: show which client gets which rows, without training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedbasin.core.expressions import parse
from fedbasin.core.holdings import Holdings
from fedbasin.core.record import write_atomically
from fedbasin.data import load
from fedbasin.partition import Partition, Pool, longtail
from fedbasin.partition.measures import (
    classes_held,
    distance_from_global,
    effective_classes,
    mean_targets,
)
from fedbasin.partition.pool import Floats, Ints
from fedbasin.report.partition_figure import partition_figure

_MOST_LISTED = 20  # more clients than this are summarised
_MOST_COLUMNS = 12  # more classes than this are not given a column each


def partition(
    data: Annotated[str, typer.Argument(help="Dataset: digits, fashion-mnist, cifar10, ...")],
    how: Annotated[str, typer.Argument(help='Partition, such as "dirichlet(alpha=0.1)".')],
    clients: Annotated[int, typer.Option(help="How many clients share the training rows.")] = 100,
    seed: Annotated[int, typer.Option(help="Seed; the same one gives the same split.")] = 0,
    imbalance: Annotated[
        float,
        typer.Option(
            help="Thin the classes to a long tail: size of the smallest over the largest."
        ),
    ] = 1.0,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder of <owner>/<dataset> mirrors.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for partition.csv and partition.png.")] = Path(
        "partition"
    ),
) -> None:
    """Show how a dataset would be divided among clients: sizes, class counts and a picture.

    Where targets have no classes, sizes and mean targets are shown.

    A run with the same data, partition, seed and imbalance (and no proxy set, rows held out or
    corrupted clients) uses the same split.
    """
    from fedbasin.core.rng import root  # imports torch, which would delay --help

    choice = parse(how, kind="partition")
    dataset = load(data, data_dir=data_dir)
    pool = Pool(dataset.train.labels, len(dataset.classes), dataset.train.groups)
    rows = pool.rows
    title = f"{data}, {choice}, {clients:,} clients, seed {seed}"
    if imbalance != 1:
        if not pool.classes:
            raise ValueError(
                f"imbalance is {imbalance}, and the targets of {data} have no classes: leave it out"
            )
        rng = root(seed).fold("longtail").numpy()
        pool = pool.only(longtail(pool.labels, pool.classes, imbalance, rng))
        title += f", imbalance {imbalance:g}"
    shared = choice(pool, clients, root(seed).fold("partition").numpy())
    counts = shared.counts(pool.labels, pool.classes)
    held = Holdings(dataset.classes, counts, rows=shared.sizes())
    console = Console()
    if not dataset.classes:
        console.print(_targets(held, mean_targets(pool, shared), title))
    elif clients <= _MOST_LISTED:
        console.print(_listing(counts, dataset.classes, title, console.width))
    else:
        console.print(_summary(counts, title))
    console.print(_totals(shared, rows), highlight=False)
    out.mkdir(parents=True, exist_ok=True)
    table = out / "partition.csv"
    write_atomically(table, held.to_csv())
    figure = partition_figure(held.stacked, held.classes, out / "partition.png", title)
    console.print(f"wrote {table} and {figure}", markup=False, highlight=False, soft_wrap=True)


def _listing(counts: Ints, class_names: tuple[str, ...], title: str, width: int) -> Table:
    """List every client; where the classes do not fit, only those it holds most of."""
    room = (width - 20) // len(class_names) - 2
    if len(class_names) <= _MOST_COLUMNS and room >= len(str(counts.max())):
        # Shorten names, never counts; the CSV file has the full names.
        table = _table(title, ["client", "rows", *(name[:room] for name in class_names)])
        for client, row in enumerate(counts.tolist()):
            table.add_row(str(client), str(sum(row)), *(str(count or "·") for count in row))
        return table
    table = _table(title, ["client", "rows", "classes"])
    table.add_column("holds most of")
    for client, row in enumerate(counts):
        top = [label for label in np.argsort(-row, kind="stable")[:4] if row[label]]
        most = ", ".join(f"{class_names[label]} {row[label]}" for label in top)
        table.add_row(str(client), str(row.sum()), str((row > 0).sum()), escape(most))
    return table


def _summary(counts: Ints, title: str) -> Table:
    """Describe many clients by quantiles; those without rows count only among the sizes."""
    held = counts[counts.sum(axis=1) > 0]
    return _quantiles(
        title,
        {
            "rows": (counts.sum(axis=1), ".0f"),
            "classes held": (classes_held(held), ".0f"),
            "effective classes": (effective_classes(held), ".2f"),
            "distance from global": (distance_from_global(held), ".3f"),
        },
    )


def _targets(held: Holdings, means: Floats, title: str) -> Table:
    """Show clients of targets without classes: their rows, and the means of the first targets."""
    names = (
        ["mean target"] if means.shape[1] == 1 else [f"mean of {k}" for k in range(len(means.T))]
    )
    shown = list(zip(names, means.T, strict=True))[:_MOST_COLUMNS]
    if len(means) > _MOST_LISTED:
        lines = {name: (values[~np.isnan(values)], ".4g") for name, values in shown}
        return _quantiles(title, {"rows": (held.sizes, ".0f"), **lines})
    table = _table(title, ["client", "rows", *(name for name, _ in shown)])
    for client, size in enumerate(held.sizes.tolist()):
        cells = [f"{values[client]:.4g}" if size else "·" for _, values in shown]
        table.add_row(str(client), str(size), *cells)
    return table


def _quantiles(title: str, lines: Mapping[str, tuple[npt.NDArray[Any], str]]) -> Table:
    table = _table(title, ["per client", "min", "10 %", "median", "90 %", "max", "mean"])
    table.columns[0].justify = "left"
    for name, (values, form) in lines.items():
        marks = np.quantile(values, [0, 0.1, 0.5, 0.9, 1])
        table.add_row(name, *(f"{mark:{form}}" for mark in marks), f"{values.mean():.2f}")
    return table


def _table(title: str, columns: list[str]) -> Table:
    table = Table(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD)
    table.padding = (0, 1, 0, 0)
    for name in columns:
        table.add_column(escape(name), justify="right", no_wrap=True)
    return table


def _totals(shared: Partition, rows: int) -> str:
    dealt = len(shared.order)
    empty = int((shared.sizes() == 0).sum())
    held = len(np.unique(shared.order))
    pooled = shared.rows
    parts = [f"{held:,} of {rows:,} rows held"]
    parts += [f"{dealt - held:,} held again"] if held < dealt else []
    parts += [f"{rows - pooled:,} thinned out"] if pooled < rows else []
    parts += [f"{pooled - held:,} dropped by the split"] if held < pooled else []
    parts += [f"{empty:,} clients without rows"] if empty else []
    return ", ".join(parts)
