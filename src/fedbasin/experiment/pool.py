"""Runs one after another, side by side as one matrix, or in several processes.

A process has some runs at a time. Runs whose process is killed are started again, one by one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context, resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING

from fedbasin.core.lock import Busy
from fedbasin.core.system import interrupts_blocked
from fedbasin.data import DataError
from fedbasin.experiment.child_process import prepare_worker, run_in_progress
from fedbasin.experiment.one_copy import OneCopy, one_copy
from fedbasin.experiment.sharing import from_main, main_script_hidden
from fedbasin.sim.batch import Outcome, run_batch
from fedbasin.sim.runner import Interrupted, Opened, drive

if TYPE_CHECKING:
    from fedbasin.experiment.comparison import Cell
_log = logging.getLogger(__package__)
Open = Callable[["Cell"], Opened]
_Work = Callable[[list["Cell"]], list[Outcome]]
AT_A_TIME = 8  # runs that one of several processes is given: enough for a matrix, few to wait for


@contextmanager
def _tracker_silenced() -> Iterator[None]:
    """Let Python's tracker of semaphores free them without a warning when this process is ended."""
    before = os.environ.get("PYTHONWARNINGS")
    silenced = "ignore::UserWarning:multiprocessing.resource_tracker"
    os.environ["PYTHONWARNINGS"] = f"{before},{silenced}" if before else silenced
    try:
        resource_tracker.ensure_running()  # it reads the variable once, at its start
        yield
    finally:
        if before is None:
            del os.environ["PYTHONWARNINGS"]
        else:
            os.environ["PYTHONWARNINGS"] = before


class _WorkerProcess:
    """A process that does one run after another. It has its own pool, so it fails alone."""

    def __init__(self, folder: Path, needs_main: bool) -> None:
        self._folder = folder
        self._needs_main = needs_main
        spawn = get_context("spawn")
        with _tracker_silenced():
            self.pool = ProcessPoolExecutor(
                1, spawn, initializer=prepare_worker, initargs=(folder,)
            )

    def submit(self, work: _Work, cells: list[Cell]) -> Future[list[Outcome]]:
        sent = [cell.without_data() for cell in cells]
        hidden = main_script_hidden(not self._needs_main)
        with interrupts_blocked(), hidden:  # the new process unblocks them once it is ready
            try:
                return self.pool.submit(work, sent)
            except BrokenProcessPool:
                self.pool = _WorkerProcess(self._folder, self._needs_main).pool
                return self.pool.submit(work, sent)


def _why_killed(mine: list[str]) -> str:
    """Say why a process may have ended twice before its run did.

    Args:
        mine: what the runs use that is defined in the main script.
    """
    memory = (
        "its process was killed twice, as happens for want of memory; run fewer at once (--jobs) "
        "and give the same command again"
    )
    if not mine:
        return memory
    return (
        f"{memory}. It also happens where a script that defines {', '.join(mine)} starts runs "
        'outside of if __name__ == "__main__":'
    )


def outcomes(
    opening: Open, layout: list[Cell], jobs: int, folder: Path, *, beside: bool = False
) -> Iterator[tuple[Cell, Outcome]]:
    """Return each cell of a layout when it ends, with its summary or its error.

    With several jobs processes are given some cells at a time. Cells whose process is killed are
    retried once, each on its own.

    Args:
        opening: opens the run of a cell.
        layout: the cells. It may be made longer whenever a cell has ended.
        jobs: how many processes; one is this one.
        folder: what processes share.
        beside: whether runs of a process may advance side by side.
    """
    if jobs > 1:
        return _in_parallel(opening, layout, jobs, folder, beside)
    return _in_this_process(opening, layout, beside)


def _in_this_process(
    opening: Open, layout: list[Cell], beside: bool
) -> Iterator[tuple[Cell, Outcome]]:
    if beside and len(layout) > 1:
        return _beside(opening, layout)
    return _one_by_one(opening, layout)


def _one_by_one(opening: Open, layout: list[Cell]) -> Iterator[tuple[Cell, Outcome]]:
    for cell in layout:  # which may become longer
        outcome: Outcome
        try:
            outcome = drive(opening(cell))
        except Interrupted:
            raise
        except Exception as error:
            outcome = error
        yield cell, outcome


def _beside(opening: Open, layout: list[Cell]) -> Iterator[tuple[Cell, Outcome]]:
    """Run the cells side by side; those that cannot join others run one after another."""
    begun: list[Cell] = []
    copies = OneCopy()

    def open_with_others(cell: Cell) -> Opened:
        with one_copy(copies):
            return opening(cell)

    def following() -> tuple[Cell, Callable[[], Opened]] | None:
        if len(begun) == len(layout):  # for now: it may become longer
            return None
        cell = layout[len(begun)]
        begun.append(cell)
        return cell, partial(open_with_others, cell)

    return run_batch(following, layout[0].experiment.sim.together)


def run_in_child(opening: Open, beside: bool, cells: list[Cell]) -> list[Outcome]:
    """Run cells in a child process; unexpected errors are returned as text."""
    with run_in_progress():
        ends = _in_this_process(opening, cells, beside)
        found = {cell.path: _sendable(cell, outcome) for cell, outcome in ends}
    return [found[cell.path] for cell in cells]


def _sendable(cell: Cell, outcome: Outcome) -> Outcome:
    """Return an outcome that another process can read."""
    if isinstance(outcome, dict | ValueError | OSError | DataError | Busy):
        return outcome
    return RuntimeError(f"{cell.path}: {type(outcome).__name__}: {outcome}")


def _in_parallel(
    opening: Open, layout: list[Cell], jobs: int, folder: Path, beside: bool
) -> Iterator[tuple[Cell, Outcome]]:
    mine = from_main([cell.experiment for cell in layout])
    free = [_WorkerProcess(folder, bool(mine)) for _ in range(jobs)]
    work = partial(run_in_child, opening, beside)
    most = AT_A_TIME if beside else 1
    begun = 0
    again: list[Cell] = []  # cells whose process was killed
    retried: set[Path] = set()
    running: dict[Future[list[Outcome]], tuple[list[Cell], _WorkerProcess]] = {}
    try:
        while begun < len(layout) or again or running:
            # Never submit more cells than processes can begin: a pool runs what it has queued even
            # after Ctrl-C.
            while free and (again or begun < len(layout)):
                worker = free.pop()
                if again:
                    cells = [again.pop()]
                else:
                    share = -(-(len(layout) - begun) // jobs)
                    cells = layout[begun : begun + min(share, most)]
                    begun += len(cells)
                running[worker.submit(work, cells)] = cells, worker
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                failed = future.exception()
                cells, worker = running.pop(future)
                free.append(worker)
                if isinstance(failed, BrokenProcessPool):
                    told = [cell for cell in cells if cell.path in retried]
                    again += [cell for cell in cells if cell.path not in retried]
                    retried.update(cell.path for cell in cells)
                    for cell in told:
                        yield cell, RuntimeError(f"{cell.path}: {_why_killed(mine)}")
                elif failed is not None:
                    raise failed
                else:
                    yield from zip(cells, future.result(), strict=True)
    except KeyboardInterrupt:
        _log.warning("finishing the rounds of %d runs, then saving", len(running))
        raise
    finally:
        for worker in [*free, *(worker for _, worker in running.values())]:
            worker.pool.shutdown(cancel_futures=True)
