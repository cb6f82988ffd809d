r"""RFA: the geometric median of the updates, by the smoothed Weiszfeld algorithm.

    z_0 = sum_i p_i d_i,   d_i = y_i - w
    b_i = p_i / max(nu, |d_i - z|),   z <- sum_i b_i d_i / sum_i b_i       (at most T times)
    w+  = w + z

It stops early when sum_i p_i |d_i - z| falls by less than 1e-6 of itself. BatchNorm statistics go
through the same rule.

Departures from the paper: clients count alike by default (the paper weighs by samples, which are
claims that a hostile client is free to make). T is 10: each pass divides the pull of a far reply by
about (n - f) / f, and after the paper's 3 or 4 passes a reply at 1e6 still moves z by tens.
Cost: one model down, one up. Server: T passes over C x P numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedbasin.core.bounds import above, at_least
from fedbasin.core.catalogue import entry
from fedbasin.core.rule import Rules
from fedbasin.core.vectors import Weighting, shares, weighted_mean
from fedbasin.methods.parts.robust import Robust

_STOP = 1e-6  # relative fall of the objective


@entry(
    "method",
    name="rfa",
    paper="Pillutla et al., IEEE TSP 2022",
    url="https://arxiv.org/abs/1912.13445",
    is_fedavg_when={"nu": 1e30},
    tunable="nothing: its numbers say how exactly the median is computed",
)
@dataclass(frozen=True)
class RFA(Robust):
    """Geometric median of the clients' updates.

    Args:
        iterations: T, the most steps of Weiszfeld's algorithm.
        nu: distances below it count as it; a huge one gives the mean.
        weighting: p_i by ``"uniform"`` or by ``"samples"`` (the paper).
        local: rules for the clients.
    """

    iterations: int = at_least(1, default=10)
    nu: float = above(0, default=1e-5)
    weighting: Weighting = "uniform"
    local: Rules = ()

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Return the geometric median."""
        share = shares(weights, self.weighting)
        middle = weighted_mean(rows, share)
        lengths = (rows - middle).norm(dim=1).double()
        objective = share @ lengths
        for _ in range(self.iterations):
            pull = share / lengths.clamp(min=self.nu)
            middle = weighted_mean(rows, pull / pull.sum())
            lengths = (rows - middle).norm(dim=1).double()
            before = objective
            objective = share @ lengths
            if bool(before - objective < _STOP * before):
                break
        return middle
