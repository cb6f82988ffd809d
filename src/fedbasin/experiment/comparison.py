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
from fedbasin.data import DataError, Dataset
from fedbasin.experiment.checks import check_needs
from fedbasin.experiment.child_process import run_in_progress, warn_once
from fedbasin.experiment.config import ConfigError, Experiment, read_experiment
from fedbasin.experiment.pool import Outcome, outcomes, run_beside
from fedbasin.experiment.runs import Branch, Options, mend_wiped, resumed, started, unlike
from fedbasin.experiment.sharing import StoredDataset, check_jobs, store_all
from fedbasin.sim import Diverged
from fedbasin.sim.runner import Course, Interrupted, Stopping, alone
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
    return alone(cell_course(cell, data_dir, log))


def cell_course(
    cell: Cell,
    data_dir: Path | None = None,
    log: Sequence[Target] = (),
    stopping: Stopping | None = None,
) -> Course:
    """Yield the requests of a cell, as `run_cell` runs it; return its summary."""
    folder = RunFolder(cell.path)
    options = Options(
        data_dir=data_dir,
        branching=cell.branching,
        until=cell.until,
        log=log,
        root=cell.root,
        stopping=stopping,
    )
    try:
        if not folder.config.exists():
            return (yield from started(cell.experiment, cell.path, options, cell.branch))
        mend_wiped(folder)
        there = read_experiment(folder.config)
        if there != cell.experiment:
            raise RecordError(
                f"{cell.path} holds a run with other settings ({unlike(there, cell.experiment)}); "
                "choose another folder"
            )
        if folder.summary.exists() and _is_done(folder.read_summary(), cell):
            return folder.read_summary()
        options = replace(options, objects=cell.experiment.objects)
        return (yield from resumed(cell.path, options))
    except Diverged:
        return folder.read_summary()


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
    with warn_once() as folder:
        work: Callable[[Cell], dict[str, Any]] = partial(run_cell, data_dir=data_dir, log=log)
        together = _together(layout) and all(isinstance(target, str) for target in log)
        begin = partial(_begin, data_dir=data_dir, log=log) if together else None
        works = None
        if jobs > 1:
            stored = store_all(experiments, folder)
            work = partial(run_in_child, data_dir=data_dir, log=log, stored=stored)
            if begin is not None:
                works = partial(_run_beside_in_child, data_dir=data_dir, log=log, stored=stored)
        for cell, outcome in outcomes(work, layout, jobs, more, folder, begin=begin, works=works):
            if on_cell is not None:
                on_cell(cell, outcome)
            elif isinstance(outcome, Busy):
                busy.append(str(outcome))
            elif isinstance(outcome, Exception):
                raise outcome
            if not isinstance(outcome, Exception):
                summaries[cell.path] = outcome
    if busy:
        raise Busy("\n".join(busy))
    return [summaries[cell.path] for cell in layout if cell.path in summaries]


def run_in_child(
    cell: Cell, data_dir: Path | None, log: Sequence[Target], stored: Mapping[str, StoredDataset]
) -> dict[str, Any]:
    """Run a cell in a child process; unexpected errors are returned as text."""
    name = cell.experiment.data.name
    cell = _with_data(cell, {name: stored[name].open()} if name in stored else {})
    try:
        with run_in_progress():
            return run_cell(cell, data_dir, log)
    except (ValueError, OSError, DataError, Interrupted):
        raise
    except Exception as error:
        raise RuntimeError(f"{cell.path}: {type(error).__name__}: {error}") from None


def _together(layout: list[Cell]) -> bool:
    """Whether runs may advance together: there are several, and nobody asks for one by one."""
    return len(layout) > 1 and all(cell.experiment.sim.together != 1 for cell in layout)


def _begin(cell: Cell, stopping: Stopping, data_dir: Path | None, log: Sequence[Target]) -> Course:
    return cell_course(cell, data_dir, log, stopping)


def _run_beside_in_child(
    cells: list[Cell],
    data_dir: Path | None,
    log: Sequence[Target],
    stored: Mapping[str, StoredDataset],
) -> list[Outcome]:
    """Run cells side by side in a child process; unexpected errors are returned as text."""
    opened = {name: each.open() for name, each in stored.items()}
    with run_in_progress():
        begin = partial(_begin, data_dir=data_dir, log=log)
        ended = run_beside(begin, [_with_data(cell, opened) for cell in cells])
    return [_sendable(cell, outcome) for cell, outcome in zip(cells, ended, strict=True)]


def _with_data(cell: Cell, opened: Mapping[str, Dataset]) -> Cell:
    """Return a cell with its data in memory, where it has such data."""
    if cell.experiment.data.name not in opened:
        return cell
    objects = replace(cell.experiment.objects, data=opened[cell.experiment.data.name])
    return replace(cell, experiment=replace(cell.experiment, objects=objects))


def _sendable(cell: Cell, outcome: Outcome) -> Outcome:
    """Return an outcome that another process can read."""
    if isinstance(outcome, dict | ValueError | OSError | DataError | Busy):
        return outcome
    return RuntimeError(f"{cell.path}: {type(outcome).__name__}: {outcome}")


def slug(expression: str) -> str:
    """Turn an expression into a safe folder name; different expressions get different names."""
    plain = re.sub(r"[^a-z0-9._]+", "-", expression.lower()).strip("-.")[:60]
    if plain == expression:
        return plain
    return f"{plain}-{hashlib.blake2b(expression.encode(), digest_size=3).hexdigest()}"
