"""Training a merged model on the server's own rows: what FedDF, FedBE and Server-FT share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fedbasin.core.bounds import Bounded, at_least, within
from fedbasin.core.method import Context, Proxy, Replies, Served, Wrapper
from fedbasin.core.rng import Key
from fedbasin.local.batches import epoch_order, proxy_batches
from fedbasin.local.optimisers import SGD
from fedbasin.local.step import clipped
from fedbasin.methods.parts.descent import Adam

Optimiser = Literal["adam", "sgd"]
Loss = Callable[[Tensor, Tensor], Tensor]  # (model, numbers of the rows) -> mean loss


@dataclass(frozen=True)
class Refinement(Bounded):
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
        weight_decay: of SGD, a multiple of the model added to each gradient.
        keep_momentum: whether the next round's SGD goes on with this round's momentum.
    """

    optimiser: Optimiser = "adam"
    lr: float = at_least(0, default=0.001)
    betas: tuple[float, float] = (0.9, 0.999)
    epochs: int = at_least(0, default=1)
    batch: int = at_least(1, default=128)
    cosine: bool = False
    clip: float = at_least(0, default=0.0)
    holdout: float = within("[0, 1)", default=0.0)
    patience: int = at_least(0, default=0)
    average_from: int = at_least(0, default=0)
    average_every: int = at_least(0, default=0)
    weight_decay: float = 0.0
    keep_momentum: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be in [0, 1), got {self.betas}")
        if self.patience and not self.holdout:
            raise ValueError(f"patience={self.patience} watches rows kept aside: set holdout")
        if self.optimiser == "adam":
            for name in ("weight_decay", "keep_momentum"):
                if getattr(self, name):
                    raise ValueError(f"{name} is of SGD: set optimiser='sgd'")
        self._sgd()  # checks the decay

    def _sgd(self) -> SGD:
        return SGD(momentum=self.betas[0], weight_decay=self.weight_decay)

    def begin(self, vector: Tensor) -> Any:
        """Return what rounds keep: the momentum, or nothing."""
        return self._sgd().init(vector) if self.keep_momentum else ()

    def run(
        self, vector: Tensor, loss: Loss, proxy: Proxy, key: Key, kept: Any = ()
    ) -> tuple[Tensor, Any]:
        """Return the model [P] after training on the server's rows, and what is kept.

        Args:
            vector: the model to start from.
            loss: what falls.
            proxy: the server's rows.
            key: of their order.
            kept: what the last round kept.
        """
        if not self.epochs:
            return vector, kept
        rows = epoch_order(key.fold("rows").tensor(vector.device), 0, proxy.size)
        aside = min(math.ceil(self.holdout * proxy.size), proxy.size - 1)
        held, rows = rows[:aside], rows[aside:]
        sgd = self._sgd()
        adam = Adam.at(vector)
        state = kept if self.keep_momentum else sgd.init(vector)
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
        kept = state if self.keep_momentum else ()
        if taken:
            return summed / taken, kept
        return best if aside else vector, kept

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


class Refiner(Wrapper):
    """A method that trains the inner method's model on the server's rows.

    Subclasses have a field ``epochs``, and say how the model is trained and what falls.
    """

    epochs: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refinement()  # checks the settings

    def refinement(self) -> Refinement:
        """Return how the model is trained."""
        raise NotImplementedError

    def loss(
        self, server: Tensor, fresh: Served, replies: Replies, context: Context, key: Key
    ) -> Loss:
        """Return what falls: of the model that was sent, the inner method's and the replies."""
        raise NotImplementedError

    def begin(self, server: Tensor, context: Context) -> Any:
        """Begin without momentum."""
        return self.refinement().begin(server)

    def step(
        self, own: Any, server: Tensor, fresh: Served, replies: Replies, context: Context
    ) -> tuple[Served, Any]:
        """Train the model."""
        if not self.epochs:
            return fresh, own
        proxy = context.need("proxy", self)
        key = context.key.fold(type(self).__name__.lower())
        loss = self.loss(server, fresh, replies, context, key)
        refined, own = self.refinement().run(fresh.send, loss, proxy, key, own)
        return shifted(fresh, refined), own


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
