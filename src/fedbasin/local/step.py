"""One local step of one client: gradient, the rules around it, clipping, SGD.

The order is fixed for all methods: draw a batch, (perturb,) forward and backward,
(un-perturb,) parameter-space corrections, clip, then the optimiser, which adds weight decay
and momentum. Everything here is pure, so the cohort engine can `vmap` it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from fedbasin.core.net import Net
from fedbasin.core.rule import Batch, Gradient, Layer, LocalRule, Look, View

Aux = tuple[Tensor, Tensor, tuple[Any, ...]]  # loss value, statistics, carries
Loss = Callable[[Tensor], tuple[Tensor, Aux]]
Differentiate = Callable[[Loss, Tensor], tuple[Tensor, Aux]]


@dataclass(frozen=True)
class SGD:
    """The client's optimiser; its momentum starts at zero every round.

    Args:
        momentum: share of the last direction that is kept, in [0, 1).
        weight_decay: multiple of the parameters added to the gradient.
        clip: largest L2 norm of the corrected gradient, or None.
    """

    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum}")
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay must be at least 0, got {self.weight_decay}")
        if self.clip is not None and self.clip <= 0:
            raise ValueError(f"clip must be above 0 or left out, got {self.clip}")

    def length(self, steps: int, pull: float = 0.0) -> float:
        """Return the accumulated weight of the gradients in K steps, a_i of FedNova.

        It is how far K steps along a gradient that is always 1 lead, in units of eta. With
        momentum rho, a = [K - rho (1 - rho^K) / (1 - rho)] / (1 - rho); with a proximal term,
        a <- (1 - eta mu) a + 1; with both, l <- rho l + 1 - eta mu a and a <- a + l.

        Args:
            steps: K.
            pull: eta mu.
        """
        rho = self.momentum
        if not pull:
            return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
        speed = length = 0.0
        for _ in range(steps):
            speed = rho * speed + 1 - pull * length
            length += speed
        return length


class Point(NamedTuple):
    """Where a client stands between two steps."""

    vector: Tensor  # [P]
    momentum: Tensor  # [P], or [0] when the optimiser has none
    buffers: Tensor  # [Q] statistics
    carries: tuple[Any, ...]  # one for each rule


def batch_mean(each: Tensor, batch: Batch) -> Tensor:
    """Return the mean of numbers [B] over the samples of a batch; padding has no weight."""
    return (each * batch.weight).sum() / batch.weight.sum().clamp(min=1)


def one_hot(labels: Tensor, like: Tensor) -> Tensor:
    """Return 0 and 1 of the shape of logits [B, classes], also where torch's own is refused."""
    return (labels[:, None] == torch.arange(like.shape[1], device=like.device)).to(like.dtype)


def task_loss(logits: Tensor, batch: Batch) -> Tensor:
    """Return the mean cross-entropy over the samples of a batch."""
    return batch_mean(F.cross_entropy(logits, batch.labels, reduction="none"), batch)


def summed_gradient(look: Look) -> Tensor:
    """Return the gradient [P] of the loss summed over the rows of a survey."""

    def total(vector: Tensor) -> Tensor:
        logits = look.net(vector, look.batch.inputs, look.buffers).logits
        each = F.cross_entropy(logits, look.batch.labels, reduction="none")
        return (each * look.batch.weight).sum()

    gradient: Tensor = torch.func.grad(total)(look.vector)
    return gradient


def other_loss(rules: tuple[LocalRule, ...]) -> Iterator[str]:
    """Say why full gradients do not belong to steps on another loss."""
    for rule in rules:
        if "loss" in rule.owns:
            yield (
                f"the full gradients are of the cross-entropy, but {rule} trains on another loss; "
                "drop one of the two"
            )


def by_autograd(loss: Loss, vector: Tensor) -> tuple[Tensor, Aux]:
    """Differentiate with plain autograd: the reference."""
    leaf = vector.detach().requires_grad_()
    value, aux = loss(leaf)
    (gradient,) = torch.autograd.grad(value, leaf)
    return gradient, aux


def nesting(rules: tuple[LocalRule, ...]) -> list[int]:
    """Return the rules' positions, outermost first."""
    return sorted(range(len(rules)), key=lambda i: get_args(Layer).index(rules[i].layer))


def step(
    point: Point,
    batch: Batch,
    lr: Tensor | float,
    key: Tensor,
    *,
    net: Net,
    rules: tuple[LocalRule, ...],
    sgd: SGD,
    differentiate: Differentiate = by_autograd,
) -> tuple[Point, Tensor]:
    """Take one step; return the new point and the loss at the old one.

    Args:
        point: where the client stands.
        batch: the samples of this step.
        lr: learning rate, eta.
        key: int64 [2], the randomness of dropout and of the rules in this step.
        net: the network.
        rules: what the client does beyond SGD.
        sgd: the optimiser.
        differentiate: how the gradient is taken.
    """
    carries = list(point.carries)
    first_to_last = sorted(range(len(rules)), key=lambda i: "loss" not in rules[i].owns)
    seen: list[tuple[Tensor, Tensor]] = []  # loss and statistics of the unperturbed evaluation

    def loss(vector: Tensor) -> tuple[Tensor, Aux]:
        outputs = net(vector, batch.inputs, point.buffers, key=key, training=True)
        value = task_loss(outputs.logits, batch)
        updated = list(carries)
        for i in first_to_last:
            view = View(net, vector, outputs, batch, key)
            value, updated[i] = rules[i].loss(carries[i], value, view)
        return value, (value.detach(), outputs.buffers, tuple(updated))

    def evaluate(vector: Tensor) -> Tensor:
        gradient, (value, buffers, updated) = differentiate(loss, vector)
        if not seen:  # a second pass (SAM) must not count again
            seen.append((value, buffers))
            carries[:] = updated
        return gradient

    def through(i: int, inner: Gradient) -> Gradient:
        def outer(vector: Tensor) -> Tensor:
            before = carries[i]
            direction, after = rules[i].direction(before, vector, inner)
            if after is not before:
                carries[i] = after
            return direction

        return outer

    gradient: Gradient = evaluate
    for i in reversed(nesting(rules)):
        gradient = through(i, gradient)
    direction = clipped(gradient(point.vector), sgd.clip)
    paces = [rule.lr_factor(carry) for rule, carry in zip(rules, carries, strict=True)]
    vector, momentum = descend(point.vector, point.momentum, direction, lr, sgd, paces)
    for i, rule in enumerate(rules):
        vector, carries[i] = rule.after_step(carries[i], vector, net)
    value, buffers = seen[0]
    return Point(vector, momentum, buffers.detach(), tuple(carries)), value


def step_in_place(
    point: Point, batch: Batch, lr: float, key: Tensor, *, net: Net, sgd: SGD
) -> tuple[Point, Tensor]:
    """Take the step of `step` without rules and clipping, writing over the point's tensors.

    Every layer's gradient is applied where the layer lies in the vector: to join them to one
    vector first is one more pass over memory, which a wide dense layer feels.
    """
    views = net.layout.views(point.vector)
    parts = {name: part.detach().requires_grad_() for name, part in views.items()}
    outputs = net.run(parts, batch.inputs, point.buffers, key=key, training=True)
    value = task_loss(outputs.logits, batch)
    gradients = torch.autograd.grad(value, list(parts.values()), allow_unused=True)
    with torch.no_grad():
        if sgd.momentum:
            direction = point.momentum.mul_(sgd.momentum)
            if sgd.weight_decay:
                direction.add_(point.vector, alpha=sgd.weight_decay)
            _add(net.layout.views(direction), gradients, 1.0)
            point.vector.sub_(direction, alpha=lr)
        else:
            if sgd.weight_decay:
                point.vector.mul_(1 - lr * sgd.weight_decay)
            _add(views, gradients, -lr)
    return point._replace(buffers=outputs.buffers.detach()), value.detach()


def _add(views: dict[str, Tensor], gradients: tuple[Tensor | None, ...], scale: float) -> None:
    """Add multiples of gradients to the parts of a vector; a part that was not used has none."""
    for view, gradient in zip(views.values(), gradients, strict=True):
        if gradient is not None:
            view.add_(gradient, alpha=scale)


def clipped(direction: Tensor, largest: float | None) -> Tensor:
    """Shorten a direction [P] to the largest norm allowed."""
    if largest is None:
        return direction
    scale: Tensor = largest / (direction.norm() + 1e-6)
    return direction * scale.clamp(max=1.0)


def descend(
    vector: Tensor,
    momentum: Tensor,
    direction: Tensor,
    lr: Tensor | float,
    sgd: SGD,
    paces: Sequence[Tensor | None] = (),
) -> tuple[Tensor, Tensor]:
    """Apply torch's SGD rule: d = direction + wd v;  m = rho m + d;  v = v - eta m.

    The rate eta is that of the round times the rules' paces.
    """
    if sgd.weight_decay:
        direction = direction + sgd.weight_decay * vector
    if sgd.momentum:
        direction = momentum = torch.add(direction, momentum, alpha=sgd.momentum)
    for pace in paces:
        direction = direction if pace is None else pace * direction
    if isinstance(lr, Tensor):
        return vector - lr * direction, momentum
    return torch.sub(vector, direction, alpha=lr), momentum  # one pass over memory, not two
