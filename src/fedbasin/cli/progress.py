"""A live display for runs: which one, how far, how good, how long still."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

if TYPE_CHECKING:
    from fedbasin.core.record import RoundRecord
    from fedbasin.experiment.runs import Cell


def run_with_progress(
    layout: Sequence[Cell], console: Console, data_dir: Path | None
) -> list[dict[str, Any]]:
    """Run or go on with the cells, showing one bar for all rounds; return their summaries."""
    from fedbasin.core.record import RunFolder
    from fedbasin.experiment.runs import run_cells

    total = sum(cell.experiment.rounds for cell in layout)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[accuracy]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    ) as progress:
        task = progress.add_task("starting", total=total, accuracy="")
        done = {cell.path: 0 for cell in layout}

        def show(cell: Cell, record: RoundRecord) -> None:
            done[cell.path] = record.round
            accuracy = "" if record.accuracy is None else f"{100 * record.accuracy:5.1f} %"
            progress.update(
                task,
                completed=sum(done.values()),
                description=escape(f"{cell.experiment.method} seed {cell.experiment.seed}"),
                accuracy=accuracy,
            )

        for cell in layout:
            done[cell.path] = len(RunFolder(cell.path).read_rounds())
        progress.update(task, completed=sum(done.values()))
        return [summary for _, summary in run_cells(layout, data_dir=data_dir, on_round=show)]
