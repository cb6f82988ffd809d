"""Runs side by side: a process each, begun anew where one is killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbasin.experiment.apart import interrupts_held, join_pool
from fedbasin.sim.runner import Interrupted

if TYPE_CHECKING:
    from fedbasin.experiment.runs import Cell, More
Work = Callable[["Cell"], dict[str, Any]]


class _Seat:
    """A process for one run after another; each has a pool to itself, so that it dies alone."""

    def __init__(self, folder: Path) -> None:
        self._folder, spawn = folder, get_context("spawn")
        self.pool = ProcessPoolExecutor(1, spawn, initializer=join_pool, initargs=(folder,))

    def submit(self, work: Work, cell: Cell) -> Future[dict[str, Any]]:
        with interrupts_held():  # a process that this begins keeps them so until it is ready
            try:
                return self.pool.submit(work, cell)
            except BrokenProcessPool:
                self.pool = _Seat(self._folder).pool
                return self.pool.submit(work, cell)


def outcomes(
    work: Work, layout: list[Cell], jobs: int, more: More, folder: Path
) -> Iterator[tuple[Cell, dict[str, Any] | Exception]]:
    """Yield each cell of a layout as it ends, with its summary or its error.

    Several jobs are processes of their own; a cell whose process is killed is begun again, once.
    """
    if jobs == 1:
        for cell in layout:  # which grows on the way
            try:
                outcome: dict[str, Any] | Exception = work(cell)
            except Interrupted:
                raise
            except Exception as error:
                outcome = error
            yield cell, outcome
            layout.extend(more())
        return
    free, begun, again = [_Seat(folder) for _ in range(jobs)], 0, set[Path]()
    running: dict[Future[dict[str, Any]], tuple[Cell, _Seat]] = {}
    try:
        while begun < len(layout) or running:
            # No more at once than processes: what a pool holds ready, it runs after Ctrl-C too.
            while free and begun < len(layout):
                cell, seat = layout[begun], free.pop()
                running[seat.submit(work, cell)] = cell, seat
                begun += 1
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                failed, (cell, seat) = future.exception(), running.pop(future)
                if isinstance(failed, BrokenProcessPool) and cell.path not in again:
                    again.add(cell.path)
                    running[seat.submit(work, cell)] = cell, seat
                    continue
                free.append(seat)
                if isinstance(failed, BrokenProcessPool):
                    failed = RuntimeError(
                        f"{cell.path}: its process was killed twice, as happens for want of "
                        "memory; run fewer at once (--jobs) and give the same command again"
                    )
                if isinstance(failed, Interrupted) or not isinstance(failed, Exception | None):
                    raise failed
                yield cell, failed or future.result()
            layout.extend(more())
    finally:
        for seat in [*free, *(seat for _, seat in running.values())]:
            seat.pool.shutdown(cancel_futures=True)
