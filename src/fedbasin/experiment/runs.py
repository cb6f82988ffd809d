"""A run: start it in a folder, resume it."""

from __future__ import annotations

import json
import logging
import shutil
import tomllib
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from fedbasin.core.archive import Archive
from fedbasin.core.lock import alone_in
from fedbasin.core.record import RecordError, RunFolder, is_wiped, write_atomically
from fedbasin.core.snapshot import Snapshots
from fedbasin.data import Dataset
from fedbasin.data.naming import named_by_content
from fedbasin.experiment.assemble import build
from fedbasin.experiment.config import RESULT_NEUTRAL, ConfigError, Experiment, read_experiment
from fedbasin.experiment.facts import facts
from fedbasin.experiment.objects import Factory, Objects, model_name, record_model
from fedbasin.sim import Diverged, Federation
from fedbasin.sim.runner import OnRound, Opened, Run, RunOptions, drive, start_from_prefix
from fedbasin.sinks import Target, sinks_of


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
        until: the round to pause after; `resume` continues from there.
        on_round: called with each round's record.
        log: where else records and summary go: names (tensorboard, mlflow, wandb), `Sink` objects,
            or functions that are called with each round's record.
        root: the folder of the comparison that the run belongs to, for sinks that keep one store
            for all its runs; by default `out`.
    """
    options = RunOptions(
        branching=branching, until=until, on_round=on_round, sinks=sinks_of(log), root=root
    )
    experiment = experiment.using(_objects(experiment, Objects(data, model)))
    summary = drive(open_new(experiment, Path(out), options, data_dir, branch))
    refuse_diverged(summary, Path(out))
    return summary


def open_new(
    experiment: Experiment,
    out: Path,
    options: RunOptions,
    data_dir: Path | None = None,
    branch: Branch | None = None,
) -> Run:
    """Open a run in a new folder.

    Args:
        experiment: what to run, with its objects.
        out: the run's folder; one that holds a run already is refused.
        options: how it is carried out.
        data_dir: a local mirror of the datasets.
        branch: another run to take the first rounds from.
    """
    folder = RunFolder(out)
    _refuse_begun(folder, branch)
    experiment = experiment.resolved()
    with ExitStack() as resources:
        federation = _federation(experiment, folder, data_dir, resources)
        _announce_snapshots(federation, folder)
        folder.path.mkdir(parents=True, exist_ok=True)
        resources.enter_context(alone_in(folder.path))
        _refuse_begun(folder, branch)  # another process may have been faster
        if branch is not None:
            start_from_prefix(federation, folder, RunFolder(branch.prefix), branch.round)
            write_atomically(folder.branch, json.dumps(branch.facts()) + "\n")
        _record_objects(experiment, federation, folder)
        write_atomically(folder.begun, experiment.to_toml())
        write_atomically(folder.config, experiment.to_toml())
        return _open(experiment, federation, folder, options, resources)


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
    options = RunOptions(
        branching=branching, until=until, on_round=on_round, sinks=sinks_of(log), root=root
    )
    summary = drive(open_begun(Path(out), options, Objects(data, model), data_dir))
    refuse_diverged(summary, Path(out))
    return summary


def open_begun(
    out: Path, options: RunOptions, objects: Objects, data_dir: Path | None = None
) -> Opened:
    """Open the run of a folder, to resume it; of a finished run return the summary.

    Args:
        out: the run's folder.
        options: how it is carried out.
        objects: data and network that it was started with, where these are Python objects.
        data_dir: a local mirror of the datasets.
    """
    folder = RunFolder(out)
    if not folder.config.exists():
        raise RecordError(f"{out} holds no run: there is no config.toml in it")
    if folder.model.exists():
        if objects.data is not None or objects.model is not None:
            _with_same_objects(folder, read_experiment(folder.config), objects)
        return folder.read_summary()
    mend_wiped(folder)
    experiment = read_experiment(folder.config)
    _refuse_edited(folder, experiment)
    experiment = _with_same_objects(folder, experiment, objects)
    with ExitStack() as resources:
        resources.enter_context(alone_in(folder.path))
        federation = _federation(experiment, folder, data_dir, resources)
        _record_objects(experiment, federation, folder)
        return _open(experiment, federation, folder, options, resources)


def refuse_diverged(summary: Mapping[str, Any], out: Path) -> None:
    """Raise `Diverged` for the summary of a run that has diverged."""
    if summary.get("status") == "diverged":
        raise Diverged(f"{summary['reason']}; the records up to there are in {out}")


def mend_wiped(folder: RunFolder) -> None:
    """Mend or remove files that a power cut has emptied, if the run can continue without them.

    The settings are written twice. Without data.json the rows are not compared with those that
    the run was begun on.
    """
    told = logging.getLogger(__package__).warning
    if is_wiped(folder.config) and folder.begun.exists() and not is_wiped(folder.begun):
        told("%s was emptied; %s holds the same settings", folder.config, folder.begun)
        write_atomically(folder.config, folder.begun.read_text(encoding="utf-8"))
    for path in (folder.begun, folder.path / "data.json"):
        if is_wiped(path):
            told("%s was emptied; the run continues without it", path)
            path.unlink()


def _refuse_edited(folder: RunFolder, experiment: Experiment) -> None:
    """Refuse edits that would change the results of a started run."""
    if not folder.begun.exists():  # the run was started by an older version
        return
    begun = read_experiment(folder.begun)
    free = {name: getattr(experiment.sim, name) for name in RESULT_NEUTRAL}
    if replace(begun, sim=replace(begun.sim, **free)) != experiment:
        raise RecordError(
            f"{folder.config} was edited since the run began ({unlike(begun, experiment)}); put "
            "that back, or start another run with it. What may change: sim."
            + ", sim.".join(RESULT_NEUTRAL)
        )


def _open(
    experiment: Experiment,
    federation: Federation,
    folder: RunFolder,
    options: RunOptions,
    resources: ExitStack,
) -> Run:
    taken = folder.read_branch()
    known = {
        **facts(experiment),
        "clients": len(federation.population),
        **_scored_rows(experiment, federation),
        **({"branch": taken} if taken else {}),
    }
    every = experiment.sim.checkpoint_every
    options = replace(options, facts=known, settings=_settings(experiment), checkpoint_every=every)
    return Run.open(federation, folder, options, resources)


def _scored_rows(experiment: Experiment, federation: Federation) -> dict[str, Any]:
    """Say on which rows a run was scored, where these are not the test rows."""
    if experiment.sim.score_on == "test":
        return {}
    return {"scored_on": experiment.sim.score_on, "scored_rows": federation.evaluator.size}


def _settings(experiment: Experiment) -> dict[str, Any]:
    """Return every setting by its full name."""
    settings: dict[str, Any] = {}
    for name, value in tomllib.loads(experiment.to_toml()).items():
        if isinstance(value, dict):
            settings |= {f"{name}.{inner}": each for inner, each in value.items()}
        else:
            settings[name] = value
    return settings


def _objects(experiment: Experiment, given: Objects) -> Objects:
    """Return the objects of a run: those given to it win over those of the experiment."""
    known = experiment.objects
    data = known.data if given.data is None else given.data
    return Objects(data, known.model if given.model is None else given.model)


def unlike(there: Experiment, asked: Experiment) -> str:
    """List the settings that differ, by comparing the lines of the two files."""
    before, now = (each.to_toml().splitlines() for each in (there, asked))
    pairs = [f"{a} there, {b} asked for" for a, b in zip(before, now, strict=False) if a != b]
    return "; ".join(pairs)


def _with_same_objects(folder: RunFolder, experiment: Experiment, objects: Objects) -> Experiment:
    """Return a run that is resumed with its objects; refuse others by their names."""
    unfinished = not folder.model.exists()
    if unfinished and objects.data is None and named_by_content(experiment.data.name):
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


def _federation(
    experiment: Experiment, folder: RunFolder, data_dir: Path | None, resources: ExitStack
) -> Federation:
    """Build the federation of a run; its archive and snapshots lie in the run's folder."""
    federation = build(
        experiment,
        data_dir=data_dir,
        archive=Archive(folder.archive),
        client_archive=Archive(folder.clients),
    )
    resources.enter_context(closing(federation))
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
