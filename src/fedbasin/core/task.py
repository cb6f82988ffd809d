r"""Tasks: what a network's outputs mean, which loss trains it and how it is scored.

A task whose loss adds up over rows is a `RowTask` and gives `each(outputs, targets) -> [B]`.
A task whose loss does not (Cox) gives `batch_loss` alone. It is refused where
losses of single rows or full gradients are needed.

    classification   cross-entropy of C outputs;  targets: whole numbers 0..C-1
    binary           logistic loss of one output; targets: 0 and 1
    regression       squared, absolute, Huber or quantile loss; targets: one or several numbers
    survival         Cox partial likelihood of one output; targets: (time, event)
    multilabel       logistic loss of L outputs;  targets: L columns of 0 and 1
    tokens           cross-entropy at every position; targets: whole numbers, below 0 is padding
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fedbasin.core.bounds import Bounded, above, within
from fedbasin.core.catalogue import entry

Provided = Literal["classes", "class_labels", "row_losses"]
_HIDDEN = -1e30  # the score of a row that does not count; exp of it is 0, and its slope is finite


class Targets(NamedTuple):
    """What a dataset's targets are."""

    classes: int  # number of classes; 0 where targets are no classes
    columns: int = 1  # numbers a row
    whole: bool = True  # whether they are whole numbers


class Task(Bounded, ABC):
    """What a network's outputs mean. Subclasses are frozen dataclasses entered in the catalogue."""

    kind: ClassVar[str] = "own"  # which metrics fit: see `Metric.fits`
    provides: ClassVar[frozenset[Provided]] = frozenset()
    usual_metrics: ClassVar[tuple[str, ...]] = ("loss",)  # the first is the headline
    headline: str = ""  # another metric as headline

    @abstractmethod
    def outputs(self, targets: Targets) -> int:
        """Return how many outputs the network has; refuse targets of another kind."""

    @abstractmethod
    def batch_loss(self, outputs: Tensor, targets: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the mean loss of a batch [0-d].

        Args:
            outputs: [B, ...] of the network.
            targets: [B, ...].
            weight: [B] 1 for a row, 0 for padding; None where all rows count.
        """

    def check_values(self, targets: Tensor) -> None:
        """Refuse targets whose numbers the loss is not meant for; takes all by default."""
        return

    @property
    def metrics(self) -> tuple[str, ...]:
        """Expressions of the metrics that every run records, the headline first."""
        if not self.headline:
            return self.usual_metrics
        others = [name for name in self.usual_metrics if name != self.headline]
        return (self.headline, *others)

    def answers(self, outputs: Tensor) -> Tensor:
        """Return the predicted class of each row [B]."""
        raise TypeError(f"{type(self).__name__.lower()} predicts no classes")

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Return the predicted probabilities [B, classes or labels]."""
        raise TypeError(f"{type(self).__name__.lower()} predicts no probabilities")

    def class_count(self, outputs: Tensor) -> int:
        """Return the number of classes that outputs speak of."""
        return outputs.shape[-1]


class RowTask(Task):
    """A task whose loss is a mean over rows."""

    provides: ClassVar[frozenset[Provided]] = frozenset({"row_losses"})

    @abstractmethod
    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of every row [B]."""

    def batch_loss(self, outputs: Tensor, targets: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the mean over rows; padding has no weight."""
        each = self.each(outputs, targets)
        if weight is None:
            return each.mean()
        return weighted_rows(each, weight)


def weighted_rows(each: Tensor, weight: Tensor) -> Tensor:
    """Return the mean of numbers [B] over rows of weight 1; 0 where there is none."""
    return (each * weight).sum() / weight.sum().clamp(min=1)


@entry("task")
@dataclass(frozen=True)
class Classification(RowTask):
    """One of several classes: cross-entropy of one output a class.

    Args:
        headline: the metric that runs are compared by; accuracy unless given.
    """

    headline: str = ""

    kind: ClassVar[str] = "classes"
    provides: ClassVar[frozenset[Provided]] = frozenset({"classes", "class_labels", "row_losses"})
    usual_metrics: ClassVar[tuple[str, ...]] = ("accuracy", "loss")

    def outputs(self, targets: Targets) -> int:
        """One output a class."""
        if targets.classes < 1 or targets.columns != 1:
            raise ValueError(
                f"classification needs one whole number from 0 a row, the targets are "
                f"{_described(targets)}; {_advice(targets)}"
            )
        return targets.classes

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy of every row."""
        if outputs.dim() != 2:
            return F.cross_entropy(outputs, targets, reduction="none")
        # The same bits as torch's cross_entropy, which imports a compiler's parts under `vmap`.
        return -outputs.log_softmax(1).gather(1, targets[:, None])[:, 0]

    def batch_loss(self, outputs: Tensor, targets: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the mean cross-entropy."""
        if weight is None:
            return F.cross_entropy(outputs, targets)  # one kernel
        return super().batch_loss(outputs, targets, weight)

    def answers(self, outputs: Tensor) -> Tensor:
        """Return the class with the largest output."""
        return outputs.argmax(-1)

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Return the softmax."""
        return outputs.softmax(-1)


CLASSIFICATION = Classification()  # what is assumed where no task is named


@entry("task")
@dataclass(frozen=True)
class Binary(RowTask):
    """Yes or no: logistic loss of one output.

    Args:
        headline: the metric that runs are compared by; auroc unless given.
    """

    headline: str = ""

    kind: ClassVar[str] = "binary"
    provides: ClassVar[frozenset[Provided]] = frozenset({"class_labels", "row_losses"})
    usual_metrics: ClassVar[tuple[str, ...]] = ("auroc", "accuracy", "average_precision", "loss")

    def outputs(self, targets: Targets) -> int:
        """One output: above 0 is class 1."""
        if targets.columns != 1 or targets.classes != 2:
            raise ValueError(
                f"binary needs targets 0 and 1, the targets are {_described(targets)}; "
                f"{_advice(targets)}"
            )
        return 1

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the logistic loss of every row."""
        _check_single(outputs, "binary")
        score = outputs[:, 0]
        return F.binary_cross_entropy_with_logits(score, targets.to(score.dtype), reduction="none")

    def answers(self, outputs: Tensor) -> Tensor:
        """Return 1 where the output is above 0."""
        return (outputs[..., 0] > 0).to(torch.int64)

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Return the probabilities of class 0 and class 1."""
        positive = outputs[..., 0].sigmoid()
        return torch.stack([1 - positive, positive], -1)

    def class_count(self, outputs: Tensor) -> int:
        """Two."""
        return 2


@entry("task")
@dataclass(frozen=True)
class Regression(RowTask):
    """Numbers: the loss of the difference between output and target, mean over columns.

    Args:
        loss: ``"mse"``, ``"mae"``, ``"huber"`` or ``"quantile"``.
        delta: where the Huber loss turns from squared to absolute.
        quantile: which quantile is predicted, in (0, 1).
        headline: the metric that runs are compared by; rmse unless given.
    """

    loss: Literal["mse", "mae", "huber", "quantile"] = "mse"
    delta: float = above(0, default=1.0)
    quantile: float = within("(0, 1)", default=0.5)
    headline: str = ""

    kind: ClassVar[str] = "numbers"
    usual_metrics: ClassVar[tuple[str, ...]] = ("rmse", "mae", "r2", "loss")

    def outputs(self, targets: Targets) -> int:
        """One output a column."""
        if targets.classes:
            raise ValueError(
                f"regression needs numbers, the targets are {_described(targets)}; write "
                f"task = {_fitting(targets)!r}, or make the data with classes=False"
            )
        return targets.columns

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of every row."""
        gap = targets.reshape(outputs.shape).to(outputs.dtype) - outputs
        if self.loss == "mse":
            loss = gap.square()
        elif self.loss == "mae":
            loss = gap.abs()
        elif self.loss == "huber":
            size = gap.abs()
            inside = size.clamp(max=self.delta)
            loss = inside * (size - 0.5 * inside)
        else:
            loss = torch.maximum(self.quantile * gap, (self.quantile - 1) * gap)
        return loss.flatten(1).mean(1)


@entry("task", paper="Cox, JRSS B 1972")
@dataclass(frozen=True)
class Survival(Task):
    r"""Time to an event, with censored rows: negative Cox partial log-likelihood.

        loss = 1/B sum_{i: event} [ log sum_{j: t_j >= t_i} exp(s_j) - s_i ]

    The risk set is that of the batch (Breslow's rule for ties). A batch without an event has the
    loss 0. Targets are two columns: time, and 1 for an event or 0 for a censored row.

    Args:
        headline: the metric that runs are compared by; c_index unless given.
    """

    headline: str = ""

    kind: ClassVar[str] = "survival"
    usual_metrics: ClassVar[tuple[str, ...]] = ("c_index", "loss")

    def outputs(self, targets: Targets) -> int:
        """One output: the larger, the sooner the event."""
        if targets.columns != 2 or targets.classes:
            raise ValueError(
                f"survival needs two columns, time and event, the targets are "
                f"{_described(targets)}; write task = {_fitting(targets)!r}"
            )
        return 1

    def check_values(self, targets: Tensor) -> None:
        """Times are not negative, events are 0 or 1."""
        if bool((targets[:, 0] < 0).any()):
            raise ValueError(
                f"survival needs times of at least 0 in the first column, got "
                f"{float(targets[:, 0].min()):g}; the columns are time and event"
            )
        _check_zeros_and_ones(targets[:, 1], "survival", "events in the second column")

    def batch_loss(self, outputs: Tensor, targets: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the mean over the rows of the batch."""
        _check_single(outputs, "survival")
        score = outputs[:, 0]
        time = targets[:, 0]
        weight = torch.ones_like(score) if weight is None else weight
        event = targets[:, 1].to(score.dtype) * weight
        counted = score.masked_fill(weight == 0, _HIDDEN)
        # Blocks of rows bound the memory of a pass over a whole test set.
        totals = []
        for block in torch.arange(len(score), device=score.device).split(1024):
            at_risk = time[None, :] >= time[block][:, None]
            everyone = counted[None, :].masked_fill(~at_risk, _HIDDEN).logsumexp(1)
            totals.append((event[block] * (everyone - score[block])).sum())
        return torch.stack(totals).sum() / weight.sum().clamp(min=1)


@entry("task")
@dataclass(frozen=True)
class Multilabel(RowTask):
    """Any of several labels: logistic loss of one output a label, mean over labels.

    Args:
        headline: the metric that runs are compared by; average_precision unless given.
    """

    headline: str = ""

    kind: ClassVar[str] = "labels"
    usual_metrics: ClassVar[tuple[str, ...]] = ("average_precision", "macro_f1", "loss")

    def outputs(self, targets: Targets) -> int:
        """One output a label."""
        if targets.classes or targets.columns < 2:
            raise ValueError(
                f"multilabel needs several columns of 0 and 1, the targets are "
                f"{_described(targets)}; write task = {_fitting(targets)!r}"
            )
        return targets.columns

    def check_values(self, targets: Tensor) -> None:
        """Labels are 0 or 1."""
        _check_zeros_and_ones(targets, "multilabel", "labels")

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean logistic loss over the labels of every row."""
        hit = targets.to(outputs.dtype)
        return F.binary_cross_entropy_with_logits(outputs, hit, reduction="none").mean(1)

    def answers(self, outputs: Tensor) -> Tensor:
        """Return 1 for every label whose output is above 0, [B, labels]."""
        return (outputs > 0).to(torch.int64)

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Return the probability of every label."""
        return outputs.sigmoid()


@entry("task")
@dataclass(frozen=True)
class Tokens(RowTask):
    """The next token at every position: cross-entropy, mean over a row's positions.

    Args:
        vocabulary: number of tokens, the size of the output at a position.
        headline: the metric that runs are compared by; accuracy unless given.
    """

    vocabulary: int
    headline: str = ""

    kind: ClassVar[str] = "tokens"
    usual_metrics: ClassVar[tuple[str, ...]] = ("accuracy", "perplexity", "loss")

    def __post_init__(self) -> None:
        if self.vocabulary < 2:
            raise ValueError(f"vocabulary must be at least 2, got {self.vocabulary}")

    def outputs(self, targets: Targets) -> int:
        """One output a token of the vocabulary."""
        if not targets.whole or targets.columns < 2:
            raise ValueError(
                f"tokens needs whole numbers at several positions, the targets are "
                f"{_described(targets)}; write task = {_fitting(targets)!r}"
            )
        return self.vocabulary

    def check_values(self, targets: Tensor) -> None:
        """Tokens are below the vocabulary's size."""
        if int(targets.max()) >= self.vocabulary:
            raise ValueError(
                f"tokens(vocabulary={self.vocabulary}) needs targets below {self.vocabulary}, got "
                f"{int(targets.max())}; set vocabulary to at least {int(targets.max()) + 1}"
            )

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy over the positions of every row [B, T]."""
        real = targets >= 0
        known = targets.clamp(min=0)
        logs = outputs.log_softmax(-1).gather(-1, known[..., None])[..., 0]
        return -(logs * real).sum(1) / real.sum(1).clamp(min=1)

    def answers(self, outputs: Tensor) -> Tensor:
        """Return the likeliest token at every position."""
        return outputs.argmax(-1)

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Return the softmax at every position."""
        return outputs.softmax(-1)


def _check_single(outputs: Tensor, task: str) -> None:
    """Refuse outputs of which all but the first would be ignored."""
    if outputs.dim() != 2 or outputs.shape[1] != 1:
        raise ValueError(
            f"{task} needs one output a row, [B, 1]; the network gives {list(outputs.shape)}"
        )


def _check_zeros_and_ones(values: Tensor, task: str, what: str) -> None:
    other = values[(values != 0) & (values != 1)]
    if other.numel():
        raise ValueError(f"{task} needs {what} that are 0 or 1, got {float(other[0]):g}")


def _described(targets: Targets) -> str:
    if targets.classes:
        return f"{targets.classes} classes"
    kind = "whole numbers" if targets.whole else "numbers"
    return f"{kind} in {targets.columns} columns" if targets.columns > 1 else kind


def _advice(targets: Targets) -> str:
    """Say what to do with targets that have no classes, or not as many as a task needs."""
    fitting = f"write task = {_fitting(targets)!r}"
    if targets.classes or targets.columns > 1:
        return fitting
    return f"{fitting}, or make the data with classes=True"


def _fitting(targets: Targets) -> str:
    """Name the task that such targets are most often for."""
    if targets.classes:
        return "classification"
    if targets.columns == 1:
        return "regression"
    return "multilabel" if targets.whole else "regression"
