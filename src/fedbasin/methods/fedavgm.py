r"""FedAvgM: momentum on the server.

    d  = inner(w, replies) - w          (the round's update)
    v+ = momentum v + d,                v_0 = 0
    w+ = w + lr v+

The learning rate stands outside the buffer, as in torch's SGD. An update that stays the same
is taken 1 / (1 - momentum) times in the end; the form that averages, (1 - momentum) d, is this
one with lr scaled by 1 - momentum.

Departures from the paper: none known; any inner method gives the update.
Cost: none for clients. Server: O(P) a round, one model of memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedbasin.core.bounds import above, within
from fedbasin.core.catalogue import entry
from fedbasin.core.method import Context, Method, Replies, Served, Wrapper
from fedbasin.core.space import Range
from fedbasin.methods.fedavg import FedAvg


@dataclass(frozen=True)
class FedAvgMState:
    """What the server remembers."""

    speed: Tensor  # [P] v


@entry(
    "method",
    paper="Hsu et al., 2019",
    url="https://arxiv.org/abs/1909.06335",
    is_fedavg_when={"momentum": 0.0, "lr": 1.0},
    tunable={"lr": Range(0.1, 3.0, "log"), "momentum": Range(0.0, 0.95)},
)
@dataclass(frozen=True)
class FedAvgM(Wrapper):
    """Server momentum over the updates of any method.

    Args:
        inner: the method that makes each round's update.
        lr: the server's learning rate, eta_s; 0.1 or 1 in WIMA's experiments.
        momentum: beta, the share of the last step that is kept; 0 with lr = 1 is the inner method.
    """

    inner: Method = field(default_factory=FedAvg)
    lr: float = above(0, default=1.0)
    momentum: float = within("[0, 1)", default=0.9)

    def begin(self, server: Tensor, context: Context) -> FedAvgMState:
        """Start at rest."""
        return FedAvgMState(torch.zeros_like(server))

    def step(
        self, own: FedAvgMState, server: Tensor, fresh: Served, replies: Replies, context: Context
    ) -> tuple[Served, FedAvgMState]:
        """Add the update to the speed and move by it."""
        speed = self.momentum * own.speed + (fresh.send - server)
        return fresh.moved(server + self.lr * speed), FedAvgMState(speed)
