"""The evaluator: rows of data on which models are scored, one or many at a time.

It scores the models of a round, models by client or group in one pass, and the many models of a
landscape: a table of weights [M, K] times a cohort matrix [K, P]. Methods that learn from data on
the server see it as a `Proxy`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.func import vmap

from fedbasin.core.metric import (
    MAE,
    Accuracy,
    GroupMetric,
    Loss,
    Metric,
    MetricError,
    RowMetric,
    SetMetric,
    metrics_of,
)
from fedbasin.core.net import Net
from fedbasin.core.record import Headline
from fedbasin.core.rng import Key
from fedbasin.core.task import RowTask, Task

Transform = Callable[..., Tensor]  # (stored rows, key or None) -> what the network takes
Tick = Callable[[int], None]  # told how many more models were measured
Scores = dict[str, float | list[float]]  # by metric; NaN where it is undefined
_LOOPED = 4  # so few models are looped over: `vmap` costs more than it saves


def no_tick(count: int) -> None:
    """Show nothing."""


class Measured(NamedTuple):
    """How good M models are; float64, on the host."""

    loss: Tensor  # [M] mean loss
    error: Tensor  # [M] share of wrong answers, mean absolute error of numbers, else the loss


class Landscape(Protocol):
    """Anything that measures mixtures of models."""

    def measure(self, weights: Tensor, models: Tensor, tick: Tick = no_tick) -> Measured:
        """Measure the M models ``weights @ models`` of weights [M, K] and models [K, P]."""
        ...


class _Captured(NamedTuple):
    """A pass as a CUDA graph, and the slots that it reads and writes."""

    graph: Any
    models: Tensor
    buffers: Tensor
    sums: list[Tensor]


@dataclass(frozen=True)
class Evaluator:
    """A set of rows to score models on, or to learn from on the server.

    Args:
        net: the network.
        inputs: [n, ...] stored rows.
        labels: [n] or [n, k] targets.
        transform: turns stored rows into network inputs.
        task: what outputs mean.
        more: metrics beside the task's own, as expressions.
        buffers: statistics [Q] for `logits`, `loss` and `measure`; the network's own if None.
        rows_at_once: rows in one forward pass.
        models_at_once: models in one forward pass of a landscape; 0 chooses by device and network.
        groups: int64 [n], the group (a hospital, a domain) of every row, for metrics over groups;
            without it all rows are one group.
    """

    net: Net
    inputs: Tensor
    labels: Tensor
    transform: Transform
    task: Task
    more: tuple[str, ...] = ()
    buffers: Tensor | None = None
    rows_at_once: int = 1000
    models_at_once: int = 0
    groups: Tensor | None = None
    _captured: dict[Any, _Captured | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.labels)

    @cached_property
    def metrics(self) -> tuple[Metric, ...]:
        """What is scored every round, the headline first."""
        return tuple(m for m in metrics_of(self.task, self.more) if m.scalar)

    @cached_property
    def last_metrics(self) -> tuple[Metric, ...]:
        """What is scored in the last round too: lists, such as accuracy by class."""
        lists = tuple(m for m in metrics_of(self.task, self.more) if not m.scalar)
        return (*self.metrics, *lists, *self._by_class(lists))

    def _by_class(self, known: tuple[Metric, ...]) -> tuple[Metric, ...]:
        """Return accuracy by class, where the task has classes."""
        if self.task.kind != "classes" or any(m.name == "accuracy_per_class" for m in known):
            return ()
        return metrics_of(self.task, ("accuracy_per_class",))[-1:]

    @cached_property
    def classes(self) -> int:
        """Number of classes; 0 where the task has none."""
        if "class_labels" not in self.task.provides:
            return 0
        with torch.no_grad():
            first = self.logits(self.net.initial()[0], torch.zeros(1, dtype=torch.int64))
        return self.task.class_count(first)

    @property
    def headline(self) -> Headline:
        """The metric that runs are compared by."""
        return self.metrics[0].headline

    def with_buffers(self, buffers: Tensor) -> Evaluator:
        """Return the same rows, for models with other statistics."""
        return replace(self, buffers=buffers)

    def on(self, inputs: Tensor, labels: Tensor, groups: Tensor | None = None) -> Evaluator:
        """Return the same scoring on other rows."""
        return replace(self, inputs=inputs, labels=labels, groups=groups)

    def sample(self, count: int, key: Key) -> tuple[Evaluator, Tensor]:
        """Return at most so many rows, drawn without replacement (0: all), and which they are."""
        rows = torch.arange(len(self))
        if not 0 < count < len(self):
            return self, rows
        drawn = key.fold("rows").numpy().permutation(len(self))[:count]
        rows = torch.from_numpy(drawn).sort().values
        here = rows.to(self.labels.device)
        groups = None if self.groups is None else self.groups[here]
        return self.on(self.inputs[here], self.labels[here], groups), rows

    def logits(self, vector: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return the outputs [n, ...] of a model on the chosen rows, differentiable in it."""
        raw = self.inputs if rows is None else self.inputs[rows]
        parts = [
            self.net(vector, self._network_inputs(part), self.buffers).logits
            for part in raw.split(self.rows_at_once)
        ]
        return torch.cat(parts)

    def loss(self, vector: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return the mean loss of a model on the chosen rows, differentiable in it."""
        labels = self.labels if rows is None else self.labels[rows]
        return self.task.batch_loss(self.logits(vector, rows), labels)

    def summed_loss(self, vector: Tensor, rows: slice) -> Tensor:
        """Return the loss of a model summed over some rows, differentiable in it."""
        outputs = self.net(vector, self._network_inputs(self.inputs[rows]), self.buffers).logits
        return self._row_task().each(outputs, self.labels[rows]).sum()

    def score(self, vector: Tensor, buffers: Tensor | None = None, *, last: bool = False) -> Scores:
        """Score one model on all rows."""
        return self.scores([vector], buffers, last=last)[0]

    @torch.no_grad()
    def scores(
        self, vectors: Sequence[Tensor], buffers: Tensor | None = None, *, last: bool = False
    ) -> list[Scores]:
        """Score models of one round on all rows, in one pass and with one transfer to the host.

        On CUDA the models go through the network side by side, and the pass is a captured graph.

        Args:
            vectors: the models.
            buffers: their statistics [Q]; the network's own by default.
            last: whether to score what is scored in the last round alone.
        """
        chosen = self.last_metrics if last else self.metrics
        models = torch.stack(list(vectors))
        statistics = self._statistics(buffers)
        by_rows = tuple(m for m in chosen if isinstance(m, RowMetric))
        values: dict[str, list[Any]] = {}
        for metric, value in self._row_values(models, statistics, by_rows).items():
            values[metric] = value.tolist()
        by_sets = [m for m in chosen if isinstance(m, SetMetric)]
        if by_sets:
            outputs = [self._all_outputs(model, statistics) for model in models]
            labels = self.labels.cpu()
            for whole in by_sets:
                values[whole.name] = [whole.value(self.task, o, labels) for o in outputs]
        by_groups = [m for m in chosen if isinstance(m, GroupMetric)]
        if by_groups:
            tables = [self._group_values(model, statistics, by_groups) for model in models]
            for over in by_groups:
                values[over.name] = [over.of_groups(table[over.inner.name]) for table in tables]
        names = [m.name for m in chosen]
        return [{name: values[name][i] for name in names} for i in range(len(models))]

    def unscored(self) -> dict[str, None]:
        """Return the columns of a round that is not scored."""
        lists = (m.name for m in self.last_metrics if not m.scalar)
        return dict.fromkeys((*self._columns(), *lists))

    def of_round(
        self,
        score: Tensor,
        send: Tensor,
        buffers: Tensor | None,
        *,
        last: bool,
        train: Evaluator | None = None,
    ) -> dict[str, Any]:
        """Return the columns of a round that is scored.

        Args:
            score: the model that counts.
            send: the broadcast model; where it is another one its headline is a column too.
            buffers: statistics of both.
            last: whether this is the last round, which has more columns.
            train: clients' rows to score on beside these.
        """
        models = [score] if send is score else [score, send]
        own, *others = self.scores(models, buffers, last=last)
        headline = self.headline.name
        columns: dict[str, Any] = {**self.unscored(), **own}
        if others:
            columns[f"{headline}_send"] = others[0][headline]
        if train is not None:
            columns[f"{headline}_train"] = train.score(score, buffers)[headline]
        return columns

    def _columns(self) -> list[str]:
        headline = self.headline.name
        return [*(m.name for m in self.metrics), f"{headline}_send", f"{headline}_train"]

    @torch.no_grad()
    def scores_by(
        self, vector: Tensor, group: Tensor, count: int, buffers: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Score a model on the rows of every group, in one pass.

        Args:
            vector: the model.
            group: int64 [n], the group (a client, a domain) of every row.
            count: number of groups.
            buffers: statistics [Q]; the network's own by default.

        Returns:
            By metric one number a group, float64 [count]; NaN where it is undefined.
        """
        own = tuple(m for m in self.metrics if not isinstance(m, GroupMetric))
        return self._values_by(vector, self._statistics(buffers), own, group, count)

    def _group_values(
        self, vector: Tensor, buffers: Tensor, metrics: Sequence[GroupMetric]
    ) -> dict[str, Tensor]:
        """Return what metrics over groups are made of, by inner metric [G]."""
        group = self.groups
        if group is None:
            group = torch.zeros(len(self), dtype=torch.int64, device=self.labels.device)
        inner = {metric.inner.name: metric.inner for metric in metrics}
        count = int(group.max()) + 1
        return self._values_by(vector, buffers, tuple(inner.values()), group, count)

    def _values_by(
        self,
        vector: Tensor,
        statistics: Tensor,
        metrics: tuple[Metric, ...],
        group: Tensor,
        count: int,
    ) -> dict[str, Tensor]:
        """Return metrics of the rows of every group, in one pass."""
        group = group.to(self.labels.device)
        segments = _Segments(self.task, metrics, count)
        for cut in self.cuts():
            inputs = self._network_inputs(self.inputs[cut])
            outputs = self.net(vector, inputs, statistics).logits
            segments.add(outputs, self.labels[cut], group[cut])
        return segments.values()

    def scores_at_home(
        self,
        models: Iterable[tuple[Tensor, Tensor, Tensor]],
        offsets: Sequence[int],
    ) -> dict[str, Tensor]:
        """Score a model of each group's own on the rows of that group.

        Args:
            models: blocks of groups [C], their models [C, P] and statistics [C, Q]; a group that no
                block names has no score.
            offsets: where the rows of each group begin, [G + 1]: rows lie in the groups' order.

        Returns:
            By metric one number a group, float64 [G]; NaN where it is undefined.
        """
        own = tuple(m for m in self.metrics if not isinstance(m, GroupMetric))
        segments = _Segments(self.task, own, len(offsets) - 1)
        starts = torch.tensor(offsets, device=self.labels.device)
        for block in models:  # which may train as it is read
            self._add_block(segments, starts, *block)
        return segments.values()

    @torch.no_grad()
    def _add_block(
        self,
        segments: _Segments,
        starts: Tensor,
        groups: Tensor,
        vectors: Tensor,
        buffers: Tensor,
    ) -> None:
        """Add the rows of some groups, each under its own model."""
        first = starts[groups]
        sizes = starts[groups + 1] - first
        # Groups of like size in one pass: shorter ones are filled up with rows that do not count.
        for part in torch.argsort(sizes).split(self._groups_at_once(sizes)):
            place = torch.arange(int(sizes[part].max()), device=first.device)
            real = place < sizes[part][:, None]
            rows = first[part][:, None] + torch.where(real, place, 0)
            rows = rows.clamp(max=len(self) - 1)
            outputs = self._run_own(vectors[part], rows, buffers[part])
            owner = groups[part][:, None].expand_as(rows)
            segments.add(outputs[real], self.labels[rows[real]], owner[real])

    def _groups_at_once(self, sizes: Tensor) -> int:
        """Return how many groups of at most so many rows run in one pass of own models."""
        looped = self.net.device.type == "cpu" and not self.net.compiles  # recurrent layers
        if looped or self.chunk_of_models() == 1 or not self.net.stacks:
            return 1
        return max(1, 4 * self.rows_at_once // max(int(sizes.max()), 1))

    def _run_own(self, vectors: Tensor, rows: Tensor, buffers: Tensor) -> Tensor:
        """Return the outputs [C, B, ...] of models [C, P], each on rows [C, B] of its own."""
        if len(vectors) == 1:
            inputs = self._network_inputs(self.inputs[rows[0]])
            return self.net(vectors[0], inputs, buffers[0]).logits[None]
        inputs = self.transform(self.inputs[rows.flatten()], None).unflatten(0, rows.shape)

        def one(vector: Tensor, mine: Tensor, statistics: Tensor) -> Tensor:
            return self.net(vector, mine, statistics).logits

        outputs: Tensor = vmap(one)(vectors, inputs, buffers)
        return outputs

    @torch.no_grad()
    def measure(self, weights: Tensor, models: Tensor, tick: Tick = no_tick) -> Measured:
        """Measure the M models ``weights @ models`` on all rows."""
        self._row_task()
        models = models.to(self.net.device, self.net.dtype)
        statistics = self._statistics(self.buffers)
        metrics = (Loss(), self._error_metric())
        loss: list[Tensor] = []
        error: list[Tensor] = []
        for part in weights.to(models).split(self.chunk_of_models()):
            sums = self._summed(mix(part, models), statistics, metrics)
            loss.append(metrics[0].value(sums[0].cpu(), self._rows()))
            error.append(metrics[1].value(sums[1].cpu(), self._rows()))
            tick(len(part))
        errors = torch.cat(error)
        return Measured(torch.cat(loss), 1 - errors if metrics[1].higher_is_better else errors)

    @torch.no_grad()
    def outputs(self, models: Tensor) -> Tensor:
        """Return what models [M, P] say about every row, [M, n, ...]."""
        models = models.to(self.net.device, self.net.dtype)
        statistics = self._statistics(self.buffers)
        parts = []
        for part in models.split(self.chunk_of_models()):
            said = [self._run(part, inputs, statistics) for inputs, _ in self._batches()]
            parts.append(torch.cat(said, 1))
        return torch.cat(parts)

    def cuts(self) -> list[slice]:
        """Return the rows as slices that fit into one forward pass."""
        starts = range(0, len(self), self.rows_at_once)
        return [slice(start, start + self.rows_at_once) for start in starts]

    def chunk_of_models(self) -> int:
        """Return how many models of a landscape run in one forward pass."""
        if self.models_at_once:
            return self.models_at_once
        if self.net.device.type == "cuda":
            return 8
        # On a CPU many models at once save Python's time but not arithmetic: convolutions with
        # weights of their own run slower in groups than one after another.
        return 1 if any(len(shape) > 2 for shape in self.net.layout.shapes) else 32

    def _row_task(self) -> RowTask:
        if not isinstance(self.task, RowTask):
            raise MetricError(
                f"the loss of {type(self.task).__name__.lower()} does not add up over rows, which "
                "this analysis needs"
            )
        return self.task

    @property
    def error_name(self) -> str:
        """What the error of `measure` is: error, mae, or loss where the task has no other."""
        metric = self._error_metric()
        return "error" if metric.higher_is_better else metric.name

    def _error_metric(self) -> RowMetric:
        """Return what stands for the error; the loss where the task is of the user's own."""
        if self.task.kind in Accuracy.fits:
            return Accuracy()
        return MAE() if self.task.kind in MAE.fits else Loss()

    def _statistics(self, buffers: Tensor | None) -> Tensor:
        return self.net.initial()[1] if buffers is None else buffers

    def _rows(self) -> Tensor:
        return torch.tensor(float(len(self)), dtype=torch.float64)

    def _network_inputs(self, raw: Tensor) -> Tensor:
        return self.net.arranged(self.transform(raw, None))

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        for cut in self.cuts():
            yield self._network_inputs(self.inputs[cut]), self.labels[cut]

    def _all_outputs(self, model: Tensor, buffers: Tensor) -> Tensor:
        """Return what one model says about every row, on the host."""
        said = [self.net(model, inputs, buffers).logits.cpu() for inputs, _ in self._batches()]
        return torch.cat(said)

    def _run(self, models: Tensor, inputs: Tensor, buffers: Tensor) -> Tensor:
        """Return the outputs [M, B, ...] of several models."""

        def one(vector: Tensor) -> Tensor:
            return self.net(vector, inputs, buffers).logits

        beside = len(models) > 1 and (models.is_cuda or len(models) > _LOOPED)
        if beside:
            outputs: Tensor = vmap(one)(models)
            return outputs
        return torch.stack([one(model) for model in models])

    def _row_values(
        self, models: Tensor, buffers: Tensor, metrics: tuple[RowMetric, ...]
    ) -> dict[str, Tensor]:
        """Return metrics that add up over rows, by name [M]."""
        if not metrics:
            return {}
        sums = self._replayed(models, buffers, metrics) if models.is_cuda else None
        if sums is None:
            sums = self._summed(models, buffers, metrics)
        widths = [each.shape[1] for each in sums]
        parts = torch.cat(sums, 1).cpu().split(widths, 1)
        pairs = zip(metrics, parts, strict=True)
        return {metric.name: metric.value(part, self._rows()) for metric, part in pairs}

    def _summed(
        self, models: Tensor, buffers: Tensor, metrics: tuple[RowMetric, ...]
    ) -> list[Tensor]:
        """Return the sums of each metric over all rows, [M, k]."""
        totals: list[Tensor] = []
        for inputs, labels in self._batches():

            def one(said: Tensor, true: Tensor = labels) -> tuple[Tensor, ...]:
                return tuple(each.sum(0) for each in _addends(self.task, said, true, metrics))

            outputs = self._run(models, inputs, buffers)
            if len(models) > _LOOPED:
                sums = list(vmap(one)(outputs))
            else:
                sums = [torch.stack(each) for each in zip(*map(one, outputs), strict=True)]
            totals = [a + b for a, b in zip(totals, sums, strict=True)] if totals else sums
        return totals

    def _replayed(
        self, models: Tensor, buffers: Tensor, metrics: tuple[RowMetric, ...]
    ) -> list[Tensor] | None:
        """Return the sums from a captured graph; None where the pass cannot be captured."""
        key = (tuple(models.shape), metrics)
        if key not in self._captured:
            self._captured[key] = _capture(
                lambda some, statistics: self._summed(some, statistics, metrics), models, buffers
            )
        captured = self._captured[key]
        if captured is None:
            return None
        captured.models.copy_(models)
        captured.buffers.copy_(buffers)
        captured.graph.replay()
        return captured.sums


class _Segments:
    """Metrics of every group of rows, from outputs that arrive in any order.

    Args:
        task: what outputs mean.
        metrics: which.
        count: number of groups.
    """

    def __init__(self, task: Task, metrics: tuple[Metric, ...], count: int) -> None:
        self._task = task
        self._metrics = metrics
        self._count = count
        self._by_rows = tuple(m for m in metrics if isinstance(m, RowMetric))
        self._by_sets = tuple(m for m in metrics if isinstance(m, SetMetric))
        self._sums: list[Tensor] = []
        self._rows = torch.zeros(count, dtype=torch.float64)
        self._kept: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, outputs: Tensor, labels: Tensor, group: Tensor) -> None:
        """Add rows with their groups."""
        addends = _addends(self._task, outputs, labels, self._by_rows)
        if not self._sums:
            self._sums = [each.new_zeros(self._count, each.shape[1]) for each in addends]
            self._rows = self._rows.to(outputs.device)
        for total, each in zip(self._sums, addends, strict=True):
            total.index_add_(0, group, each)
        self._rows += torch.bincount(group, minlength=self._count)
        if self._by_sets:
            self._kept.append((outputs.cpu(), labels.cpu(), group.cpu()))

    def values(self) -> dict[str, Tensor]:
        """Return each metric by group, float64 [count] on the host."""
        rows = self._rows.cpu()
        undefined = torch.full((self._count,), torch.nan, dtype=torch.float64)
        values = dict.fromkeys((m.name for m in self._metrics), undefined)
        for metric, total in zip(self._by_rows, self._sums, strict=bool(self._sums)):
            values[metric.name] = metric.value(total.cpu(), rows)
        if self._kept:
            outputs, labels, group = (torch.cat(each) for each in zip(*self._kept, strict=True))
            for whole in self._by_sets:
                values[whole.name] = whole.by_group(self._task, outputs, labels, group, self._count)
        return values


def _addends(
    task: Task, outputs: Tensor, labels: Tensor, metrics: tuple[RowMetric, ...]
) -> list[Tensor]:
    """Return what every row adds to each metric, float64 [B, k]."""
    return [m.addends(task, outputs, labels).to(torch.float64) for m in metrics]


def _capture(
    summed: Callable[[Tensor, Tensor], list[Tensor]], models: Tensor, buffers: Tensor
) -> _Captured | None:
    """Record a pass that reads models and statistics from slots of its own."""
    models = models.clone()
    buffers = buffers.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # lets libraries choose their kernels
        summed(models, buffers)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            sums = summed(models, buffers)
    except RuntimeError as error:
        first = str(error).strip().split("\n", 1)[0]
        warnings.warn(f"evaluation is not captured as a CUDA graph: {first}", stacklevel=2)
        return None
    return _Captured(graph, models, buffers, sums)


def mix(weights: Tensor, models: Tensor) -> Tensor:
    """Return ``weights @ models`` in the models' full precision, even where tf32 is on."""
    out = models.new_zeros(len(weights), models.shape[1])
    for column, model in zip(weights.unbind(1), models, strict=True):
        out.addr_(column, model)
    return out
