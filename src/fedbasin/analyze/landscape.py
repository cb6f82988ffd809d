r"""Loss and error on lines between models, on planes through three, over mixtures of three.

    line     w(b) = (1 - b) w_1 + b w_2,  also beyond b in [0, 1]
    plane    w(x, y) = w_1 + x e_1 + y e_2
             e_1 along w_2 - w_1,  e_2 along w_3 - w_1 less its part along e_1,  |e_1| = |e_2| = 1

With unit axes a distance on the plane is the distance between models. Any other model v has the
place (<v - w_1, e_1>, <v - w_1, e_2>); the rest of v - w_1 says how far it lies off the plane.
Zhou et al. (IMA), Figures 1, 5 and 7-10.

The loss over all ways to weigh three clients, Li et al. (FedLAW), Figure 12:

    w(lambda) = lambda_1 w_1 + lambda_2 w_2 + lambda_3 w_3,   lambda_i >= 0,  sum lambda_i = 1

measured on an even grid of the triangle; the best point, round after round, is the optimum's path.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedbasin.core.evaluator import Landscape, Measured, Tick, no_tick


class Slice(NamedTuple):
    """A line through the landscape."""

    position: Tensor  # [M]; 0 is the first model, 1 the second
    loss: Tensor  # [M]
    error: Tensor  # [M]


class Axes(NamedTuple):
    """A plane in the space of models, float64; the axes are orthonormal."""

    origin: Tensor  # [P] w_1
    across: Tensor  # [P] e_1
    up: Tensor  # [P] e_2

    def place(self, models: Tensor) -> tuple[Tensor, Tensor]:
        """Return where models [M, P] lie on the plane, [M, 2], and how far off it, [M]."""
        offset = models.double() - self.origin
        axes = torch.stack([self.across, self.up])
        places = offset @ axes.T
        return places, (offset - places @ axes).norm(dim=1)


class Plane(NamedTuple):
    """The landscape over a rectangle of the plane through three models."""

    x: Tensor  # [n] places along e_1
    y: Tensor  # [m] places along e_2
    loss: Tensor  # [m, n]
    error: Tensor  # [m, n]
    corners: Tensor  # [3, 2] places of the three models
    others: Tensor  # [k, 2] places of other models, projected
    off_plane: Tensor  # [k] their distances from the plane


def line(
    evaluator: Landscape, first: Tensor, second: Tensor, positions: Tensor, tick: Tick = no_tick
) -> Slice:
    """Measure models on the line through two models [P]."""
    weights = torch.stack([1 - positions, positions], dim=1)
    scores = evaluator.measure(weights, torch.stack([first, second]), tick)
    return Slice(positions, *scores)


def plane_axes(three: Tensor) -> Axes:
    """Return the plane through three models [3, P]; two equal or three on a line have none."""
    origin, second, third = three.double()
    across = second - origin
    width = across.norm()
    up = third - origin
    reach = up.norm()
    if width > 0:
        across = across / width
        up = up - (up @ across) * across
    if not (width > 0 and up.norm() > 1e-9 * reach):
        raise ValueError("a plane needs three models that differ and do not lie on one line")
    return Axes(origin, across, up / up.norm())


def plane(
    evaluator: Landscape,
    three: Tensor,
    others: Tensor,
    *,
    points: int = 25,
    margin: float = 0.3,
    tick: Tick = no_tick,
) -> Plane:
    """Measure a grid on the plane through three models.

    Args:
        evaluator: what to measure on.
        three: the models [3, P].
        others: further models [k, P] to mark, perhaps none.
        points: grid points along each axis.
        margin: how far the grid goes beyond the outermost of all marked models, as a share of
            their spread.
        tick: told of progress.
    """
    axes = plane_axes(three)
    corners, _ = axes.place(three)
    marked, off_plane = axes.place(others)
    every = torch.cat([corners, marked])
    low = every.min(0).values
    high = every.max(0).values
    border = margin * (high - low)
    low = low - border
    high = high + border
    x, y = (torch.linspace(float(a), float(b), points) for a, b in zip(low, high, strict=True))
    rows, columns = torch.meshgrid(y, x, indexing="ij")
    weights = torch.stack([torch.ones(points**2), columns.flatten(), rows.flatten()], dim=1)
    scores: Measured = evaluator.measure(weights, torch.stack(axes), tick)
    loss, error = (part.view(points, points) for part in scores)
    return Plane(x, y, loss, error, corners, marked, off_plane)


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
