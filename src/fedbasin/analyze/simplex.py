r"""The loss over all ways to weigh three clients: Li et al. (FedLAW), Figure 12.

    w(lambda) = lambda_1 w_1 + lambda_2 w_2 + lambda_3 w_3,   lambda_i >= 0,  sum lambda_i = 1

measured on an even grid of the triangle; the best point, round after round, is the optimum's path.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedbasin.core.evaluator import Landscape, Tick, no_tick


class Simplex(NamedTuple):
    """The landscape of three clients' weights."""

    position: Tensor  # [n] lambda_1 along rows' x axis and lambda_2 along the y axis
    loss: Tensor  # [n, n], at [j, i] for lambda_1 = position[i]; NaN outside the triangle
    error: Tensor  # [n, n]
    best: Tensor  # [3] lambda of the smallest loss


def weight_plane(
    evaluator: Landscape, three: Tensor, points: int = 21, tick: Tick = no_tick
) -> Simplex:
    """Measure every mixture of three models [3, P] on a grid of `points` along each edge."""
    if points < 2:
        raise ValueError(f"points must be at least 2, got {points}")
    steps = torch.arange(points)
    second, first = torch.meshgrid(steps, steps, indexing="ij")
    inside = first + second <= points - 1
    table = torch.stack([first[inside], second[inside], points - 1 - (first + second)[inside]], 1)
    weights = table.double() / (points - 1)
    scores = evaluator.measure(weights, three, tick)
    loss, error = torch.full((2, points, points), float("nan"), dtype=torch.float64)
    loss[inside] = scores.loss
    error[inside] = scores.error
    return Simplex(steps.double() / (points - 1), loss, error, weights[scores.loss.argmin()])
