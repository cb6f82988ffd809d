r"""FedDyn: dynamic regularisers that make the clients' optima agree with the server's.

    client:  v <- v - eta (g(v) - q_i + alpha_i (v - x)),   q_i+ = q_i - alpha_i d_i
    server:  h+ = h - alpha/N sum_{i in S} d_i,             w+ = sum_i p_i y_i - h+/alpha

with d_i = y_i - x and alpha_i = alpha, or alpha nbar/n_i (`by_size`, the authors' code). Kept in
the equivalent form of `parts/duals.py`: r_i = -q_i/alpha_i and s = -h/alpha = mean over ALL N
clients of r_i, hence r_i+ = r_i + d_i, s+ = s + 1/N sum_S d_i and w+ = sum_i p_i y_i + s+. At a
fixed point of full participation s = 0, q_i is the gradient of f_i at w, and w is the optimum of
the mean objective (with `by_size` of the sample-weighted one).

What to watch. With few clients a round or skewed data s can grow without bound: `guard` shortens
the shift that is applied, never s itself. Local work that is far from exact breaks the argument,
so the authors hold the learning rate (x 0.9995 a round, or constant).

Departures from the paper: the guard (off by default). `score` is the mean of the active models, as
in the authors' code; the paper does not say.
Cost: one model down, one up; one model on each client and one on the server.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedbasin.core.bounds import above, within
from fedbasin.core.catalogue import entry
from fedbasin.core.method import Averaging, Context, Replies, Served
from fedbasin.core.rule import LocalRule, Rules
from fedbasin.core.space import Range
from fedbasin.core.vectors import Weighting
from fedbasin.methods.parts.duals import Duals, MeanClientSize, mean_drift


@dataclass(frozen=True)
class FedDynState:
    """What the server remembers."""

    drift: Tensor  # [P] s = -h/alpha


class FedDynNotes(NamedTuple):
    """What a round leaves in the record."""

    drift_norm: Tensor  # |s|, before the guard
    guarded: Tensor  # 1 where the guard shortened the shift


@entry(
    "method",
    paper="Acar et al., ICLR 2021",
    url="https://arxiv.org/abs/2111.04263",
    is_fedavg_when="never: its first round has the proximal pull, and alpha = 0 has no server step",
    tunable={"alpha": Range(0.001, 1.0, "log")},
)
@dataclass(frozen=True)
class FedDyn(Averaging):
    """Clients and server carry duals, so that local optima meet at the global one.

    Args:
        alpha: strength of the pull; 0.1, 0.01 and 0.001 are used in papers.
        score: the model that counts, the ``"mean"`` of the cohort's or the shifted ``"server"``.
        by_size: alpha_i = alpha nbar/n_i, weaker pulls for clients with more data.
        guard: longest shift |w+ - mean| in units of |mean|; 1e999 is none.
        weighting: p_i by ``"uniform"`` (the paper) or ``"samples"``.
        local: further rules for the clients; with ``lesam`` this is FedLESAM-D.
    """

    alpha: float = within("(0, inf)", words="must be above 0", default=0.1)
    score: Literal["mean", "server"] = "mean"
    by_size: bool = False
    guard: float = above(0, default=math.inf)
    weighting: Weighting = "uniform"
    local: Rules = ()

    def init(self, server: Tensor, context: Context) -> FedDynState:
        """Start with s = 0."""
        if self.by_size and not context.examples > 0:
            raise ValueError("feddyn(by_size=True) needs to know how much data a client has")
        return FedDynState(torch.zeros_like(server))

    def own_rules(self) -> tuple[LocalRule, ...]:
        """Return the duals."""
        return (Duals(self.alpha),)

    def own_broadcast(
        self, state: FedDynState, server: Tensor, context: Context
    ) -> tuple[Any, ...]:
        """Send the mean amount of data, where the pull depends on it."""
        return (MeanClientSize(server.new_tensor(context.examples)) if self.by_size else (),)

    def aggregate(
        self, state: FedDynState, server: Tensor, replies: Replies, context: Context
    ) -> tuple[Served, FedDynState]:
        """Average, then shift by the mean drift of all clients."""
        mean = self.mean(replies)
        drift = mean_drift(state.drift, server, replies, context.able)
        length = drift.norm()
        most = self.guard * mean.norm()
        over = length > most
        model = mean + torch.where(over, most / length, 1.0) * drift
        notes = FedDynNotes(length, over.to(length.dtype))
        return Served(model, mean if self.score == "mean" else model, notes), FedDynState(drift)
