r"""FedExP: a server step that is longer the more the clients' updates disagree.

    d     = inner(w, replies) - w,   d_i = y_i - w        (the round's update; m clients)
    eta_g = max(1, sum_i p_i |d_i|^2 / (2 (|d|^2 + m eps)))
    w+    = w + eta_g d              (broadcast)
    scored is (w + w+) / 2 from the second round on: the last iterate swings around the optimum

Norms are over all parameters of the model. p_i is the weighting of the base method. If all
clients agree, eta_g = 1; if their updates are orthogonal and equally long, it is m/2.

Departures from the paper: it prints sum_i |d_i|^2 / (2 m (|d|^2 + eps)), so its eps is m times
ours. The authors' code also scales eps by the square of the
clients' learning-rate decay, because d_i shrinks with it (``follow_lr=True``). In rounds whose
inner method is not a mean (SCAFFOLD with eta_g != 1, server optimisers), d is what it gives.
Cost: none for clients (|d_i|^2 where the server may not see models). Server: O(C P) a round, no
memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fedbasin.core.bounds import at_least
from fedbasin.core.catalogue import entry
from fedbasin.core.method import Context, Method, Replies, Served, Wrapper
from fedbasin.core.space import Range
from fedbasin.core.vectors import shares
from fedbasin.methods.fedavg import FedAvg


@dataclass(frozen=True)
class FedExPState:
    """What the server remembers."""

    first_lr: float  # the clients' learning rate in the first round


class FedExPNotes(NamedTuple):
    """What a round leaves in the record."""

    server_lr: Tensor  # eta_g


@entry(
    "method",
    paper="Jhunjhunwala et al., ICLR 2023",
    url="https://arxiv.org/abs/2301.09604",
    is_fedavg_when={"eps": float("inf"), "average": False},
    tunable={"eps": Range(1e-5, 0.1, "log")},
)
@dataclass(frozen=True)
class FedExP(Wrapper):
    """Extrapolate the update of any method by as much as the clients disagree.

    Args:
        inner: the method that makes each round's update.
        eps: keeps eta_g small while updates are short; infinity is the inner method.
        average: whether the mean of the last two iterates is scored.
        follow_lr: whether eps falls with the square of the clients' learning rate.
    """

    inner: Method = field(default_factory=FedAvg)
    eps: float = at_least(0, default=1e-3)
    average: bool = True
    follow_lr: bool = False

    @property
    def averages(self) -> bool:  # type: ignore[override]
        """Whether the scored model is a mean of two."""
        return self.average

    def begin(self, server: Tensor, context: Context) -> FedExPState:
        """Start without a learning rate to compare with."""
        return FedExPState(0.0)

    def streams(self) -> None:
        """Every reply counts."""
        return None

    def step(
        self, own: FedExPState, server: Tensor, fresh: Served, replies: Replies, context: Context
    ) -> tuple[Served, FedExPState]:
        """Step further along the update, and score the middle of the step."""
        own = FedExPState(own.first_lr or context.lr)
        update = fresh.send - server
        server_lr = self._server_lr(own.first_lr, server, update, replies, context)
        served = fresh.moved(server + server_lr.to(server.dtype) * update)
        if self.average and context.round > 0:
            back = (served.send - server) / 2
            served = replace(served, score=served.score - back)
        return served.noted(FedExPNotes(server_lr)), own

    def _server_lr(
        self, first_lr: float, server: Tensor, update: Tensor, replies: Replies, context: Context
    ) -> Tensor:
        """Return eta_g as a 0-d float64 tensor."""
        decay = context.lr / first_lr if self.follow_lr and first_lr else 1.0
        share = shares(replies.weights, getattr(self.base, "weighting", "samples"))
        norms = (replies.models - server).square().sum(1).double()
        clients = (replies.weights > 0).sum().double()
        below = 2 * (update.square().sum().double() + clients * self.eps * decay**2)
        ratio = torch.where(below > 0, share @ norms / below, 1.0)
        return ratio.clamp(min=1)
