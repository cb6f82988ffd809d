"""A live display for runs: which one, how far, how good, how long still."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
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
from rich.text import Text

from fedbasin.core.record import RoundRecord, latest_score

if TYPE_CHECKING:
    from fedbasin.experiment.runs import Cell, More, OnCell

_QUIET_SECONDS = 60  # between two lines where there is no terminal to draw a bar on


def wide_console() -> Console:
    """Return a console that cuts no table off where its output goes into a file or a pipe."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=160)


def bar(console: Console, *beside: ProgressColumn) -> Progress:
    """Return the display of all long work: what, a bar, how many of how many, how long."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(
        *columns,
        TimeElapsedColumn(),
        *beside,
        console=console,
        transient=True,
        speed_estimate_period=3600,  # rounds may take minutes, and the time left is told from two
    )


def run_with_progress(
    layout: list[Cell],
    console: Console,
    data_dir: Path | None,
    jobs: int = 1,
    *,
    log: Sequence[str] = (),
    on_cell: OnCell | None = None,
    more: More = list,
    rounds: int | None = None,
    again: str = "",
) -> list[dict[str, Any]]:
    """Run or go on with the cells, showing one bar for all rounds; return their summaries.

    The bar reads the records the runs write, so it works the same for processes of their own.
    `log` names where else records go.
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
    score = TextColumn("{task.fields[score]}")
    stopped = f"stopped; what has been run is kept. Go on with {again}" if again else ""
    with bar(console, TimeRemainingColumn(), score) as progress, _last_words(stopped, console):
        task = progress.add_task("starting", total=total, score="")
        finished = threading.Event()
        watcher = threading.Thread(target=_watch, args=(layout, progress, task, finished))
        watcher.start()
        try:
            return run_cells(
                layout,
                data_dir=data_dir,
                jobs=jobs,
                log=log,
                on_cell=on_cell,
                more=more,
            )
        except (KeyboardInterrupt, Interrupted):
            if not again:
                raise
            raise Interrupted(stopped) from None
        finally:
            finished.set()
            watcher.join()


@contextmanager
def _last_words(words: str, console: Console) -> Iterator[None]:
    """Have SIGTERM say so before it ends this process; runs in processes of their own then save."""

    def end(number: int, frame: object) -> None:
        console.show_cursor()  # which the bar hides
        Console(stderr=True).print(Text(words), soft_wrap=True)
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    before = signal.signal(signal.SIGTERM, end) if words else signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _watch(
    layout: Sequence[Cell], progress: Progress, task: TaskID, finished: threading.Event
) -> None:
    """Show how many rounds are recorded, and the latest one, until the runs are over."""
    places: dict[Path, int] = {}  # bytes read so far
    rounds: dict[Path, int] = {}
    told = time.monotonic()
    while not finished.wait(0.3):
        newest: tuple[Cell, RoundRecord] | None = None
        for cell in tuple(layout):  # which may grow meanwhile
            place = places.get(cell.path, 0)
            lines, places[cell.path] = _new_lines(cell.path / "rounds.jsonl", place)
            if lines:
                newest = cell, RoundRecord.read(lines[-1])
                rounds[cell.path] = newest[1].round
        if newest is not None:
            # Once for all cells: the rounds that were there before are then no sign of speed.
            _show(*newest, sum(rounds.values()), progress, task)
        told = tell_a_log(progress, task, told)


def _show(cell: Cell, latest: RoundRecord, done: int, progress: Progress, task: TaskID) -> None:
    progress.update(
        task,
        completed=done,
        description=escape(f"{cell.experiment.method} seed {cell.experiment.seed}"),
        score=latest_score(latest),
    )


def tell_a_log(progress: Progress, task: TaskID, told: float) -> float:
    """Say each minute in one line where rounds are, if no terminal shows it; return when last."""
    if progress.console.is_terminal or time.monotonic() - told <= _QUIET_SECONDS:
        return told
    now = progress.tasks[task]
    gone, left = (
        None if seconds is None else timedelta(seconds=round(seconds))
        for seconds in (now.elapsed, now.time_remaining)
    )
    of = "" if now.total is None else f" of {now.total:g}"
    ahead = "" if left is None else f", {left} left"
    latest = f"{now.description} {now.fields['score'].strip()}".strip()
    line = f"{now.completed:g}{of} rounds in {gone}{ahead}; {latest}"
    Console(stderr=True).print(line, soft_wrap=True, highlight=False)
    return time.monotonic()


def _new_lines(path: Path, place: int) -> tuple[list[str], int]:
    """Return the whole lines a run has added beyond a place in its file, and the new place."""
    size = path.stat().st_size if path.exists() else 0
    if size <= place:
        return [], size  # a resumed run cuts its file back
    with path.open("rb") as file:
        file.seek(place)
        whole, _, _ = file.read(size - place).rpartition(b"\n")
    return whole.decode().splitlines(), place + len(whole) + (1 if whole else 0)
