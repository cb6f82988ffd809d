r"""MoFedSAM: FedCM whose clients take their gradients a little way uphill.

    client:  e = rho g(v)/|g(v)|,   v <- v - eta (alpha g(v + e) + (1 - alpha) M)
    server:  w+ = w + eta_g sum_i p_i d_i,           d_i = y_i - x
             M+ = - sum_i p_i d_i / (eta K_i),       M_0 = 0

The same as `fedcm(alpha, local=sam(rho))`: the perturbation acts inside the mixture. What FedCM's
file says about unequal steps, weight decay and adaptive optimisers holds here too.

Departures from the paper: those of FedCM. A public copy drops alpha before g(v + e); ours has it.
Cost: two models down (w, M), one up; two backward passes a step; one model on the server.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbasin.core.bounds import above, at_least, within
from fedbasin.core.catalogue import entry
from fedbasin.core.method import Averaging, Context, Replies, Served
from fedbasin.core.rule import LocalRule, Rules, Setting
from fedbasin.core.space import Range
from fedbasin.core.vectors import Weighting, shares
from fedbasin.local.sharpness import SAM
from fedbasin.methods.parts.client_momentum import (
    ClientMomentum,
    SharedMomentum,
    mean_direction,
    unequal_steps,
)


@dataclass(frozen=True)
class MoFedSAMState:
    """What the server remembers."""

    momentum: Tensor  # [P] M


class MoFedSAMNotes(NamedTuple):
    """What a round leaves in the record."""

    momentum_norm: Tensor  # |M|, of the next broadcast


@entry(
    "method",
    paper="Qu et al., ICML 2022",
    url="https://arxiv.org/abs/2206.02618",
    needs=("plain_sgd",),
    is_fedavg_when={"rho": 0.0, "alpha": 1.0, "server_lr": 1.0},
    down=2.0,
    tunable={"rho": Range(0.01, 1.0, "log"), "alpha": Range(0.03, 1.0, "log")},
)
@dataclass(frozen=True)
class MoFedSAM(Averaging):
    """Sharpness-aware clients with the server's momentum inside every step.

    Args:
        rho: how far uphill; 0 is FedCM.
        alpha: the gradient's share in a step; 1 is FedSAM, 0.05 and 0.1 are used in papers.
        server_lr: eta_g, the server's step along the mean update.
        weighting: p_i by ``"uniform"`` (the paper) or ``"samples"``.
        local: further rules for the clients.
    """

    rho: float = at_least(0, default=0.1)
    alpha: float = within("(0, 1]", words="must be above 0 and at most 1", default=0.1)
    server_lr: float = above(0, default=1.0)
    weighting: Weighting = "uniform"
    local: Rules = ()

    def init(self, server: Tensor, context: Context) -> MoFedSAMState:
        """Start with M = 0."""
        return MoFedSAMState(torch.zeros_like(server))

    def own_rules(self) -> tuple[LocalRule, ...]:
        """Return the mixture and, inside it, the perturbation."""
        return (ClientMomentum(), SAM(self.rho))

    def own_broadcast(
        self, state: MoFedSAMState, server: Tensor, context: Context
    ) -> tuple[Any, ...]:
        """Send M beside the model."""
        return SharedMomentum(state.momentum, server.new_tensor(self.alpha)), ()

    def cautions(self, setting: Setting) -> Iterator[str]:
        """Name unequal steps, which the method does not foresee."""
        yield from super().cautions(setting)
        yield from unequal_steps(setting)

    def aggregate(
        self, state: MoFedSAMState, server: Tensor, replies: Replies, context: Context
    ) -> tuple[Served, MoFedSAMState]:
        """Step along the mean update and turn it into the next momentum."""
        share = shares(replies.weights, self.weighting)
        model = self.stepped(server, self.mean(replies))
        momentum = mean_direction(replies, share, server)
        return Served(model, model, MoFedSAMNotes(momentum.norm())), MoFedSAMState(momentum)
