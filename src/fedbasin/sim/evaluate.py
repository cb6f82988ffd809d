"""How good a model is: accuracy and loss on a set of rows, computed on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

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

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.labels)

    def logits(self, vector: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return the logits [n, classes] of a model, differentiable in the vector."""
        raw = self.inputs if rows is None else self.inputs[rows]
        parts = [
            self.net(vector, self.transform(part, None), self.buffers).logits
            for part in raw.split(self.chunk)
        ]
        return torch.cat(parts)

    def loss(self, vector: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return the mean cross-entropy of a model, differentiable in the vector."""
        labels = self.labels if rows is None else self.labels[rows]
        return F.cross_entropy(self.logits(vector, rows), labels)

    @torch.no_grad()
    def score(self, vector: Tensor, buffers: Tensor | None = None) -> Score:
        """Score a model on all rows, with one transfer to the host."""
        right = torch.zeros(self.classes, dtype=torch.float64, device=vector.device)
        total = torch.zeros((), dtype=torch.float64, device=vector.device)
        for raw, labels in zip(
            self.inputs.split(self.chunk), self.labels.split(self.chunk), strict=True
        ):
            inputs = self.net.arranged(self.transform(raw, None))
            logits = self.net(vector, inputs, buffers).logits
            total += F.cross_entropy(logits, labels, reduction="sum")
            right += torch.bincount(labels[logits.argmax(1) == labels], minlength=self.classes)
        members = torch.bincount(self.labels, minlength=self.classes)
        host = torch.cat([right, members, total[None]]).tolist()
        hits, sizes = host[: self.classes], host[self.classes : -1]
        each = [h / n if n else float("nan") for h, n in zip(hits, sizes, strict=True)]
        return Score(sum(hits) / self.size, host[-1] / self.size, each)
