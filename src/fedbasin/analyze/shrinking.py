r"""Global weight shrinking: Li et al. (FedLAW), Figures 2-4 and 9-11.

    gamma (w - g) = w - gamma g - (1 - gamma) w,     r = |gamma g| / |(1 - gamma) w|

gamma is the sum of the aggregation weights, g the mean pseudo-gradient and w the model before
the round: a round is a step along gamma g and a pull (1 - gamma) w towards zero.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedbasin.core.evaluator import Landscape, Tick, no_tick


class Pulls(NamedTuple):
    """The two parts of each round's step, [T]."""

    step: Tensor  # |gamma g|
    pull: Tensor  # |(1 - gamma) w|
    ratio: Tensor  # r; infinite at gamma = 1


class Histogram(NamedTuple):
    """How the parameters of a model are spread."""

    edges: Tensor  # [bins + 1]
    share: Tensor  # [bins] of all parameters
    norm: float
    near_zero: float  # share with |w| below a hundredth of the histogram's reach


class Rescaled(NamedTuple):
    """The loss of gamma w."""

    gamma: Tensor  # [M]
    loss: Tensor  # [M]
    error: Tensor  # [M]


def pulls(gamma: Tensor, gradient: Tensor, norm: Tensor) -> Pulls:
    """Return the two parts from gamma, |g| and |w| before the round, each [T]."""
    step = gamma * gradient
    pull = (1 - gamma).abs() * norm
    return Pulls(step, pull, step / pull)


def histogram(model: Tensor, bins: int = 61, reach: float = 0.0) -> Histogram:
    """Count the parameters [P] in equal bins over [-reach, reach]; 0 takes the largest."""
    sizes = model.double().abs().cpu()
    reach = reach or float(sizes.max())
    counts, edges = torch.histogram(
        model.double().cpu(), bins=bins, range=(-reach, reach), density=False
    )
    near = float((sizes < 0.01 * reach).double().mean())
    return Histogram(edges, counts / model.numel(), float(sizes.norm()), near)


def rescale(evaluator: Landscape, model: Tensor, gammas: Tensor, tick: Tick = no_tick) -> Rescaled:
    """Measure gamma w for a model [P]; flat where the network does not mind its scale."""
    return Rescaled(gammas, *evaluator.measure(gammas[:, None], model[None], tick))
