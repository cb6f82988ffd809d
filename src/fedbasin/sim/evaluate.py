"""How good a model is: accuracy and loss on a set of rows, computed on the device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fedbasin.core.net import Net
from fedbasin.local.train import Transform


class Score(NamedTuple):
    """The result of an evaluation."""

    accuracy: float
    loss: float  # mean cross-entropy
    per_class: list[float]  # accuracy of each class; NaN for a class with no row


@dataclass(frozen=True)
class Examiner:
    """A set of rows to score models on, or to learn from on the server.

    Args:
        net: the network.
        inputs: uint8 [n, ...] stored rows.
        labels: int64 [n].
        transform: turns stored rows into network inputs.
        classes: number of classes.
        buffers: statistics [Q] used by `logits` and `loss`; the network's own if None.
        chunk: rows in one forward pass.
    """

    net: Net
    inputs: Tensor
    labels: Tensor
    transform: Transform
    classes: int
    buffers: Tensor | None = None
    chunk: int = 1000
    _kept: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.labels)

    def with_buffers(self, buffers: Tensor) -> Examiner:
        """Return the same rows, for models with other statistics."""
        return replace(self, buffers=buffers)

    def logits(self, vector: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return the logits [n, classes] of a model, differentiable in the vector."""
        raw = self.inputs if rows is None else self.inputs[rows]
        parts = [
            self.net(vector, self.net.arranged(self.transform(part, None)), self.buffers).logits
            for part in raw.split(self.chunk)
        ]
        return torch.cat(parts)

    def loss(self, vector: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return the mean cross-entropy of a model, differentiable in the vector."""
        labels = self.labels if rows is None else self.labels[rows]
        return F.cross_entropy(self.logits(vector, rows), labels)

    def score(self, vector: Tensor, buffers: Tensor | None = None) -> Score:
        """Score a model on all rows."""
        return self.scores([vector], buffers)[0]

    @torch.no_grad()
    def scores(self, vectors: Sequence[Tensor], buffers: Tensor | None = None) -> list[Score]:
        """Score models of one round on all rows, in one pass and with one transfer to the host.

        On CUDA the models go through the network side by side, and the pass is a captured graph.
        """
        models = torch.stack(list(vectors))
        statistics = self.net.initial()[1] if buffers is None else buffers
        counts = self._replayed(models, statistics) if models.is_cuda else None
        if counts is None:
            counts = self._counts(models, statistics)
        members = self._members()
        return [_score(line[:-1], members, line[-1]) for line in counts.tolist()]

    def _counts(self, models: Tensor, buffers: Tensor) -> Tensor:
        """Return right answers by class, then the summed loss, of every model [M, classes + 1]."""
        found = models.new_zeros(len(models), self.classes + 1, dtype=torch.float64)
        for raw, labels in zip(
            self.inputs.split(self.chunk), self.labels.split(self.chunk), strict=True
        ):
            inputs = self.net.arranged(self.transform(raw, None))
            if models.is_cuda and len(models) > 1:
                run = torch.func.vmap(lambda v, x=inputs: self.net(v, x, buffers).logits)
                logits = run(models)
            else:
                logits = torch.stack([self.net(v, inputs, buffers).logits for v in models])
            right = (logits.argmax(2) == labels).to(torch.float64)
            found.index_add_(1, labels, right)
            truth = labels.expand(len(models), -1)
            each = F.cross_entropy(logits.transpose(1, 2), truth, reduction="none")
            found[:, -1] += each.to(torch.float64).sum(1)
        return found

    def _members(self) -> list[float]:
        """Return how many rows each class has."""
        if "members" not in self._kept:
            self._kept["members"] = torch.bincount(self.labels, minlength=self.classes).tolist()
        members: list[float] = self._kept["members"]
        return members

    def _replayed(self, models: Tensor, buffers: Tensor) -> Tensor | None:
        """Return the counts from a captured graph; None where the pass cannot be captured."""
        shape = tuple(models.shape)
        if shape not in self._kept:
            self._kept[shape] = _capture(self._counts, models, buffers)
        if self._kept[shape] is None:
            return None
        graph, model_slot, buffer_slot, counts = self._kept[shape]
        model_slot.copy_(models)
        buffer_slot.copy_(buffers)
        graph.replay()
        found: Tensor = counts
        return found


def _capture(count: Callable[[Tensor, Tensor], Tensor], models: Tensor, buffers: Tensor) -> Any:
    """Record a pass that reads models and statistics from slots of its own."""
    models, buffers = models.clone(), buffers.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # lets libraries choose their kernels
        count(models, buffers)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            counts = count(models, buffers)
    except RuntimeError as error:
        first = str(error).strip().split("\n", 1)[0]
        warnings.warn(f"evaluation is not captured as a CUDA graph: {first}", stacklevel=2)
        return None
    return graph, models, buffers, counts


def _score(right: list[float], members: list[float], loss: float) -> Score:
    each = [h / n if n else float("nan") for h, n in zip(right, members, strict=True)]
    return Score(sum(right) / sum(members), loss / sum(members), each)
