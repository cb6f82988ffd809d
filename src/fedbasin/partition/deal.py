"""The three moves every label skew is made of: deal by a table, fill up, take by a prior.

A split is decided as a table of counts [N, C] (how many rows of class c client k gets); which
rows these are is a shuffle. That keeps every partition a few lines and fast for many clients.
"""

from __future__ import annotations

import numpy as np

from fedbasin.partition.pool import Floats, Ints, Partition, cut


def listed(labels: Ints, counts: Ints, rng: np.random.Generator) -> Ints:
    """List rows client by client and, within a client, class by class, as the table demands.

    Args:
        labels: the class of each row, [n].
        counts: rows of class c that client k gets, [N, C]; at most the class has.
        rng: shuffles the rows within each class.
    """
    shuffled = rng.permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    had = np.bincount(labels, minlength=counts.shape[1])
    used = counts.sum(axis=0)
    place = np.arange(len(labels)) - np.repeat(np.cumsum(had) - had, had)  # place within the class
    dealt = by_class[place < np.repeat(used, had)]
    owner = np.repeat(np.tile(np.arange(counts.shape[0]), counts.shape[1]), counts.T.ravel())
    return dealt[np.argsort(owner, kind="stable")]


def deal(labels: Ints, counts: Ints, rng: np.random.Generator) -> Partition:
    """Give every client randomly chosen rows of each class, as many as the table says."""
    return cut(listed(labels, counts, rng), counts.sum(axis=1), len(labels))


def deal_again(labels: Ints, counts: Ints, rng: np.random.Generator) -> Partition:
    """Deal rows as the table says; a class that runs out is put back whole and dealt once more."""
    wanted = counts.sum(axis=0)
    supply = np.concatenate(
        [
            np.resize(rng.permutation(np.flatnonzero(labels == label)), wanted[label])
            for label in np.flatnonzero(wanted)
        ]
    )
    order = supply[listed(labels[supply], counts, rng)]
    parts = np.split(order, np.cumsum(counts.sum(axis=1))[:-1])
    return Partition(tuple(np.sort(part) for part in parts), len(labels), again=True)


def missing(counts: Ints, minimum: int) -> int:
    """How many rows the small clients lack to reach the minimum size."""
    return int(np.maximum(minimum - counts.sum(axis=1), 0).sum())


def fill_up(counts: Ints, minimum: int) -> Ints:
    """Raise every client to the minimum size by taking from the largest; always ends.

    Each client that is too small takes rows of the class it already holds most of from the
    largest client that holds this class and can spare rows (stays at the minimum); where
    there is none, rows of the largest client's largest class. A step moves at least one row
    and makes nobody too small, so there are at most `missing(counts, minimum)` steps.

    Args:
        counts: table [N, C] with at least N * minimum rows.
        minimum: the size every client reaches.
    """
    counts = counts.copy()
    sizes = counts.sum(axis=1)
    for client in np.flatnonzero(sizes < minimum):
        while sizes[client] < minimum:
            kind = int(counts[client].argmax())
            giver = int(np.where(counts[:, kind] > 0, sizes, -1).argmax())
            if sizes[giver] <= minimum or counts[client, kind] == 0:
                giver = int(sizes.argmax())
                kind = int(counts[giver].argmax())
            moved = min(minimum - sizes[client], sizes[giver] - minimum, counts[giver, kind])
            counts[giver, kind] -= moved
            counts[client, kind] += moved
            sizes[giver] -= moved
            sizes[client] += moved
    return counts


def take(need: Ints, prior: Floats, left: Ints, rng: np.random.Generator) -> Ints:
    """Let every client draw rows by its own class prior, without putting any back.

    All clients ask at once: asked_k ~ Multinomial(need_k, prior_k restricted to the classes
    with rows left). A class asked for more rows than it has left gives them to a random subset
    of the requests and is then exhausted: its probability becomes 0, the priors are
    renormalised, and who went short asks again. A client whose prior has no mass on any class
    left asks in proportion to the rows left. Each pass ends or exhausts a class: at most C.

    Args:
        need: rows each client takes, [N]; in all at most the rows left.
        prior: class probabilities of each client, [N, C].
        left: rows of each class, [C].
        rng: the source of the draws.
    """
    need = need.copy()
    left = left.copy()
    taken = np.zeros(prior.shape, dtype=np.int64)
    while need.any():
        open_classes = np.flatnonzero(left)
        stock = left[open_classes]
        mass = prior[:, open_classes]
        mass = np.where(mass.sum(axis=1, keepdims=True) > 0, mass, stock)
        asked = rng.multinomial(need, mass / mass.sum(axis=1, keepdims=True))
        for column in np.flatnonzero(asked.sum(axis=0) > stock):
            asked[:, column] = rng.multivariate_hypergeometric(asked[:, column], stock[column])
        taken[:, open_classes] += asked
        left[open_classes] -= asked.sum(axis=0)
        need -= asked.sum(axis=1)
    return taken
