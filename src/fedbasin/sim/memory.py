"""How many clients fit in memory side by side."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from fedbasin.core.rule import Batch
from fedbasin.core.tree import count_bytes
from fedbasin.local.step import task_loss
from fedbasin.local.train import Trainer
from fedbasin.sim.population import Population

SHARE = 0.6  # of the free memory that a cohort may take; the rest is for libraries and the server


def free_bytes(device: torch.device) -> int:
    """Return how much memory is free on a device."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def client_bytes(trainer: Trainer, population: Population, vector: Tensor) -> int:
    """Estimate what one client takes while a cohort advances.

    Its model, gradient, direction and next model, twice for a captured graph's own copy; its
    optimiser's state and what it keeps between rounds; and what the backward pass needs of the
    forward pass.
    """
    model = count_bytes(vector)
    own = count_bytes(trainer.zero_state(vector))
    state = count_bytes(trainer.optimiser.init(vector))
    return 5 * model + 3 * state + 3 * own + int(1.5 * _saved_bytes(trainer, population, vector))


def _saved_bytes(trainer: Trainer, population: Population, vector: Tensor) -> int:
    """Count what autograd keeps for the backward pass of one batch."""
    sizes: dict[int, int] = {}  # by storage, which several tensors may share

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    raw = population.inputs[:1].expand(trainer.batch, *population.inputs.shape[1:])
    labels = population.labels[:1].expand(trainer.batch, *population.labels.shape[1:])
    leaf = vector.detach().requires_grad_()
    inputs = trainer.transform(raw, None)
    batch = Batch(
        inputs, labels, torch.ones(trainer.batch, dtype=vector.dtype, device=vector.device)
    )
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        task_loss(trainer.net(leaf, inputs).logits, batch, trainer.task)
    return sum(sizes.values())
