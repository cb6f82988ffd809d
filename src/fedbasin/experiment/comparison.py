"""Comparisons: runs of every method and seed, one after another, side by side or in processes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fedbasin.core.lock import Busy
from fedbasin.core.record import RecordError, RunFolder
from fedbasin.experiment.checks import check_needs
from fedbasin.experiment.child_process import warn_once
from fedbasin.experiment.config import ConfigError, Experiment, read_experiment
from fedbasin.experiment.pool import outcomes
from fedbasin.experiment.runs import Branch, mend_wiped, open_begun, open_new, unlike
from fedbasin.experiment.sharing import StoredDataset, check_jobs, store_all
from fedbasin.sim.runner import Opened, RunOptions, drive
from fedbasin.sinks import Target, refuse_across_processes, sinks_of


def compare(
    base: Experiment,
    methods: Sequence[str],
    seeds: Sequence[int],
    out: Path | str,
    *,
    data_dir: Path | None = None,
    jobs: int = 1,
    log: Sequence[Target] = (),
) -> list[dict[str, Any]]:
    """Run every method with every seed on the same clients; return the summaries.

    `log` is that of `run`; with several jobs it takes names only.
    """
    layout = cells(base, methods, seeds, Path(out))
    return run_cells(layout, data_dir=data_dir, jobs=jobs, log=log)


@dataclass(frozen=True)
class Cell:
    """One run of a comparison.

    Args:
        experiment: what to run.
        path: its folder.
        branch: another run to take the first rounds from, if the cell has not started.
        branching: rounds after which a checkpoint is kept for other runs to start from.
        root: the folder of the comparison; by default `path`.
        until: the round to pause after; None runs to the end.
    """

    experiment: Experiment
    path: Path
    branch: Branch | None = None
    branching: tuple[int, ...] = ()
    root: Path | None = None
    until: int | None = None

    @property
    def rounds(self) -> int:
        """How many rounds the cell has when it ends."""
        whole = self.experiment.rounds
        return whole if self.until is None else min(self.until, whole)

    def without_data(self) -> Cell:
        """Return the cell as it is sent to another process, which maps the data from files."""
        objects = replace(self.experiment.objects, data=None)
        return replace(self, experiment=replace(self.experiment, objects=objects))


OnCell = Callable[[Cell, dict[str, Any] | Exception], None]
More = Callable[[], list[Cell]]


def cells(base: Experiment, methods: Sequence[str], seeds: Sequence[int], out: Path) -> list[Cell]:
    """Lay out a comparison: every method with every seed, a folder each."""
    if not methods or not seeds:
        raise ConfigError("a comparison needs at least one method and one seed")
    experiments: list[Experiment] = []
    for seed in seeds:
        for method in methods:
            experiment = replace(base, method=method, seed=seed).resolved()
            if experiment in experiments:
                raise ConfigError(
                    f"a comparison lists {experiment.method} with seed {experiment.seed} twice"
                )
            experiments.append(experiment)
    for experiment in experiments:
        check_needs(experiment)  # before any training starts
    return [Cell(e, out / slug(e.method) / f"seed{e.seed}", root=out) for e in experiments]


def run_cell(
    cell: Cell, data_dir: Path | None = None, log: Sequence[Target] = ()
) -> dict[str, Any]:
    """Start or resume a cell, or return the summary of a finished one.

    A run that diverges is a result: its summary says so, and the comparison continues.
    """
    return drive(open_cell(cell, data_dir, log))


def open_cell(
    cell: Cell,
    data_dir: Path | None = None,
    log: Sequence[Target] = (),
    stored: Mapping[str, StoredDataset] | None = None,
) -> Opened:
    """Open the run of a cell, new or begun; of a cell that is over return the summary.

    Args:
        cell: what to run.
        data_dir: a local mirror of the datasets.
        log: where else records and summary go.
        stored: datasets in memory that another process has stored, by name.
    """
    folder = RunFolder(cell.path)
    options = RunOptions(
        branching=cell.branching, until=cell.until, sinks=sinks_of(log), root=cell.root
    )
    experiment = _with_data(cell.experiment, stored or {})
    if not folder.config.exists():
        return open_new(experiment, cell.path, options, data_dir, cell.branch)
    mend_wiped(folder)
    there = read_experiment(folder.config)
    if there != experiment:
        raise RecordError(
            f"{cell.path} holds a run with other settings ({unlike(there, experiment)}); "
            "choose another folder"
        )
    if folder.summary.exists() and _is_done(folder.read_summary(), cell):
        return folder.read_summary()
    return open_begun(cell.path, options, experiment.objects, data_dir)


def _is_done(summary: Mapping[str, Any], cell: Cell) -> bool:
    """Whether a run has diverged, or is paused where the cell ends or after that."""
    status = summary.get("status")
    paused = status == "paused" and cell.until is not None
    return status == "diverged" or (paused and summary.get("rounds", 0) >= cell.rounds)


def run_cells(
    layout: list[Cell],
    *,
    data_dir: Path | None = None,
    jobs: int = 1,
    log: Sequence[Target] = (),
    on_cell: OnCell | None = None,
    more: More = list,
) -> list[dict[str, Any]]:
    """Run the unfinished cells of a comparison and return all summaries.

    Args:
        layout: the cells.
        data_dir: a local mirror of the datasets.
        jobs: processes at once, with one thread each; results do not depend on it.
        log: where else records and summaries go, as in `run`; with several jobs names only.
        on_cell: called when a cell ends, with its summary or its error; the other cells continue.
            Without it the first error ends the comparison. Cells that another process is running
            raise `Busy` after all others have ended.
        more: called when a cell ends; returns cells that could not start before, which are added
            to the layout.
    """
    sinks_of(log)  # a name may be unknown or a package missing
    refuse_across_processes(log, jobs)
    summaries: dict[Path, dict[str, Any]] = {}
    busy: list[str] = []
    experiments = [cell.experiment for cell in layout]
    check_jobs(experiments, jobs)
    beside = _may_advance_together(layout) and all(isinstance(target, str) for target in log)
    with warn_once() as folder:
        stored = store_all(experiments, folder) if jobs > 1 else None
        opening = partial(open_cell, data_dir=data_dir, log=log, stored=stored)
        for cell, outcome in outcomes(opening, layout, jobs, folder, beside=beside):
            if on_cell is not None:
                on_cell(cell, outcome)
            elif isinstance(outcome, Busy):
                busy.append(str(outcome))
            elif isinstance(outcome, Exception):
                raise outcome
            if not isinstance(outcome, Exception):
                summaries[cell.path] = outcome
            layout.extend(more())
    if busy:
        raise Busy("\n".join(busy))
    return [summaries[cell.path] for cell in layout if cell.path in summaries]


def _may_advance_together(layout: list[Cell]) -> bool:
    """Whether runs may advance together: nobody asks for one by one."""
    return all(cell.experiment.sim.together != 1 for cell in layout)


def _with_data(experiment: Experiment, stored: Mapping[str, StoredDataset]) -> Experiment:
    """Return the settings of a run with its data in memory, where another process stored it."""
    name = experiment.data.name
    if name not in stored:
        return experiment
    return replace(experiment, objects=replace(experiment.objects, data=stored[name].dataset))


def slug(expression: str) -> str:
    """Turn an expression into a safe folder name; different expressions get different names."""
    plain = re.sub(r"[^a-z0-9._]+", "-", expression.lower()).strip("-.")[:60]
    if plain == expression:
        return plain
    return f"{plain}-{hashlib.blake2b(expression.encode(), digest_size=3).hexdigest()}"
