"""One local step of one client: gradient, the rules around it, clipping, the optimiser.

The order is fixed for all methods: draw a batch, (perturb,) forward and backward,
(un-perturb,) parameter-space corrections, clip, then the optimiser, which adds weight decay
and momentum. Everything here is pure, so the cohort engine can `vmap` it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from fedbasin.core.net import Net
from fedbasin.core.rule import Batch, Gradient, Layer, LocalRule, LossInputs, SurveyBatch
from fedbasin.core.task import CLASSIFICATION, RowTask, Task, weighted_rows
from fedbasin.local.optimisers import Optimiser

Aux = tuple[Tensor, Tensor, tuple[Any, ...]]  # loss value, statistics, carries
Loss = Callable[[Tensor], tuple[Tensor, Aux]]
Differentiate = Callable[[Loss, Tensor], tuple[Tensor, Aux]]


class Point(NamedTuple):
    """Where a client stands between two steps."""

    vector: Tensor  # [P]
    state: Any  # the optimiser's
    buffers: Tensor  # [Q] statistics
    carries: tuple[Any, ...]  # one for each rule


def batch_mean(each: Tensor, batch: Batch) -> Tensor:
    """Return the mean of numbers [B] over the samples of a batch; padding has no weight."""
    return weighted_rows(each, batch.weight)


def one_hot(labels: Tensor, like: Tensor) -> Tensor:
    """Return 0 and 1 of the shape of logits [B, classes], also where torch's own is refused."""
    return (labels[:, None] == torch.arange(like.shape[1], device=like.device)).to(like.dtype)


def task_loss(outputs: Tensor, batch: Batch, task: Task = CLASSIFICATION) -> Tensor:
    """Return the mean loss over the samples of a batch."""
    return task.batch_loss(outputs, batch.labels, batch.weight)


def summed_gradient(look: SurveyBatch) -> Tensor:
    """Return the gradient [P] of the loss summed over the rows of a survey."""
    task = look.task
    if not isinstance(task, RowTask):
        raise ValueError(f"the loss of {task} does not add up over rows: it has no full gradient")

    def total(vector: Tensor) -> Tensor:
        outputs = look.net(vector, look.batch.inputs, look.buffers).logits
        return (task.each(outputs, look.batch.labels) * look.batch.weight).sum()

    gradient: Tensor = torch.func.grad(total)(look.vector)
    return gradient


def other_loss(rules: tuple[LocalRule, ...]) -> Iterator[str]:
    """Say why full gradients do not belong to steps on another loss."""
    for rule in rules:
        if "loss" in rule.owns:
            yield (
                f"the full gradients are of the task's loss, but {rule} trains on another loss; "
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


def local_loss(
    point: Point,
    batch: Batch,
    key: Tensor | None,
    *,
    net: Net,
    rules: tuple[LocalRule, ...],
    task: Task,
) -> tuple[Tensor, Aux]:
    """Return what one client's gradient is taken of at a point, and what is kept beside it."""
    outputs = net(point.vector, batch.inputs, point.buffers, key=key, training=True)
    value = task_loss(outputs.logits, batch, task)
    carries = list(point.carries)
    for i in sorted(range(len(rules)), key=lambda i: "loss" not in rules[i].owns):
        view = LossInputs(net, point.vector, outputs, batch, key, task)  # type: ignore[arg-type]
        value, carries[i] = rules[i].loss(carries[i], value, view)
    return value, (value.detach(), outputs.buffers, tuple(carries))


def step(
    point: Point,
    batch: Batch,
    lr: Tensor | float,
    key: Tensor | None,
    *,
    net: Net,
    rules: tuple[LocalRule, ...],
    optimiser: Optimiser,
    clip: float | None = None,
    task: Task = CLASSIFICATION,
    differentiate: Differentiate = by_autograd,
) -> tuple[Point, Tensor]:
    """Take one step; return the new point and the loss at the old one.

    Args:
        point: where the client stands.
        batch: the samples of this step.
        lr: learning rate, eta.
        key: int64 [2], the randomness of dropout and of the rules in this step; None where nothing
            is drawn.
        net: the network.
        rules: what the client does beyond the optimiser's step.
        optimiser: what turns the direction into the next model.
        clip: largest L2 norm of the corrected gradient, or None.
        task: what the network's outputs mean.
        differentiate: how the gradient is taken.
    """
    carries = list(point.carries)
    seen: list[tuple[Tensor, Tensor]] = []  # loss and statistics of the unperturbed evaluation

    def loss(vector: Tensor) -> tuple[Tensor, Aux]:
        here = point._replace(vector=vector, carries=tuple(carries))
        return local_loss(here, batch, key, net=net, rules=rules, task=task)

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
    direction = clipped(gradient(point.vector), clip)
    paces = [rule.lr_factor(carry) for rule, carry in zip(rules, carries, strict=True)]
    vector, state = optimiser.update(direction, point.state, point.vector, lr, paces)
    for i, rule in enumerate(rules):
        vector, carries[i] = rule.after_step(carries[i], vector, net)
    value, buffers = seen[0]
    return Point(vector, state, buffers.detach(), tuple(carries)), value


def step_in_place(
    point: Point,
    batch: Batch,
    lr: float,
    key: Tensor,
    *,
    net: Net,
    optimiser: Optimiser,
    task: Task = CLASSIFICATION,
) -> tuple[Point, Tensor]:
    """Take the step of `step` without rules and clipping, writing over the point's tensors.

    Only for an optimiser that says that it writes in place.
    """
    views = net.layout.views(point.vector)
    parts = {name: part.detach().requires_grad_() for name, part in views.items()}
    outputs = net.run(parts, batch.inputs, point.buffers, key=key, training=True)
    value = task_loss(outputs.logits, batch, task)
    gradients = torch.autograd.grad(value, list(parts.values()), allow_unused=True)
    with torch.no_grad():
        optimiser.update_in_place(gradients, point.state, point.vector, lr, net.layout)
    return point._replace(buffers=outputs.buffers.detach()), value.detach()


def clipped(direction: Tensor, largest: float | None) -> Tensor:
    """Shorten a direction [P] to the largest norm allowed."""
    if largest is None:
        return direction
    scale: Tensor = largest / (direction.norm() + 1e-6)
    return direction * scale.clamp(max=1.0)
