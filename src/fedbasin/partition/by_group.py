"""Splits that follow what the data says of its origin: a writer, a role, a domain."""

from __future__ import annotations

import numpy as np

from fedbasin.core.catalogue import entry
from fedbasin.partition.by_class import dirichlet
from fedbasin.partition.by_label import iid, quantity_skew
from fedbasin.partition.pool import Partition, Pool, cut, whole


@entry("partition", paper="Caldas et al., 2018", url="https://arxiv.org/abs/1812.01097")
def natural(
    pool: Pool,
    clients: int,
    rng: np.random.Generator,
    *,
    minimum: int = 1,
    merge: bool = False,
) -> Partition:
    """Make each writer, role or user of the data one client.

    Of the groups with at least `minimum` rows, `clients` are drawn at random (all, when there
    are just as many) and stand in the order of their ids; the rows of the others are dropped.
    With `merge` no group is drawn: all are dealt to the clients at random, as evenly as can be.

    Args:
        minimum: rows a group must have to count.
        merge: whether groups are joined into clients rather than drawn.
    """
    whole("clients", clients)
    whole("minimum", minimum)
    _, group, sizes = np.unique(
        pool.needed_groups("natural"), return_inverse=True, return_counts=True
    )
    able = np.flatnonzero(sizes >= minimum)
    if clients > len(able):
        raise ValueError(
            f"clients is {clients}: the data has {len(able)} groups of at least {minimum} rows; "
            "give at most as many clients, or a smaller minimum"
        )
    owner_of_group = np.full(len(sizes), -1, dtype=np.int64)
    if merge:
        owner_of_group[able] = rng.permutation(np.arange(len(able)) % clients)
    else:
        drawn = np.sort(rng.choice(able, size=clients, replace=False))
        owner_of_group[drawn] = np.arange(clients)
    owner = owner_of_group[group]
    held = np.flatnonzero(owner >= 0)
    order = held[np.argsort(owner[held], kind="stable")]
    return cut(order, np.bincount(owner[held], minlength=clients), pool.rows)


@entry("partition", paper="Zhou et al., IEEE TMC 2024", url="https://arxiv.org/abs/2305.07845")
def domain_skew(
    pool: Pool,
    clients: int,
    rng: np.random.Generator,
    *,
    alpha: float | None = None,
    labels: int | None = None,
    minimum: int = 10,
) -> Partition:
    """Give each domain the same number of clients and skew the labels inside it (Digit-Five, PACS).

    With D domains (`pool.groups`), clients d * N/D to (d+1) * N/D - 1 share domain d: by
    `dirichlet` when `alpha` is given, by `quantity_skew` when `labels` is given, evenly
    otherwise. Feature skew and label skew then act together.

    Args:
        alpha: concentration inside a domain, or None.
        labels: classes of each client inside a domain, or None.
        minimum: rows every client gets at least; only read with `alpha`.
    """
    whole("clients", clients)
    if alpha is not None and labels is not None:
        raise ValueError(f"alpha is {alpha} and labels is {labels}: give one of them, not both")
    domains, domain = np.unique(pool.needed_groups("domain_skew"), return_inverse=True)
    each, odd = divmod(clients, len(domains))
    if odd or not each:
        raise ValueError(
            f"clients is {clients}: the data has {len(domains)} domains that get as many clients "
            f"each; give {max(each, 1) * len(domains)} or {(each + 1) * len(domains)}"
        )
    order = []
    sizes = []
    for one in range(len(domains)):
        rows = np.flatnonzero(domain == one)
        part = pool.only(rows)
        if alpha is not None:
            inner = dirichlet(part, each, rng, alpha=alpha, minimum=minimum)
        elif labels is not None:
            inner = quantity_skew(part, each, rng, labels=labels)
        else:
            inner = iid(part, each, rng)
        order.append(rows[inner.order])
        sizes.append(inner.sizes())
    return cut(np.concatenate(order), np.concatenate(sizes), pool.rows)
