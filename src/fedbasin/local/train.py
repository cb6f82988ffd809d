"""A client's whole local training, one client at a time, with plain autograd.

This is the reference that faster engines must equal, and what a real client runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbasin.core.method import Plan
from fedbasin.core.needs import check_task
from fedbasin.core.net import Net
from fedbasin.core.rng import fold_in
from fedbasin.core.rule import Batch, DrawsRows, Finish, LocalRule, Start, SurveyBatch, check_rules
from fedbasin.core.task import CLASSIFICATION, Task
from fedbasin.core.tree import added, mapped
from fedbasin.local.batches import AUGMENT, DROPOUT, batches, count_steps, steps_per_epoch
from fedbasin.local.optimisers import Optimiser
from fedbasin.local.step import Point, step, step_in_place, summed_gradient

SURVEY_ROWS = 256  # rows of a client that a survey looks at in one pass
Transform = Callable[..., Tensor]  # (raw rows, key or None) -> what the network takes


class Shard(NamedTuple):
    """The rows one client holds, as stored."""

    inputs: Tensor  # [n, ...] uint8
    labels: Tensor  # [n] or [n, k] targets


class Received(NamedTuple):
    """What a client is given for one round."""

    vector: Tensor  # [P] the model
    buffers: Tensor  # [Q] statistics
    shared: tuple[Any, ...]  # what the method broadcasts, one entry for each rule
    own: tuple[Any, ...]  # what the client kept, shaped as `Trainer.zero_state`
    round: int  # finished rounds
    key: Tensor  # int64 [2], the client's randomness of this round


class Trained(NamedTuple):
    """What one client's local training gives."""

    vector: Tensor  # [P]
    buffers: Tensor  # [Q]
    own: tuple[Any, ...]
    reports: tuple[Any, ...]
    examples: int
    steps: int
    lr_sum: float
    length: float
    last_loss: Tensor  # mean training loss of the last pass over the data
    mean_loss: Tensor  # mean training loss of the whole round


@dataclass(frozen=True)
class Trainer:
    """How every client of a run trains.

    Args:
        net: the network.
        rules: what clients do beyond the optimiser's step.
        optimiser: what turns a direction into the next model.
        batch: batch size, B.
        transform: turns stored rows into network inputs; augments when given a key.
        classes: number of classes; 0 where targets are no classes.
        clip: largest L2 norm of the corrected gradient, or None.
        keep_optimiser: whether a client keeps the optimiser's state between rounds; by default it
            starts afresh in every round.
        task: what outputs mean.
    """

    net: Net
    rules: tuple[LocalRule, ...]
    optimiser: Optimiser
    batch: int
    transform: Transform
    classes: int
    clip: float | None = None
    keep_optimiser: bool = False
    task: Task = CLASSIFICATION

    def __post_init__(self) -> None:
        check_rules(self.rules)
        check_task(self.rules, self.task)
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip must be above 0 or left out, got {self.clip}")

    @property
    def in_place(self) -> bool:
        """Whether steps may write over a client's vector: nobody else looks at it."""
        return not self.rules and self.clip is None and self.optimiser.writes_in_place

    @property
    def augments(self) -> bool:
        """Whether the transform may draw from a key; one that does not say so may."""
        inner = getattr(self.transform, "func", self.transform)
        return bool(getattr(inner, "augment", True))

    @property
    def draws(self) -> bool:
        """Whether a step needs random numbers: for dropout, or for rules."""
        return bool(self.rules) or self.net.draws

    def zero_state(self, vector: Tensor) -> tuple[Any, ...]:
        """Return what a client keeps before its first round.

        One entry for each rule, then the optimiser's state where that is kept.
        """
        own = tuple(rule.client_state(vector) for rule in self.rules)
        return (*own, self.optimiser.init(vector)) if self.keep_optimiser else own

    def length(self, steps: int) -> float:
        """Return how many gradients K steps add up to; K for an adaptive optimiser."""
        counted = self.optimiser.effective_steps(steps)
        return float(steps) if counted is None else counted

    def train(self, shard: Shard, received: Received, plan: Plan) -> Trained:
        """Train one client from what it received; nothing given is changed."""
        rows = len(shard.labels)
        steps = count_steps(plan, rows, self.batch)
        starts = self._starts(shard, received, plan, steps)
        carries = tuple(r.begin(s, self.net) for r, s in zip(self.rules, starts, strict=True))
        vector = received.vector
        state = received.own[-1] if self.keep_optimiser else self.optimiser.init(vector)
        take: Callable[..., tuple[Point, Tensor]]
        if self.in_place:
            vector = vector.clone()
            state = mapped(torch.clone, state) if self.keep_optimiser else state
            take = partial(step_in_place, net=self.net, optimiser=self.optimiser, task=self.task)
        else:
            take = partial(
                step,
                net=self.net,
                rules=self.rules,
                optimiser=self.optimiser,
                clip=self.clip,
                task=self.task,
            )
        point = Point(vector, state, received.buffers, carries)
        losses = []
        counts = []
        numbers = torch.arange(steps, device=received.key.device)
        augment, dropout = (
            fold_in(fold_in(received.key, use), numbers).unbind() for use in (AUGMENT, DROPOUT)
        )
        chances = self.chances(shard.labels)
        for number, index in enumerate(batches(received.key, plan, rows, self.batch, chances)):
            batch = self._batch(shard, index, augment[number])
            point, loss = take(point, batch, plan.lr, dropout[number])
            losses.append(loss)
            counts.append(len(index))
        ended = Finish(
            point.vector, _number(steps, received.vector), _number(plan.lr * steps, received.vector)
        )
        together = list(zip(self.rules, point.carries, starts, strict=True))
        ends = [rule.end(carry, start, ended) for rule, carry, start in together]
        uploaded = ended
        for rule, carry, start in together:
            uploaded = uploaded._replace(vector=rule.upload(carry, start, uploaded))
        own = tuple(own for own, _ in ends)
        return Trained(
            vector=uploaded.vector,
            buffers=point.buffers,
            own=(*own, point.state) if self.keep_optimiser else own,
            reports=tuple(report for _, report in ends),
            examples=rows,
            steps=steps,
            lr_sum=plan.lr * steps,
            length=self.length(steps),
            last_loss=_mean(losses, counts, last=steps_per_epoch(rows, self.batch)),
            mean_loss=_mean(losses, counts, last=steps),
        )

    def full_gradient(self, shard: Shard, vector: Tensor, buffers: Tensor) -> Tensor:
        """Return the gradient [P] of the mean loss over all rows, without augmentation."""
        parts = [
            summed_gradient(
                SurveyBatch(
                    self.net, vector, buffers, (), self._batch(shard, index, None), self.task
                )
            )
            for index in torch.arange(len(shard.labels), device=vector.device).split(SURVEY_ROWS)
        ]
        return torch.stack(parts).sum(0) / max(len(shard.labels), 1)

    @property
    def drawer(self) -> DrawsRows | None:
        """The rule that draws rows with replacement, if there is one."""
        return next((rule for rule in self.rules if isinstance(rule, DrawsRows)), None)

    def chances(self, labels: Tensor) -> Tensor | None:
        """Return how likely each row [n] is, where a rule draws rows with replacement."""
        if self.drawer is None:
            return None
        return self.drawer.chances(labels, class_counts(labels, self.classes))

    def _survey(self, rule: LocalRule, shared: Any, shard: Shard, received: Received) -> Any:
        """Return the sums of a rule's survey over all rows."""
        if not rule.surveys:
            return ()
        vector, buffers = received.vector, received.buffers
        return added(
            [
                rule.survey(
                    SurveyBatch(
                        self.net,
                        vector,
                        buffers,
                        shared,
                        self._batch(shard, index, None),
                        self.task,
                    )
                )
                for index in torch.arange(len(shard.labels), device=vector.device).split(
                    SURVEY_ROWS
                )
            ]
        )

    def _starts(
        self, shard: Shard, received: Received, plan: Plan, steps: int
    ) -> tuple[Start, ...]:
        vector = received.vector
        counts = class_counts(shard.labels, self.classes).to(vector.dtype)
        kept = received.own[: len(self.rules)]
        return tuple(
            Start(
                vector=vector,
                shared=shared,
                client_state=own,
                round=_number(received.round, vector),
                lr=_number(plan.lr, vector),
                steps=_number(steps, vector),
                epoch_steps=_number(steps_per_epoch(len(shard.labels), self.batch), vector),
                examples=_number(len(shard.labels), vector),
                class_counts=counts,
                survey=self._survey(rule, shared, shard, received),
                buffers=received.buffers,
            )
            for rule, shared, own in zip(self.rules, received.shared, kept, strict=True)
        )

    def _batch(self, shard: Shard, index: Tensor, augment: Tensor | None) -> Batch:
        inputs = self.net.arranged(self.transform(shard.inputs[index], augment))
        return Batch(inputs, shard.labels[index], inputs.new_ones(len(index), dtype=self.net.dtype))


def class_counts(labels: Tensor, classes: int) -> Tensor:
    """Count rows by class [classes]; nothing is counted where targets are no classes."""
    if not classes:
        return torch.zeros(0, dtype=torch.int64, device=labels.device)
    return torch.bincount(labels, minlength=classes)


def _number(value: float, like: Tensor) -> Tensor:
    """Return a number as a 0-d tensor beside a vector, as rules see it in every engine."""
    return torch.tensor(value, dtype=like.dtype, device=like.device)


def _mean(losses: list[Tensor], counts: list[int], last: int) -> Tensor:
    """Return the mean loss per sample over the last steps; NaN-free zero for no step at all."""
    if not losses or last == 0:
        return torch.zeros(())
    weight = torch.tensor(counts[-last:], dtype=losses[0].dtype, device=losses[0].device)
    return (torch.stack(losses[-last:]) * weight).sum() / weight.sum()
