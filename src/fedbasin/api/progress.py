"""A live display of runs: progress, latest score and time left."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib.util import find_spec
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
    from fedbasin.experiment.comparison import Cell, More, OnCell
    from fedbasin.sinks import Target

_QUIET_SECONDS = 60  # between two lines of output without a terminal


def wide_console() -> Console:
    """Return a console that is wide enough for tables if output goes to a file or a pipe.

    It is plain there. FORCE_COLOR, which notebooks set for commands, would make a bar of thousands
    of lines.
    """
    if sys.stdout.isatty():
        return Console()
    return Console(width=None if "COLUMNS" in os.environ else 160, force_terminal=False)


def console_for_a_bar() -> Console:
    """Return the console of this process; in a notebook rich's bar needs ipywidgets.

    Without them the console is a plain one: a line a minute is printed (`tell_a_log`).
    """
    if "ipykernel" in sys.modules and find_spec("ipywidgets") is None:
        return Console(force_jupyter=False, force_terminal=False)
    return Console()


def bar(console: Console, *beside: ProgressColumn) -> Progress:
    """Return the display of long work: description, bar, count, time, further columns."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(
        *columns,
        TimeElapsedColumn(),
        *beside,
        console=console,
        transient=True,
        speed_estimate_period=3600,  # rounds may take minutes, and an estimate needs two
    )


def run_with_progress(
    layout: list[Cell],
    console: Console,
    data_dir: Path | None,
    jobs: int = 1,
    *,
    log: Sequence[Target] = (),
    on_cell: OnCell | None = None,
    more: More = list,
    rounds: int | None = None,
    again: str = "",
) -> list[dict[str, Any]]:
    """Run or resume the cells with one progress bar for all rounds; return their summaries.

    The bar reads the records that the runs write, so it also works for runs in child processes.

    Args:
        layout: the cells.
        console: where the bar is drawn.
        data_dir: a local mirror of the datasets.
        jobs: processes at once.
        log: further sinks for records; with several jobs names only.
        on_cell: called when a cell ends, as in `run_cells`.
        more: returns cells that can start now, as in `run_cells`.
        rounds: the rounds of all cells, including those that `more` will return.
        again: how to resume several runs, for the message after Ctrl-C.
    """
    import torch

    from fedbasin.experiment.comparison import run_cells
    from fedbasin.sim import Interrupted

    if "OMP_NUM_THREADS" not in os.environ:
        # Small steps gain nothing from more threads, and lose much if other work shares the cores.
        torch.set_num_threads(1)
    total = rounds or sum(cell.rounds for cell in layout)
    score = TextColumn("{task.fields[score]}")
    stopped = f"stopped; finished rounds are kept. Resume with {again}" if again else ""
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
    """Print a message on SIGTERM before this process ends; child processes then save and exit."""

    def end(number: int, frame: object) -> None:
        console.show_cursor()  # the bar hides it
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
    """Show the number of recorded rounds and the latest one, until the runs have ended."""
    places: dict[Path, int] = {}  # bytes read so far
    rounds: dict[Path, int] = {}
    told = time.monotonic()
    while not finished.wait(0.3):
        newest: tuple[Cell, RoundRecord] | None = None
        for cell in tuple(layout):  # a copy: it may grow during the loop
            place = places.get(cell.path, 0)
            lines, places[cell.path] = _new_lines(cell.path / "rounds.jsonl", place)
            # A resumed run cuts its file back: the place may be in the middle of a line.
            with suppress(ValueError, TypeError, IndexError):
                newest = cell, RoundRecord.read(lines[-1])
                rounds[cell.path] = newest[1].round
        if newest is not None:
            # One update for all cells, so that rounds recorded before do not count as speed.
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
    """Without a terminal, print the progress once a minute; return the time of the last line."""
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
    """Return the complete lines after a position in a run's file, and the new position."""
    size = path.stat().st_size if path.exists() else 0
    if size <= place:
        return [], size  # a resumed run truncates its file
    with path.open("rb") as file:
        file.seek(place)
        whole, _, _ = file.read(size - place).rpartition(b"\n")
    return whole.decode(errors="replace").splitlines(), place + len(whole) + (1 if whole else 0)
