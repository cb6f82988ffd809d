"""Runs of a grid: finished runs are kept, stopped ones resumed, equal cells share one run.

Cells whose first rounds are equal share these rounds: a method whose averaging starts late starts
from the checkpoint of the method without averaging (`shared_prefix`).
"""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path

from fedbasin.core.expressions import parse
from fedbasin.core.lock import Busy
from fedbasin.core.method import Method
from fedbasin.core.protocols import shared_prefix
from fedbasin.core.record import RunFolder
from fedbasin.experiment import Experiment, from_mapping
from fedbasin.experiment.comparison import Cell
from fedbasin.experiment.config import read_config
from fedbasin.experiment.runs import Branch
from fedbasin.papers.grid import CellRun, fingerprint
from fedbasin.papers.results import Result, append, read, result_of


@dataclass(frozen=True)
class Grid:
    """The runs that a command asks for, by folder.

    Args:
        cell_runs: the runs asked for.
        out: where run folders lie.
        results: the file that lines are added to.
        data_dir: a local mirror of the datasets.
    """

    cell_runs: tuple[CellRun, ...]
    out: Path
    results: Path
    data_dir: Path | None = None
    failures: dict[str, str] = field(default_factory=dict)
    begun: set[Path] = field(default_factory=set)
    failed: set[Path] = field(default_factory=set)

    def collect(self) -> None:
        """Write the lines of runs that have already ended."""
        written = {line.key for line in self._written()}
        for path, cell_runs in self._by_path.items():
            left = [cell_run for cell_run in cell_runs if cell_run.key not in written]
            if not left or not over(path):
                continue
            for cell_run in left:
                append(self.results, result_of(cell_run, path, self.data_dir))

    def unfinished(self) -> dict[Path, Experiment]:
        """Return the runs that have not ended and whose line is missing, each once."""
        written = {line.key for line in self._written()}
        left: dict[Path, Experiment] = {}
        for path, cell_runs in self._by_path.items():
            if any(cell_run.key not in written for cell_run in cell_runs) and not over(path):
                left[path] = _as_begun(cell_runs[0], path)
        return left

    def waiting(self) -> list[Cell]:
        """Return the runs that can start now and have not been returned before.

        A run that starts from another one of the grid waits until that one has ended or failed.
        """
        ahead = {path: run for path, run in self.unfinished().items() if path not in self.failed}
        left = {path: run for path, run in ahead.items() if path not in self.begun}
        branches = {path: _branch(run, self.out) for path, run in left.items()}
        leaving: dict[Path, set[int]] = defaultdict(set)
        for wanted in filter(None, branches.values()):
            leaving[wanted.prefix].add(wanted.round)
        cells = []
        for path, run in left.items():
            branch = branches[path]
            if branch and branch.prefix in ahead:
                continue
            if branch and not RunFolder(branch.prefix).branching(branch.round).exists():
                branch = None
            cells.append(Cell(run, path, branch, tuple(sorted(leaving[path]))))
        self.begun.update(cell.path for cell in cells)
        return cells

    def ended(self, cell: Cell, outcome: object) -> None:
        """Write the lines of a run that has ended, or record why it failed."""
        if isinstance(outcome, Exception):
            self.failed.add(cell.path)
        if isinstance(outcome, Busy):
            logging.getLogger(__package__).warning("skipped: %s", outcome)
            return
        for cell_run in self._by_path.get(cell.path, ()):
            if isinstance(outcome, Exception):
                self.failures[cell_run.command] = f"{type(outcome).__name__}: {outcome}"
            else:
                append(self.results, result_of(cell_run, cell.path, self.data_dir))

    def lines(self) -> list[Result]:
        """Return the lines of the runs asked for."""
        asked = {cell_run.key for cell_run in self.cell_runs}
        return [line for line in self._written() if line.key in asked]

    @cached_property
    def _by_path(self) -> dict[Path, list[CellRun]]:
        by_path: dict[Path, list[CellRun]] = defaultdict(list)
        for cell_run in self.cell_runs:
            by_path[cell_run.folder(self.out)].append(cell_run)
        return by_path

    def _written(self) -> list[Result]:
        return read(self.results) if self.results.exists() else []


def over(path: Path) -> bool:
    """Whether a folder's run has finished or diverged."""
    folder = RunFolder(path)
    if folder.model.exists():
        return True
    return folder.summary.exists() and folder.read_summary().get("status") == "diverged"


def _as_begun(cell_run: CellRun, path: Path) -> Experiment:
    """Return the experiment of a run; a run that has started keeps its settings."""
    begun = RunFolder(path).config
    return from_mapping(read_config(begun)) if begun.exists() else cell_run.experiment


@cache  # called for all remaining cells whenever one ends
def _branch(experiment: Experiment, out: Path) -> Branch | None:
    """Return the run whose first rounds an experiment shares, and how many of them."""
    method: Method = parse(experiment.method, "method")
    plain, common = shared_prefix(method, experiment.rounds)
    if plain == method or not common:
        return None
    return Branch(out / fingerprint(replace(experiment, method=str(plain))), common)
