"""Runs of a grid: what is over is kept, what was stopped goes on, equal cells share one run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from fedbasin.core.record import RunFolder
from fedbasin.experiment import from_mapping
from fedbasin.experiment.config import read_config
from fedbasin.experiment.runs import Cell
from fedbasin.papers.grid import Task
from fedbasin.papers.results import Result, append, result_of


@dataclass(frozen=True)
class Grid:
    """The tasks of a command by the folder that each is run in.

    Args:
        tasks: what is asked for.
        out: where run folders lie.
        results: the file that lines are added to.
        data_dir: a local mirror of the datasets.
    """

    tasks: tuple[Task, ...]
    out: Path
    results: Path
    data_dir: Path | None = None
    failures: dict[str, str] = field(default_factory=dict)

    def waiting(self) -> list[Cell]:
        """Write the lines of runs that are over, and return those that are not, each once."""
        cells: dict[Path, Cell] = {}
        for task in self.tasks:
            path = task.folder(self.out)
            if over(path):
                append(self.results, result_of(task, path, self.data_dir))
            else:
                cells.setdefault(path, _cell(task, path))
        return list(cells.values())

    def ended(self, cell: Cell, outcome: object) -> None:
        """Write the lines of a run that has just ended, or remember why it failed."""
        for task in self.tasks:
            if task.folder(self.out) != cell.path:
                continue
            if isinstance(outcome, Exception):
                self.failures[task.command] = f"{type(outcome).__name__}: {outcome}"
            else:
                append(self.results, result_of(task, cell.path, self.data_dir))

    def lines(self, read: Callable[[Path], Iterable[Result]]) -> list[Result]:
        """Return the lines that belong to the tasks."""
        asked = {(t.table.name, t.row.name, t.column.name, t.seed, t.config) for t in self.tasks}
        found = read(self.results) if self.results.exists() else []
        return [r for r in found if (r.table, r.row, r.column, r.seed, r.config) in asked]


def over(path: Path) -> bool:
    """Whether a folder's run has finished or diverged."""
    folder = RunFolder(path)
    if folder.model.exists():
        return True
    return folder.summary.exists() and folder.read_summary().get("status") == "diverged"


def _cell(task: Task, path: Path) -> Cell:
    """Return the run of a task; one that was begun goes on where, and as, it was begun."""
    begun = RunFolder(path).config
    experiment = from_mapping(read_config(begun)) if begun.exists() else task.experiment
    return Cell(experiment, path)
