r"""Duals: every client remembers how far it was pulled off, and the server takes the mean of it.

    client:  v <- v - eta (g(v) - q_i + alpha_i (v - x)),      q_i+ = q_i - alpha_i (y_i - x)

minimises f_i(v) - <q_i, v> + alpha_i/2 |v - x|^2 (FedDyn, FedSpeed, FedSMOO). It is kept as the
drift r_i = -q_i / alpha_i, the sum of all the client's updates so far:

    client:  v <- v - eta (g(v) + alpha_i (v - (x - r_i))),    r_i+ = r_i + (y_i - x)
    server:  s = 1/N sum over ALL clients of r_i,              s+ = s + 1/N sum_{i in S} (y_i - x)

so a dual is a proximal term with another centre, and the server needs no alpha. N counts the
clients that hold rows: others never move their r_i.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedbasin.core.method import Replies
from fedbasin.core.net import Net
from fedbasin.core.rule import Finish, Gradient, LocalRule, Setting, Start, rescaled
from fedbasin.core.vectors import weighted_mean


class Drift(NamedTuple):
    """What a client keeps."""

    total: Tensor  # [P] r_i


class MeanClientSize(NamedTuple):
    """What the server tells clients where the pull goes by how much data they hold."""

    examples: Tensor  # 0-d, the mean of n_i


class DualCarry(NamedTuple):
    """What the rule carries through the steps."""

    alpha: Tensor  # 0-d, alpha_i
    centre: Tensor  # [P] x - r_i


@dataclass(frozen=True)
class Duals(LocalRule):
    """Pull the client towards x - r_i, then add its update to r_i.

    Args:
        alpha: strength of the pull; with a broadcast `MeanClientSize`, that of a mean client.
        amended: whether y_i + r_i+ is sent in place of y_i.
    """

    alpha: float
    amended: bool = False

    def __post_init__(self) -> None:
        if not self.alpha > 0:
            raise ValueError(f"the pull must be above 0, got {self.alpha}")

    def client_state(self, vector: Tensor) -> Drift:
        """Start with r_i = 0."""
        return Drift(torch.zeros_like(vector))

    def begin(self, start: Start, net: Net) -> DualCarry:
        """Form the centre once."""
        alpha = torch.full_like(start.examples, self.alpha)
        if start.shared:
            alpha = alpha * start.shared.examples / start.examples.clamp(min=1)
        return DualCarry(alpha, start.vector - start.client_state.total)

    def direction(
        self, carry: DualCarry, vector: Tensor, gradient: Gradient
    ) -> tuple[Tensor, DualCarry]:
        """Add the pull, at the unperturbed point."""
        return gradient(vector) + carry.alpha * (vector - carry.centre), carry

    def upload(self, carry: DualCarry, start: Start, finish: Finish) -> Tensor:
        """Return y_i, or y_i + r_i+."""
        if not self.amended:
            return finish.vector
        drift: Tensor = start.client_state.total + (finish.vector - start.vector)
        return finish.vector + drift

    def end(self, carry: DualCarry, start: Start, finish: Finish) -> tuple[Drift, tuple[()]]:
        """Add this round's update to the drift."""
        return Drift(start.client_state.total + (finish.vector - start.vector)), ()

    def cautions(self, setting: Setting) -> Iterator[str]:
        """Name what local momentum and an adaptive optimiser do to the pull."""
        yield from rescaled(setting, "the pull alpha (v - x + r_i)")
        if setting.momentum:
            yield (
                f"local.momentum = {setting.momentum} takes the pull alpha (v - x + r_i) "
                f"{1 / (1 - setting.momentum):.3g} times; the paper has no local momentum"
            )


def mean_drift(before: Tensor, server: Tensor, replies: Replies, clients: int) -> Tensor:
    """Return s+ [P], the mean of all clients' r_i after a cohort has moved its own."""
    counted = (replies.weights > 0).to(server.dtype)
    return before + weighted_mean(replies.models - server, counted / clients)
