"""Run folders for analyses: records are read at once, data and models when needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedbasin.analyze import AnalysisError, Data, Subject
from fedbasin.core.expressions import parse
from fedbasin.core.metric import metrics_of
from fedbasin.core.record import Headline, RunFolder, headline_of, read_object
from fedbasin.core.snapshot import Snapshots
from fedbasin.core.state import read
from fedbasin.core.task import Task
from fedbasin.experiment.assemble import build
from fedbasin.experiment.config import Experiment, SnapshotConfig, from_mapping, read_config


def open_subject(path: Path, *, data_dir: Path | None = None, device: str | None = None) -> Subject:
    """Open a run folder for analysis.

    Args:
        path: the run's folder.
        data_dir: a local mirror of the datasets.
        device: where models are measured; by default as the run was configured.
    """
    folder = RunFolder(path)
    if not folder.config.exists():
        raise AnalysisError(f"{path} holds no run: there is no config.toml in it")
    settings = read_config(folder.config)
    if device is not None:
        settings["sim"] = settings.get("sim", {}) | {"device": device}
    experiment = from_mapping(settings)
    task: Task = parse(experiment.task, "task")
    ended = folder.summary.exists()
    return Subject(
        name=str(path),
        method=experiment.method,
        seed=experiment.seed,
        records=tuple(folder.read_rounds()),
        snapshots=Snapshots(folder.snapshots),
        load=lambda: _load(experiment, folder, data_dir),
        headline=headline_of(read_object(folder.summary)) if ended else _headline(task),
        task=task,
        setting=_setting(experiment),
    )


def _setting(experiment: Experiment) -> str:
    """Return all settings but the seed and what is kept; a split of its own seed is no matter."""
    kept = replace(experiment.partition, seed=0)
    return replace(experiment, seed=0, partition=kept, snapshots=SnapshotConfig()).to_toml()


def _headline(task: Task) -> Headline:
    """Return the headline of a run that has no summary yet."""
    return metrics_of(task)[0].headline


def _load(experiment: Experiment, folder: RunFolder, data_dir: Path | None) -> Data:
    federation = build(experiment, data_dir=data_dir)
    net = federation.net
    test = federation.evaluator
    population = federation.population
    assert federation.holdings is not None
    classes = federation.holdings.classes

    def final() -> tuple[Tensor, Tensor]:
        if not folder.model.exists():
            raise AnalysisError(
                f"{folder.path} has no final model; finish it with fedbasin resume {folder.path}"
            )
        named = read(folder.model)
        layouts = (net.layout, net.buffer_layout)
        vector, buffers = (part.flat({n: named[n] for n in part.names}) for part in layouts)  # type: ignore[misc]
        return vector, buffers

    owner = torch.from_numpy(np.repeat(np.arange(len(population)), population.sizes))
    return Data(
        test=test,
        train=test.on(population.inputs, population.labels, owner),
        owner=owner,
        counts=population.class_counts(len(classes)),
        class_names=classes,
        cohort=lambda round: federation.cohort(round - 1)[1],
        final=final,
    )
