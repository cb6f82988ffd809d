"""Sums over all rows of each client of a cohort: what rules ask for before training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedbasin.core.round import Sent
from fedbasin.core.rule import Batch, LocalRule, SurveyBatch
from fedbasin.core.tree import added
from fedbasin.local.step import summed_gradient
from fedbasin.local.train import SURVEY_ROWS, Trainer
from fedbasin.sim.population import Population


class _Gradient(NamedTuple):
    """The sum of a client's gradients."""

    total: Tensor


def survey(
    rule: LocalRule,
    shared: Any,
    trainer: Trainer,
    population: Population,
    clients: np.ndarray,
    sent: Sent,
) -> Any:
    """Return a rule's survey of every client, stacked [C, ...]."""
    if not rule.surveys:
        return ()
    net = trainer.net
    vector = sent.vector
    buffers = sent.buffers
    return _sums(
        lambda batch: rule.survey(SurveyBatch(net, vector, buffers, shared, batch, trainer.task)),
        trainer,
        population,
        clients,
    )


def gradients(trainer: Trainer, population: Population, clients: np.ndarray, sent: Sent) -> Tensor:
    """Return every client's mean gradient over its rows [C, P]."""
    net = trainer.net
    vector = sent.vector
    buffers = sent.buffers
    sums: _Gradient = _sums(
        lambda batch: _Gradient(
            summed_gradient(SurveyBatch(net, vector, buffers, (), batch, trainer.task))
        ),
        trainer,
        population,
        clients,
    )
    sizes = torch.from_numpy(population.sizes[clients]).to(vector)
    return sums.total / sizes[:, None].clamp(min=1)


def _sums(
    find: Callable[[Batch], Any], trainer: Trainer, population: Population, clients: np.ndarray
) -> Any:
    """Add up what `find` returns over blocks of every client's rows; padding has no weight."""
    device = population.labels.device
    first = torch.from_numpy(population.offsets[clients]).to(device)[:, None]
    sizes = torch.from_numpy(population.sizes[clients]).to(device)[:, None]

    def one(raw: Tensor, labels: Tensor, weight: Tensor) -> Any:
        return find(Batch(trainer.transform(raw, None), labels, weight))

    blocks = []
    most = max(int(population.sizes[clients].max()), 1)
    for begin in range(0, most, SURVEY_ROWS):
        place = torch.arange(begin, min(begin + SURVEY_ROWS, most), device=device)[None]
        real = place < sizes
        rows = first + place * real
        weight = real.to(trainer.net.dtype)
        blocks.append(torch.func.vmap(one)(population.take(rows), population.labels[rows], weight))
    return added(blocks)
