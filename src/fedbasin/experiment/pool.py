"""Runs in parallel, one process each. A run whose process is killed is started again."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbasin.core.system import interrupts_blocked
from fedbasin.experiment.child_process import prepare_worker
from fedbasin.experiment.sharing import from_main, main_script_hidden
from fedbasin.sim.runner import Interrupted

if TYPE_CHECKING:
    from fedbasin.experiment.runs import Cell, More
_log = logging.getLogger(__package__)
Work = Callable[["Cell"], dict[str, Any]]
Outcome = dict[str, Any] | Exception


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

    def submit(self, work: Work, cell: Cell) -> Future[dict[str, Any]]:
        hidden = main_script_hidden(not self._needs_main)
        with interrupts_blocked(), hidden:  # the new process unblocks them once it is ready
            try:
                return self.pool.submit(work, cell.without_data())
            except BrokenProcessPool:
                self.pool = _WorkerProcess(self._folder, self._needs_main).pool
                return self.pool.submit(work, cell.without_data())


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
    work: Work, layout: list[Cell], jobs: int, more: More, folder: Path
) -> Iterator[tuple[Cell, Outcome]]:
    """Yield each cell of a layout when it ends, with its summary or its error.

    With several jobs each runs in its own process. A cell whose process is killed is retried once.
    """
    if jobs == 1:
        yield from _one_by_one(work, layout, more)
    else:
        yield from _in_parallel(work, layout, jobs, more, folder)


def _one_by_one(work: Work, layout: list[Cell], more: More) -> Iterator[tuple[Cell, Outcome]]:
    for cell in layout:  # `more` makes it longer during the loop
        try:
            outcome: Outcome = work(cell)
        except Interrupted:
            raise
        except Exception as error:
            outcome = error
        yield cell, outcome
        layout.extend(more())


def _in_parallel(
    work: Work, layout: list[Cell], jobs: int, more: More, folder: Path
) -> Iterator[tuple[Cell, Outcome]]:
    mine = from_main([cell.experiment for cell in layout])
    free = [_WorkerProcess(folder, bool(mine)) for _ in range(jobs)]
    begun = 0
    retried: set[Path] = set()
    running: dict[Future[dict[str, Any]], tuple[Cell, _WorkerProcess]] = {}
    try:
        while begun < len(layout) or running:
            # Never submit more cells than there are processes: a pool runs what it has queued
            # even after Ctrl-C.
            while free and begun < len(layout):
                cell = layout[begun]
                worker = free.pop()
                running[worker.submit(work, cell)] = cell, worker
                begun += 1
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                failed = future.exception()
                cell, worker = running.pop(future)
                if isinstance(failed, BrokenProcessPool) and cell.path not in retried:
                    retried.add(cell.path)
                    running[worker.submit(work, cell)] = cell, worker
                    continue
                free.append(worker)
                if isinstance(failed, BrokenProcessPool):
                    failed = RuntimeError(f"{cell.path}: {_why_killed(mine)}")
                if isinstance(failed, Interrupted) or not isinstance(failed, Exception | None):
                    raise failed
                yield cell, failed or future.result()
            layout.extend(more())
    except KeyboardInterrupt:
        _log.warning("finishing the rounds of %d runs, then saving", len(running))
        raise
    finally:
        for worker in [*free, *(worker for _, worker in running.values())]:
            worker.pool.shutdown(cancel_futures=True)
