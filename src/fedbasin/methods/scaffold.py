r"""SCAFFOLD: control variates that cancel the drift of clients.

    client:  v <- v - eta (g(v) + c - c_i)
             c_i+ = mean of the mini-batch gradients taken in this round   (option "steps")
             c_i+ = full-batch gradient at x                               (option "full")
    server:  w+ = w + eta_g sum_i p_i (y_i - x)
             c+ = c + 1/N sum_{i in S} (c_i+ - c_i)

Under plain SGD, option "steps" is the paper's option II,
c_i+ = c_i - c + (x - y_i) / (K_i eta). That formula is wrong under local momentum, weight
decay, clipping or an adaptive optimiser, so the gradients themselves are accumulated; they agree
where the formula holds. Option "full" is the paper's option I.

Departures from the paper: the accumulation above; sample weights p_i are selectable (the
paper is uniform, our default), while c is always the plain mean over all N clients that hold rows.
Cost: two models down (w, c), two up (y_i, c_i+ - c_i); one model of state on each client.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedbasin.core.bounds import above
from fedbasin.core.catalogue import entry
from fedbasin.core.method import Averaging, Context, Replies, Served
from fedbasin.core.net import Net
from fedbasin.core.rule import (
    Finish,
    Gradient,
    LocalRule,
    Rules,
    Setting,
    Start,
    SurveyBatch,
    rescaled,
)
from fedbasin.core.space import Range
from fedbasin.core.vectors import Weighting, weighted_mean
from fedbasin.local.step import other_loss, summed_gradient

Option = Literal["steps", "full"]


class Variate(NamedTuple):
    """A control variate: the server's (shared) or a client's own."""

    control: Tensor  # [P] c, or c_i


class Change(NamedTuple):
    """What a client reports."""

    control: Tensor  # [P] c_i+ - c_i


class ControlCarry(NamedTuple):
    """What the rule carries through the steps."""

    correction: Tensor  # [P] c - c_i
    total: Tensor  # [P] sum of the raw gradients so far


@dataclass(frozen=True)
class ControlVariates(LocalRule):
    """The client half: correct every gradient by c - c_i, then renew c_i."""

    option: Option = "steps"

    @property
    def surveys(self) -> bool:  # type: ignore[override]
        """Option "full" needs the full-batch gradient at the received model."""
        return self.option == "full"

    def survey(self, look: SurveyBatch) -> Variate:
        """Sum the gradients of all rows."""
        return Variate(summed_gradient(look))

    def client_state(self, vector: Tensor) -> Variate:
        """Start with c_i = 0."""
        return Variate(torch.zeros_like(vector))

    def begin(self, start: Start, net: Net) -> ControlCarry:
        """Form the correction once."""
        return ControlCarry(
            start.shared.control - start.client_state.control, torch.zeros_like(start.vector)
        )

    def direction(
        self, carry: ControlCarry, vector: Tensor, gradient: Gradient
    ) -> tuple[Tensor, ControlCarry]:
        """Add the correction and remember the raw gradient."""
        raw = gradient(vector)
        return raw + carry.correction, ControlCarry(carry.correction, carry.total + raw)

    def cautions(self, setting: Setting) -> Iterator[str]:
        """Name what local momentum and an adaptive optimiser do to a constant correction."""
        yield from rescaled(setting, "the correction c - c_i")
        if setting.momentum:
            yield (
                f"local.momentum = {setting.momentum} makes the correction c - c_i "
                f"{1 / (1 - setting.momentum):.3g} times as large; the paper has no local momentum"
            )

    def end(self, carry: ControlCarry, start: Start, finish: Finish) -> tuple[Variate, Change]:
        """Renew c_i and report its change."""
        if self.option == "full":
            renewed = start.survey.control / start.examples.clamp(min=1)
        else:
            renewed = carry.total / finish.steps.clamp(min=1)
        return Variate(renewed), Change(renewed - start.client_state.control)


@dataclass(frozen=True)
class ScaffoldState:
    """What the server remembers."""

    control: Tensor  # [P] c, the mean of all clients' c_i


@entry(
    "method",
    paper="Karimireddy et al., ICML 2020",
    url="https://arxiv.org/abs/1910.06378",
    needs=("row_losses",),
    is_fedavg_when="never: only its first round is (uniform) FedAvg, while all variates are zero",
    down=2.0,
    up=2.0,
    tunable={"server_lr": Range(0.3, 3.0, "log")},
)
@dataclass(frozen=True)
class Scaffold(Averaging):
    """FedAvg with control variates on server and clients.

    Args:
        server_lr: eta_g, the server's step along the mean update.
        option: how c_i is renewed, from the gradients of the ``"steps"`` or the ``"full"`` batch.
        weighting: p_i by ``"uniform"`` (the paper) or ``"samples"``.
        local: further rules for the clients.
    """

    server_lr: float = above(0, default=1.0)
    option: Option = "steps"
    weighting: Weighting = "uniform"
    local: Rules = ()

    @property
    def optional_needs(self) -> frozenset[str]:
        """Only the option "full" takes full gradients."""
        return frozenset() if self.option == "full" else frozenset({"row_losses"})

    def cautions(self, setting: Setting) -> Iterator[str]:
        """Name a second loss."""
        yield from super().cautions(setting)
        if self.option == "full":
            yield from other_loss(self.rules())

    def init(self, server: Tensor, context: Context) -> ScaffoldState:
        """Start with c = 0."""
        return ScaffoldState(torch.zeros_like(server))

    def own_rules(self) -> tuple[LocalRule, ...]:
        """Return the control variates."""
        return (ControlVariates(self.option),)

    def own_broadcast(
        self, state: ScaffoldState, server: Tensor, context: Context
    ) -> tuple[Any, ...]:
        """Send c beside the model."""
        return (Variate(state.control),)

    def aggregate(
        self, state: ScaffoldState, server: Tensor, replies: Replies, context: Context
    ) -> tuple[Served, ScaffoldState]:
        """Step along the mean update and move c by the changes over all N clients."""
        model = self.stepped(server, self.mean(replies))
        counted = (replies.weights > 0).to(server.dtype)
        change = weighted_mean(replies.report(Change).control, counted / context.able)
        return Served(send=model, score=model), ScaffoldState(state.control + change)
