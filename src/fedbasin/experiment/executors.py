"""Pick the device, the precision and the executor of a run."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from fedbasin.core.expressions import parse
from fedbasin.core.rng import Key
from fedbasin.experiment.config import ConfigError, Experiment
from fedbasin.experiment.training import plan_of
from fedbasin.local import Trainer
from fedbasin.local.batches import count_steps
from fedbasin.sim import LoopExecutor, Population
from fedbasin.sim.allocator import keep_freed_memory
from fedbasin.sim.cohort import CohortExecutor, Unsupported
from fedbasin.sim.lean import LeanStep
from fedbasin.sim.loop import Executor
from fedbasin.sim.participation import draw_cohort
from fedbasin.sim.workers import WorkerExecutor


def pick_device(name: str) -> torch.device:
    """Turn a device name into an available device."""
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
    """Turn a precision's name into a floating type, and allow or forbid tf32 on CUDA."""
    fast = device.type == "cuda" and name in ("auto", "tf32", "bf16")
    torch.backends.cuda.matmul.allow_tf32 = fast
    torch.backends.cudnn.allow_tf32 = fast
    return torch.float64 if name == "fp64" else torch.float32


# A matrix of clients saves a CPU Python's time but no arithmetic: measured, it wins up to about so
# many products of one client's step (benchmarks/speed/executors.py).
MATRIX_PAYS_BELOW = 5_000_000
DENSE_PAYS_BELOW = 20_000_000  # of dense layers alone, which are batched products
# What a network of other layers costs is not counted; it pays up to about so many weights.
WEIGHTS_PAY_BELOW = 200_000
# Compiling such a step takes a CPU 10 to 30 seconds and saves about 2 milliseconds each time.
COMPILING_PAYS_FROM = 20_000
# It takes a GPU half a minute, and on a CIFAR CNN that is won back in about 300 rounds of ten
# clients with 500 rows and 5 epochs: as many rounds, or rows in fewer and larger ones.
GPU_ROUNDS = 300
GPU_ROWS = 7_500_000


def pick_executor(
    experiment: Experiment, trainer: Trainer, population: Population, key: Key
) -> Executor:
    """Choose how cohorts are trained: a matrix on CUDA and for small steps, else a loop.

    A network may say of itself that a matrix does not pay (`Net.stacks`).

    With `sim.workers` above 1 the loop is divided among processes.
    """
    sim = experiment.sim
    on_cuda = trainer.net.device.type == "cuda"
    if sim.executor == "ray":
        return _on_ray(experiment, trainer, population, key)
    if not on_cuda:
        keep_freed_memory()
    if sim.executor == "loop" or (sim.executor == "auto" and not _matrix_pays(trainer, population)):
        return _loop(experiment, trainer, population, key)
    compiled = trainer.net.compiles and compiling_pays(experiment, population, key, on_cuda)
    if not on_cuda and LeanStep(trainer, population).dense:
        compiled = False  # batched products are as fast without
    if sim.compile != "auto":
        compiled = sim.compile == "on"
    memory = int(sim.memory * 2**30)
    if compiled:
        population = population.apart()
    try:
        return CohortExecutor(trainer, population, key, compiled, sim.chunk, memory)
    except Unsupported as reason:
        if sim.executor == "cohort":
            raise ConfigError(f"sim.executor: cohort cannot be used: {reason}") from reason
        return _loop(experiment, trainer, population, key)


def _matrix_pays(trainer: Trainer, population: Population) -> bool:
    """Whether a cohort is faster as one matrix: on CUDA, or where a step is little work."""
    net = trainer.net
    if not net.stacks or net.has_statistics:
        return False
    if net.device.type == "cuda":
        return True
    products = _products(trainer, population)
    if products is None:
        flat = all(len(shape) <= 2 for shape in net.layout.shapes)
        return flat and net.layout.size + net.frozen_size < WEIGHTS_PAY_BELOW
    dense = LeanStep(trainer, population).dense
    return products < (DENSE_PAYS_BELOW if dense else MATRIX_PAYS_BELOW)


@torch.no_grad()
def _products(trainer: Trainer, population: Population) -> int | None:
    """Count the products of a step's forward pass; None where layers are of other kinds."""
    net = trainer.net
    weighted = [
        part
        for part in net.module.modules()
        if any(weight.dim() > 1 for weight in part.parameters(recurse=False))
    ]
    if not all(isinstance(part, nn.Linear | nn.Conv1d | nn.Conv2d) for part in weighted):
        return None
    counted = [0]

    def count(part: nn.Module, given: object, outputs: Tensor) -> None:
        counted[0] += outputs[0].numel() * part.weight[0].numel()  # type: ignore[index]

    hooks = [part.register_forward_hook(count) for part in weighted]
    try:
        net(net.initial()[0], trainer.transform(population.inputs[:2], None), training=True)
    finally:
        for hook in hooks:
            hook.remove()
    return counted[0] * trainer.batch


def compiling_pays(experiment: Experiment, population: Population, key: Key, on_cuda: bool) -> bool:
    """Whether a run is long enough to compile its step, and a CPU has a compiler."""
    rounds = experiment.rounds
    local = experiment.local
    sim = experiment.sim
    plan = plan_of(local)
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
