"""The ground that landscapes lie over: rows of data on which many models are measured at once.

Every landscape is a table of weights [M, K] times a cohort matrix [K, P]: a line mixes two
models, a plane an origin and two directions, averaging a subset of clients. So there is one
function to measure with, and it runs all M models as one `vmap`, cut into chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F

from fedbasin.core.net import Net
from fedbasin.core.rng import Key
from fedbasin.local.train import Transform

Tick = Callable[[int], None]  # told how many more models were measured


def no_tick(count: int) -> None:
    """Show nothing."""


class Scores(NamedTuple):
    """How good M models are; float64, on the host."""

    loss: Tensor  # [M] mean cross-entropy
    error: Tensor  # [M] share of wrong answers


class Landscape(Protocol):
    """Anything that measures mixtures of models."""

    def measure(self, weights: Tensor, models: Tensor, tick: Tick = no_tick) -> Scores:
        """Measure the M models ``weights @ models`` of weights [M, K] and models [K, P]."""
        ...


@dataclass(frozen=True)
class Ground:
    """Rows that models are measured on.

    Args:
        net: the network.
        inputs: [n, ...] stored rows.
        labels: int64 [n].
        transform: turns stored rows into network inputs.
        classes: number of classes.
        buffers: BatchNorm statistics [Q] used for every model; the network's own if None.
        rows_at_once: rows in one forward pass.
        models_at_once: models in one forward pass; 0 chooses by device and kind of network.
    """

    net: Net
    inputs: Tensor
    labels: Tensor
    transform: Transform
    classes: int
    buffers: Tensor | None = None
    rows_at_once: int = 1000
    models_at_once: int = 0

    def __len__(self) -> int:
        return len(self.labels)

    def sample(self, count: int, key: Key) -> tuple[Ground, Tensor]:
        """Return at most so many rows, drawn without replacement (0: all), and which they are."""
        rows = torch.arange(len(self))
        if not 0 < count < len(self):
            return self, rows
        drawn = key.fold("rows").numpy().permutation(len(self))[:count]
        rows = torch.from_numpy(drawn).sort().values
        here = rows.to(self.labels.device)
        return replace(self, inputs=self.inputs[here], labels=self.labels[here]), rows

    @torch.no_grad()
    def measure(self, weights: Tensor, models: Tensor, tick: Tick = no_tick) -> Scores:
        """Measure the M models ``weights @ models`` on all rows."""
        models = models.to(self.net.device, self.net.dtype)
        loss, wrong = [], []
        for part in weights.to(models).split(self.chunk_of_models()):
            batch = mix(part, models)
            total = torch.zeros(len(part), dtype=torch.float64, device=models.device)
            missed = torch.zeros_like(total)
            for inputs, labels in self._batches():
                logits = self._run(batch, inputs)
                everyone = labels.expand(len(part), -1)
                each = F.cross_entropy(logits.flatten(0, 1), everyone.flatten(), reduction="none")
                total += each.view(len(part), -1).double().sum(1)
                missed += (logits.argmax(2) != everyone).double().sum(1)
            loss.append(total / len(self))
            wrong.append(missed / len(self))
            if models.is_cuda:
                torch.cuda.synchronize()  # so that progress tells the truth
            tick(len(part))
        return Scores(torch.cat(loss).cpu(), torch.cat(wrong).cpu())

    @torch.no_grad()
    def logits(self, models: Tensor) -> Tensor:
        """Return what models [M, P] say about every row, [M, n, classes]."""
        models = models.to(self.net.device, self.net.dtype)
        parts = [
            torch.cat([self._run(part, inputs) for inputs, _ in self._batches()], dim=1)
            for part in models.split(self.chunk_of_models())
        ]
        return torch.cat(parts)

    def loss(self, vector: Tensor, rows: slice) -> Tensor:
        """Return the summed cross-entropy of a model on some rows, differentiable in it."""
        inputs = self.transform(self.inputs[rows], None)
        logits = self.net(vector, inputs, self.buffers).logits
        return F.cross_entropy(logits, self.labels[rows], reduction="sum")

    def cuts(self) -> list[slice]:
        """Return the rows as slices that fit into one forward pass."""
        starts = range(0, len(self), self.rows_at_once)
        return [slice(start, start + self.rows_at_once) for start in starts]

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        for cut in self.cuts():
            yield self.transform(self.inputs[cut], None), self.labels[cut]

    def _run(self, models: Tensor, inputs: Tensor) -> Tensor:
        if len(models) == 1:
            return self.net(models[0], inputs, self.buffers).logits[None]

        def one(vector: Tensor) -> Tensor:
            return self.net(vector, inputs, self.buffers).logits

        logits: Tensor = vmap(one)(models)
        return logits

    def chunk_of_models(self) -> int:
        """Return how many models run in one forward pass."""
        if self.models_at_once:
            return self.models_at_once
        if self.net.device.type == "cuda":
            return 8
        # On a CPU many models at once save Python's time but not arithmetic: convolutions with
        # weights of their own run slower in groups than one after another.
        return 1 if any(len(shape) > 2 for shape in self.net.layout.shapes) else 32


def mix(weights: Tensor, models: Tensor) -> Tensor:
    """Return ``weights @ models`` in the models' full precision, even where tf32 is on."""
    out = models.new_zeros(len(weights), models.shape[1])
    for column, model in zip(weights.unbind(1), models, strict=True):
        out.addr_(column, model)
    return out
