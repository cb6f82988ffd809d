"""Metrics: numbers that say how good a model is.

A `RowMetric` adds up over rows on the device: it is cheap, and can be scored by client. A
`SetMetric` is a function of all outputs, on the host: scikit-learn's where it has one. A
`GroupMetric` is made of another metric's values on each group of rows, such as a hospital's.

A metric of your own is a function of the outputs and targets of a batch:

    @entry("metric")
    def within_ten(outputs, targets):
        return (outputs[:, 0] - targets).abs() < 10

The name is the column in ``rounds.jsonl``. What is not defined (AUROC of one class) is NaN, which
is written as null and left out of means.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fedbasin.core.bounds import Bounded, within
from fedbasin.core.catalogue import CATALOGUE, card_of, entry
from fedbasin.core.expressions import Choice, parse
from fedbasin.core.record import COLUMNS, Headline
from fedbasin.core.served import PREFIXES
from fedbasin.core.task import RowTask, Task

_ANY: frozenset[str] = frozenset()


class Metric(Bounded):
    """A number that says how good a model is."""

    unit: ClassVar[Literal["%", ""]] = ""
    higher_is_better: ClassVar[bool] = True
    fits: ClassVar[frozenset[str]] = _ANY  # kinds of tasks; empty fits all
    scalar: ClassVar[bool] = True  # False: a list of numbers, recorded in the last round alone

    @property
    def name(self) -> str:
        """The column in the records."""
        return card_of(self).name

    @property
    def headline(self) -> Headline:
        """How tables, targets and tests treat it."""
        return Headline(self.name, self.higher_is_better, self.unit)


class RowMetric(Metric):
    """A metric of sums over rows."""

    @abstractmethod
    def addends(self, task: Task, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return what every row adds, [B, k]."""

    @abstractmethod
    def value(self, sums: Tensor, rows: Tensor) -> Tensor:
        """Return the metric [...] from sums [..., k] over rows [...]; float64, NaN if undefined."""


class MeanMetric(RowMetric):
    """The mean of one number a row."""

    @abstractmethod
    def each(self, task: Task, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the number of every row [B]."""

    def addends(self, task: Task, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return one number a row."""
        return self.each(task, outputs, targets)[:, None]

    def value(self, sums: Tensor, rows: Tensor) -> Tensor:
        """Return the mean."""
        return sums[..., 0] / rows


class SetMetric(Metric):
    """A metric of all rows together."""

    def value(self, task: Task, outputs: Tensor, targets: Tensor) -> float:
        """Return the metric; NaN where a model puts out NaN or Inf, which scikit-learn refuses."""
        if not bool(outputs.isfinite().all()):
            return math.nan
        with np.errstate(all="ignore"):  # a model that diverges may overflow
            return self.of_rows(task, outputs, targets)

    @abstractmethod
    def of_rows(self, task: Task, outputs: Tensor, targets: Tensor) -> float:
        """Return the metric of the outputs and targets of all rows, which are on the host."""

    def by_group(
        self, task: Task, outputs: Tensor, targets: Tensor, group: Tensor, count: int
    ) -> Tensor:
        """Return the metric of every group of rows, float64 [count]; NaN where undefined.

        This is a loop over groups. A metric that can be had from sorted rows overrides it.
        """
        order = torch.argsort(group, stable=True)
        sizes = torch.bincount(group, minlength=count).tolist()
        pairs = zip(outputs[order].split(sizes), targets[order].split(sizes), strict=True)
        values = [self.value(task, o, t) if len(t) else math.nan for o, t in pairs]
        return torch.tensor(values, dtype=torch.float64)


@entry("metric")
@dataclass(frozen=True)
class Loss(MeanMetric):
    """The mean loss of the task."""

    higher_is_better: ClassVar[bool] = False

    def each(self, task: Task, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of every row."""
        assert isinstance(task, RowTask)  # `metrics_of` takes `WholeLoss` for others
        return task.each(outputs, targets)


@dataclass(frozen=True)
class WholeLoss(SetMetric):
    """The loss of a task that does not add up over rows, of all rows as one batch."""

    name: ClassVar[str] = "loss"
    higher_is_better: ClassVar[bool] = False

    def of_rows(self, task: Task, outputs: Tensor, targets: Tensor) -> float:
        """Return the loss of one large batch."""
        return float(task.batch_loss(outputs, targets))


@entry("metric")
@dataclass(frozen=True)
class Accuracy(MeanMetric):
    """The share of right answers; of multi-label rows, those with all labels right."""

    unit: ClassVar[Literal["%", ""]] = "%"
    fits: ClassVar[frozenset[str]] = frozenset({"classes", "binary", "labels", "tokens"})

    def each(self, task: Task, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return 1 for a right answer."""
        right = task.answers(outputs) == targets
        if task.kind == "tokens":
            real = targets >= 0
            return (right & real).sum(1) / real.sum(1).clamp(min=1)
        return right.flatten(1).all(1) if right.dim() > 1 else right


class _ByClass(RowMetric):
    """What is counted by class: right answers, answers and rows."""

    unit: ClassVar[Literal["%", ""]] = "%"
    fits: ClassVar[frozenset[str]] = frozenset({"classes", "binary", "labels"})

    def addends(self, task: Task, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return right, answered and true, [B, 3 classes]."""
        answers = task.answers(outputs)
        if task.kind == "labels":
            answered = answers.to(torch.float64)
            true = targets.to(torch.float64)
        else:
            numbers = torch.arange(task.class_count(outputs), device=outputs.device)
            answered = (answers[:, None] == numbers).to(torch.float64)
            true = (targets[:, None] == numbers).to(torch.float64)
        return torch.cat([answered * true, answered, true], 1)

    def value(self, sums: Tensor, rows: Tensor) -> Tensor:
        """Return the metric from the three counts of every class."""
        right, answered, true = sums.unflatten(-1, (3, -1)).unbind(-2)
        return self.of_counts(right, answered, true)

    @abstractmethod
    def of_counts(self, right: Tensor, answered: Tensor, true: Tensor) -> Tensor:
        """Return the metric from counts [..., classes]."""


@entry("metric", name="accuracy_per_class")
@dataclass(frozen=True)
class AccuracyPerClass(_ByClass):
    """The share of right answers among the rows of each class; NaN for a class without rows."""

    scalar: ClassVar[bool] = False

    def of_counts(self, right: Tensor, answered: Tensor, true: Tensor) -> Tensor:
        """Return the recall of each class."""
        return right / true


@entry("metric", name="balanced_accuracy")
@dataclass(frozen=True)
class BalancedAccuracy(_ByClass):
    """The mean over classes of the accuracy on their rows; a class without rows is left out."""

    fits: ClassVar[frozenset[str]] = frozenset({"classes", "binary"})

    def of_counts(self, right: Tensor, answered: Tensor, true: Tensor) -> Tensor:
        """Return the mean recall."""
        return (right / true).nanmean(-1)


@entry("metric", name="macro_f1")
@dataclass(frozen=True)
class MacroF1(_ByClass):
    """The mean over classes or labels of F1; one without rows and answers is left out."""

    def of_counts(self, right: Tensor, answered: Tensor, true: Tensor) -> Tensor:
        """Return the mean of 2 right / (answered + true)."""
        return (2 * right / (answered + true)).nanmean(-1)


@entry("metric")
@dataclass(frozen=True)
class Brier(MeanMetric):
    """The squared distance between predicted probabilities and the truth; of class 1 if binary."""

    higher_is_better: ClassVar[bool] = False
    fits: ClassVar[frozenset[str]] = frozenset({"classes", "binary"})

    def each(self, task: Task, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the squared distance of every row."""
        probabilities = task.probabilities(outputs)
        numbers = torch.arange(probabilities.shape[1], device=outputs.device)
        true = (targets[:, None] == numbers).to(probabilities.dtype)
        gap = (probabilities - true).square()
        return gap[:, 1] if task.kind == "binary" else gap.sum(1)


@entry("metric")
@dataclass(frozen=True)
class ECE(RowMetric):
    """Expected calibration error: how far confidence and accuracy are apart, by bins of confidence.

    Args:
        bins: number of bins of equal width.
    """

    bins: int = within("[1, 10000]", words="must be from 1 to 10000", default=15)

    higher_is_better: ClassVar[bool] = False
    fits: ClassVar[frozenset[str]] = frozenset({"classes", "binary"})

    def addends(self, task: Task, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return confidence minus right, in the bin of the confidence."""
        confidence = task.probabilities(outputs).amax(-1).to(torch.float64)
        right = (task.answers(outputs) == targets).to(torch.float64)
        bin_of = (confidence * self.bins).ceil().clamp(1, self.bins) - 1
        inside = bin_of[:, None] == torch.arange(self.bins, device=outputs.device)
        return torch.where(inside, (confidence - right)[:, None], 0.0)

    def value(self, sums: Tensor, rows: Tensor) -> Tensor:
        """Return the mean over rows of the gaps' sizes."""
        return sums.abs().sum(-1) / rows


@entry("metric")
@dataclass(frozen=True)
class MAE(MeanMetric):
    """Mean absolute error, mean over columns."""

    higher_is_better: ClassVar[bool] = False
    fits: ClassVar[frozenset[str]] = frozenset({"numbers"})

    def each(self, task: Task, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean absolute error of every row."""
        return _gap(outputs, targets).abs().mean(1)


@entry("metric")
@dataclass(frozen=True)
class RMSE(MeanMetric):
    """Root of the mean squared error; of several columns the mean of their squared errors."""

    higher_is_better: ClassVar[bool] = False
    fits: ClassVar[frozenset[str]] = frozenset({"numbers"})

    def each(self, task: Task, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean squared error of every row."""
        return _gap(outputs, targets).square().mean(1)

    def value(self, sums: Tensor, rows: Tensor) -> Tensor:
        """Return the root of the mean."""
        return (sums[..., 0] / rows).sqrt()


@entry("metric")
@dataclass(frozen=True)
class R2(SetMetric):
    """The share of the targets' variance that is explained; undefined for fewer than two rows."""

    fits: ClassVar[frozenset[str]] = frozenset({"numbers"})

    def of_rows(self, task: Task, outputs: Tensor, targets: Tensor) -> float:
        """Return scikit-learn's."""
        if len(outputs) < 2:
            return math.nan
        from sklearn.metrics import r2_score

        return float(r2_score(targets.reshape(outputs.shape).numpy(), outputs.numpy()))


@entry("metric")
@dataclass(frozen=True)
class AUROC(SetMetric):
    """Area under the ROC curve; of classes the mean of one against the rest.

    A class that all rows or no rows have is left out. Where none is left it is undefined.
    """

    fits: ClassVar[frozenset[str]] = frozenset({"classes", "binary", "labels"})

    def of_rows(self, task: Task, outputs: Tensor, targets: Tensor) -> float:
        """Return the mean of scikit-learn's over classes."""
        from sklearn.metrics import roc_auc_score

        return _one_against_rest(roc_auc_score, task, outputs, targets)

    def by_group(
        self, task: Task, outputs: Tensor, targets: Tensor, group: Tensor, count: int
    ) -> Tensor:
        """Return it for every group from ranks within groups, without a loop over groups."""
        truth, scores = _columns(task, outputs, targets)
        owner = group.numpy()
        finite = np.isfinite(outputs.flatten(1).numpy()).all(1)
        areas = np.stack(
            [_areas(t, s, owner, count) for t, s in zip(truth.T, scores.T, strict=True)]
        )
        defined = np.isfinite(areas)
        sums = np.where(defined, areas, 0.0).sum(0)
        with np.errstate(invalid="ignore", divide="ignore"):
            values = sums / defined.sum(0)
        values[np.bincount(owner[~finite], minlength=count) > 0] = math.nan
        return torch.from_numpy(values)


@entry("metric", name="average_precision")
@dataclass(frozen=True)
class AveragePrecision(SetMetric):
    """Area under the precision-recall curve; of classes the mean of one against the rest."""

    fits: ClassVar[frozenset[str]] = frozenset({"classes", "binary", "labels"})

    def of_rows(self, task: Task, outputs: Tensor, targets: Tensor) -> float:
        """Return the mean of scikit-learn's over classes."""
        from sklearn.metrics import average_precision_score

        return _one_against_rest(average_precision_score, task, outputs, targets)


@entry("metric", name="c_index")
@dataclass(frozen=True)
class CIndex(SetMetric):
    """Harrell's concordance index: the share of comparable pairs in the right order.

    A pair is comparable where one row has an event before the other's time, or at the same time as
    the other is censored. Equal scores count half. Without a comparable pair it is undefined.
    """

    fits: ClassVar[frozenset[str]] = frozenset({"survival"})

    def of_rows(self, task: Task, outputs: Tensor, targets: Tensor) -> float:
        """Compare every row that has an event with all others."""
        score = outputs[:, 0].double().numpy()
        time = targets[:, 0].double().numpy()
        event = targets[:, 1].numpy() > 0
        pairs = right = 0.0
        for block in np.array_split(np.flatnonzero(event), max(1, int(event.sum()) // 256)):
            later = time[None, :] > time[block, None]
            outlived = (time[None, :] == time[block, None]) & ~event[None, :]
            comparable = later | outlived
            ahead = (score[block, None] > score[None, :]) & comparable
            equal = (score[block, None] == score[None, :]) & comparable
            pairs += comparable.sum()
            right += ahead.sum() + 0.5 * equal.sum()
        return float(right / pairs) if pairs else math.nan


@entry("metric")
@dataclass(frozen=True)
class Perplexity(MeanMetric):
    """The exponential of the mean loss."""

    higher_is_better: ClassVar[bool] = False
    fits: ClassVar[frozenset[str]] = frozenset({"tokens", "classes"})

    def each(self, task: Task, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of every row."""
        assert isinstance(task, RowTask)
        return task.each(outputs, targets)

    def value(self, sums: Tensor, rows: Tensor) -> Tensor:
        """Return exp of the mean; infinite where it overflows."""
        return (sums[..., 0] / rows).exp()


@dataclass(frozen=True)
class OwnMetric(MeanMetric):
    """A metric that a function of outputs and targets gives: the mean of one number a row."""

    choice: Choice

    @property
    def name(self) -> str:
        """The function's name."""
        return self.choice.name

    @property
    def headline(self) -> Headline:
        """Higher is better, unless the function has an attribute that says otherwise."""
        make = CATALOGUE[self.choice.name].make
        return Headline(
            self.name, getattr(make, "higher_is_better", True), getattr(make, "unit", "")
        )

    def each(self, task: Task, outputs: Tensor, targets: Tensor) -> Tensor:
        """Call the function."""
        values = self.choice(outputs, targets)
        if not isinstance(values, Tensor) or values.shape != outputs.shape[:1]:
            shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(
                f"metric {self.name} must return one number a row, [{len(outputs)}], got {shape}"
            )
        return values


_ACCURACY = Accuracy()


@dataclass(frozen=True)
class GroupMetric(Metric):
    """A metric of another metric's values on each group of the scored rows.

    Rows without groups are one group.
    """

    of: Metric | Choice = _ACCURACY

    def __post_init__(self) -> None:
        if isinstance(self.of, GroupMetric) or not getattr(self.of, "scalar", True):
            raise ValueError(f"of must be a metric that is one number, got {self.of.name}")

    @property
    def name(self) -> str:
        """The inner metric's column, and what is made of it."""
        return f"{self.of.name}_{card_of(self).name}"

    @property
    def headline(self) -> Headline:
        """The direction and unit of the inner metric."""
        return self.inner.headline._replace(name=self.name)

    @property
    def inner(self) -> Metric:
        """The metric of each group."""
        return OwnMetric(self.of) if isinstance(self.of, Choice) else self.of

    @abstractmethod
    def of_groups(self, values: Tensor) -> float | list[float]:
        """Return the metric from the values of the groups, float64 [G]; NaN where undefined."""


@entry("metric", name="group_mean")
@dataclass(frozen=True)
class GroupMean(GroupMetric):
    """The plain mean of a metric over groups of rows, each group counted once.

    A group for which it is undefined is left out.

    Args:
        of: the metric of each group; accuracy unless given.
    """

    def of_groups(self, values: Tensor) -> float:
        """Return the mean of the values that are defined."""
        return float(values.nanmean())


@entry("metric", name="by_group")
@dataclass(frozen=True)
class ByGroup(GroupMetric):
    """A metric of each group of rows, by the group's number.

    Args:
        of: the metric of each group; accuracy unless given.
    """

    scalar: ClassVar[bool] = False

    def of_groups(self, values: Tensor) -> list[float]:
        """Return all values."""
        listed: list[float] = values.tolist()
        return listed


class MetricError(ValueError):
    """A metric that does not fit a task, with those that do."""


def metrics_of(task: Task, more: tuple[str, ...] = ()) -> tuple[Metric, ...]:
    """Return the metrics of a task and those asked for beside them, each once."""
    metrics: dict[str, Metric] = {}
    for expression in (*task.metrics, *more):
        metric = _fitted(parse(expression, "metric"), task)
        if metric.name in COLUMNS or metric.name.startswith(("note_", *PREFIXES)):
            raise MetricError(f"metric {metric.name}: the name is a column of the records")
        metrics[metric.name] = metric
    return tuple(metrics.values())


def _fitted(read: Metric | Choice, task: Task) -> Metric:
    """Return what an expression names as a metric of this task; refuse one that does not fit."""
    if isinstance(read, GroupMetric):
        return replace(read, of=_fitted(read.of, task))
    metric: Metric = OwnMetric(read) if isinstance(read, Choice) else read
    if isinstance(metric, Loss) and not isinstance(task, RowTask):
        metric = WholeLoss()
    if metric.fits and task.kind not in metric.fits:
        fitting = [
            card.name
            for card in CATALOGUE.values()
            if card.kind == "metric" and task.kind in getattr(card.make, "fits", ())
        ]
        raise MetricError(
            f"metric {metric.name} does not fit the task {task_name(task)}; "
            f"available: {', '.join(fitting)}"
        )
    return metric


def task_name(task: Task) -> str:
    """Return what a task is called in messages."""
    return type(task).__name__.lower()


def _gap(outputs: Tensor, targets: Tensor) -> Tensor:
    return (targets.reshape(outputs.shape).to(torch.float64) - outputs).flatten(1)


def _one_against_rest(score: Any, task: Task, outputs: Tensor, targets: Tensor) -> float:
    """Return the mean of a binary score over the classes that some rows have and some have not."""
    truth, scores = _columns(task, outputs, targets)
    columns = zip(truth.T, scores.T, strict=True)
    values = [score(true, said) for true, said in columns if 0 < true.sum() < len(true)]
    return float(np.mean(values)) if values else math.nan


def _columns(task: Task, outputs: Tensor, targets: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return for every class or label whether rows have it, and the rows' scores for it, [n, k]."""
    scores = task.probabilities(outputs.double())
    if task.kind == "binary":
        truth = targets.reshape(-1, 1)
        scores = outputs.double()  # ranks of the output itself: a sigmoid saturates
    elif task.kind == "labels":
        truth = targets
    else:
        truth = targets[:, None] == torch.arange(scores.shape[1])
    return truth.double().numpy(), scores.numpy()


def _areas(truth: np.ndarray, scores: np.ndarray, owner: np.ndarray, count: int) -> np.ndarray:
    """Return the area under the ROC curve of every group [count], from the ranks in its rows.

    With the sum R of the ranks of the n positive rows among n + m, equal scores sharing the mean of
    their ranks, it is (R - n (n + 1) / 2) / (n m). NaN where n or m is 0.
    """
    order = np.lexsort((scores, owner))
    sorted_owner = owner[order]
    sorted_scores = scores[order]
    begins = np.ones(len(order), dtype=bool)  # of a run of equal scores in one group
    begins[1:] = (np.diff(sorted_owner) != 0) | (np.diff(sorted_scores) != 0)
    run = np.cumsum(begins) - 1
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(order)) - 1
    sizes = np.bincount(owner, minlength=count)
    before = np.cumsum(sizes) - sizes  # rows of earlier groups
    ranks = (first[run] + last[run]) / 2 + 1 - before[sorted_owner]
    positive = truth[order]
    sums = np.bincount(sorted_owner, weights=ranks * positive, minlength=count)
    n = np.bincount(sorted_owner, weights=positive, minlength=count)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((sums - n * (n + 1) / 2) / (n * (sizes - n)))
