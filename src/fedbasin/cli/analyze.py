"""Analyses of finished runs: ``fedbasin analyze NAME RUN...``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from fedbasin.analyze.subject import Entry
    from fedbasin.core.figure_data import Analysis


def analyze(
    name: Annotated[str | None, typer.Argument(help="The analysis; none lists them all.")] = None,
    runs: Annotated[list[Path] | None, typer.Argument(help="Run folders.")] = None,
    models: Annotated[
        list[str] | None,
        typer.Option(
            help="A model: score:40, send:last, start:40, mean:40, client7:40, final; 2/score:40 "
            "is of the second run. May be repeated."
        ),
    ] = None,
    points: Annotated[int | None, typer.Option(help="Grid points along an axis.")] = None,
    margin: Annotated[
        float | None, typer.Option(help="How far to go beyond the models, as a share.")
    ] = None,
    rows: Annotated[int | None, typer.Option(help="Rows to measure on; 0 is all.")] = None,
    count: Annotated[
        int | None, typer.Option(help="Eigenvalues (hessian), subsets of a size (averaging).")
    ] = None,
    draws: Annotated[
        int | None, typer.Option(help="Late rounds taken as draws of a client's model.")
    ] = None,
    target: Annotated[
        float | None, typer.Option(help="Value of the headline metric for rounds to target.")
    ] = None,
    groups: Annotated[
        str | None, typer.Option(help="Groups of clients, as in 0-9,10-19 or 0+3+5,1-2.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda; else the run's.")] = None,
    tag: Annotated[
        str | None, typer.Option(help="Added to the file names, to keep several results.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where results go; analysis/ of the first run by default.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of dataset mirrors.")] = None,
    trust: Annotated[
        bool, typer.Option(help="Import and run the modules that the runs' settings name.")
    ] = False,
) -> None:
    """Make a figure of the papers from your own runs: line, plane, hessian, coherence, ...

    Writes NAME.json, NAME.csv, NAME.png and NAME.svg into the first run's analysis/ folder.
    Most analyses need models that the run kept: --set snapshots.every=10 (and, for those of
    cohorts, --set snapshots.clients=true) when it was started. Without a name, all are listed.
    """
    from fedbasin.analyze import CATALOGUE, Options, find
    from fedbasin.experiment.checks import check_imports
    from fedbasin.experiment.subjects import open_subject

    console = Console()
    if name is None:
        console.print(_listing(CATALOGUE.values()))
        return
    entry = find(name)
    if not runs:
        raise ValueError(f"analyze {name}: give one run folder or more")
    given = {
        "models": None if models is None else tuple(models), "points": points, "margin": margin,
        "rows": rows, "count": count, "draws": draws, "target": target,
        "groups": None if groups is None else read_groups(groups),
    }  # fmt: skip
    chosen: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    for key in chosen:
        if key not in entry.uses:
            used = ", ".join(f"--{use}" for use in entry.uses) or "none of these options"
            raise ValueError(f"analyze {name} does not use --{key}; it takes {used}")
    options = Options(**chosen)
    file_name = f"{name}-{_checked_tag(tag)}" if tag else name
    folder = out or runs[0] / "analysis"
    for run in runs:
        if not trust:
            check_imports(run)
    subjects = [open_subject(run, data_dir=data_dir, device=device) for run in runs]
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    ) as progress:

        def watch(what: str, total: int) -> Callable[[int], None]:
            task = progress.add_task(escape(what), total=total or None)
            return lambda done: progress.advance(task, done)

        analysis = entry(subjects, options, watch)
    written = write_analysis(analysis, folder, file_name)
    for note in analysis.notes:
        console.print(Text(note), soft_wrap=True)
    for panel in analysis.panels:
        if panel.kind == "table":
            console.print(_table(panel.title, panel.columns, panel.rows))
    console.print(Text("wrote " + ", ".join(str(path) for path in written)), soft_wrap=True)


def write_analysis(analysis: Analysis, folder: Path, file_name: str) -> list[Path]:
    """Write an analysis as JSON, CSV, PNG and SVG; return the four paths."""
    from fedbasin.analyze.draw import draw
    from fedbasin.core.record import write_atomically

    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{file_name}.{ending}" for ending in ("json", "csv", "png", "svg")]
    write_atomically(paths[0], analysis.to_json())
    write_atomically(paths[1], analysis.to_csv())
    for path in paths[2:]:
        draw(analysis, path)
    return paths


def read_groups(text: str) -> tuple[frozenset[int], ...]:
    """Read groups of client ids: ranges with -, single ids with +, groups with commas."""
    try:
        return tuple(_group(group) for group in text.split(","))
    except ValueError as error:
        raise ValueError(
            f"--groups is {text!r}; write groups of clients as in 0-9,10-19 or 0+3+5,1-2"
        ) from error


def _group(text: str) -> frozenset[int]:
    clients: set[int] = set()
    for part in text.split("+"):
        low, dash, high = part.partition("-")
        clients.update(range(int(low), int(high) + 1) if dash else [int(low)])
    return frozenset(clients)


def _checked_tag(tag: str) -> str:
    if not tag.replace("-", "").replace("_", "").isalnum():
        raise ValueError(f"--tag is {tag!r}; use letters, digits, - and _")
    return tag


def _listing(entries: Sequence[Entry] | Any) -> Table:
    from fedbasin.analyze.subject import tasks_for

    table = Table(title="fedbasin analyze NAME RUN...; docs/analyses.md has the formulas")
    for column in ("name", "what it shows", "after", "tasks", "options"):
        table.add_column(column, no_wrap=column == "name")
    for entry in entries:
        options = " ".join(f"--{use}" for use in entry.uses) or "-"
        table.add_row(entry.name, entry.title, entry.source, tasks_for(entry), options)
    return table


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    table = Table(title=Text(title))
    for column in columns:
        table.add_column(Text(column))
    for row in rows:
        cells = (f"{cell:.4g}" if isinstance(cell, float) else str(cell or "-") for cell in row)
        table.add_row(*(Text(cell) for cell in cells))
    return table
