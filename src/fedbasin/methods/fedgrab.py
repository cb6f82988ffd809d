r"""Fed-GraB: each client balances, class by class, the gradients that pull a logit up and down.

    client:  loss = 1/B sum_b sum_c f_bc BCE(z_bc, [y_b = c])       one sigmoid a class
             f_bc = f(u_c) where y_b = c, else f(-u_c);  f(u) = (10/9) / (1/9 + exp(-u/2))
             D_c = sum |dloss/dz_bc| over y_b = c  -  over y_b != c, over all steps of the client
             u_c += Kp (e - e') + Ki e + Kd (e - 2 e' + e''),       e = -D_c, then |u_c| <= 100
    server:  w+ = sum_i p_i y_i
             a_c = mean over rounds of the share of class c in the norms of the head's rows

A controller (PID, incremental form; e', e'' are its last errors) is open for tail classes alone:
with classes in falling order of a_c, those after the one at which the sum of shares reaches 95 %.
The share of a row is its norm less the smallest row's, over the sum. A closed controller has u = 0,
f = 1, and forgets. Before the first round all are closed. f is a constant in the gradient; D_c
counts gradients as weighted by f. Errors, u and D stay on the client between its rounds. A model is
scored by its largest logit.

Departures from the paper: none known in the rule. The release trains no head, opens all controllers
(its prior is not wired in), and its limit of u does nothing; here head and prior are used and u is
limited, since exp(-u/2) overflows.
Cost: one model down, one up, and C numbers down; 5 numbers a class on each client.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fedbasin.core.bounds import at_least, within
from fedbasin.core.catalogue import entry
from fedbasin.core.method import Averaging, Context, Served
from fedbasin.core.net import Net
from fedbasin.core.rule import Finish, LocalRule, LossInputs, Rules, Start
from fedbasin.core.space import Range
from fedbasin.core.vectors import Weighting
from fedbasin.local.step import one_hot
from fedbasin.methods.parts.heads import Head

_LIMIT = 100.0
_ERROR, _BEFORE, _OUTPUT, _PULL, _PUSH = range(5)  # rows of what a client keeps


class Open(NamedTuple):
    """What the server sends beside the model."""

    tail: Tensor  # [classes] 1 where a controller is open


class ControllerState(NamedTuple):
    """What a client keeps: e', e'', u and the two sums of |gradients|, by class."""

    numbers: Tensor  # [5, most_classes]; columns beyond the classes are zero


class Control(NamedTuple):
    """What a client carries through its steps."""

    numbers: Tensor  # [5, classes]
    tail: Tensor  # [classes]


def response(u: Tensor) -> Tensor:
    """Return f(u), in (0, 10) and 1 at 0."""
    return (10 / 9) / (1 / 9 + torch.exp(-u / 2))


@dataclass(frozen=True)
class GradientBalancer(LocalRule):
    """The client half."""

    owns: ClassVar[frozenset[Literal["loss", "rows"]]] = frozenset({"loss"})

    kp: float
    ki: float
    kd: float
    most_classes: int

    def client_state(self, vector: Tensor) -> ControllerState:
        """Start with controllers at rest; how many there are is not known here."""
        return ControllerState(vector.new_zeros(5, self.most_classes))

    def begin(self, start: Start, net: Net) -> Control:
        """Take up the controllers; one that is closed now forgets."""
        tail = start.shared.tail
        if len(tail) > self.most_classes:
            raise ValueError(
                f"fedgrab has room for {self.most_classes} classes on each client, but there are "
                f"{len(tail)}; write fedgrab(most_classes={len(tail)})"
            )
        return Control(start.client_state.numbers[:, : len(tail)], tail)

    def loss(self, carry: Control, value: Tensor, view: LossInputs) -> tuple[Tensor, Control]:
        """Weigh the gradients of each class's logit."""
        logits = view.outputs.logits
        batch = view.batch
        numbers = self._controlled(carry)
        u = numbers[_OUTPUT]
        hit = one_hot(batch.labels, logits)
        weight = hit * response(u) + (1 - hit) * response(-u)
        each = F.binary_cross_entropy_with_logits(logits, hit, reduction="none")
        share = (batch.weight / batch.weight.sum().clamp(min=1))[:, None]
        slope = (torch.sigmoid(logits.detach()) - hit).abs() * weight * share
        sums = torch.stack([(slope * hit).sum(0), (slope * (1 - hit)).sum(0)])
        after = torch.cat([numbers[:_PULL], numbers[_PULL:] + sums])
        return (each * weight * share).sum(), carry._replace(numbers=after)

    def _controlled(self, carry: Control) -> Tensor:
        """Return the numbers after the controllers have moved."""
        before, older, u, pull, push = carry.numbers
        error = push - pull
        moved = u + self.kp * (error - before) + self.ki * error
        moved = moved + self.kd * (error - 2 * before + older)
        control = torch.stack([error, before, moved.clamp(-_LIMIT, _LIMIT)])
        return torch.cat([torch.where(carry.tail > 0, control, 0.0), carry.numbers[_PULL:]])

    def end(self, carry: Control, start: Start, finish: Finish) -> tuple[ControllerState, Any]:
        """Keep the controllers; nothing is reported."""
        unused = start.client_state.numbers[:, len(carry.tail) :]
        return ControllerState(torch.cat([carry.numbers, unused], 1)), ()


def tail_of(prior: Tensor, cut: float) -> Tensor:
    """Return 1 for the classes after the one that brings the sum of shares to `cut`."""
    order = prior.argsort(descending=True, stable=True)
    reached = prior[order].cumsum(0) - prior[order] >= cut * prior.sum()
    return torch.zeros_like(prior).scatter(0, order, reached.to(prior.dtype))


@dataclass(frozen=True)
class FedGraBState:
    """What the server remembers."""

    prior: Tensor  # [classes] sum over rounds of the classes' shares


@entry(
    "method",
    name="fedgrab",
    paper="Xiao et al., NeurIPS 2023",
    url="https://arxiv.org/abs/2310.07587",
    needs=("classes",),
    is_fedavg_when="never: every class has a sigmoid of its own instead of one softmax",
    tunable={"kp": Range(1.0, 100.0, "log"), "ki": Range(0.001, 0.1, "log")},
)
@dataclass(frozen=True)
class FedGraB(Averaging):
    """Controllers on the clients balance the gradients of scarce classes.

    Args:
        kp: proportional gain of the controllers; with ki = kd = 0 and kp = 0 they rest.
        ki: integral gain.
        kd: differential gain.
        cut: the share of the prior that is not tail; 0 opens every controller.
        most_classes: how many classes clients have room for.
        weighting: p_i by ``"samples"`` or ``"uniform"``.
        local: further rules for the clients.
    """

    kp: float = at_least(0, default=10.0)
    ki: float = at_least(0, default=0.01)
    kd: float = at_least(0, default=0.1)
    cut: float = within("[0, 1]", default=0.95)
    most_classes: int = at_least(1, default=1000)
    weighting: Weighting = "samples"
    local: Rules = ()

    def init(self, server: Tensor, context: Context) -> FedGraBState:
        """Start without a prior."""
        return FedGraBState(server.new_zeros(Head.of(context.layout).classes))

    def own_rules(self) -> tuple[LocalRule, ...]:
        """Return the controllers."""
        return (GradientBalancer(self.kp, self.ki, self.kd, self.most_classes),)

    def own_broadcast(
        self, state: FedGraBState, server: Tensor, context: Context
    ) -> tuple[Any, ...]:
        """Send which controllers are open."""
        known = state.prior.sum() > 0
        return (Open(torch.where(known, tail_of(state.prior, self.cut), 0.0)),)

    def serve(
        self, state: FedGraBState, server: Tensor, mean: Tensor, context: Context
    ) -> tuple[Served, FedGraBState]:
        """Read the prior off the head."""
        head = Head.of(context.layout)
        norms = mean[head.weight].view(head.classes, head.width).norm(dim=1)
        above = norms - norms.min()
        share = above / above.sum().clamp(min=torch.finfo(above.dtype).tiny)
        return Served(send=mean, score=mean), FedGraBState(state.prior + share)
