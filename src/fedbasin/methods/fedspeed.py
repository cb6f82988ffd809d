r"""FedSpeed: FedDyn's duals on a gradient taken a little way uphill, and amended uploads.

    client:  g1 = g(v),  g2 = g(v + rho g1/|g1|)              (same batch)
             v <- v - eta ((1 - a) g1 + a g2 - q_i + (v - x)/lambda)
             q_i+ = q_i - (y_i - x)/lambda
    server:  w+ = sum_i p_i (y_i - lambda q_i+)                             ("paper")
             w+ = sum_i p_i y_i - lambda 1/N sum over ALL clients of q_i+   ("release")

Clients of the "paper" send y_i - lambda q_i+ in place of y_i. The "release" server is FedDyn's, so
`fedspeed(server="release")` is `feddyn(alpha=1/lambda, local=sam(rho, share=a), score="server")`.
The two agree when all clients take part. Kept as r_i = -lambda q_i, see `parts/duals.py`.

Departures from the paper: none known. The paper's full text was not at hand; the client's rule and
both servers follow public code, which agrees on them.
Cost: one model down, one up; two backward passes a step; one model on each client ("release": one
on the server too).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedbasin.core.bounds import at_least, within
from fedbasin.core.catalogue import entry
from fedbasin.core.method import Averaging, Context, Replies, Served
from fedbasin.core.rule import LocalRule, Rules
from fedbasin.core.space import Range
from fedbasin.core.vectors import Weighting
from fedbasin.local.sharpness import SAM
from fedbasin.methods.parts.duals import Duals, mean_drift


@dataclass(frozen=True)
class FedSpeedState:
    """What the server remembers."""

    drift: Tensor | None  # [P] mean of all r_i for the "release" server


@entry(
    "method",
    paper="Sun et al., ICLR 2023",
    url="https://arxiv.org/abs/2302.10429",
    is_fedavg_when="never: its first round has the proximal pull",
    tunable={"rho": Range(0.01, 1.0, "log"), "lam": Range(1.0, 100.0, "log")},
)
@dataclass(frozen=True)
class FedSpeed(Averaging):
    """Sharpness-aware clients with duals, whose uploads are amended by them.

    Args:
        rho: how far uphill.
        lam: lambda; the pull towards x is 1/lambda.
        share: a, the share of the uphill gradient; 1 in the authors' code.
        server: ``"paper"`` (mean of amended uploads) or ``"release"`` (FedDyn's server).
        weighting: p_i by ``"uniform"`` (the paper) or ``"samples"``.
        local: further rules for the clients.
    """

    rho: float = at_least(0, default=0.1)
    lam: float = within("(0, inf)", words="must be above 0 and finite", default=10.0)
    share: float = within("[0, 1]", default=1.0)
    server: Literal["paper", "release"] = "paper"
    weighting: Weighting = "uniform"
    local: Rules = ()

    def init(self, server: Tensor, context: Context) -> FedSpeedState:
        """Start with r_i = 0 for all clients."""
        return FedSpeedState(torch.zeros_like(server) if self.server == "release" else None)

    def own_rules(self) -> tuple[LocalRule, ...]:
        """Return the duals and, inside them, the perturbation."""
        return (
            Duals(1 / self.lam, amended=self.server == "paper"),
            SAM(self.rho, self.share),
        )

    def aggregate(
        self, state: FedSpeedState, server: Tensor, replies: Replies, context: Context
    ) -> tuple[Served, FedSpeedState]:
        """Average the uploads; the release then shifts by the mean drift of all clients."""
        model = self.mean(replies)
        if state.drift is None:
            return Served(model, model), state
        drift = mean_drift(state.drift, server, replies, context.able)
        model = model + drift
        return Served(model, model), FedSpeedState(drift)
