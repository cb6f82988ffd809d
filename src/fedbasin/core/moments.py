"""What adaptive server optimisers share: two moments of the round's update, and the step.

With d = inner's model - w, the round's update (downhill, minus the papers' pseudo-gradient):

    m <- beta1 m + (1 - beta1) d
    w <- w + lr m / (sqrt(v) + tau)

How v follows d^2 is what sets FedAdam, FedYogi and FedAdagrad apart. There is no bias correction,
and tau stands outside the root, as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedbasin.core.method import Context

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

    def renewed(self, update: Tensor, beta1: float, square: Tensor, round: int = 0) -> Moments:
        """Return the moments after an update d [P] in a round, with the new v given."""
        return Moments(beta1 * self.mean + (1 - beta1) * update, square, round + 1)

    def step(self, lr: float, tau: float) -> Tensor:
        """Return how far the server moves [P]."""
        return lr * self.mean / (self.square.sqrt() + tau)


def check(lr: float, tau: float, restart: float = 1.0, **betas: float) -> None:
    """Refuse settings that no optimiser of the family can have."""
    if not lr > 0:
        raise ValueError(f"lr must be above 0, got {lr}")
    if not tau > 0:
        raise ValueError(f"tau must be above 0, got {tau}")
    if not 0 <= restart <= 1:
        raise ValueError(f"restart is a share of the rounds, in [0, 1], got {restart}")
    for name, beta in betas.items():
        if not 0 <= beta < 1:
            raise ValueError(f"{name} must be in [0, 1), got {beta}")


def restarts(moments: Moments, share: float, context: Context) -> bool:
    """Whether this is the first step in or after the round of a restart, which may be empty."""
    return moments.rounds <= restart_round(share, context.rounds) <= context.round


def restart_round(share: float, rounds: int) -> int:
    """Return the round before whose update the moments are forgotten."""
    return int(share * rounds + 1e-9)
