"""`fedbasin data`: list, describe and download datasets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import TaskID
from rich.table import Table

from fedbasin.api.progress import bar, wide_console
from fedbasin.data import DataError, Dataset, Fetched, available, describe, fetch
from fedbasin.data.arrays import Progress as Report

app = typer.Typer(
    no_args_is_help=True,
    help="List, inspect and fetch datasets.\n\n"
    "Data comes from a local folder in the Hugging Face hub's layout (--data-dir or FEDBASIN_DATA: "
    "the folder that holds OWNER/NAME/...), or else from the hub itself. It is decoded once into a "
    "cache (--cache-dir or FEDBASIN_CACHE); every later run opens it at once.",
)

Name = Annotated[
    str,
    typer.Argument(
        help="A name from 'fedbasin data list', or for any other image dataset on the hub "
        "hf:OWNER/NAME (hf:OWNER/NAME/CONFIG@REVISION); add ?label=COLUMN, ?size=PIXELS or "
        "?mode=RGB if asked to.",
        show_default=False,
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option(help="Folder that holds OWNER/NAME/...; else FEDBASIN_DATA; else the hub."),
]
CacheDir = Annotated[
    Path | None,
    typer.Option(help="Where decoded data is kept; else FEDBASIN_CACHE; else your cache folder."),
]
_COLOURS = {"decoded": "green", "built in": "green", "no": "red"}


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Show a `DataError` as one red line and exit with status 1."""
    try:
        yield
    except DataError as error:
        Console(stderr=True, soft_wrap=True).print(
            f"[red]error:[/red] {escape(str(error))}", highlight=False
        )
        raise typer.Exit(1) from None


@contextmanager
def _progress_bar() -> Iterator[Report]:
    """Yield a function that reports to a bar, which appears with the first report."""
    shown = bar(Console(stderr=True))
    tasks: dict[str, TaskID] = {}

    def report(what: str, done: int, total: int) -> None:
        if what not in tasks:
            shown.start()
            tasks[what] = shown.add_task(what, total=total)
        shown.update(tasks[what], completed=done)

    try:
        yield report
    finally:
        shown.stop()


@app.command("list")
def list_(data_dir: DataDir = None, cache_dir: CacheDir = None) -> None:
    """List the datasets, the papers that use them, and whether they are available here.

    Rows are the published ones until a dataset has been decoded; '+ held out' means that it is
    published in one piece and fedbasin holds out a fixed share for testing.
    """
    table = Table(box=None, padding=(0, 1, 0, 0))
    for title in (
        "name",
        "train/test rows",
        "classes",
        "shape",
        "groups",
        "used in",
        "at hand",
    ):
        wraps = title == "used in"
        table.add_column(title, no_wrap=not wraps, min_width=10 if wraps else None)
    with _one_line_errors():
        listings = available(data_dir=data_dir, cache_dir=cache_dir)
    for listing in listings:
        train, test = listing.rows
        table.add_row(
            listing.name,
            f"{train:,}/{test:,}" if test else f"{train:,} + held out",
            str(listing.classes or "-"),
            "x".join(map(str, listing.shape)),
            listing.groups or "-",
            listing.paper,
            f"[{_COLOURS.get(listing.at_hand, 'yellow')}]{listing.at_hand}",
        )
    wide_console().print(table)


@app.command()
def info(
    name: Annotated[
        str,
        typer.Argument(
            help="A name from 'fedbasin data list', hf:OWNER/NAME, or a table of your own: the "
            "path of a CSV or parquet file.",
            show_default=False,
        ),
    ],
    target: Annotated[
        str | None,
        typer.Option(help="Of a table: the column to predict, or several with commas."),
    ] = None,
    client: Annotated[
        str | None, typer.Option(help="Of a table: the column that names each row's client.")
    ] = None,
    data_dir: DataDir = None,
    cache_dir: CacheDir = None,
) -> None:
    """Show where a dataset comes from, its sizes, and its rows by class or its targets' range.

    For a table of your own: its columns, missing values, clients and their balance, and whether it
    can be trained on as it is.

    A dataset in the data folder is decoded first. One that is only on the hub must be
    fetched before.
    """
    with _one_line_errors():
        if _is_table(name):
            from fedbasin.cli.table_info import describe_table

            describe_table(Path(name), target, client)
            return
        if target is not None or client is not None:
            raise DataError(
                f"--target and --client name columns of a table, and {name} is no file: give the "
                "path of a CSV or parquet file"
            )
        if describe(name, data_dir=data_dir, cache_dir=cache_dir).at_hand == "on hub":
            raise DataError(f"{name} is on the hub, not here yet; run: fedbasin data fetch {name}")
        fetched = _fetch(name, data_dir, cache_dir)
    _describe(fetched)


@app.command("fetch")
def fetch_(name: Name, data_dir: DataDir = None, cache_dir: CacheDir = None) -> None:
    """Download a dataset if needed, check it, decode it into the cache, and print its folder."""
    with _one_line_errors():
        fetched = _fetch(name, data_dir, cache_dir)
    rows = f"{len(fetched.dataset.train):,} train and {len(fetched.dataset.test):,} test rows"
    if fetched.entry is None:
        place = "built into fedbasin's dependencies, nothing to fetch"
    else:
        place = f"{'decoded into' if fetched.decoded else 'already in'} {fetched.entry.folder}"
    Console(soft_wrap=True).print(f"{escape(name)}: {rows}, {escape(place)}", highlight=False)


def _is_table(name: str) -> bool:
    """Whether a name is the path of a table, there or not."""
    path = Path(name)
    if path.is_dir():
        return any(path.glob("*.parquet"))
    return path.suffix.lower() in (".csv", ".tsv", ".parquet", ".pq")


def _fetch(name: str, data_dir: Path | None, cache_dir: Path | None) -> Fetched:
    with _progress_bar() as report:
        return fetch(name, data_dir=data_dir, cache_dir=cache_dir, progress=report)


def _describe(fetched: Fetched) -> None:
    """Print everything known about a loaded dataset."""
    dataset = fetched.dataset
    console = Console(soft_wrap=True)
    facts = Table.grid(padding=(0, 2))
    facts.add_row("name", escape(dataset.name))
    facts.add_row("inputs", f"{dataset.kind}, {'x'.join(map(str, dataset.train.inputs.shape[1:]))}")
    facts.add_row("rows", f"{len(dataset.train):,} train, {len(dataset.test):,} test")
    facts.add_row("classes", str(len(dataset.classes) or "none"))
    facts.add_row("groups", str(len(dataset.group_names) or "none"))
    if dataset.mean:
        facts.add_row("mean, std", f"{dataset.mean}, {dataset.std}")
    if fetched.entry is not None:
        facts.add_row("cache", escape(str(fetched.entry.folder)))
        for file in fetched.entry.files:
            commit = f" at commit {file.commit[:12]}" if file.commit else ""
            facts.add_row("made from", f"{escape(file.name)}{commit}, sha256 {file.sha256[:12]}...")
    console.print(facts, highlight=False)
    console.print(_classes(dataset) if dataset.classes else _targets(dataset))


def _classes(dataset: Dataset) -> Table:
    """Count the rows of each class."""
    counts = Table("label", "class", "train rows", "test rows")
    columns = (
        np.bincount(s.labels, minlength=len(dataset.classes)) for s in (dataset.train, dataset.test)
    )
    for label, (title, train, test) in enumerate(zip(dataset.classes, *columns, strict=True)):
        shown = title if title.isprintable() and title.strip() else repr(title)
        counts.add_row(str(label), escape(shown), f"{train:,}", f"{test:,}")
    return counts


def _targets(dataset: Dataset) -> Table:
    """Describe targets without classes, a line for each column of each split."""
    table = Table("target", "rows", "least", "mean", "greatest", "standard deviation")
    for name, split in (("train", dataset.train), ("test", dataset.test)):
        for column, values in enumerate(split.labels.reshape(len(split), -1).T):
            numbers = (values.min(), values.mean(), values.max(), values.std())
            table.add_row(str(column), name, *(f"{number:.4g}" for number in numbers))
    return table
