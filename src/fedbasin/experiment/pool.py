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
from typing import TYPE_CHECKING, Any

from fedbasin.core.system import interrupts_blocked
from fedbasin.experiment.child_process import prepare_worker
from fedbasin.experiment.one_copy import one_copy
from fedbasin.experiment.sharing import from_main, main_script_hidden
from fedbasin.sim.batch import side_by_side
from fedbasin.sim.runner import Course, Interrupted, Stopping

if TYPE_CHECKING:
    from fedbasin.experiment.comparison import Cell, More
_log = logging.getLogger(__package__)
Outcome = dict[str, Any] | Exception
Work = Callable[["Cell"], dict[str, Any]]
Works = Callable[[list["Cell"]], list[Outcome]]
Begin = Callable[["Cell", Stopping], Course]
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

    def submit(self, works: Works, cells: list[Cell]) -> Future[list[Outcome]]:
        sent = [cell.without_data() for cell in cells]
        hidden = main_script_hidden(not self._needs_main)
        with interrupts_blocked(), hidden:  # the new process unblocks them once it is ready
            try:
                return self.pool.submit(works, sent)
            except BrokenProcessPool:
                self.pool = _WorkerProcess(self._folder, self._needs_main).pool
                return self.pool.submit(works, sent)


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
    work: Work,
    layout: list[Cell],
    jobs: int,
    more: More,
    folder: Path,
    *,
    begin: Begin | None = None,
    works: Works | None = None,
) -> Iterator[tuple[Cell, Outcome]]:
    """Yield each cell of a layout when it ends, with its summary or its error.

    With several jobs processes are given some cells at a time. Cells whose process is killed are
    retried once, each on its own.

    Args:
        work: runs a cell.
        layout: the cells.
        jobs: how many processes; one is this one.
        more: called when a cell ends; returns further cells.
        folder: what processes share.
        begin: begins a cell that may advance beside others in this process.
        works: runs several cells in another process; by default one after another, one at a time.
    """
    if jobs > 1:
        yield from _in_parallel(work, layout, jobs, more, folder, works)
    elif begin is not None:
        yield from _beside(begin, layout, more)
    else:
        yield from _one_by_one(work, layout, more)


def _one_by_one(work: Work, layout: list[Cell], more: More) -> Iterator[tuple[Cell, Outcome]]:
    for cell in layout:  # `more` makes it longer during the loop
        yield cell, _outcome(work, cell)
        layout.extend(more())


def _outcome(work: Work, cell: Cell) -> Outcome:
    try:
        return work(cell)
    except Interrupted:
        raise
    except Exception as error:
        return error


def _beside(begin: Begin, layout: list[Cell], more: More) -> Iterator[tuple[Cell, Outcome]]:
    """Run the cells side by side; those that cannot join others run one after another."""
    begun: list[Cell] = []

    def following() -> tuple[Cell, Callable[[Stopping], Course]] | None:
        if len(begun) == len(layout):  # for now: `more` makes it longer
            return None
        cell = layout[len(begun)]
        begun.append(cell)
        return cell, partial(begin, cell)

    most = layout[0].experiment.sim.together if layout else 0
    with one_copy():
        for cell, outcome in side_by_side(following, most):
            yield cell, outcome
            layout.extend(more())


def run_beside(begin: Begin, cells: list[Cell]) -> list[Outcome]:
    """Run cells side by side; return the result of each."""
    found = {cell.path: outcome for cell, outcome in _beside(begin, list(cells), list)}
    return [found[cell.path] for cell in cells]


def _in_parallel(
    work: Work, layout: list[Cell], jobs: int, more: More, folder: Path, works: Works | None
) -> Iterator[tuple[Cell, Outcome]]:
    mine = from_main([cell.experiment for cell in layout])
    free = [_WorkerProcess(folder, bool(mine)) for _ in range(jobs)]
    each: Works = partial(_each, work)
    most = 1 if works is None else AT_A_TIME
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
                way = each if works is None or len(cells) == 1 else works
                running[worker.submit(way, cells)] = cells, worker
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
            layout.extend(more())
    except KeyboardInterrupt:
        _log.warning("finishing the rounds of %d runs, then saving", len(running))
        raise
    finally:
        for worker in [*free, *(worker for _, worker in running.values())]:
            worker.pool.shutdown(cancel_futures=True)


def _each(work: Work, cells: list[Cell]) -> list[Outcome]:
    return [_outcome(work, cell) for cell in cells]
