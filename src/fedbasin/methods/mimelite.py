r"""MIMELite: clients take the server's momentum steps with its state frozen, in one message.

    client:  v <- v - eta ((1 - beta) g(v) + beta M)       (M is not touched during local steps)
             sends the full-batch gradient at x beside y_i
    server:  w+ = w + eta_s sum_i p_i (y_i - x)
             M+ = (1 - beta) sum_i p_i grad f_i(x) + beta M,   M_0 = 0

MIME without the recentred gradient, so nothing has to be known before training. FedCM differs in
M: there it comes from the clients' displacements, which hold M itself, here from gradients at x.

What to watch. This is the paper's damped momentum; see `mime.py` on copied learning rates.

Departures from the paper: as MIME's on augmentation, dropout and weight decay.
Cost: two models down (w, M), two up (y_i, gradient); one more pass over the client's data; one
model on the server.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedbasin.core.bounds import above, within
from fedbasin.core.catalogue import entry
from fedbasin.core.method import Averaging, Context, Replies, Served
from fedbasin.core.rule import Finish, LocalRule, Rules, Setting, Start, SurveyBatch
from fedbasin.core.space import Range
from fedbasin.core.vectors import Weighting, shares, weighted_mean
from fedbasin.local.step import other_loss, summed_gradient
from fedbasin.methods.parts.client_momentum import (
    ClientMomentum,
    SharedMomentum,
    UndampedMomentum,
    frozen_momentum,
)


class FullGradient(NamedTuple):
    """A gradient over all rows of a client: summed in the survey, the mean in the report."""

    gradient: Tensor  # [P]


@dataclass(frozen=True)
class ReportGradient(LocalRule):
    """Send the full-batch gradient at the received model."""

    surveys: ClassVar[bool] = True

    def survey(self, look: SurveyBatch) -> FullGradient:
        """Sum the gradients of all rows."""
        return FullGradient(summed_gradient(look))

    def end(self, carry: Any, start: Start, finish: Finish) -> tuple[Any, FullGradient]:
        """Report their mean."""
        return (), FullGradient(start.survey.gradient / start.examples.clamp(min=1))


@dataclass(frozen=True)
class MimeLiteState:
    """What the server remembers."""

    momentum: Tensor  # [P] M


class MimeLiteNotes(NamedTuple):
    """What a round leaves in the record."""

    gradient_norm: Tensor  # |sum_i p_i grad f_i(x)|


@entry(
    "method",
    paper="Karimireddy et al., NeurIPS 2021",
    url="https://arxiv.org/abs/2008.03606",
    needs=("row_losses",),
    is_fedavg_when={"momentum": 0.0, "server_lr": 1.0},
    down=2.0,
    up=2.0,
    tunable={"momentum": Range(0.0, 0.95), "server_lr": Range(0.3, 3.0, "log")},
)
@dataclass(frozen=True)
class MimeLite(Averaging):
    """Clients take the server's momentum steps; its momentum comes from full gradients.

    Args:
        momentum: beta in [0, 1); 0 is FedAvg.
        server_lr: eta_s, the server's step along the mean update.
        weighting: p_i by ``"uniform"`` (the paper) or ``"samples"``.
        damped: whether steps are those of the paper; if not, they are 1 / (1 - beta) times as long,
            for learning rates of code that writes G + beta M (fedjax, optax, torch).
        local: further rules for the clients.
    """

    momentum: float = within("[0, 1)", default=0.9)
    server_lr: float = above(0, default=1.0)
    weighting: Weighting = "uniform"
    damped: bool = True
    local: Rules = ()

    def init(self, server: Tensor, context: Context) -> MimeLiteState:
        """Start with M = 0."""
        return MimeLiteState(torch.zeros_like(server))

    def own_rules(self) -> tuple[LocalRule, ...]:
        """Return the momentum, and the report of the gradient."""
        momentum = ClientMomentum() if self.damped else UndampedMomentum()
        return (momentum, ReportGradient())

    def own_broadcast(
        self, state: MimeLiteState, server: Tensor, context: Context
    ) -> tuple[Any, ...]:
        """Send M beside the model."""
        return SharedMomentum(state.momentum, server.new_tensor(1 - self.momentum)), ()

    def cautions(self, setting: Setting) -> Iterator[str]:
        """Name a second momentum and a second loss."""
        yield from super().cautions(setting)
        yield from frozen_momentum(setting)
        yield from other_loss(self.rules())

    def aggregate(
        self, state: MimeLiteState, server: Tensor, replies: Replies, context: Context
    ) -> tuple[Served, MimeLiteState]:
        """Step along the mean update, and renew the momentum from the reported gradients."""
        share = shares(replies.weights, self.weighting)
        model = self.stepped(server, self.mean(replies))
        gradient = weighted_mean(replies.report(FullGradient).gradient, share)
        momentum = (1 - self.momentum) * gradient + self.momentum * state.momentum
        return Served(model, model, MimeLiteNotes(gradient.norm())), MimeLiteState(momentum)
