"""Corrupted clients: some have two labels exchanged in all of their rows."""

from __future__ import annotations

import numpy as np

from fedbasin.partition.pool import Ints, Partition


def exchange_labels(
    labels: Ints, parts: Partition, classes: int, share: float, rng: np.random.Generator
) -> Ints:
    """Return the labels with two of them exchanged in the rows of some clients.

    floor(share * N) clients are drawn of those that hold rows (all of these, if they are fewer).
    Each exchanges a class that it holds with another one, drawn for each client anew.

    Args:
        labels: int64 [n], the class of each row.
        parts: who holds which row; no row may be held twice.
        classes: C, how many classes there are.
        share: of all clients, in [0, 1].
        rng: draws clients and classes.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share is {share!r}: give a share of the clients, in [0, 1]")
    if parts.again:
        raise ValueError(
            "labels of some clients cannot be exchanged in a split that deals rows again: "
            "others hold the same rows; use one without refill"
        )
    if classes < 2:
        raise ValueError(f"classes is {classes}: there are no two labels to exchange")
    changed = np.array(labels)
    holders = np.flatnonzero(parts.sizes() > 0)
    count = min(int(share * len(parts.clients) + 1e-9), len(holders))
    for client in rng.choice(holders, size=count, replace=False):
        mine = parts.clients[client]
        one = rng.choice(np.unique(labels[mine]))
        other = (one + rng.integers(1, classes)) % classes
        changed[mine[labels[mine] == one]] = other
        changed[mine[labels[mine] == other]] = one
    return changed
