"""The last K models of every client, one of each picked, and the sum of the picked ones.

Everything here returns a new memory and leaves the old one as it was; models are never copied
for it. The sum is kept in float64 and moves by the models that are picked or let go, so a round
costs its cohort, not all clients.

With an archive the models lie in its files and the memory itself holds numbers only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedbasin.core.archive import Archive
from fedbasin.core.method import Replies


@dataclass(frozen=True)
class Memory:
    """What is remembered of N clients, at most K records each."""

    models: tuple[tuple[Tensor, ...], ...]  # N x K models [P], [0] while empty; () in an archive
    rounds: Tensor  # [N, K] int64 round of each record, -1 while empty
    losses: Tensor  # [N, K] last-epoch loss of each record
    squares: Tensor  # [N, K] |w|^2 of each record
    work: Tensor  # [N, K, 3] steps, lr_sum and effective_steps of each record, as in `Replies`
    picked: Tensor  # [N] int64 round of the picked record, -1 where none is
    weights: Tensor  # [N] weight of each client, 0 before it is seen
    total: Tensor  # [P] float64 weighted sum of the picked models
    merge: Any = ()  # what a method that merges the picked models remembers

    def history(self, client: int) -> list[int]:
        """Return the rounds of a client's records, newest first."""
        return sorted((r for r in self.rounds[client].tolist() if r >= 0), reverse=True)

    def model(self, client: int, round: int, archive: Archive | None) -> Tensor:
        """Return the model [P] of a record."""
        if archive is not None:
            return archive.get(client, round)
        return self.models[client][self.rounds[client].tolist().index(round)]

    def remember(
        self, replies: Replies, weights: Tensor, round: int, archive: Archive | None
    ) -> Memory:
        """Put each reply in the place of its client's oldest record, with its weight [C]."""
        models = list(self.models)
        rounds = self.rounds.clone()
        losses = self.losses.clone()
        squares = self.squares.clone()
        work = self.work.clone()
        known = self.weights.clone()
        done = torch.stack([replies.steps, replies.lr_sum, replies.effective_steps], 1).to(work)
        for row, n in enumerate(replies.clients.tolist()):
            model = replies.models[row]
            oldest = int(rounds[n].argmin())
            rounds[n, oldest] = round
            losses[n, oldest] = float(replies.last_loss[row])
            exact = model.double()
            squares[n, oldest] = float(exact @ exact)
            work[n, oldest] = done[row]
            known[n] = float(weights[row])
            if archive is not None:
                archive.put(n, round, model)
            else:  # a copy, or one row would hold the whole cohort's replies in memory
                own = model.to(models[n][oldest].device, copy=True)
                models[n] = (*models[n][:oldest], own, *models[n][oldest + 1 :])
        tables = {"rounds": rounds, "losses": losses, "squares": squares, "work": work}
        return replace(self, models=tuple(models), weights=known, **tables)

    def pick(
        self, clients: Sequence[int], rounds: Sequence[int], archive: Archive | None
    ) -> Memory:
        """Pick the records of these rounds for clients that have none picked."""
        total = self.total.clone()
        picked = self.picked.clone()
        for n, round in zip(clients, rounds, strict=True):
            model = self.model(n, round, archive)
            total.add_(model.to(total.device), alpha=float(self.weights[n]))
            picked[n] = round
        return replace(self, total=total, picked=picked)

    def let_go(self, clients: Sequence[int], archive: Archive | None) -> Memory:
        """Take the picked models of these clients out of the sum."""
        total = self.total.clone()
        picked = self.picked.clone()
        for n in clients:
            if picked[n] >= 0:
                model = self.model(n, int(picked[n]), archive)
                total.sub_(model.to(total.device), alpha=float(self.weights[n]))
            picked[n] = -1
        return replace(self, total=total, picked=picked)

    def picks(self, like: Tensor, archive: Archive | None) -> Replies:
        """Return the picked models as replies, in the order of client ids, where `like` is."""
        clients = torch.nonzero(self.picked >= 0)[:, 0]
        models = [self.model(n, int(self.picked[n]), archive) for n in clients.tolist()]
        mine = self.rounds[clients] == self.picked[clients, None]  # one record of each client
        steps, lr_sum, effective = self.work[clients][mine].to(like.device).unbind(1)
        losses = self.losses[clients][mine].to(like)
        return Replies(
            models=torch.stack([model.to(like) for model in models]),
            weights=self.weights[clients].to(like.device),
            clients=clients.to(like.device),
            steps=steps,
            lr_sum=lr_sum,
            effective_steps=effective,
            last_loss=losses,
            train_loss=torch.full_like(losses, math.nan),  # it is not stored
            buffers=like.new_zeros(len(models), 0),
        )

    @property
    def picked_weight(self) -> float:
        """The total weight of the clients with a picked model."""
        return float(self.weights[self.picked >= 0].sum())

    def mean(self, table: Tensor) -> float:
        """Return the weighted mean of the entries of a table [N, K] at the picked records."""
        mine = (self.rounds == self.picked[:, None]) & (self.picked >= 0)[:, None]
        return float(self.weights @ table.where(mine, 0.0).sum(1)) / self.picked_weight

    def divergence(self) -> float:
        """Return the weighted mean squared distance of the picked models from their mean."""
        centre = self.total / self.picked_weight
        return max(0.0, self.mean(self.squares) - float(centre @ centre))


def empty(clients: int, records: int, like: Tensor, *, where: str | None = "cpu") -> Memory:
    """Return a memory of N clients and K records each that holds nothing.

    Args:
        clients: N.
        records: K.
        like: a model, for size, type and the device of the sum.
        where: the device models are kept on; None if they go to an archive.
    """
    numbers = torch.zeros(clients, records, dtype=torch.float64)
    slots = (like.new_empty(0, device=where),) * records
    return Memory(
        models=() if where is None else (slots,) * clients,
        rounds=torch.full((clients, records), -1),
        losses=numbers,
        squares=numbers,
        work=torch.zeros(clients, records, 3, dtype=torch.float64),
        picked=torch.full((clients,), -1),
        weights=torch.zeros(clients, dtype=torch.float64),
        total=torch.zeros_like(like, dtype=torch.float64),
    )
