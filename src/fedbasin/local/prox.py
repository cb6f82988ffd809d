"""The proximal term: stay near the model that was received."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fedbasin.core.bounds import at_least
from fedbasin.core.catalogue import entry
from fedbasin.core.net import Net
from fedbasin.core.rule import Gradient, LocalRule, Start


class ProxCarry(NamedTuple):
    """What the rule holds on to during a round."""

    anchor: Tensor  # [P] the received model, x


@entry("rule", paper="Li et al., MLSys 2020", url="https://arxiv.org/abs/1812.06127")
@dataclass(frozen=True)
class Prox(LocalRule):
    """Pull the client towards the model it received: g + mu (v - x).

    That is the gradient of ``loss(v) + mu/2 |v - x|^2``, added outside the backward pass so
    that it is clipped with the gradient and leaves weight decay alone.

    Args:
        mu: strength of the pull; 0 is plain SGD.
    """

    mu: float = at_least(0, default=0.01)

    @property
    def proximal_mu(self) -> float:
        """The strength mu."""
        return self.mu

    def begin(self, start: Start, net: Net) -> ProxCarry:
        """Remember where the round started."""
        return ProxCarry(start.vector)

    def direction(
        self, carry: ProxCarry, vector: Tensor, gradient: Gradient
    ) -> tuple[Tensor, ProxCarry]:
        """Add the pull."""
        return gradient(vector) + self.mu * (vector - carry.anchor), carry
