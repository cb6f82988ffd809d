"""The server half: a method merges what a cohort sends back.

A method is a frozen dataclass of hyper-parameters with pure functions, state in and state
out. It never sees training data, the engine or the network. What it needs from outside it
declares on its card, and finds in the `Context`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from fedbasin.core.archive import Archive
from fedbasin.core.expressions import ExpressionError, text
from fedbasin.core.rng import Key
from fedbasin.core.rule import LocalRule
from fedbasin.core.tree import rebuild
from fedbasin.core.vectors import Layout, Weighting, shares, weighted_mean


class ReplyError(ValueError):
    """A reply that must not be aggregated, with the client named."""


@dataclass(frozen=True)
class Plan:
    """How clients train in one round.

    Args:
        lr: learning rate, eta.
        epochs: passes over the client's data, or None when `steps` is given.
        steps: number of mini-batches, or None when `epochs` is given.
    """

    lr: float
    epochs: int | None = 1
    steps: int | None = None

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(f"give epochs or steps, got epochs={self.epochs}, steps={self.steps}")
        if not self.lr >= 0:
            raise ValueError(f"lr must be a number of at least 0, got {self.lr}")


class Proxy(Protocol):
    """A small labelled set on the server, as methods see it: a loss and its size."""

    @property
    def size(self) -> int:
        """Number of rows."""
        ...

    def logits(self, vector: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return the logits [n, classes] of a model on the chosen rows (all by default)."""
        ...

    def loss(self, vector: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return the mean cross-entropy of a model, differentiable in the vector."""
        ...


@dataclass(frozen=True)
class Context:
    """What surrounds a round.

    Args:
        layout: names of the parts of a vector.
        clients: how many clients there are in all, N.
        rounds: how many rounds the run has, R.
        key: the randomness of this round's server step.
        round: how many rounds are finished, t.
        lr: the learning rate the cohort used.
        plan: how the cohort trains, once a round has begun.
        batch: the clients' batch size, B; 0 where it is not known.
        proxy: server data, for methods that need ``"proxy"``.
        class_counts: [N, classes] samples by client and class, for those that need them.
        archive: files for models of clients, for methods that keep them on disk.
    """

    layout: Layout
    clients: int
    rounds: int
    key: Key
    round: int = 0
    lr: float = 0.0
    plan: Plan | None = None
    batch: int = 0
    proxy: Proxy | None = None
    class_counts: Tensor | None = None
    archive: Archive | None = None

    def at(self, round: int, lr: float, plan: Plan | None = None) -> Context:
        """Return the context of one round."""
        return replace(self, round=round, lr=lr, plan=plan, key=self.key.fold("server", round))


@dataclass(frozen=True)
class Replies:
    """What a cohort of C clients sends back."""

    models: Tensor  # [C, P] trained models, y_i
    weights: Tensor  # [C] number of samples, n_i
    clients: Tensor  # [C] client ids
    steps: Tensor  # [C] local steps taken, K_i
    lr_sum: Tensor  # [C] sum of step sizes
    lengths: Tensor  # [C] accumulated length of the local update in gradients, a_i of FedNova
    last_loss: Tensor  # [C] mean training loss of the last local epoch
    reports: tuple[Any, ...] = ()  # what each client rule reports, in the order of `rules`

    def check(self, server: Tensor) -> None:
        """Refuse replies that are of the wrong length or not finite, naming the client."""
        count = len(self.clients)
        if self.models.shape != (count, server.numel()):
            raise ReplyError(
                f"replies are {tuple(self.models.shape)}, expected {count} clients "
                f"x {server.numel()} parameters"
            )
        if count == 0:
            raise ReplyError("a round needs at least one reply")
        finite = torch.isfinite(self.models).all(1) & torch.isfinite(self.weights)
        good = finite & (self.weights >= 0)
        if not bool(good.all()):
            bad = int(self.clients[int(torch.nonzero(~good)[0])])
            raise ReplyError(f"client {bad} sent a model or weight that is NaN, Inf or negative")
        if not bool(self.weights.sum() > 0):
            raise ReplyError("all replies have weight zero")

    def take(self, index: Tensor) -> Replies:
        """Return the chosen rows, in that order."""
        chosen: Replies = rebuild(
            self, lambda _, leaf: leaf[index] if isinstance(leaf, Tensor) else leaf
        )
        return chosen

    def averaged(self, weighting: Weighting) -> Replies:
        """Return the cohort as one client that holds all samples and sends the mean, no reports."""
        share = shares(self.weights, weighting)

        def mean(column: Tensor) -> Tensor:
            return weighted_mean(column, share)[None]

        return Replies(
            models=mean(self.models),
            weights=self.weights.sum()[None],
            clients=self.clients[:1],
            steps=mean(self.steps),
            lr_sum=mean(self.lr_sum),
            lengths=mean(self.lengths),
            last_loss=mean(self.last_loss),
        )


@dataclass(frozen=True)
class Served:
    """What a round gives: where clients start next, and the model that counts."""

    send: Tensor  # [P] broadcast to the next cohort
    score: Tensor  # [P] evaluated and shipped
    notes: Any = ()  # a named tuple of numbers for the run's record


class Method(ABC):
    """How the server merges. Subclasses are frozen dataclasses entered in the catalogue."""

    @abstractmethod
    def init(self, server: Tensor, context: Context) -> Any:
        """Return the state before the first round; its shape (as a tree) never changes."""

    @abstractmethod
    def aggregate(
        self, state: Any, server: Tensor, replies: Replies, context: Context
    ) -> tuple[Served, Any]:
        """Merge the replies of clients that started from `server`; return new state too."""

    def rules(self) -> tuple[LocalRule, ...]:
        """Return what clients do beyond plain SGD, the method's own rules first."""
        return ()

    def broadcast(self, state: Any, server: Tensor, context: Context) -> tuple[Any, ...]:
        """Return what is sent beside the model: one entry for each of `rules`."""
        return tuple(() for _ in self.rules())

    def plan(self, schedule: Callable[[int], Plan], context: Context) -> Plan:
        """Return how clients train in round ``context.round``; `schedule` is the configured one."""
        return schedule(context.round)

    def streams(self) -> Weighting | None:
        """Return how replies may be averaged as they arrive, or None where each one counts.

        A method that names a weighting promises that `aggregate` gives the same for the cohort
        and for `Replies.averaged`: a server then never holds more than one reply.
        """
        return None

    def __str__(self) -> str:
        try:
            return text(self)
        except ExpressionError:  # a method that is not in the catalogue
            return repr(self)
