"""Splits by counting: iid, label shards, and a fixed number of classes a client."""

from __future__ import annotations

import numpy as np

from fedbasin.core.catalogue import entry
from fedbasin.partition.deal import deal, listed
from fedbasin.partition.pool import Partition, Pool, cut, even, whole


@entry("partition")
def iid(pool: Pool, clients: int, rng: np.random.Generator) -> Partition:
    """Shuffle all rows and cut them evenly; sizes differ by at most one.

    With more clients than rows the last clients are empty.
    """
    whole("clients", clients)
    return cut(rng.permutation(pool.rows), even(pool.rows, clients), pool.rows)


@entry("partition", paper="McMahan et al., AISTATS 2017", url="https://arxiv.org/abs/1602.05629")
def shards(pool: Pool, clients: int, rng: np.random.Generator, *, per_client: int = 2) -> Partition:
    """Sort the rows by label, cut them into equal shards, deal each client a few at random.

    With S = `per_client` there are S * N shards of floor(n / (S * N)) rows. A client may get
    two shards of the same class. Left-over rows, at the end of the last class, are dropped.

    Args:
        per_client: S, shards of each client.
    """
    count, size = shard_size(pool, clients, per_client)
    pool.need_classes("shards")
    by_class = listed(pool.labels, pool.class_sizes[None, :], rng)
    dealt = by_class[: count * size].reshape(count, size)[rng.permutation(count)]
    return cut(dealt.ravel(), np.full(clients, per_client * size), pool.rows)


def shard_size(pool: Pool, clients: int, per_client: int) -> tuple[int, int]:
    """Return how many shards there are and how many rows each has."""
    whole("clients", clients)
    whole("per_client", per_client)
    count = clients * per_client
    if count > pool.rows:
        raise ValueError(
            f"per_client is {per_client}: {clients} clients would need {count} shards of "
            f"{pool.rows} rows; use per_client={max(pool.rows // clients, 1)} or fewer clients"
        )
    return count, pool.rows // count


@entry("partition", paper="Li et al., ICDE 2022", url="https://arxiv.org/abs/2102.02079")
def quantity_skew(
    pool: Pool, clients: int, rng: np.random.Generator, *, labels: int = 2
) -> Partition:
    """Give every client a fixed number of classes; each class is split evenly among its owners.

    Client i owns class i mod C and `labels` - 1 others drawn without replacement. This is
    "#C=2" of NIID-Bench, called pathological elsewhere. Where clients are so few that a class
    has no owner, its rows are dropped.

    Args:
        labels: how many classes each client owns.
    """
    whole("clients", clients)
    pool.need_classes("quantity_skew")
    whole("labels", labels)
    if labels > pool.classes:
        raise ValueError(
            f"labels is {labels}: the data has {pool.classes} classes; give at most that many"
        )
    lots = rng.random((clients, pool.classes))
    lots[np.arange(clients), np.arange(clients) % pool.classes] = -1.0  # its own class comes first
    owns = np.zeros((clients, pool.classes), dtype=bool)
    np.put_along_axis(owns, np.argsort(lots, axis=1)[:, :labels], True, axis=1)
    owners = np.maximum(owns.sum(axis=0), 1)
    rank = np.cumsum(owns, axis=0) - 1  # a client's place among the owners of the class
    share = pool.class_sizes // owners + (rank < pool.class_sizes % owners)
    return deal(pool.labels, np.where(owns, share, 0), rng)
