"""Where the gradient is taken: a little way up, so that flat minima are found (SAM and kin).

All norms are over the whole vector, not one for each tensor. These rules act inside those that
correct the gradient, and the second pass of a step counts no statistics twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedbasin.core.bounds import at_least, within
from fedbasin.core.catalogue import entry
from fedbasin.core.net import Net
from fedbasin.core.rule import Finish, Gradient, Layer, LocalRule, Start

_TINY = 1e-12


def of_length(rho: float, vector: Tensor) -> Tensor:
    """Return a vector [P] stretched to the length rho; zero stays zero."""
    scale: Tensor = rho / (vector.norm() + _TINY)
    return vector * scale


@entry("rule", paper="Foret et al., ICLR 2021", url="https://arxiv.org/abs/2010.01412")
@dataclass(frozen=True)
class SAM(LocalRule):
    """Take the gradient at v + rho g/|g|, on the same batch.

    Args:
        rho: how far up; 0 is plain SGD.
        share: a in (1 - a) g(v) + a g(v + e), which FedSpeed mixes; 1 is SAM.
    """

    layer: ClassVar[Layer] = "perturb"
    rho: float = at_least(0, default=0.1)
    share: float = within("[0, 1]", default=1.0)

    def direction(
        self, carry: tuple[()], vector: Tensor, gradient: Gradient
    ) -> tuple[Tensor, tuple[()]]:
        """Climb, and return the gradient from there."""
        here = gradient(vector)
        there = gradient(vector + of_length(self.rho, here))
        return there if self.share == 1 else here + self.share * (there - here), carry


class Adapted(NamedTuple):
    """What ASAM carries through the steps."""

    scaled: Tensor  # bool [P], whether an element's reach grows with its size


@entry("rule", paper="Kwon et al., ICML 2021", url="https://arxiv.org/abs/2102.11600")
@dataclass(frozen=True)
class ASAM(LocalRule):
    """Take the gradient at v + rho T^2 g/|T g|: large weights are moved further.

    T = |v| + eta for tensors whose name holds "weight" (those of normalisation layers too, as
    in the authors' code) and 1 for the others; it follows v from step to step.

    Args:
        rho: how far up, in units of the scaled space; 0 is plain SGD.
        eta: reach of a weight of size zero.
    """

    layer: ClassVar[Layer] = "perturb"
    rho: float = at_least(0, default=0.7)
    eta: float = at_least(0, default=0.2)

    def begin(self, start: Start, net: Net) -> Adapted:
        """Mark the weights."""
        names = [name for name in net.layout.names if "weight" in name]
        return Adapted(net.layout.mask(names, start.vector).bool())

    def direction(
        self, carry: Adapted, vector: Tensor, gradient: Gradient
    ) -> tuple[Tensor, Adapted]:
        """Climb in the scaled space, and return the gradient from there."""
        scale = torch.where(carry.scaled, vector.abs() + self.eta, 1.0)
        return gradient(vector + scale * of_length(self.rho, scale * gradient(vector))), carry


class LastSeen(NamedTuple):
    """What a client of LESAM keeps."""

    model: Tensor  # [P] o_i, the model it received when it last took part
    known: Tensor  # 0-d, 1 once there is one


class Fixed(NamedTuple):
    """What LESAM carries through the steps."""

    shift: Tensor  # [P] e


@entry("rule", paper="Fan et al., ICML 2024", url="https://arxiv.org/abs/2405.18890")
@dataclass(frozen=True)
class LESAM(LocalRule):
    """Take the gradient at v + rho (o_i - x)/|o_i - x|, o_i the model received the time before.

    The global model came from o_i to x downhill, so the way back is up; it costs no second pass.
    A client's first round is plain SGD.

    Args:
        rho: how far up; 0 is plain SGD.
    """

    layer: ClassVar[Layer] = "perturb"
    rho: float = at_least(0, default=0.1)

    def client_state(self, vector: Tensor) -> LastSeen:
        """Start without a model."""
        return LastSeen(torch.zeros_like(vector), vector.new_zeros(()))

    def begin(self, start: Start, net: Net) -> Fixed:
        """Form the perturbation once."""
        last = start.client_state
        return Fixed(last.known * of_length(self.rho, last.model - start.vector))

    def direction(self, carry: Fixed, vector: Tensor, gradient: Gradient) -> tuple[Tensor, Fixed]:
        """Return the gradient at the perturbed point."""
        return gradient(vector + carry.shift), carry

    def end(self, carry: Fixed, start: Start, finish: Finish) -> tuple[LastSeen, tuple[()]]:
        """Remember the model that was received."""
        return LastSeen(start.vector, torch.ones_like(start.client_state.known)), ()
