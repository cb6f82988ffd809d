"""Momentum kept between rounds, as if each client's optimiser were made once for the run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from fedbasin.core.bounds import at_least, within
from fedbasin.core.catalogue import entry
from fedbasin.core.net import Net
from fedbasin.core.rule import Finish, Gradient, Layer, LocalRule, Setting, Start


class SavedMomentum(NamedTuple):
    """What a client keeps from its last step to its next round."""

    momentum: Tensor  # [P] m


@entry("rule", name="kept_momentum")
@dataclass(frozen=True)
class KeptMomentum(LocalRule):
    """Step along m <- beta m + g + decay v, with m kept from the client's last round.

    It is torch's SGD where the optimiser lives through the run; `local.momentum`, which starts at
    zero in every round, stays 0 beside it, and so does `local.weight_decay`. FedNova, FedCM and
    FedWCM divide updates by plain steps and do not know of it.

    Args:
        beta: share of the last direction that is kept, in [0, 1).
        decay: weight decay, inside the momentum as in torch.
    """

    layer: ClassVar[Layer] = "keep"
    beta: float = within("[0, 1)", default=0.9)
    decay: float = at_least(0, default=0.0)

    def client_state(self, vector: Tensor) -> SavedMomentum:
        """Begin at rest."""
        return SavedMomentum(vector.new_zeros(vector.shape))

    def begin(self, start: Start, net: Net) -> SavedMomentum:
        """Start with the momentum of the last round."""
        kept: SavedMomentum = start.client_state
        return kept

    def direction(
        self, carry: SavedMomentum, vector: Tensor, gradient: Gradient
    ) -> tuple[Tensor, SavedMomentum]:
        """Add this step's gradient to what is kept."""
        momentum = self.beta * carry.momentum + gradient(vector) + self.decay * vector
        return momentum, SavedMomentum(momentum)

    def end(
        self, carry: SavedMomentum, start: Start, finish: Finish
    ) -> tuple[SavedMomentum, tuple[()]]:
        """Keep the momentum."""
        return carry, ()

    def cautions(self, setting: Setting) -> Iterator[str]:
        """Say why a second momentum or decay counts twice."""
        if setting.adaptive:
            yield (
                f"local.optimiser = {setting.adaptive} keeps a momentum of its own of what "
                "kept_momentum gives; take the optimiser sgd, or drop the rule"
            )
        for name in ("momentum", "weight_decay"):
            if value := getattr(setting, name):
                yield (
                    f"local.{name} = {value} comes on top of what kept_momentum does; "
                    f"set local.{name} = 0 and give it to the rule"
                )
