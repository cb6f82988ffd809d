"""How uneven a split is: three numbers a client from the table of counts [N, C], or its targets."""

from __future__ import annotations

import numpy as np

from fedbasin.partition.pool import Floats, Ints, Partition, Pool


def classes_held(counts: Ints) -> Ints:
    """How many classes each client has rows of, [N]."""
    held: Ints = (counts > 0).sum(axis=1)
    return held


def effective_classes(counts: Ints) -> Floats:
    """Return exp(entropy) of each client's class mix, [N]: C when even, 1 for one class.

    A client without rows has NaN.
    """
    shares = _shares(counts)
    logs = np.log(np.where(shares > 0, shares, 1.0))
    entropy: Floats = -(shares * logs).sum(axis=1)
    return np.exp(entropy)


def distance_from_global(counts: Ints) -> Floats:
    """Return the total variation between each client's class mix and that of all rows held, [N].

    TV(p, g) = 1/2 sum_c |p_c - g_c|: 0 when the client mirrors the whole, near 1 when it holds
    classes hardly anybody else has. A client without rows has NaN.
    """
    overall = counts.sum(axis=0) / max(counts.sum(), 1)
    distance: Floats = 0.5 * np.abs(_shares(counts) - overall).sum(axis=1)
    return distance


def mean_targets(pool: Pool, shared: Partition) -> Floats:
    """Return the mean of every target of each client, [N, k]; NaN for a client without rows."""
    targets = pool.labels.reshape(pool.rows, -1).astype(np.float64)
    sums = np.zeros((len(shared.clients), targets.shape[1]))
    owner = np.repeat(np.arange(len(shared.clients)), shared.sizes())
    np.add.at(sums, owner, targets[shared.order])
    sizes = shared.sizes().astype(np.float64)
    sizes[sizes == 0] = np.nan
    means: Floats = sums / sizes[:, None]
    return means


def _shares(counts: Ints) -> Floats:
    sizes: Floats = counts.sum(axis=1, keepdims=True).astype(np.float64)
    sizes[sizes == 0] = np.nan
    return np.divide(counts, sizes)
