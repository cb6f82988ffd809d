"""Training a merged model on the server's own rows: what FedDF, FedBE and Server-FT share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fedbasin.core.method import Proxy, Served
from fedbasin.core.rng import Key
from fedbasin.local.batches import epoch_order, proxy_batches
from fedbasin.local.optimisers import SGD
from fedbasin.local.step import clipped
from fedbasin.methods.parts.descent import Adam

Optimiser = Literal["adam", "sgd"]
Loss = Callable[[Tensor, Tensor], Tensor]  # (model, numbers of the rows) -> mean loss


@dataclass(frozen=True)
class Refinement:
    """How a model is trained on the server.

    Args:
        optimiser: ``"adam"`` or ``"sgd"`` with momentum.
        lr: learning rate.
        betas: of Adam; the first is the momentum of SGD.
        epochs: passes over the rows.
        batch: rows in a step.
        cosine: whether the learning rate falls to 0 along a cosine.
        clip: largest norm of a gradient; 0 does not clip.
        holdout: share of the rows kept aside; the model with the least loss on them is returned.
        patience: stop after so many epochs without a smaller loss there; 0 never does.
        average_from: the step from which models are averaged.
        average_every: the steps between two of them; 0 averages none, and the last model counts.
    """

    optimiser: Optimiser = "adam"
    lr: float = 0.001
    betas: tuple[float, float] = (0.9, 0.999)
    epochs: int = 1
    batch: int = 128
    cosine: bool = False
    clip: float = 0.0
    holdout: float = 0.0
    patience: int = 0
    average_from: int = 0
    average_every: int = 0

    def __post_init__(self) -> None:
        for name in ("lr", "epochs", "clip", "patience", "average_from", "average_every"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.batch < 1:
            raise ValueError(f"batch must be at least 1, got {self.batch}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be in [0, 1), got {self.betas}")
        if not 0 <= self.holdout < 1:
            raise ValueError(f"holdout must be in [0, 1), got {self.holdout}")
        if self.patience and not self.holdout:
            raise ValueError(f"patience={self.patience} watches rows kept aside: set holdout")

    def run(self, vector: Tensor, loss: Loss, proxy: Proxy, key: Key) -> Tensor:
        """Return the model [P] after training on the server's rows."""
        if not self.epochs:
            return vector
        rows = epoch_order(key.fold("rows").tensor(vector.device), 0, proxy.size)
        aside = min(math.ceil(self.holdout * proxy.size), proxy.size - 1)
        held, rows = rows[:aside], rows[aside:]
        sgd = SGD(momentum=self.betas[0])
        adam = Adam.at(vector)
        state = sgd.init(vector)
        total = self.epochs * math.ceil(len(rows) / self.batch)
        best = vector
        least = self._watched(vector, proxy, held)
        idle = 0
        taken = 0
        summed = torch.zeros_like(vector)
        step = 0
        order = key.fold("order").tensor(vector.device)
        for epoch in range(self.epochs):
            for chosen in proxy_batches(order, epoch, len(rows), self.batch):
                gradient = self._gradient(vector, loss, rows if chosen is None else rows[chosen])
                fall = (1 + math.cos(math.pi * step / total)) / 2 if self.cosine else 1.0
                lr = self.lr * fall
                if self.optimiser == "adam":
                    vector, adam = adam.step(vector, gradient, lr, self.betas)
                else:
                    vector, state = sgd.update(gradient, state, vector, lr)
                step += 1
                late = step - self.average_from
                if self.average_every and late >= 0 and late % self.average_every == 0:
                    taken += 1
                    summed = summed + vector
            if aside:
                value = self._watched(vector, proxy, held)
                if value < least:
                    best = vector
                    least = value
                    idle = 0
                else:
                    idle += 1
                if self.patience and idle >= self.patience:
                    break
        if taken:
            return summed / taken
        return best if aside else vector

    def _gradient(self, vector: Tensor, loss: Loss, rows: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = vector.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(loss(leaf, rows), leaf)
        return clipped(gradient, self.clip or None)

    def _watched(self, vector: Tensor, proxy: Proxy, held: Tensor) -> float:
        """Return the cross-entropy on the rows kept aside."""
        if not len(held):
            return math.inf
        with torch.no_grad():
            return float(proxy.loss(vector, held))


def shifted(fresh: Served, refined: Tensor) -> Served:
    """Serve the refined model; one that is scored apart from it moves by the same shift."""
    if fresh.score is fresh.send:
        return Served(refined, refined, fresh.notes)
    return Served(refined, fresh.score + (refined - fresh.send), fresh.notes)


@torch.no_grad()
def teacher_logits(proxy: Proxy, models: Sequence[Tensor]) -> Tensor:
    """Return the logits of several models on all rows, [m, n, classes]."""
    return torch.stack([proxy.logits(model) for model in models])


def distillation(proxy: Proxy, target: Tensor) -> Loss:
    """Return the mean over rows of KL(target || softmax(student)), for targets [n, classes]."""
    known = torch.xlogy(target, target).sum(1)

    def loss(vector: Tensor, rows: Tensor) -> Tensor:
        student = F.log_softmax(proxy.logits(vector, rows), 1)
        return (known[rows] - (target[rows] * student).sum(1)).mean()

    return loss
