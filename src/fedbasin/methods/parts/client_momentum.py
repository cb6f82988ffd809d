r"""Client momentum: every local step leans towards the direction the cohorts moved before.

    client:  v <- v - eta c_i (alpha g(v) + (1 - alpha) M)          (eta c_i is a learning rate)
    server:  M+ = sum_i w_i (x - y_i) / (eta a_i c_i)

where M is the server's momentum in the units of a gradient, a_i is how many gradients client i's
displacement x - y_i adds up to (its steps K_i under plain SGD) and c_i evens out step counts:
1, or Khat / K_i where the method broadcasts a standard number of steps Khat. Hence
M+ = alpha sum_i w_i gbar_i + (1 - alpha) M with gbar_i the mean of the client's gradients: an
exponential moving average, for any K_i and any learning rate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedbasin.core.method import Context, Replies
from fedbasin.core.net import Net
from fedbasin.core.rule import Gradient, LocalRule, Setting, Start
from fedbasin.core.vectors import weighted_mean

Counted = Literal["steps", "rows"]  # what a displacement is divided by


class SharedMomentum(NamedTuple):
    """What the server broadcasts beside the model."""

    momentum: Tensor  # [P] M
    alpha: Tensor  # 0-d, the gradient's share in a step
    steps: Tensor | None = None  # 0-d, Khat, for `EvenMomentum`


class MomentumCarry(NamedTuple):
    """What the rule carries through the steps."""

    alpha: Tensor  # 0-d
    pull: Tensor  # [P] (1 - alpha) M


class EvenCarry(NamedTuple):
    """The same, of a client whose steps are evened out."""

    alpha: Tensor  # 0-d
    pull: Tensor  # [P]
    even: Tensor  # 0-d, c_i


@dataclass(frozen=True)
class ClientMomentum(LocalRule):
    """Step along alpha g + (1 - alpha) M; both come with the broadcast."""

    def begin(self, start: Start, net: Net) -> MomentumCarry | EvenCarry:
        """Form the constant part of every step once."""
        shared: SharedMomentum = start.shared
        return MomentumCarry(shared.alpha, (1 - shared.alpha) * shared.momentum)

    def direction(
        self, carry: MomentumCarry, vector: Tensor, gradient: Gradient
    ) -> tuple[Tensor, MomentumCarry]:
        """Mix the gradient with the momentum."""
        return carry.alpha * gradient(vector) + carry.pull, carry


@dataclass(frozen=True)
class UndampedMomentum(ClientMomentum):
    """Step along g + (1 - alpha) / alpha M: 1 / alpha times as far, as torch and optax write it."""

    def begin(self, start: Start, net: Net) -> MomentumCarry:
        """Form the constant part of every step once."""
        alpha = start.shared.alpha
        return MomentumCarry(torch.ones_like(alpha), (1 - alpha) / alpha * start.shared.momentum)


@dataclass(frozen=True)
class EvenMomentum(ClientMomentum):
    """The same at a rate that evens out the clients' numbers of steps."""

    def begin(self, start: Start, net: Net) -> EvenCarry:
        """Form c_i = Khat / K_i too."""
        alpha, pull, *_ = super().begin(start, net)
        return EvenCarry(alpha, pull, start.shared.steps / start.steps.clamp(min=1))

    def lr_factor(self, carry: EvenCarry) -> Tensor:
        """Take every step at the rate eta c_i: gradient, momentum and weight decay."""
        return carry.even


def unequal_steps(setting: Setting) -> Iterator[str]:
    """Say why momentum from clients with different numbers of steps leans to the largest."""
    if setting.ragged:
        yield (
            "clients take different numbers of steps, and those with most rows follow the momentum "
            "most; give local.steps, or take fedwcm(unequal=True)"
        )


def counted_rows(counted: Counted) -> Iterator[str]:
    """Say what comes of counting steps by rows."""
    if counted == "rows":
        yield (
            "counted='rows' lets the momentum grow without bound where an epoch's last batch is "
            "far from full; watch note_momentum_norm, or write counted='steps'"
        )


def frozen_momentum(setting: Setting) -> Iterator[str]:
    """Say why a momentum of the local optimiser has no place beside a frozen one."""
    if setting.adaptive:
        yield (
            f"local.optimiser = {setting.adaptive} has a state that changes in every step, while "
            "the server's must stay frozen; take the optimiser sgd"
        )
    if setting.momentum:
        yield (
            f"local.momentum = {setting.momentum} is a second momentum that changes in every step, "
            "while the server's must stay frozen; set local.momentum = 0"
        )


def steps_counted(counted: Counted, replies: Replies, context: Context) -> Tensor | None:
    """Return what stands for the steps K_i [C]: nothing, or whole batches of rows, E n_i / B.

    Where the last batch of an epoch is not full these are fewer than the steps taken, and M+ comes
    out K_i B / (E n_i) times too long: above 1 / (1 - alpha), M grows without bound.
    """
    if counted == "steps":
        return None
    if context.plan is None or context.plan.epochs is None or context.batch < 1:
        raise ValueError("counted='rows' needs local.epochs and local.batch: write counted='steps'")
    return context.plan.epochs * replies.weights / context.batch


def mean_direction(
    replies: Replies, share: Tensor, server: Tensor, steps: float | Tensor | None = None
) -> Tensor:
    """Return M+ [P], the mean direction of a cohort's steps, from how far its models moved.

    Each displacement is divided by what produced it: the learning rate of this very round and the
    client's own steps, counted as FedNova's a_i so that local SGD momentum does not inflate M. A
    client that took no step (or steps of length 0) adds nothing.

    Args:
        replies: the trained models, y_i.
        share: [C] the weights w_i.
        server: [P] where the cohort started, x.
        steps: Khat where it was broadcast, or what else stands for K_i, see `steps_counted`.
    """
    length = replies.lr_sum * replies.effective_steps / replies.steps  # eta a_i
    if steps is not None:
        length = length * (steps / replies.steps)
    pace = torch.where(length > 0, share / length, 0.0)
    return -weighted_mean(replies.models - server, pace)
