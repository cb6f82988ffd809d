"""Splits that need no classes: by sizes alone, and by quantiles of the target."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedbasin.core.catalogue import CATALOGUE, entry
from fedbasin.core.expressions import Choice
from fedbasin.partition.by_class import dirichlet
from fedbasin.partition.pool import Ints, Partition, Pool, whole


@entry("partition", paper="Li et al., ICDE 2022", url="https://arxiv.org/abs/2102.02079")
def size_dirichlet(
    pool: Pool, clients: int, rng: np.random.Generator, *, alpha: float, minimum: int = 10
) -> Partition:
    """Skew the sizes alone: rows are drawn at random, clients get Dirichlet shares of them.

    q ~ Dir(alpha * 1_N); the shuffled rows are cut at floor(n * cumsum(q)). A minimum size is
    reached as in `dirichlet`. This is "quantity skew" of NIID-Bench.

    Args:
        alpha: concentration; small means that few clients hold most rows.
        minimum: rows every client gets at least; 0 for no minimum.
    """
    alike = Pool(np.zeros(pool.rows, np.int64), 1)
    return dirichlet(alike, clients, rng, alpha=alpha, minimum=minimum, balance=False)


@entry("partition")
def quantiles(
    pool: Pool,
    clients: int,
    rng: np.random.Generator,
    *,
    split: Choice,
    bins: int = 10,
    column: int = 0,
) -> Partition:
    """Split by quantiles of the target, as another partition splits by classes.

    Row i is in bin floor(q * #{j: y_j < y_i} / n), q = `bins`: equal targets share a bin, bins are
    equally large where all targets differ, and ties may leave a bin empty. `split` then takes the
    bins for classes: ``quantiles(dirichlet(alpha=0.1))``, ``quantiles(shards(per_client=2))``.

    Args:
        split: the partition that shares out the bins.
        bins: q, how many bins there are, at least 2.
        column: which target decides, where rows have several.
    """
    whole("clients", clients)
    whole("bins", bins, least=2)
    if CATALOGUE[split.name].kind != "partition":
        raise ValueError(
            f"split is {split}, a {CATALOGUE[split.name].kind}: give a partition, such as "
            "dirichlet(alpha=0.1)"
        )
    binned = Pool(_bins(_column(pool, column), bins), bins, pool.groups)
    shared: Partition = split(binned, clients, rng)
    return shared


def _column(pool: Pool, column: int) -> npt.NDArray[np.generic]:
    """Return the targets that decide, [n]."""
    whole("column", column, least=0)
    targets = pool.labels.reshape(pool.rows, -1)
    if column >= targets.shape[1]:
        raise ValueError(
            f"column is {column}: the targets have {targets.shape[1]} columns, numbered from 0"
        )
    chosen: npt.NDArray[np.generic] = targets[:, column]
    return chosen


def _bins(targets: npt.NDArray[np.generic], bins: int) -> Ints:
    smaller = np.searchsorted(np.sort(targets), targets, side="left").astype(np.int64)
    return smaller * bins // len(targets)
