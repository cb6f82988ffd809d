"""A live display for runs: which one, how far, how good, how long still."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from fedbasin.core.record import RoundRecord

if TYPE_CHECKING:
    from fedbasin.experiment.runs import Cell, More, OnCell


def wide_console() -> Console:
    """Return a console that cuts no table off where its output goes into a file or a pipe."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=160)


def bar(console: Console, *beside: ProgressColumn) -> Progress:
    """Return the display of all long work: what, a bar, how many of how many, how long."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), *beside, console=console, transient=True)


def run_with_progress(
    layout: list[Cell],
    console: Console,
    data_dir: Path | None,
    jobs: int = 1,
    *,
    tensorboard: bool = False,
    on_cell: OnCell | None = None,
    more: More = list,
    rounds: int | None = None,
    again: str = "",
) -> list[dict[str, Any]]:
    """Run or go on with the cells, showing one bar for all rounds; return their summaries.

    The bar reads the records the runs write, so it works the same for processes of their own.
    `on_cell` is told of each cell as it ends and `more` asked for further ones, as in `run_cells`;
    `rounds` counts theirs too. Where there are several, `again` says how to go on with all of them.
    """
    import torch

    from fedbasin.experiment.runs import run_cells
    from fedbasin.sim import Interrupted

    if "OMP_NUM_THREADS" not in os.environ:
        # Small steps gain nothing from more, and lose much where other work shares the cores.
        torch.set_num_threads(1)
    total = rounds or sum(cell.experiment.rounds for cell in layout)
    accuracy = TextColumn("{task.fields[accuracy]}")
    with bar(console, TimeRemainingColumn(), accuracy) as progress:
        task = progress.add_task("starting", total=total, accuracy="")
        finished = threading.Event()
        watcher = threading.Thread(target=_watch, args=(layout, progress, task, finished))
        watcher.start()
        try:
            return run_cells(
                layout,
                data_dir=data_dir,
                jobs=jobs,
                tensorboard=tensorboard,
                on_cell=on_cell,
                more=more,
            )
        except (KeyboardInterrupt, Interrupted):
            if not again:
                raise
            raise Interrupted(f"stopped; what has been run is kept. Go on with {again}") from None
        finally:
            finished.set()
            watcher.join()


def _watch(
    layout: Sequence[Cell], progress: Progress, task: TaskID, finished: threading.Event
) -> None:
    """Show how many rounds are recorded, and the latest one, until the runs are over."""
    places: dict[Path, int] = {}  # bytes read so far
    rounds: dict[Path, int] = {}
    while not finished.wait(0.3):
        for cell in tuple(layout):  # which may grow meanwhile
            place = places.get(cell.path, 0)
            lines, places[cell.path] = _new_lines(cell.path / "rounds.jsonl", place)
            if not lines:
                continue
            latest = RoundRecord.read(lines[-1])
            rounds[cell.path] = latest.round
            progress.update(
                task,
                completed=sum(rounds.values()),
                description=escape(f"{cell.experiment.method} seed {cell.experiment.seed}"),
                accuracy="" if latest.accuracy is None else f"{100 * latest.accuracy:5.1f} %",
            )


def _new_lines(path: Path, place: int) -> tuple[list[str], int]:
    """Return the whole lines a run has added beyond a place in its file, and the new place."""
    size = path.stat().st_size if path.exists() else 0
    if size <= place:
        return [], size  # a resumed run cuts its file back
    with path.open("rb") as file:
        file.seek(place)
        whole, _, _ = file.read(size - place).rpartition(b"\n")
    return whole.decode().splitlines(), place + len(whole) + (1 if whole else 0)
