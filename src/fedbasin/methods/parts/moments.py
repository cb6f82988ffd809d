"""What adaptive server optimisers share: two moments of the round's update, and the step.

With d = inner's model - w, the round's update (downhill, minus the papers' pseudo-gradient):

    m <- beta1 m + (1 - beta1) d
    w <- w + lr m / (sqrt(v) + tau)

How v follows d^2 is what sets FedAdam, FedYogi and FedAdagrad apart. There is no bias correction,
and tau stands outside the root, as in the paper.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedbasin.core.method import Context, Method, Replies, Served, Wrapped, Wrapper
from fedbasin.core.protocols import StartsLate, shared_prefix, state_from_prefix

First = Literal["tau", "zero"]


@dataclass(frozen=True)
class Moments:
    """What the server remembers."""

    mean: Tensor  # [P] m
    square: Tensor  # [P] v
    rounds: int = 0  # how many had begun by the last step

    @classmethod
    def begin(cls, server: Tensor, tau: float, first: First) -> Moments:
        """Start with m = 0 and v = tau^2 (the paper) or v = 0."""
        square = tau * tau if first == "tau" else 0.0
        return cls(torch.zeros_like(server), torch.full_like(server, square))

    def renewed(self, update: Tensor, beta1: float, square: Tensor, round: int) -> Moments:
        """Return the moments after an update d [P] in a round, with the new v given."""
        return Moments(beta1 * self.mean + (1 - beta1) * update, square, round + 1)

    def step(self, lr: float, tau: float) -> Tensor:
        """Return how far the server moves [P]."""
        return lr * self.mean / (self.square.sqrt() + tau)


class AdaptiveServer(StartsLate, Wrapper):
    """A server that divides its step by the root of a second moment.

    Subclasses have the fields ``inner``, ``lr``, ``beta1``, ``tau`` and ``first``, where wanted
    ``restart``, and say in `square` how v follows the update.
    """

    lr: float
    beta1: float
    tau: float
    first: First
    restart: float = 1.0

    @abstractmethod
    def square(self, before: Tensor, update: Tensor) -> Tensor:
        """Return v+ [P] from v and d."""

    def begin(self, server: Tensor, context: Context) -> Moments:
        """Start with m = 0 and v = v_0."""
        return Moments.begin(server, self.tau, self.first)

    def shared_prefix(self, rounds: int) -> tuple[Method, int]:
        """Until the restart, equal the same server without one."""
        inner, common = shared_prefix(self.inner, rounds)
        plain = self if self.restart == 1 else replace(self, restart=1.0)  # type: ignore[type-var]
        parted = restart_round(self.restart, rounds)
        return replace(plain, inner=inner), min(common, parted)  # type: ignore[type-var]

    def state_from_prefix(self, state: Wrapped, server: Tensor, context: Context) -> Wrapped:
        """Keep the moments."""
        inner = state_from_prefix(self.inner, state.inner, server, context)
        return Wrapped(state.own, inner)

    def step(
        self, own: Moments, server: Tensor, fresh: Served, replies: Replies, context: Context
    ) -> tuple[Served, Moments]:
        """Renew the moments, then move along the first over the root of the second."""
        if restarts(own, self.restart, context):
            own = self.begin(server, context)
        update = fresh.send - server
        own = own.renewed(update, self.beta1, self.square(own.square, update), context.round)
        return fresh.moved(server + own.step(self.lr, self.tau)), own


def restarts(moments: Moments, share: float, context: Context) -> bool:
    """Whether this is the first step in or after the round of a restart, which may be empty."""
    return moments.rounds <= restart_round(share, context.rounds) <= context.round


def restart_round(share: float, rounds: int) -> int:
    """Return the round before whose update the moments are forgotten."""
    return int(share * rounds + 1e-9)
