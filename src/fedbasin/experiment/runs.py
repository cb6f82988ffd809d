"""Runs and comparisons: start, resume, repeat over methods and seeds."""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from fedbasin.core.archive import Archive
from fedbasin.core.lock import Busy, alone_in
from fedbasin.core.record import (
    RecordError,
    RoundRecord,
    RunFolder,
    is_wiped,
    write_atomically,
)
from fedbasin.core.sink import Log, Sink
from fedbasin.core.snapshot import Snapshots
from fedbasin.data import DataError, Dataset
from fedbasin.data.naming import named_by_content
from fedbasin.experiment.assemble import build
from fedbasin.experiment.checks import check_needs
from fedbasin.experiment.child_process import run_in_progress, warn_once
from fedbasin.experiment.config import ConfigError, Experiment, read_experiment
from fedbasin.experiment.executors import pick_device
from fedbasin.experiment.objects import Factory, Objects, model_name, record_model
from fedbasin.experiment.pool import Outcome, outcomes, run_beside
from fedbasin.experiment.sharing import StoredDataset, check_jobs, store_all
from fedbasin.sim import Diverged, Federation
from fedbasin.sim.runner import Course, Interrupted, Stopping, alone, course, start_from_prefix
from fedbasin.sinks import Target, refuse_across_processes, sinks_of

OnRound = Callable[[RoundRecord], bool | None]
# Settings that change no result: they may be edited in config.toml before a run is resumed.
_FREE = (
    "device",
    "workers",
    "address",
    "chunk",
    "memory",
    "together",
    "client_memory",
    "checkpoint_every",
)


@dataclass(frozen=True)
class Branch:
    """The run that another one starts from, and how many of its rounds are reused."""

    prefix: Path
    round: int

    def facts(self) -> dict[str, Any]:
        """Return what the summary records about it."""
        known = RunFolder(self.prefix).read_summary()
        return {"run": self.prefix.name, "rounds": self.round, "commit": known.get("commit")}


def run(
    experiment: Experiment,
    out: Path | str,
    *,
    data_dir: Path | None = None,
    data: Dataset | None = None,
    model: nn.Module | Factory | None = None,
    branch: Branch | None = None,
    branching: Collection[int] = (),
    until: int | None = None,
    on_round: OnRound | None = None,
    log: Sequence[Target] = (),
    root: Path | None = None,
) -> dict[str, Any]:
    """Start a run in a new folder and return its summary.

    Args:
        experiment: what to run.
        out: the run's folder; one that holds a run already is refused.
        data_dir: a local mirror of the datasets.
        data: data in memory, in place of what `data.name` says; its name goes into the records.
            To resume the run, give the same data again.
        model: a network as an object, in place of what `model` says; likewise.
        branch: another run to take the first rounds from.
        branching: rounds after which a checkpoint is kept for other runs to start from.
        until: the round to pause after; `resume` goes on from there.
        on_round: called with each round's record.
        log: where else records and summary go: names (tensorboard, mlflow, wandb), `Sink` objects,
            or functions that are called with each round's record.
        root: the folder of the comparison that the run belongs to, for sinks that keep one store
            for all its runs; by default `out`.
    """
    return alone(
        _started(
            experiment,
            Path(out),
            data_dir=data_dir,
            objects=Objects(data, model),
            branch=branch,
            branching=branching,
            until=until,
            on_round=on_round,
            log=log,
            root=root,
        )
    )


def _started(
    experiment: Experiment,
    out: Path,
    *,
    data_dir: Path | None,
    objects: Objects,
    branch: Branch | None,
    branching: Collection[int],
    until: int | None,
    on_round: OnRound | None,
    log: Sequence[Target],
    root: Path | None,
    stopping: Stopping | None = None,
) -> Course:
    """Yield the requests of a run in a new folder; return its summary."""
    sinks = sinks_of(log)  # before any work: a package may be missing
    folder = RunFolder(out)
    _refuse_begun(folder, branch)
    experiment = experiment.using(_objects(experiment, objects.data, objects.model)).resolved()
    with closing(_federation(experiment, folder, data_dir)) as federation:
        _announce_snapshots(federation, folder)
        folder.path.mkdir(parents=True, exist_ok=True)
        with alone_in(folder.path):
            _refuse_begun(folder, branch)  # another process may have been faster
            if branch is not None:
                start_from_prefix(federation, folder, RunFolder(branch.prefix), branch.round)
                write_atomically(folder.branch, json.dumps(branch.facts()) + "\n")
            _record_objects(experiment, federation, folder)
            write_atomically(folder.begun, experiment.to_toml())
            write_atomically(folder.config, experiment.to_toml())
            log_of_run = _log(experiment, folder, sinks, root)
            ends = _Ends(branching, until, on_round, stopping)
            return (yield from _run(experiment, federation, folder, ends, log_of_run))


def _refuse_begun(folder: RunFolder, branch: Branch | None) -> None:
    if folder.config.exists():
        raise RecordError(
            f"{folder.path} holds a run already; resume it (fedbasin resume {folder.path}) or "
            "choose another folder"
        )
    if folder.checkpoint.exists() and branch is None:  # a branch writes this checkpoint itself
        raise RecordError(
            f"{folder.path} has a checkpoint without config.toml; choose another folder"
        )


def resume(
    out: Path | str,
    *,
    data_dir: Path | None = None,
    data: Dataset | None = None,
    model: nn.Module | Factory | None = None,
    branching: Collection[int] = (),
    until: int | None = None,
    on_round: OnRound | None = None,
    log: Sequence[Target] = (),
    root: Path | None = None,
) -> dict[str, Any]:
    """Resume the run of a folder and return its summary; a finished run is not changed.

    Args:
        out: the run's folder.
        data_dir: a local mirror of the datasets.
        data: the data in memory that the run was started with; other data is refused.
        model: the network, or the function that makes it, that the run was started with; others
            are refused.
        branching: rounds after which a checkpoint is kept for other runs to start from.
        until: the round to pause after, as in `run`.
        on_round: called with each round's record.
        log: where else records go, as in `run`.
        root: the folder of the comparison that the run belongs to, as in `run`.
    """
    return alone(
        _resumed(
            Path(out),
            data_dir=data_dir,
            objects=Objects(data, model),
            branching=branching,
            until=until,
            on_round=on_round,
            log=log,
            root=root,
        )
    )


def _resumed(
    out: Path,
    *,
    data_dir: Path | None,
    objects: Objects,
    branching: Collection[int],
    until: int | None,
    on_round: OnRound | None,
    log: Sequence[Target],
    root: Path | None,
    stopping: Stopping | None = None,
) -> Course:
    """Yield the requests of the run of a folder; return its summary."""
    sinks = sinks_of(log)
    folder = RunFolder(out)
    if not folder.config.exists():
        raise RecordError(f"{out} holds no run: there is no config.toml in it")
    if folder.model.exists():
        return folder.read_summary()
    mend_wiped(folder)
    experiment = read_experiment(folder.config)
    _refuse_edited(folder, experiment)
    experiment = _with_same_objects(folder, experiment, objects)
    with (
        alone_in(folder.path),
        closing(_federation(experiment, folder, data_dir)) as federation,
    ):
        _record_objects(experiment, federation, folder)
        log_of_run = _log(experiment, folder, sinks, root)
        ends = _Ends(branching, until, on_round, stopping)
        return (yield from _run(experiment, federation, folder, ends, log_of_run))


def mend_wiped(folder: RunFolder) -> None:
    """Do without the files that a power cut has emptied, where the run can.

    The settings are written twice. Without data.json the rows are not compared with those that
    the run was begun on.
    """
    told = logging.getLogger(__package__).warning
    if is_wiped(folder.config) and folder.begun.exists() and not is_wiped(folder.begun):
        told("%s was emptied; %s holds the same settings", folder.config, folder.begun)
        write_atomically(folder.config, folder.begun.read_text(encoding="utf-8"))
    for path in (folder.begun, folder.path / "data.json"):
        if is_wiped(path):
            told("%s was emptied; the run goes on without it", path)
            path.unlink()


def _refuse_edited(folder: RunFolder, experiment: Experiment) -> None:
    """Refuse edits that would change the results of a started run."""
    if not folder.begun.exists():  # the run was started by an older version
        return
    begun = read_experiment(folder.begun)
    free = {name: getattr(experiment.sim, name) for name in _FREE}
    if replace(begun, sim=replace(begun.sim, **free)) != experiment:
        raise RecordError(
            f"{folder.config} was edited since the run began ({_unlike(begun, experiment)}); put "
            "that back, or start another run with it. What may change: sim." + ", sim.".join(_FREE)
        )


class _Ends(NamedTuple):
    """What may end or pause a run, and what is kept on the way."""

    branching: Collection[int]
    until: int | None
    on_round: OnRound | None
    stopping: Stopping | None


def _run(
    experiment: Experiment, federation: Federation, folder: RunFolder, ends: _Ends, log: Log
) -> Course:
    taken = folder.read_branch()
    with closing(log):
        return (
            yield from course(
                federation,
                folder,
                facts(experiment)
                | {"clients": len(federation.population)}
                | _scored_rows(experiment, federation)
                | ({"branch": taken} if taken else {}),
                checkpoint_every=experiment.sim.checkpoint_every,
                log=log,
                **ends._asdict(),
            )
        )


def _scored_rows(experiment: Experiment, federation: Federation) -> dict[str, Any]:
    """Say on which rows a run was scored, where these are not the test rows."""
    if experiment.sim.score_on == "test":
        return {}
    return {"scored_on": experiment.sim.score_on, "scored_rows": federation.evaluator.size}


def _log(
    experiment: Experiment, folder: RunFolder, sinks: Sequence[Sink], root: Path | None
) -> Log:
    settings: dict[str, Any] = {}
    for name, value in tomllib.loads(experiment.to_toml()).items():
        if isinstance(value, dict):
            settings |= {f"{name}.{inner}": each for inner, each in value.items()}
        else:
            settings[name] = value
    return Log(sinks, folder.path, root or folder.path, settings)


def _objects(
    experiment: Experiment, data: Dataset | None, model: nn.Module | Factory | None
) -> Objects:
    """Return the objects of a run: those given to it win over those of the experiment."""
    known = experiment.objects
    return Objects(known.data if data is None else data, known.model if model is None else model)


def _with_same_objects(folder: RunFolder, experiment: Experiment, objects: Objects) -> Experiment:
    """Return a run that is resumed with its objects; refuse others by their names."""
    if objects.data is None and named_by_content(experiment.data.name):
        raise RecordError(
            f"{folder.path} was begun on data in memory, {experiment.data.name}: give it again, "
            f"fedbasin.resume({str(folder.path)!r}, data=...)"
        )
    asked = experiment.using(objects)
    if asked.data.name != experiment.data.name:
        raise RecordError(
            f"{folder.path} was begun on other data: {experiment.data.name}, and data= is "
            f"{asked.data.name}; give it the data it was begun on, or start again in a new folder"
        )
    if asked.model != experiment.model:
        raise RecordError(
            f"{folder.path} was begun with the network {experiment.model}, and model= is "
            f"{asked.model}; give it the network it was begun with, or start again in a new folder"
        )
    return asked


def _record_objects(experiment: Experiment, federation: Federation, folder: RunFolder) -> None:
    """Record what the network takes, how tables are encoded, and the start of a given network."""
    write_atomically(folder.interface, federation.interface)
    if experiment.objects.model is not None:
        record_model(folder, model_name(experiment.objects.model), federation.net)
    if federation.encoding:
        write_atomically(folder.encoding, federation.encoding)


def _federation(experiment: Experiment, folder: RunFolder, data_dir: Path | None) -> Federation:
    """Build the federation of a run; its archive and snapshots lie in the run's folder."""
    federation = build(
        experiment,
        data_dir=data_dir,
        archive=Archive(folder.archive),
        client_archive=Archive(folder.clients),
    )
    chosen = experiment.snapshots.chosen(experiment.rounds)
    snapshots = Snapshots(folder.snapshots, chosen, experiment.snapshots.clients)
    return replace(federation, snapshots=snapshots)


def _announce_snapshots(federation: Federation, folder: RunFolder) -> None:
    """Log the disk space that snapshots take, and refuse the run if it does not fit."""
    if federation.snapshots is None or not federation.snapshots.rounds:
        return
    disk = next(path for path in folder.path.absolute().parents if path.exists())
    size = federation.snapshot_bytes() / 1e6
    free = shutil.disk_usage(disk).free / 1e6
    count = len(federation.snapshots.rounds)
    if size > free:
        raise ConfigError(
            f"snapshots: {count} rounds take up to {size:,.0f} MB, {disk} has {free:,.0f} "
            "MB left; keep fewer rounds or write snapshots.clients = false"
        )
    logging.getLogger(__package__).warning(
        "snapshots: models of %d rounds take up to %s MB in %s",
        count,
        f"{size:,.1f}",
        folder.snapshots,
    )


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
    try:
        if not folder.config.exists():
            return (
                yield from _started(
                    cell.experiment,
                    cell.path,
                    data_dir=data_dir,
                    objects=Objects(),
                    branch=cell.branch,
                    branching=cell.branching,
                    until=cell.until,
                    on_round=None,
                    log=log,
                    root=cell.root,
                    stopping=stopping,
                )
            )
        mend_wiped(folder)
        there = read_experiment(folder.config)
        if there != cell.experiment:
            raise RecordError(
                f"{cell.path} holds a run with other settings ({_unlike(there, cell.experiment)}); "
                "choose another folder"
            )
        if folder.summary.exists() and _is_done(folder.read_summary(), cell):
            return folder.read_summary()
        return (
            yield from _resumed(
                cell.path,
                data_dir=data_dir,
                objects=cell.experiment.objects,
                branching=cell.branching,
                until=cell.until,
                on_round=None,
                log=log,
                root=cell.root,
                stopping=stopping,
            )
        )
    except Diverged:
        return folder.read_summary()


def _is_done(summary: Mapping[str, Any], cell: Cell) -> bool:
    """Whether a run has diverged, or is paused where the cell ends or after that."""
    status = summary.get("status")
    paused = status == "paused" and cell.until is not None
    return status == "diverged" or (paused and summary.get("rounds", 0) >= cell.rounds)


def _unlike(there: Experiment, asked: Experiment) -> str:
    """List the settings that differ, by comparing the lines of the two files."""
    before, now = (each.to_toml().splitlines() for each in (there, asked))
    pairs = [f"{a} there, {b} asked for" for a, b in zip(before, now, strict=False) if a != b]
    return "; ".join(pairs)


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


def facts(experiment: Experiment) -> dict[str, Any]:
    """Return what a summary records about how a run was made."""
    device = pick_device(experiment.sim.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "method": experiment.method,
        "seed": experiment.seed,
        "dataset": experiment.data.name,
        "model": experiment.model,
        "task": experiment.task,
        "partition": experiment.partition.how,
        "device": f"{device} ({name})",
        "python": platform.python_version(),
        "versions": dict(_versions()),
        "commit": _own_commit(),
    }


@cache
def _versions() -> dict[str, str]:
    """Return the versions of what a run depends on."""
    packages = ("fedbasin", "torch", "numpy")
    return {package: metadata.version(package) for package in packages if _installed(package)}


@cache
def _own_commit() -> str | None:
    """Return the commit of the code that this process runs."""
    return commit_of(Path(__file__))


def _installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def commit_of(file: Path) -> str | None:
    """Return the commit that a source file belongs to, or None outside a repository.

    "-dirty" is appended if tracked files have uncommitted changes.
    """
    git = ["git", "-C", str(file.parent)]
    try:
        for command in (
            ["ls-files", "--error-unmatch", file.name],
            ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
        ):
            answer = subprocess.run(
                [*git, *command], capture_output=True, text=True, timeout=10, check=False
            )
            if answer.returncode:
                return None
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None
