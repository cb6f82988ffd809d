"""What clients keep between rounds, in one store keyed by client id.

Simulated clients have no disk of their own; moving this state onto real clients replaces
this class and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedbasin.core.rule import LocalRule
from fedbasin.core.tree import row, stack, tensors


@dataclass(frozen=True)
class Kept:
    """The store as a tree for checkpoints: only clients that have taken part."""

    ids: Tensor  # int64 [k]
    rows: Any  # own states, stacked [k, ...]


class ClientStates:
    """Own states of all clients; a client that never took part has the rules' zero state."""

    def __init__(self, rules: tuple[LocalRule, ...], vector: Tensor) -> None:
        self._zero = tuple(rule.own(vector) for rule in rules)
        self._held: dict[int, tuple[Any, ...]] = {}

    def get(self, client: int) -> tuple[Any, ...]:
        """Return a client's own state, one entry for each rule."""
        return self._held.get(client, self._zero)

    def put(self, clients: Iterable[int], states: Iterable[tuple[Any, ...]]) -> None:
        """Replace the states of the clients that took part."""
        if tensors(self._zero):
            self._held.update(zip(clients, states, strict=True))

    def kept(self) -> Kept:
        """Return everything worth saving."""
        ids = sorted(self._held)
        rows = stack([self._held[i] for i in ids]) if ids else self._zero
        return Kept(torch.tensor(ids, dtype=torch.int64), rows)

    def restore(self, kept: Kept) -> None:
        """Take back what `kept` returned."""
        self._held = {int(i): row(kept.rows, n) for n, i in enumerate(kept.ids)}
