r"""FedACG: clients start where the server's momentum is about to take them.

    server sends  x = w + lambda m
    client:       v <- v - eta (g(v) + beta (v - x))
    server:       m+ = lambda m + sum_i p_i d_i,   d_i = y_i - x,   m_0 = 0
                  w+ = w + m+ = sum_i p_i y_i

so the look-ahead adds Nesterov's momentum without a message, and the scored model w is the plain
mean of what clients send.

Departures from the paper: the pull has the factor 1/2 in the objective, beta/2 |v - x|^2 (the
authors' code lacks it: their beta is half of ours).
Cost: one model down, one up; one model on the server.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedbasin.core.bounds import at_least, within
from fedbasin.core.catalogue import entry
from fedbasin.core.method import Averaging, Context, Served
from fedbasin.core.rule import LocalRule, Rules
from fedbasin.core.space import Range
from fedbasin.core.vectors import Weighting
from fedbasin.local.prox import Prox


@dataclass(frozen=True)
class FedACGState:
    """What the server remembers."""

    momentum: Tensor  # [P] m


@entry(
    "method",
    paper="Kim et al., CVPR 2024",
    url="https://arxiv.org/abs/2201.03172",
    is_fedavg_when={"momentum": 0.0, "beta": 0.0},
    tunable={"momentum": Range(0.0, 0.95), "beta": Range(0.001, 1.0, "log")},
)
@dataclass(frozen=True)
class FedACG(Averaging):
    """FedAvg from a look-ahead along the server's momentum, with a proximal term.

    Args:
        momentum: lambda in [0, 1); 0.8 to 0.9 are used in papers.
        beta: strength of the pull towards the look-ahead x; 0.01 and 0.001 are used.
        weighting: p_i by ``"uniform"`` (the paper) or ``"samples"``.
        local: further rules for the clients.
    """

    momentum: float = within("[0, 1)", default=0.85)
    beta: float = at_least(0, default=0.01)
    weighting: Weighting = "uniform"
    local: Rules = ()

    def init(self, server: Tensor, context: Context) -> FedACGState:
        """Start with m = 0."""
        return FedACGState(torch.zeros_like(server))

    def own_rules(self) -> tuple[LocalRule, ...]:
        """Return the pull towards where the client starts."""
        return (Prox(self.beta),)

    def serve(
        self, state: FedACGState, server: Tensor, mean: Tensor, context: Context
    ) -> tuple[Served, FedACGState]:
        """Renew the momentum and look ahead along it."""
        momentum = self.momentum * state.momentum + (mean - server)
        return Served(mean + self.momentum * momentum, mean), FedACGState(momentum)
