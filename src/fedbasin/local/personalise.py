"""Fine-tuning at home: how a client trains a copy of the final model before it is scored.

This is the plainest way to personalise (FedAvg + fine-tuning; Yu, Bagdasaryan and Shmatikov 2020),
and hard to beat. Nothing of it is sent to the server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from fedbasin.core.bounds import Bounded, at_least
from fedbasin.core.catalogue import entry
from fedbasin.core.method import Plan
from fedbasin.core.net import Net
from fedbasin.core.rule import LocalRule, Start


class _Before(NamedTuple):
    vector: Tensor  # [P] the model that was received


@dataclass(frozen=True)
class HeadOnly(LocalRule):
    """Train the last linear layer; the rest stays as it was received."""

    def begin(self, start: Start, net: Net) -> _Before:
        """Keep the received model."""
        return _Before(start.vector)

    def after_step(self, carry: _Before, vector: Tensor, net: Net) -> tuple[Tensor, Any]:
        """Put back all but the head, whatever the optimiser did to it."""
        return net.layout.mix("head", vector, carry.vector), carry


@dataclass(frozen=True)
class Personalisation(Bounded):
    """How long a client trains at home, and what of the network.

    Args:
        count: epochs or steps.
        head: train the last linear layer alone.
        lr: learning rate; 0 is `local.lr`.
    """

    count: int = at_least(1, default=1)
    head: bool = False
    lr: float = at_least(0, default=0.0)

    def rules(self) -> tuple[LocalRule, ...]:
        """Return what restricts the training."""
        return (HeadOnly(),) if self.head else ()

    def plan(self, lr: float) -> Plan:
        """Return the plan of a client, given `local.lr`."""
        raise NotImplementedError


@entry("personalisation", name="epochs")
@dataclass(frozen=True)
class Epochs(Personalisation):
    """Passes over the client's rows.

    Args:
        count: how many.
        head: train the last linear layer alone.
        lr: learning rate; 0 is `local.lr`.
    """

    def plan(self, lr: float) -> Plan:
        """Return a plan of epochs."""
        return Plan(self.lr or lr, self.count)


@entry("personalisation", name="steps")
@dataclass(frozen=True)
class Steps(Personalisation):
    """Mini-batches.

    Args:
        count: how many.
        head: train the last linear layer alone.
        lr: learning rate; 0 is `local.lr`.
    """

    def plan(self, lr: float) -> Plan:
        """Return a plan of steps."""
        return Plan(self.lr or lr, None, self.count)
