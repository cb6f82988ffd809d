r"""How well a server's step follows the gradient: Li et al. (FedWCM), Appendix E.

    epsilon_r = |grad f(x_r) - g_{r+1}|^2,     x_{r+1} = x_r - gamma g_{r+1}
    U_r       = 1/(N K) sum_{i,k} |x_{r,k}^i - x_r|^2

g_{r+1} is known up to gamma, whose unit each method chooses, so epsilon_r is taken at the gamma
that makes it least: with c = max(0, cos(grad f, x_r - x_{r+1}))

    min_gamma epsilon_r = (1 - c^2) |grad f(x_r)|^2

Of U_r a run keeps the last local step alone, k = K: 1/N sum_i |y_i - x_r|^2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad

from fedbasin.core.evaluator import Evaluator


class Followed(NamedTuple):
    """A step beside the gradient where it began."""

    cosine: float  # cos(grad f, -step)
    error: float  # least epsilon_r / |grad f|^2 over the step's length: 0 to 1


def full_gradient(evaluator: Evaluator, model: Tensor) -> Tensor:
    """Return the gradient of the mean loss over all of the evaluator's rows, [P]."""
    total = torch.zeros_like(model)
    for cut in evaluator.cuts():
        total += grad(lambda vector, cut=cut: evaluator.summed_loss(vector, cut))(model)
    return total / len(evaluator)


def follow(gradient: Tensor, step: Tensor) -> Followed:
    """Compare a step [P] with the direction that descends fastest; NaN where one of them is 0."""
    gradient = gradient.double()
    step = step.double()
    size = gradient.norm() * step.norm()
    cosine = float(-(gradient @ step) / size) if float(size) > 0 else float("nan")
    return Followed(cosine, 1 - max(cosine, 0.0) ** 2 if cosine == cosine else cosine)
