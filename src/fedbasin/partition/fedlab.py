"""Splits with FedLab's own draws, so that a split published by its seed is had again.

FedLab seeds NumPy's global state and draws from it. The same numbers come here from a state of
their own, which NumPy keeps as it is for all versions; the run's seed has no say.
"""

from __future__ import annotations

import numpy as np

from fedbasin.core.catalogue import entry
from fedbasin.partition.by_label import shard_size
from fedbasin.partition.pool import Ints, Partition, Pool, cut, enough, positive, whole

TRIES = 1000  # draws before a minimum is given up; FedLab never does


@entry("partition", paper="Zeng et al., JMLR 2023", url="https://arxiv.org/abs/2107.11621")
def fedlab_dirichlet(
    pool: Pool,
    clients: int,
    rng: np.random.Generator,
    *,
    alpha: float,
    seed: int,
    minimum: int = 10,
) -> Partition:
    """Split as `dirichlet` does, row for row what FedLab's hetero-dir gives for a seed.

    ``fedlab_dirichlet(alpha=0.1, seed=1)`` of CIFAR-10 or Fashion-MNIST among 100 clients is the
    split of FedIMA's code.

    Args:
        alpha: concentration; small means few clients hold a class.
        seed: FedLab's, from 0 to 2^32 - 1.
        minimum: rows every client gets at least; the whole draw is repeated until then.
    """
    whole("clients", clients)
    pool.need_classes("fedlab_dirichlet")
    positive("alpha", alpha)
    whole("minimum", minimum, least=0)
    enough(pool.rows, clients, minimum)
    draws = _state(seed)
    for _ in range(TRIES):
        owner = _hetero_dir(pool, clients, alpha, draws)
        sizes = np.bincount(owner, minlength=clients)
        if sizes.min() >= minimum:
            return cut(np.argsort(owner, kind="stable"), sizes, pool.rows)
    raise ValueError(
        f"minimum is {minimum}: {TRIES} draws from seed {seed} leave a client with fewer rows; "
        "give a larger alpha, a smaller minimum or fewer clients"
    )


@entry("partition", paper="Zeng et al., JMLR 2023", url="https://arxiv.org/abs/2107.11621")
def fedlab_shards(
    pool: Pool, clients: int, rng: np.random.Generator, *, seed: int, per_client: int = 2
) -> Partition:
    """Deal shards as `shards` does, to whom FedLab deals them for a seed.

    Each client's classes are FedLab's. Which rows of a class a shard holds FedLab leaves to an
    unstable sort; here they are in the order of the data.

    Args:
        seed: FedLab's, from 0 to 2^32 - 1.
        per_client: S, shards of each client.
    """
    count, size = shard_size(pool, clients, per_client)
    pool.need_classes("fedlab_shards")
    by_class = np.argsort(pool.labels, kind="stable")[: count * size].reshape(count, size)
    dealt = by_class[_state(seed).permutation(count)]
    return cut(dealt.ravel(), np.full(clients, per_client * size), pool.rows)


def _hetero_dir(pool: Pool, clients: int, alpha: float, draws: np.random.RandomState) -> Ints:
    """Return who gets each row, int64 [n], in one draw."""
    owner = np.empty(pool.rows, dtype=np.int64)
    held = np.zeros(clients, dtype=np.int64)
    for label in range(pool.classes):
        rows = np.flatnonzero(pool.labels == label)
        draws.shuffle(rows)
        shares = draws.dirichlet(np.full(clients, alpha)) * (held < pool.rows / clients)
        if not len(rows):
            continue  # drawn all the same, for the draws that follow
        ends = (np.cumsum(shares / shares.sum()) * len(rows)).astype(np.int64)
        sizes = np.diff(ends[:-1], prepend=0, append=len(rows))
        owner[rows] = np.repeat(np.arange(clients), sizes)
        held += sizes
    return owner


def _state(seed: int) -> np.random.RandomState:
    whole("seed", seed, least=0)
    if seed >= 1 << 32:
        raise ValueError(f"seed is {seed}: NumPy's state takes at most {(1 << 32) - 1}")
    return np.random.RandomState(seed)  # FedLab's own generator
