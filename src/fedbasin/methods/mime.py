r"""MIME: clients imitate the server's optimiser, with its state frozen and their drift removed.

    phase 1: the cohort sends full-batch gradients at w;  C = sum_i p_i grad f_i(w)
    client:  G = g(v) - g(x) + C                       (both on the same batch and dropout mask)
             v <- v - eta ((1 - beta) G + beta M)      (M is not touched during local steps)
    server:  w+ = w + eta_s sum_i p_i (y_i - x),       M+ = (1 - beta) C + beta M,   M_0 = 0

`momentum` is beta: 0 is MIME SGD, above it is MIME SGDm. At v = x every batch gives G = C, so one
local step is a step of gradient descent on the cohort's objective whatever the batch.

What to watch. This is the paper's damped momentum. Code with U = G + beta M (torch, optax, fedjax)
needs eta (1 - beta) in place of ours: a learning rate copied from there is 10 times off at 0.9.
`damped=False` takes such a rate as it is.

Departures from the paper: the full gradient is taken without augmentation and dropout, and weight
decay is in neither G nor M but added by the local optimiser. Clients drop out before phase 1 or
not at all.
Cost: three models down (w, M, C; two without momentum), two up (gradient, y_i), in two messages;
two backward passes a step and one more pass over the data; one model on the server.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbasin.core.bounds import above, within
from fedbasin.core.catalogue import entry
from fedbasin.core.method import Averaging, Context, Replies, Served
from fedbasin.core.net import Net
from fedbasin.core.protocols import NeedsGradients
from fedbasin.core.rule import Gradient, LocalRule, Rules, Setting, Start
from fedbasin.core.space import Range
from fedbasin.core.vectors import Weighting, shares, weighted_mean
from fedbasin.local.step import other_loss
from fedbasin.methods.parts.client_momentum import (
    ClientMomentum,
    SharedMomentum,
    UndampedMomentum,
    frozen_momentum,
)


class CohortGradient(NamedTuple):
    """What the server sends after phase 1."""

    mean: Tensor  # [P] C


class Recentring(NamedTuple):
    """What the rule carries through the steps."""

    anchor: Tensor  # [P] x
    mean: Tensor  # [P] C


@dataclass(frozen=True)
class Recentred(LocalRule):
    """Replace the batch's gradient at x by the cohort's: g(v) - g(x) + C."""

    def begin(self, start: Start, net: Net) -> Recentring:
        """Remember where the round started."""
        return Recentring(start.vector, start.shared.mean)

    def direction(
        self, carry: Recentring, vector: Tensor, gradient: Gradient
    ) -> tuple[Tensor, Recentring]:
        """Take both gradients of this batch; the first counts for loss and statistics."""
        here = gradient(vector)
        return here - gradient(carry.anchor) + carry.mean, carry


@dataclass(frozen=True)
class MimeState:
    """What the server remembers."""

    momentum: Tensor  # [P] M


class MimeNotes(NamedTuple):
    """What a round leaves in the record."""

    gradient_norm: Tensor  # |C|


@entry(
    "method",
    paper="Karimireddy et al., NeurIPS 2021",
    url="https://arxiv.org/abs/2008.03606",
    needs=("row_losses",),
    is_fedavg_when="never: every step is recentred on the cohort's gradient",
    down=3.0,
    up=2.0,
    tunable={"momentum": Range(0.0, 0.95), "server_lr": Range(0.3, 3.0, "log")},
)
@dataclass(frozen=True)
class Mime(NeedsGradients, Averaging):
    """Clients take the server's momentum steps, recentred on the cohort's gradient.

    Args:
        momentum: beta in [0, 1); 0 is MIME SGD (two models down).
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

    def init(self, server: Tensor, context: Context) -> MimeState:
        """Start with M = 0."""
        return MimeState(torch.zeros_like(server))

    def own_rules(self) -> tuple[LocalRule, ...]:
        """Return the momentum, where there is any, around the recentred gradient."""
        momentum = ClientMomentum() if self.damped else UndampedMomentum()
        return (momentum, Recentred()) if self.momentum else (Recentred(),)

    def own_broadcast(self, state: MimeState, server: Tensor, context: Context) -> tuple[Any, ...]:
        """Send M and C beside the model."""
        sent = CohortGradient(self._gradient(server, context))
        if not self.momentum:
            return (sent,)
        return SharedMomentum(state.momentum, server.new_tensor(1 - self.momentum)), sent

    def cautions(self, setting: Setting) -> Iterator[str]:
        """Name a second momentum and a second loss."""
        yield from super().cautions(setting)
        yield from frozen_momentum(setting)
        yield from other_loss(self.rules())

    def aggregate(
        self, state: MimeState, server: Tensor, replies: Replies, context: Context
    ) -> tuple[Served, MimeState]:
        """Step along the mean update, and renew the momentum from the gradients of phase 1."""
        model = self.stepped(server, self.mean(replies))
        gradient = self._gradient(server, context)
        momentum = (1 - self.momentum) * gradient + self.momentum * state.momentum
        return Served(model, model, MimeNotes(gradient.norm())), MimeState(momentum)

    def _gradient(self, server: Tensor, context: Context) -> Tensor:
        """Return C; zero in a round to which no client comes."""
        if context.probe is None:
            return torch.zeros_like(server)
        return weighted_mean(context.probe.gradients, shares(context.probe.weights, self.weighting))
