r"""A weighted sum of models whose weights are learnt, without a graph through the models.

    w = gamma m,   m = x + eta_g sum_i lambda_i (y_i - x)
    lambda_i = u(z_i) / sum_j u(z_j),   gamma = u(c),   u(v) = exp(v) or v^2

A loss L(w) has, with g = dL/dw and s_i = <g, y_i>, the gradient

    dL/dc = u'(c) <g, m>,   dL/dz_i = u'(z_i) / sum_j u(z_j) gamma eta_g (s_i - <lambda, s>)

in the free numbers z and c: one backward pass and two matrix-vector products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedbasin.core.vectors import weighted_mean

Parameterisation = Literal["exponential", "quadratic"]


class Curve(NamedTuple):
    """How a free number becomes an amount above zero: u, u' and the inverse of u."""

    amount: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    inverse: Callable[[Tensor], Tensor]


CURVES: dict[Parameterisation, Curve] = {
    "exponential": Curve(torch.exp, torch.exp, torch.log),
    "quadratic": Curve(torch.square, lambda v: 2 * v, torch.sqrt),
}


@dataclass(frozen=True)
class Mixture:
    """A merged model as a function of the free numbers (z, c), float64 [C + 1]."""

    server: Tensor  # [P] x
    models: Tensor  # [C, P] y_i
    server_lr: float
    curve: Curve

    def read(self, free: Tensor) -> tuple[Tensor, Tensor]:
        """Return lambda [C] and gamma."""
        amounts = self.curve.amount(free)
        return amounts[:-1] / amounts[:-1].sum(), amounts[-1]

    @property
    def differ(self) -> bool:
        """Whether the models differ; where they do not, z moves nothing but rounding."""
        return any(not torch.equal(model, self.models[0]) for model in self.models[1:])

    def mean(self, weights: Tensor) -> Tensor:
        """Return m [P], the merged model before it shrinks."""
        mean = weighted_mean(self.models, weights)
        return mean if self.server_lr == 1 else self.server + self.server_lr * (mean - self.server)

    def model(self, weights: Tensor, gamma: Tensor) -> Tensor:
        """Return w = gamma m [P]."""
        mean = self.mean(weights)
        return gamma.to(mean.dtype) * mean

    def gradient(self, free: Tensor, loss: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Return the gradient of the loss in (z, c) and the loss, after one backward pass."""
        weights, gamma = self.read(free)
        mean = self.mean(weights)
        with torch.enable_grad():
            merged = (gamma.to(mean.dtype) * mean).requires_grad_()
            value = loss(merged)
            (slope,) = torch.autograd.grad(value, merged)
        along = (self.models @ slope).to(free.dtype)
        scale = gamma * self.server_lr / self.curve.amount(free[:-1]).sum()
        outer = torch.cat([scale * (along - weights @ along), (slope @ mean).to(free.dtype)[None]])
        return self.curve.slope(free) * outer, value.detach()
