"""Refuse what cannot run before data is loaded, and warn of what may not work well."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from fedbasin import data
from fedbasin.core.catalogue import needs_of
from fedbasin.core.expressions import Choice, load_module, no_imports, parse
from fedbasin.core.method import Method
from fedbasin.core.metric import GroupMetric, MetricError, metrics_of
from fedbasin.core.needs import NeedError, check_task
from fedbasin.core.net import Net
from fedbasin.core.record import RunFolder
from fedbasin.core.rule import Setting
from fedbasin.core.task import Task
from fedbasin.experiment.config import ConfigError, Experiment, LocalConfig, read_experiment
from fedbasin.experiment.training import optimiser_of
from fedbasin.local import SGD
from fedbasin.local.optimisers import check_plain_steps
from fedbasin.sim import Population

_WIDE = 5.0  # standard deviation of a regression's targets


def check_needs(experiment: Experiment) -> None:
    """Refuse a method that needs what the run does not have, before data is loaded."""
    method = parse(experiment.method, "method")
    task = parse(experiment.task, "task")
    kept = experiment.local.keep_optimiser
    try:
        check_task(method, task)
    except NeedError as error:
        raise ConfigError(f"method: {error}") from error
    try:
        metrics_of(task, experiment.sim.metrics)
    except MetricError as error:
        raise ConfigError(f"sim.metrics: {error}") from error
    try:
        check_plain_steps(method, optimiser_of(experiment.local), kept)
    except ValueError as error:
        raise ConfigError(f"local.optimiser: {error}") from error
    settings = experiment.data
    without = not settings.proxy_per_class and not settings.proxy_rows
    if "proxy" in needs_of(method) and without:
        raise ConfigError(
            f"{method} learns from data on the server: set data.proxy_per_class (10 in the paper), "
            "or data.proxy_rows where there are no classes"
        )


def check_groups(experiment: Experiment, dataset: data.Dataset) -> None:
    """Refuse a metric over groups where the test rows have no groups."""
    metrics = metrics_of(parse(experiment.task, "task"), experiment.sim.metrics)
    over = [metric.name for metric in metrics if isinstance(metric, GroupMetric)]
    if over and dataset.test.groups is None:
        raise ConfigError(
            f"metric {over[0]} is made of the groups of the test rows, and {dataset.name} has no "
            "groups: give them in Rows(inputs, labels, groups), or leave the metric out"
        )


def log_cautions(method: Method, experiment: Experiment, net: Net, population: Population) -> None:
    """Warn where the method may not do in this run what its paper says."""
    local = experiment.local
    sizes = population.sizes[population.sizes > 0]
    optimiser = optimiser_of(local)
    plain = optimiser if isinstance(optimiser, SGD) else SGD()
    setting = Setting(
        momentum=plain.momentum,
        weight_decay=plain.weight_decay,
        clip=local.clip or None,
        ragged=not local.steps and len(set(np.ceil(sizes / local.batch))) > 1,
        statistics=net.has_statistics and experiment.sim.buffers != "recalibrate",
        adaptive=str(optimiser) if optimiser.adaptive else "",
        clients=len(sizes),
    )
    for caution in method.cautions(setting):
        logging.getLogger(__package__).warning("%s: %s", method, caution)
    _warn_of_wide_targets(experiment, population)
    if local.lr == LocalConfig.lr and optimiser.default_lr < local.lr:
        logging.getLogger(__package__).warning(
            "local.lr = %g is the default, which is meant for SGD; %s is most often run at %g: set "
            "local.lr",
            local.lr,
            optimiser,
            optimiser.default_lr,
        )


def _warn_of_wide_targets(experiment: Experiment, population: Population) -> None:
    """Warn of a regression whose targets are so wide that steps of the usual length diverge."""
    task: Task = parse(experiment.task, "task")
    if task.kind != "numbers":
        return
    spread = float(population.labels.float().std())
    if spread > _WIDE:
        logging.getLogger(__package__).warning(
            "the targets have a standard deviation of %.3g, and gradients grow with it: divide the "
            "targets by it, or lower local.lr (%g) if the loss does not fall",
            spread,
            experiment.local.lr,
        )


def check_imports(folder: Path) -> None:
    """Refuse a run whose settings name modules of others: these would be imported and run."""
    run = RunFolder(folder)
    for path in (run.config, run.begun):
        if not path.exists():
            continue
        with no_imports("if you know where the run comes from, give --trust"):
            experiment = read_experiment(path)
            _check_models(parse(experiment.model, "model"))


def _check_models(choice: object) -> None:
    if not isinstance(choice, Choice):
        return
    for name, value in choice.arguments:
        if choice.name == "custom" and name == "path":
            load_module(str(value).partition(":")[0])
        _check_models(value)
