"""Put the rooms together: from a configuration to a federation that is ready to run."""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedbasin import data, partition
from fedbasin.core.archive import Archive
from fedbasin.core.catalogue import needs_of
from fedbasin.core.evaluator import Evaluator
from fedbasin.core.expressions import Choice, parse
from fedbasin.core.holdings import Holdings
from fedbasin.core.method import Context, Method, Plan
from fedbasin.core.metric import MetricError, metrics_of
from fedbasin.core.needs import NeedError, check_network, check_task
from fedbasin.core.net import Net
from fedbasin.core.permutations import Group
from fedbasin.core.rng import Key, root, torch_draws_from
from fedbasin.core.rule import Setting
from fedbasin.core.task import Targets, Task
from fedbasin.data.transform import Transform
from fedbasin.experiment.config import ConfigError, DataConfig, Experiment, LocalConfig
from fedbasin.local import SGD, Optimiser, Trainer
from fedbasin.local.batches import count_steps
from fedbasin.local.optimisers import check_plain_steps
from fedbasin.models.atoms import SymmetryError
from fedbasin.sim import Federation, LoopExecutor, Population
from fedbasin.sim.allocator import keep_freed_memory
from fedbasin.sim.cohort import CohortExecutor, Unsupported
from fedbasin.sim.loop import Executor
from fedbasin.sim.participation import draw_cohort
from fedbasin.sim.population import as_tensor
from fedbasin.sim.provenance import identity
from fedbasin.sim.workers import WorkerExecutor


@dataclass(frozen=True)
class Rows:
    """The rows of a run: who trains on what, what the server holds, what is scored."""

    splits: data.Splits
    parts: partition.Partition
    classes: int
    corrupted: frozenset[int] = frozenset()  # clients with exchanged labels


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
    """Split off the proxy set, thin tails, deal the training rows to clients, mislabel some."""
    key = root(experiment.partition.seed if experiment.partition.seed >= 0 else experiment.seed)
    settings = experiment.data
    if not dataset.classes:
        _refuse_class_settings(experiment, dataset)
    splits = data.split(
        dataset,
        proxy_per_class=settings.proxy_per_class,
        proxy_rows=settings.proxy_rows,
        proxy_from=settings.proxy_from,
        rng=key.fold("proxy").numpy(),
    )
    classes = len(dataset.classes)
    train, proxy = splits.train, splits.proxy
    if settings.imbalance < 1:
        draws = key.fold("longtail").numpy()
        train = train.take(partition.longtail(train.labels, classes, settings.imbalance, draws))
    if proxy is not None and settings.proxy_imbalance < 1:
        draws = key.fold("proxy longtail").numpy()
        tail = partition.longtail(proxy.labels, classes, settings.proxy_imbalance, draws)
        proxy = proxy.take(tail)
    if proxy is not None and settings.proxy_evened:
        proxy = proxy.take(partition.evened(proxy.labels, classes))
    how: Choice = parse(experiment.partition.how, "partition")
    pool = partition.Pool(train.labels, classes, train.groups)  # 0 classes: targets without any
    try:
        parts = how(pool, experiment.partition.clients, key.fold("partition").numpy())
    except ValueError as error:
        raise ConfigError(f"partition.how, {how}: {error}") from error
    if experiment.partition.hold_out:
        parts = parts.hold_out(experiment.partition.hold_out, key.fold("hold out").numpy())
    corrupted: frozenset[int] = frozenset()
    if experiment.partition.corrupted:
        share, draws = experiment.partition.corrupted, key.fold("corrupted").numpy()
        try:
            labels = partition.exchange_labels(train.labels, parts, classes, share, draws)
        except ValueError as error:
            raise ConfigError(f"partition.corrupted: {error}") from error
        others = labels != train.labels
        corrupted = frozenset(i for i, mine in enumerate(parts.clients) if others[mine].any())
        train = replace(train, labels=labels)
    return Rows(data.Splits(train, proxy, splits.test), parts, classes, corrupted)


def _refuse_class_settings(experiment: Experiment, dataset: data.Dataset) -> None:
    """Refuse settings that speak of classes where the targets have none."""
    settings = experiment.data
    if settings.proxy_per_class:
        raise ConfigError(
            f"data.proxy_per_class is {settings.proxy_per_class}, and the targets of "
            f"{dataset.name} have no classes: set data.proxy_rows to the number of rows the server "
            "holds"
        )
    usual = (
        ("data.imbalance", settings.imbalance, 1.0),
        ("data.proxy_imbalance", settings.proxy_imbalance, 1.0),
        ("data.proxy_evened", settings.proxy_evened, False),
        ("partition.corrupted", experiment.partition.corrupted, 0.0),
    )
    for name, value, default in usual:
        if value != default:
            raise ConfigError(
                f"{name} is {value}, and the targets of {dataset.name} have no classes: leave it "
                f"at {default}"
            )


def build(
    experiment: Experiment,
    *,
    data_dir: Path | None = None,
    dataset: data.Dataset | None = None,
    archive: Archive | None = None,
    client_archive: Archive | None = None,
) -> Federation:
    """Build everything a run needs; errors name the setting at fault.

    Args:
        experiment: the settings.
        data_dir: a local mirror of the datasets.
        dataset: data in memory, in place of what `data.name` says.
        archive: files for models that the method keeps.
        client_archive: files for what clients keep, where it does not fit in memory.
    """
    experiment = experiment.resolved()
    check_needs(experiment)
    device = pick_device(experiment.sim.device)
    dtype = pick_precision(experiment.sim.precision, device)
    key = root(experiment.seed)
    if dataset is None:
        dataset = data.load(experiment.data.name, data_dir=data_dir)
    task: Task = parse(experiment.task, "task")
    outputs = _outputs(task, dataset)
    rows = cut_rows(experiment, dataset)
    method: Method = parse(experiment.method, "method")
    shape = tuple(rows.splits.train.inputs.shape[1:])
    with torch_draws_from(key.fold("model")):
        module = parse(experiment.model, "model")(shape, outputs)
    net = Net(module, device, dtype, mixed=experiment.sim.precision == "bf16")
    transform = _transform(dataset, experiment.data, dtype)

    def examiner(part: data.Rows) -> Evaluator:
        inputs, labels = _on_device(part, device)
        return Evaluator(net, inputs, labels, transform, task, experiment.sim.metrics)

    train = rows.splits.train
    population = Population.of(train.inputs, train.labels, rows.parts.clients, device)
    net.check_draws(transform(population.inputs[:3], None))
    _check_network(experiment, method, net, transform(population.inputs[:2], None), outputs)
    proxy = examiner(rows.splits.proxy) if rows.splits.proxy is not None else None
    test = examiner(rows.splits.test)
    trained_on = None
    if experiment.sim.evaluate_train:
        trained_on = replace(test, inputs=population.inputs, labels=population.labels)
    context = replace(
        _context(experiment, net, population, key),
        proxy=proxy,
        class_counts=_class_counts(method, population, rows.classes),
        archive=archive,
        permutations=_permutations(method, module, transform(population.inputs[:2]), device),
    )
    trainer = Trainer(
        net=net,
        rules=method.rules(),
        optimiser=optimiser_of(experiment.local),
        batch=experiment.local.batch,
        transform=transform,
        classes=rows.classes,
        clip=experiment.local.clip or None,
        task=task,
        keep_optimiser=experiment.local.keep_optimiser,
    )
    _say_cautions(method, experiment, net, population)
    counts = population.class_counts(rows.classes).cpu().numpy()
    participation: Choice = parse(experiment.sim.participation, "participation")
    eligible = np.flatnonzero(population.sizes > 0)
    draw_cohort(participation, eligible, key, 0)  # says what is wrong before the run
    return Federation(
        method=method,
        net=net,
        trainer=trainer,
        population=population,
        evaluator=examiner(rows.splits.test),
        context=context,
        schedule=_schedule(experiment),
        participation=participation,
        eligible=eligible,
        key=key,
        rounds=experiment.rounds,
        dropout=experiment.sim.dropout,
        buffers=experiment.sim.buffers,
        recalibrate=_recalibration(experiment, net, proxy),
        evaluate_every=experiment.sim.evaluate_every,
        evaluate_last=experiment.sim.evaluate_last,
        train=trained_on,
        client_memory=experiment.sim.client_memory * 2**30,
        client_archive=client_archive,
        # Last: what starts processes does so once nothing else can be wrong.
        executor=pick_executor(experiment, trainer, population, key),
        holdings=Holdings(dataset.classes, counts, rows.corrupted, population.sizes),
        data=identity(
            dataset.train.labels,
            dataset.test.labels,
            rows.parts.clients,
            (dataset.train.inputs, dataset.test.inputs),
        ),
    )


def _outputs(task: Task, dataset: data.Dataset) -> int:
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
    """Return what surrounds every method's rounds, without what only some methods need."""
    return Context(
        layout=net.layout,
        clients=len(population),
        rounds=experiment.rounds,
        key=key,
        batch=experiment.local.batch,
        examples=float(population.sizes.mean()),
        effective_steps=optimiser_of(experiment.local).effective_steps,
        net=net,
    )


# A matrix of clients saves a CPU Python's time but no arithmetic: measured, it wins for dense
# networks up to about this size and loses for convolutions (benchmarks/speed/executors.py).
MATRIX_PAYS_BELOW = 200_000
# Compiling such a step takes a CPU 10 to 30 seconds and saves about 2 milliseconds each time.
COMPILING_PAYS_FROM = 20_000
# It takes a GPU half a minute, and on a CIFAR CNN that is won back in about 300 rounds of ten
# clients with 500 rows and 5 epochs: as many rounds, or rows in fewer and larger ones.
GPU_ROUNDS, GPU_ROWS = 300, 7_500_000


def pick_executor(
    experiment: Experiment, trainer: Trainer, population: Population, key: Key
) -> Executor:
    """Choose how cohorts are trained: a matrix on CUDA and for small dense models, else a loop.

    With `sim.workers` above 1 the loop is shared out to processes.
    """
    sim, on_cuda = experiment.sim, trainer.net.device.type == "cuda"
    if sim.executor == "ray":
        return _on_ray(experiment, trainer, population, key)
    if not on_cuda:
        keep_freed_memory()
    if sim.executor == "loop" or (sim.executor == "auto" and not (on_cuda or _is_small(trainer))):
        return _loop(experiment, trainer, population, key)
    compiled = trainer.net.compiles and compiling_pays(experiment, population, key, on_cuda)
    if sim.compile != "auto":
        compiled = sim.compile == "on"
    memory = int(sim.memory * 2**30)
    try:
        return CohortExecutor(trainer, population, key, compiled, sim.chunk, memory)
    except Unsupported as reason:
        if sim.executor == "cohort":
            raise ConfigError(f"sim.executor: cohort cannot be used: {reason}") from reason
        return _loop(experiment, trainer, population, key)


def _is_small(trainer: Trainer) -> bool:
    layout = trainer.net.layout
    return layout.size < MATRIX_PAYS_BELOW and all(len(shape) <= 2 for shape in layout.shapes)


def compiling_pays(experiment: Experiment, population: Population, key: Key, on_cuda: bool) -> bool:
    """Whether a run is long enough to compile its step, and on a CPU a compiler is there."""
    rounds, local, sim = experiment.rounds, experiment.local, experiment.sim
    plan = Plan(local.lr, None, local.steps) if local.steps else Plan(local.lr, local.epochs)
    steps = [count_steps(plan, int(rows), local.batch) for rows in population.sizes]
    if on_cuda:
        participation = parse(sim.participation, "participation")
        cohort = draw_cohort(participation, np.flatnonzero(population.sizes > 0), key, 0)
        rows = sum(steps[client] for client in cohort) * local.batch
        return rounds >= GPU_ROUNDS or rounds * rows >= GPU_ROWS
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    return rounds * max(steps, default=0) >= COMPILING_PAYS_FROM and compiler is not None


def _loop(experiment: Experiment, trainer: Trainer, population: Population, key: Key) -> Executor:
    if experiment.sim.workers <= 1 or trainer.net.device.type != "cpu":
        return LoopExecutor(trainer, population, key)
    return WorkerExecutor(trainer, population, key, experiment.sim.workers)


def _on_ray(experiment: Experiment, trainer: Trainer, population: Population, key: Key) -> Executor:
    try:
        from fedbasin.sim.ray_executor import RayExecutor
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError(
            "sim.executor: ray is not installed; pip install 'fedbasin[ray]'"
        ) from error
    return RayExecutor(
        trainer,
        population,
        key,
        partial(_for_worker, experiment),
        workers=experiment.sim.workers,
        address=experiment.sim.address,
    )


def _for_worker(
    experiment: Experiment, trainer: Trainer, population: Population, key: Key
) -> Executor:
    """Choose the executor of one Ray worker, for the device that the worker has."""
    pick_precision(experiment.sim.precision, trainer.net.device)
    alone = replace(experiment.sim, executor="auto", workers=0, address="")
    return pick_executor(replace(experiment, sim=alone), trainer, population, key)


def _on_device(part: data.Rows, device: torch.device) -> tuple[Tensor, Tensor]:
    return as_tensor(part.inputs, device), as_tensor(part.labels, device)


def _transform(dataset: data.Dataset, settings: DataConfig, dtype: torch.dtype) -> Any:
    middle, spread = {"symmetric": (0.5, 0.5), "unit": (0.0, 1.0)}.get(settings.normalise, (0, 0))
    mean, std = dataset.mean, dataset.std
    if dataset.kind != "image":
        _refuse_pixel_settings(dataset, settings)
    elif settings.normalise != "dataset":
        mean, std = (middle,) * len(mean), (spread,) * len(std)
    transform = Transform(mean, std, augment=settings.augment, kind=dataset.kind)
    return partial(transform, dtype=dtype)


def optimiser_of(local: LocalConfig) -> Optimiser:
    """Return the clients' optimiser; `local.momentum` and `local.weight_decay` are those of SGD."""
    optimiser: Optimiser = parse(local.optimiser, "optimiser")
    if type(optimiser) is not SGD:
        return optimiser
    return replace(
        optimiser,
        momentum=optimiser.momentum or local.momentum,
        weight_decay=optimiser.weight_decay or local.weight_decay,
    )


def _refuse_pixel_settings(dataset: data.Dataset, settings: DataConfig) -> None:
    """Refuse settings that speak of pixels where the inputs are no images."""
    if settings.normalise != "dataset":
        raise ConfigError(
            f"data.normalise is {settings.normalise!r}, which scales pixels, and {dataset.name} is "
            f"{dataset.kind}: leave it at 'dataset' and scale the numbers beforehand"
        )
    if settings.augment:
        raise ConfigError(
            f"data.augment crops and flips images, and {dataset.name} is {dataset.kind}: leave it "
            "at false"
        )


def _schedule(experiment: Experiment) -> Any:
    local = experiment.local
    plan = Plan(local.lr, None, local.steps) if local.steps else Plan(local.lr, local.epochs)
    choice: Choice = parse(local.schedule, "schedule")
    try:
        choice(plan, 0, experiment.rounds)  # a schedule that cannot run says so before the run
    except ValueError as error:
        raise ConfigError(f"local.schedule, {choice}: {error}") from error
    return lambda round: choice(plan, round, experiment.rounds)


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


def _say_cautions(method: Method, experiment: Experiment, net: Net, population: Population) -> None:
    """Log why the method may not do what its paper says in this run."""
    local, sizes = experiment.local, population.sizes[population.sizes > 0]
    optimiser = optimiser_of(local)
    plain = optimiser if isinstance(optimiser, SGD) else SGD()
    setting = Setting(
        momentum=plain.momentum,
        weight_decay=plain.weight_decay,
        clip=local.clip or None,
        ragged=not local.steps and len(set(np.ceil(sizes / local.batch))) > 1,
        statistics=net.has_statistics and experiment.sim.buffers != "recalibrate",
        adaptive=str(optimiser) if optimiser.adaptive else "",
    )
    for caution in method.cautions(setting):
        logging.getLogger(__package__).warning("%s: %s", method, caution)
    if local.lr == LocalConfig.lr and optimiser.default_lr < local.lr:
        logging.getLogger(__package__).warning(
            "local.lr = %g is the default, which is meant for SGD; %s is most often run at %g: set "
            "local.lr",
            *(local.lr, optimiser, optimiser.default_lr),
        )


def _class_counts(method: Method, population: Population, classes: int) -> Tensor | None:
    """Return the clients' class counts for a method that needs them, and say who sees them."""
    if "class_counts" not in needs_of(method):
        return None
    logging.getLogger(__package__).warning(
        "%s: the server sees every client's class counts in plain. fedbasin private-counts shows "
        "how their sum is gathered under encryption.",
        method,
    )
    return population.class_counts(classes)


def _permutations(
    method: Method, module: nn.Module, example: Tensor, device: torch.device
) -> tuple[Group, ...] | None:
    """Return which units of the network may change places, for a method that matches neurons."""
    if "permutations" not in needs_of(method):
        return None
    from fedbasin.models.symmetries import permutations  # slow to import, and few runs need it

    try:
        return permutations(module, example, device)
    except SymmetryError as error:
        raise ConfigError(f"{method} matches neurons: {error}, or another model") from error


def _recalibration(experiment: Experiment, net: Net, proxy: Evaluator | None) -> Any:
    """Return how statistics are renewed: forward passes over the server's rows."""
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
        key, zeros = Key(0).tensor(vector.device), torch.zeros_like(buffers)

        def after(raw: Tensor, old: Tensor) -> Tensor:
            return net(vector, proxy.transform(raw, None), old, key=key, training=True).buffers

        chunks = proxy.inputs.split(500)
        momentum = 1 - (after(chunks[0], torch.ones_like(buffers)) - after(chunks[0], zeros))
        found = sum(after(raw, zeros) * len(raw) for raw in chunks) / proxy.size
        untouched = momentum < 1e-6
        return torch.where(untouched, buffers, found / momentum.masked_fill(untouched, 1.0))

    return recalibrate
