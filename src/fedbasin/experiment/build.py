"""Put the rooms together: from a configuration to a federation that is ready to run."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbasin import data, partition
from fedbasin.core.archive import Archive
from fedbasin.core.catalogue import needs_of
from fedbasin.core.expressions import Choice, parse
from fedbasin.core.method import Context, Method, Plan
from fedbasin.core.net import Net
from fedbasin.core.rng import Key, root, torch_draws_from
from fedbasin.core.rule import Setting
from fedbasin.data.transform import Transform
from fedbasin.experiment.config import ConfigError, DataConfig, Experiment
from fedbasin.local import SGD, Trainer
from fedbasin.sim import Examiner, Federation, LoopExecutor, Population
from fedbasin.sim.cohort import CohortExecutor, Compiled, Unsupported
from fedbasin.sim.loop import Executor
from fedbasin.sim.participation import draw_cohort


@dataclass(frozen=True)
class Rows:
    """The rows of a run: who trains on what, what the server holds, what is scored."""

    splits: data.Splits
    parts: partition.Partition
    classes: int


def pick_device(name: str) -> torch.device:
    """Turn a device name into a device that is there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(
            f"sim.device: {name!r} is not a device; write auto, cpu or cuda"
        ) from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("sim.device: cuda is not available here; write auto or cpu")
    return device


def pick_precision(name: str, device: torch.device) -> torch.dtype:
    """Turn a precision's name into a floating type, and let CUDA use tf32 where it says so."""
    fast = device.type == "cuda" and name in ("auto", "tf32", "bf16")
    torch.backends.cuda.matmul.allow_tf32 = fast
    torch.backends.cudnn.allow_tf32 = fast
    return torch.float64 if name == "fp64" else torch.float32


def cut_rows(experiment: Experiment, dataset: data.Dataset) -> Rows:
    """Split off the proxy set, thin the tail, and deal the training rows to clients."""
    key = root(experiment.partition.seed if experiment.partition.seed >= 0 else experiment.seed)
    settings = experiment.data
    splits = data.split(
        dataset,
        proxy_per_class=settings.proxy_per_class,
        proxy_from=settings.proxy_from,
        rng=key.fold("proxy").numpy(),
    )
    classes = len(dataset.classes)
    train = splits.train
    if settings.imbalance < 1:
        kept = partition.longtail(
            train.labels, classes, settings.imbalance, key.fold("longtail").numpy()
        )
        train = train.take(kept)
        splits = data.Splits(train, splits.proxy, splits.test)
    how: Choice = parse(experiment.partition.how, "partition")
    pool = partition.Pool(train.labels, classes, train.groups)
    parts = how(pool, experiment.partition.clients, key.fold("partition").numpy())
    return Rows(splits, parts, classes)


def build(
    experiment: Experiment, *, data_dir: Path | None = None, archive: Archive | None = None
) -> Federation:
    """Build everything a run needs; errors name the setting at fault."""
    experiment = experiment.resolved()
    device = pick_device(experiment.sim.device)
    dtype = pick_precision(experiment.sim.precision, device)
    key = root(experiment.seed)
    dataset = data.load(experiment.data.name, data_dir=data_dir)
    rows = cut_rows(experiment, dataset)
    method: Method = parse(experiment.method, "method")
    shape = tuple(rows.splits.train.inputs.shape[1:])
    with torch_draws_from(key.fold("model")):
        module = parse(experiment.model, "model")(shape, rows.classes)
    net = Net(module, device, dtype, mixed=experiment.sim.precision == "bf16")
    transform = _transform(dataset, experiment.data, dtype)

    def examiner(part: data.Rows) -> Examiner:
        inputs, labels = _on_device(part, device)
        return Examiner(net, inputs, labels, transform, rows.classes)

    population = Population.of(
        rows.splits.train.inputs, rows.splits.train.labels, rows.parts.clients, device
    )
    proxy = examiner(rows.splits.proxy) if rows.splits.proxy is not None else None
    context = Context(
        layout=net.layout,
        clients=len(population),
        rounds=experiment.rounds,
        key=key,
        batch=experiment.local.batch,
        proxy=proxy,
        class_counts=_class_counts(method, population, rows.classes),
        archive=archive,
        net=net,
    )
    _check_needs(method, context)
    trainer = Trainer(
        net=net,
        rules=method.rules(),
        sgd=_sgd(experiment),
        batch=experiment.local.batch,
        transform=transform,
        classes=rows.classes,
    )
    _say_cautions(method, experiment, net, population)
    participation: Choice = parse(experiment.sim.participation, "participation")
    eligible = np.flatnonzero(population.sizes > 0)
    draw_cohort(participation, eligible, key.fold("cohort", 0))  # says what is wrong before the run
    return Federation(
        method=method,
        executor=pick_executor(experiment, trainer, population, key),
        context=context,
        schedule=_schedule(experiment),
        participation=participation,
        eligible=eligible,
        key=key,
        test=examiner(rows.splits.test),
        rounds=experiment.rounds,
        dropout=experiment.sim.dropout,
        buffers=experiment.sim.buffers,
        recalibrate=_recalibration(experiment, net, proxy),
        evaluate_every=experiment.sim.evaluate_every,
        evaluate_last=experiment.sim.evaluate_last,
    )


def pick_executor(
    experiment: Experiment, trainer: Trainer, population: Population, key: Key
) -> Executor:
    """Choose how cohorts are trained: a matrix on CUDA and for small models, else a loop.

    On a CPU the matrix saves Python's time but not arithmetic, so it wins only where a step is
    mostly overhead: networks without convolutions of up to a few hundred thousand weights.
    """
    loop = LoopExecutor(trainer, population, key)
    name, on_cuda = experiment.sim.executor, trainer.net.device.type == "cuda"
    small = trainer.net.layout.size < 300_000 and all(
        len(s) <= 2 for s in trainer.net.layout.shapes
    )
    if name == "loop" or (name == "auto" and not (on_cuda or small)):
        return loop
    sim = experiment.sim
    compiled: Compiled = "wide" if on_cuda and trainer.net.compiles else "no"
    if sim.compile != "auto":
        compiled = "all" if sim.compile == "on" else "no"
    memory = int(sim.memory * 2**30)
    try:
        return CohortExecutor(trainer, population, key, compiled, sim.chunk, memory)
    except Unsupported as reason:
        if name == "cohort":
            raise ConfigError(f"sim.executor: cohort cannot be used: {reason}") from reason
        return loop


def _on_device(part: data.Rows, device: torch.device) -> tuple[Tensor, Tensor]:
    inputs = torch.from_numpy(np.array(part.inputs)).to(device)
    return inputs, torch.from_numpy(np.array(part.labels)).to(device)


def _transform(dataset: data.Dataset, settings: DataConfig, dtype: torch.dtype) -> Any:
    middle, spread = {"symmetric": (0.5, 0.5), "unit": (0.0, 1.0)}.get(settings.normalise, (0, 0))
    mean, std = dataset.mean, dataset.std
    if settings.normalise != "dataset":
        mean, std = (middle,) * len(mean), (spread,) * len(std)
    transform = Transform(mean, std, augment=settings.augment, kind=dataset.kind)
    return lambda raw, key=None: transform(raw, key, dtype)


def _sgd(experiment: Experiment) -> SGD:
    local = experiment.local
    return SGD(local.momentum, local.weight_decay, local.clip or None)


def _schedule(experiment: Experiment) -> Any:
    local = experiment.local
    plan = Plan(local.lr, None, local.steps) if local.steps else Plan(local.lr, local.epochs)
    choice: Choice = parse(local.schedule, "schedule")
    choice(plan, 0, experiment.rounds)  # a schedule that cannot run says so before the run
    return lambda round: choice(plan, round, experiment.rounds)


def _check_needs(method: Method, context: Context) -> None:
    if "proxy" in needs_of(method) and context.proxy is None:
        raise ConfigError(
            f"{method} learns from data on the server: set data.proxy_per_class (10 in the paper)"
        )


def _say_cautions(method: Method, experiment: Experiment, net: Net, population: Population) -> None:
    """Log why the method may not do what its paper says in this run."""
    local, sizes = experiment.local, population.sizes[population.sizes > 0]
    setting = Setting(
        momentum=local.momentum,
        weight_decay=local.weight_decay,
        clip=local.clip or None,
        ragged=not local.steps and len(set(np.ceil(sizes / local.batch))) > 1,
        statistics=net.has_statistics and experiment.sim.buffers != "recalibrate",
    )
    for caution in method.cautions(setting):
        logging.getLogger(__name__).warning("%s: %s", method, caution)


def _class_counts(method: Method, population: Population, classes: int) -> Tensor | None:
    """Return the clients' class counts for a method that needs them, and say who sees them."""
    if "class_counts" not in needs_of(method):
        return None
    logging.getLogger(__name__).warning(
        "%s: the server sees every client's class counts in plain. fedbasin private-counts shows "
        "how their sum is gathered under encryption.",
        method,
    )
    return population.class_counts(classes)


def _recalibration(experiment: Experiment, net: Net, proxy: Examiner | None) -> Any:
    """Return how statistics are renewed: forward passes over the server's rows."""
    if experiment.sim.buffers != "recalibrate":
        return None
    if proxy is None:
        raise ConfigError(
            "sim.buffers = 'recalibrate' runs the model over server data: set data.proxy_per_class"
        )

    @torch.no_grad()
    def recalibrate(vector: Tensor, buffers: Tensor) -> Tensor:
        """Return the mean statistics of the server's rows under this model.

        A training pass turns old statistics s into (1 - m) s + m b, where b are the batch's
        and m is a layer's momentum; passes from zeros and from ones give m, then b.
        """
        key, zeros = Key(0).tensor(vector.device), torch.zeros_like(buffers)

        def after(raw: Tensor, old: Tensor) -> Tensor:
            return net(vector, proxy.transform(raw, None), old, key=key, training=True).buffers

        chunks = proxy.inputs.split(500)
        momentum = 1 - (after(chunks[0], torch.ones_like(buffers)) - after(chunks[0], zeros))
        found = sum(after(raw, zeros) * len(raw) for raw in chunks) / proxy.size
        untouched = momentum < 1e-6
        return torch.where(untouched, buffers, found / momentum.masked_fill(untouched, 1.0))

    return recalibrate
