"""Build a federation that is ready to run from a configuration."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedbasin.core.archive import Archive
from fedbasin.core.catalogue import needs_of
from fedbasin.core.evaluator import Evaluator
from fedbasin.core.expressions import Choice, parse
from fedbasin.core.holdings import Holdings
from fedbasin.core.method import Context, Method
from fedbasin.core.needs import NeedError, check_network
from fedbasin.core.net import Net
from fedbasin.core.permutations import Group
from fedbasin.core.randomness import RandomnessError
from fedbasin.core.rng import Key, root
from fedbasin.core.task import Targets, Task
from fedbasin.data import Dataset, Rows
from fedbasin.experiment.checks import check_groups, check_needs, log_cautions
from fedbasin.experiment.clients import Clients
from fedbasin.experiment.config import ConfigError, Experiment
from fedbasin.experiment.executors import pick_device, pick_executor, pick_precision
from fedbasin.experiment.interface import Interface
from fedbasin.experiment.network import network_of
from fedbasin.experiment.one_copy import population_of, scored_rows
from fedbasin.experiment.rows import Rows as RunRows
from fedbasin.experiment.rows import cut_rows, dataset_of, transform_of
from fedbasin.experiment.training import optimiser_of, schedule_of
from fedbasin.local import Trainer
from fedbasin.local.train import Transform
from fedbasin.models.atoms import SymmetryError
from fedbasin.sim import Federation, Population
from fedbasin.sim.attacks import Hostility
from fedbasin.sim.participation import draw_cohort, sampling_of
from fedbasin.sim.population import as_tensor
from fedbasin.sim.provenance import identity


def build(
    experiment: Experiment,
    *,
    data_dir: Path | None = None,
    data: Dataset | None = None,
    archive: Archive | None = None,
    client_archive: Archive | None = None,
) -> Federation:
    """Build everything a run needs; errors name the setting at fault.

    Args:
        experiment: the settings.
        data_dir: a local mirror of the datasets.
        data: data in memory, in place of what `data.name` says.
        archive: files for models that the method keeps.
        client_archive: files for the clients' states, if these do not fit in memory.
    """
    if data is not None:
        experiment = experiment.using(replace(experiment.objects, data=data))
    experiment = experiment.resolved()
    check_needs(experiment)
    device = pick_device(experiment.sim.device)
    dtype = pick_precision(experiment.sim.precision, device)
    key = root(experiment.seed)
    dataset = dataset_of(experiment, data_dir)
    check_groups(experiment, dataset)
    task: Task = parse(experiment.task, "task")
    outputs = _outputs(task, dataset)
    rows = cut_rows(experiment, dataset)
    method: Method = parse(experiment.method, "method")
    shape = tuple(rows.splits.train.inputs.shape[1:])
    module = network_of(experiment, shape, outputs, key.fold("model"))
    net = Net(module, device, dtype, mixed=experiment.sim.precision == "bf16")
    transform = transform_of(dataset, experiment.data, dtype)

    def evaluator_of(part: Rows) -> Evaluator:
        inputs, labels = scored_rows(dataset, part, device)
        groups = None if part.groups is None else as_tensor(part.groups, device)
        more = experiment.sim.metrics
        return Evaluator(net, inputs, labels, transform, task, more, groups=groups)

    train = rows.splits.train
    population = population_of(experiment, dataset, train, rows.parts.clients, device)
    _try_network(experiment, net, transform(population.inputs[:2], None), dataset)
    net.check_draws(transform(population.inputs[:3], None))
    _check_network(experiment, method, net, transform(population.inputs[:2], None), outputs)
    proxy = evaluator_of(rows.splits.proxy) if rows.splits.proxy is not None else None
    test = evaluator_of(_rows_to_score(experiment, rows))
    context = replace(
        _context(experiment, net, population, key),
        proxy=proxy,
        class_counts=_class_counts(method, population, rows.classes),
        archive=archive,
        permutations=_permutations(method, module, transform(population.inputs[:2]), device),
    )
    trainer = _trainer(experiment, net, method, task, transform, rows.classes)
    log_cautions(method, experiment, net, population)
    schedule = schedule_of(experiment)
    counts = population.class_counts(rows.classes).cpu().numpy()
    participation: Choice = parse(experiment.sim.participation, "participation")
    eligible = np.flatnonzero(population.sizes > 0)
    draw_cohort(participation, eligible, key, 0)  # an error here comes before the run
    clients = Clients(experiment, dataset, rows, population, trainer, key)
    context = replace(context, sampling=sampling_of(participation, eligible, key))
    hostility, triggered = _attack(experiment, rows, test, device)
    return Federation(
        method=method,
        net=net,
        trainer=trainer,
        population=population,
        evaluator=test,
        context=context,
        schedule=schedule,
        participation=participation,
        eligible=eligible,
        key=key,
        rounds=experiment.rounds,
        dropout=experiment.sim.dropout,
        buffers=experiment.sim.buffers,
        recalibrate=_recalibration(experiment, net, proxy),
        evaluate_every=experiment.sim.evaluate_every,
        evaluate_last=experiment.sim.evaluate_last,
        train=_training_rows(experiment, test, population, device),
        home=clients.scores(test, lambda round: draw_cohort(participation, eligible, key, round)),
        client_memory=experiment.sim.client_memory * 2**30,
        client_archive=client_archive,
        # Last: it may start processes, so nothing may fail after it.
        executor=pick_executor(experiment, trainer, population, key),
        holdings=Holdings(dataset.classes, counts, rows.corrupted, population.sizes),
        data=identity(
            dataset.train.labels,
            dataset.test.labels,
            rows.parts.clients,
            (dataset.train.inputs, dataset.test.inputs),
        ),
        interface=Interface.of(dataset, outputs, transform.func).to_json(),
        encoding="" if rows.encoding is None else rows.encoding.to_json(),
        hostility=hostility,
        triggered=triggered,
    )


def _rows_to_score(experiment: Experiment, rows: RunRows) -> Rows:
    """Return the rows that a run is scored on: the test rows, or those that clients hold out."""
    scored = rows.held_out if experiment.sim.score_on == "held_out" else rows.splits.test
    if not len(scored.labels):
        raise ConfigError(
            f"partition.hold_out is {experiment.partition.hold_out}, and no client has enough rows "
            "to hold one out: use a larger share, or fewer clients"
        )
    return scored


def _training_rows(
    experiment: Experiment, test: Evaluator, population: Population, device: torch.device
) -> Evaluator | None:
    """Return what scores models on the clients' training rows, where that is asked for."""
    if not experiment.sim.evaluate_train:
        return None
    owners = as_tensor(np.repeat(np.arange(len(population)), population.sizes), device)
    return test.on(population.inputs, population.labels, owners)


def _trainer(
    experiment: Experiment, net: Net, method: Method, task: Task, transform: Transform, classes: int
) -> Trainer:
    """Return how a client trains."""
    local = experiment.local
    return Trainer(
        net=net,
        rules=method.rules(),
        optimiser=optimiser_of(local),
        batch=local.batch,
        transform=transform,
        classes=classes,
        clip=local.clip or None,
        task=task,
        keep_optimiser=local.keep_optimiser,
    )


def _attack(
    experiment: Experiment, rows: RunRows, test: Evaluator, device: torch.device
) -> tuple[Hostility | None, Evaluator | None]:
    """Return the hostile clients, and the test rows on which a backdoor's success is measured."""
    if not experiment.partition.hostile:
        return None, None
    hostility = Hostility(parse(experiment.attack, "attack"), rows.hostile)
    part = rows.splits.test
    triggered = hostility.attack.triggered(part.inputs, part.labels)
    if triggered is None:
        return hostility, None
    inputs, target = triggered
    wanted = np.full(len(inputs), target, dtype=part.labels.dtype)
    return hostility, test.on(as_tensor(inputs, device), as_tensor(wanted, device))


def _outputs(task: Task, dataset: Dataset) -> int:
    """Return how many outputs the network has; refuse targets that the task is not for."""
    labels = dataset.train.labels
    columns = 1 if labels.ndim == 1 else int(labels.shape[1])
    whole = bool(np.issubdtype(labels.dtype, np.integer))
    targets = Targets(len(dataset.classes), columns, whole)
    try:
        outputs = task.outputs(targets)
        for rows in (dataset.train, dataset.test):
            task.check_values(as_tensor(rows.labels))
    except ValueError as error:
        raise ConfigError(f"task: {error}") from error
    return outputs


@torch.no_grad()
def _try_network(experiment: Experiment, net: Net, inputs: Tensor, dataset: Dataset) -> None:
    """Run a network once; what a layer raises is told beside the rows that it was given."""
    try:
        net(net.initial()[0], net.arranged(inputs))
    except RandomnessError:
        raise
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        kind = str(inputs.dtype).removeprefix("torch.")
        hint = ""
        if inputs.is_floating_point() and np.issubdtype(dataset.train.inputs.dtype, np.integer):
            hint = "; for whole numbers that a network looks up give the data kind='text'"
        raise ConfigError(
            f"model: {experiment.model} cannot take rows of {dataset.name}, {kind} "
            f"{list(inputs.shape[1:])} each: {str(error).splitlines()[0]}{hint}"
        ) from error


def _check_network(
    experiment: Experiment, method: Method, net: Net, inputs: Tensor, outputs: int
) -> None:
    """Refuse a network that does not fit the method or the task."""
    try:
        check_network(method, net, experiment.model)
    except NeedError as error:
        raise ConfigError(f"model: {error}") from error
    shape = net(net.initial()[0], net.arranged(inputs)).logits.shape
    if len(shape) < 2 or shape[-1] != outputs:
        width = f"{shape[-1]} outputs" if len(shape) > 1 else "one number without an axis"
        raise ConfigError(
            f"model: {experiment.model} gives {width} a row, and the task {experiment.task} needs "
            f"{outputs} on this data: give the last layer as many outputs as the factory is told"
        )


def _context(experiment: Experiment, net: Net, population: Population, key: Key) -> Context:
    """Return the part of a method's context that every method needs."""
    holders = int((population.sizes > 0).sum())
    return Context(
        layout=net.layout,
        clients=len(population),
        holders=holders,
        rounds=experiment.rounds,
        key=key,
        batch=experiment.local.batch,
        examples=float(population.sizes.sum() / holders),
        effective_steps=optimiser_of(experiment.local).effective_steps,
        net=net,
    )


def _class_counts(method: Method, population: Population, classes: int) -> Tensor | None:
    """Return the clients' class counts for a method that needs them, and warn who sees them."""
    if "class_counts" not in needs_of(method):
        return None
    logging.getLogger(__package__).warning(
        "%s: a simulation's server sees every client's class counts in plain. fedbasin "
        "private-counts shows how their sum is gathered under encryption.",
        method,
    )
    return population.class_counts(classes)


def _permutations(
    method: Method, module: nn.Module, example: Tensor, device: torch.device
) -> tuple[Group, ...] | None:
    """Return which units of the network may be permuted, for a method that matches neurons."""
    if "permutations" not in needs_of(method):
        return None
    from fedbasin.models.symmetries import permutations  # slow to import, and few runs need it

    try:
        return permutations(module, example, device)
    except SymmetryError as error:
        raise ConfigError(f"{method} matches neurons: {error}, or another model") from error


def _recalibration(experiment: Experiment, net: Net, proxy: Evaluator | None) -> Any:
    """Return the function that recomputes statistics by forward passes over the server's rows."""
    if experiment.sim.buffers != "recalibrate":
        return None
    if proxy is None:
        raise ConfigError(
            "sim.buffers = 'recalibrate' runs the model over server data: set "
            "data.proxy_per_class or data.proxy_rows"
        )

    @torch.no_grad()
    def recalibrate(vector: Tensor, buffers: Tensor) -> Tensor:
        """Return the mean statistics of the server's rows under this model.

        A training pass turns old statistics s into (1 - m) s + m b, where b are the batch's
        and m is a layer's momentum; passes from zeros and from ones give m, then b.
        """
        key = Key(0).tensor(vector.device)
        zeros = torch.zeros_like(buffers)

        def after(raw: Tensor, old: Tensor) -> Tensor:
            return net(vector, proxy.transform(raw, None), old, key=key, training=True).buffers

        chunks = proxy.inputs.split(500)
        momentum = 1 - (after(chunks[0], torch.ones_like(buffers)) - after(chunks[0], zeros))
        mean = sum(after(raw, zeros) * len(raw) for raw in chunks) / proxy.size
        untouched = momentum < 1e-6
        return torch.where(untouched, buffers, mean / momentum.masked_fill(untouched, 1.0))

    return recalibrate
