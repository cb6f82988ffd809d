"""Dirichlet splits drawn client by client: equal sizes, each client with its own class prior."""

from __future__ import annotations

import numpy as np

from fedbasin.core.catalogue import entry
from fedbasin.partition.deal import deal, deal_again, take
from fedbasin.partition.pool import Ints, Partition, Pool, even, positive, whole


@entry("partition", paper="Hsu et al., 2019", url="https://arxiv.org/abs/1909.06335")
def client_dirichlet(
    pool: Pool, clients: int, rng: np.random.Generator, *, alpha: float, refill: bool = False
) -> Partition:
    """Give every client the same number of rows, drawn by a class prior of its own.

    Client k draws q_k ~ Dir(alpha * 1_C) and takes floor(n / N) rows by it without putting any
    back; the n mod N rows left over are dropped. An exhausted class gets probability 0 (it is
    not refilled, so a long tail stays one); `deal.take` states the rule. With alpha = 0 every
    client holds one class: classes get owners in proportion to their rows (largest remainders)
    and are cut evenly among them, at most floor(n / N) rows each; all sizes are equal where
    classes are and C divides N.

    Args:
        alpha: concentration; 0 for one class a client, large for the overall mix.
        refill: put an exhausted class back, as FL-Simulator does: clients keep to their priors,
            rows are held more than once, and of a long tail little is left. Not with alpha = 0.
    """
    whole("clients", clients)
    pool.need_classes("client_dirichlet")
    positive("alpha", alpha, zero="one class a client")
    if refill and alpha == 0:
        raise ValueError("refill is True with alpha = 0, which runs out of nothing: leave it out")
    quota = pool.rows // clients
    if not quota:
        raise ValueError(
            f"clients is {clients}: equal sizes need at least one row each and there are "
            f"{pool.rows}; give at most {pool.rows} clients"
        )
    if alpha == 0:
        return deal(pool.labels, _one_class_each(pool.class_sizes, clients, quota, rng), rng)
    if refill:
        held = np.where(pool.class_sizes, clients * quota, 0)  # as good as endless
        return deal_again(pool.labels, client_counts(held, clients, quota, rng, alpha), rng)
    return deal(pool.labels, client_counts(pool.class_sizes, clients, quota, rng, alpha), rng)


@entry("partition", paper="Reddi et al., ICLR 2021", url="https://arxiv.org/abs/2003.00295")
def pachinko(
    pool: Pool,
    clients: int,
    rng: np.random.Generator,
    *,
    alpha: float = 0.1,
    beta: float = 10.0,
) -> Partition:
    """Draw coarse classes, then fine classes within them, for each client (Pachinko, CIFAR-100).

    One client after another takes floor(n / N) rows: theta ~ Dir(alpha * 1) over the coarse
    classes (`pool.groups`), phi_g ~ Dir(beta * 1) over the fine classes of g; a row's coarse
    class ~ theta, its fine class ~ phi_g, without putting any back. An exhausted fine class is
    taken out of phi_g, an exhausted coarse class out of theta, and what remains renormalised.
    CIFAR-100 with 500 clients of 100 rows is the published setting. Late clients get what is
    left, as there. The n mod N rows left over are dropped.

    Args:
        alpha: concentration over the coarse classes.
        beta: concentration over the fine classes of a coarse one.
    """
    whole("clients", clients)
    pool.need_classes("pachinko")
    positive("alpha", alpha)
    positive("beta", beta)
    members = _fine_classes(pool)
    fine_left = pool.class_sizes.copy()
    counts = np.zeros((clients, pool.classes), dtype=np.int64)
    for client in range(clients):
        coarse_left = np.array([fine_left[fine].sum() for fine in members])
        theta = rng.dirichlet(np.full(len(members), alpha), size=1)
        by_coarse = take(np.array([pool.rows // clients]), theta, coarse_left, rng)[0]
        for coarse in np.flatnonzero(by_coarse):
            fine = members[coarse]
            phi = rng.dirichlet(np.full(len(fine), beta), size=1)
            counts[client, fine] = take(by_coarse[[coarse]], phi, fine_left[fine], rng)[0]
        fine_left -= counts[client]
    return deal(pool.labels, counts, rng)


def client_counts(
    class_sizes: Ints, clients: int, quota: int, rng: np.random.Generator, alpha: float
) -> Ints:
    """Draw the table of equal sizes: every client takes `quota` rows by its own Dirichlet prior."""
    priors = rng.dirichlet(np.full(len(class_sizes), alpha), size=clients)
    return take(np.full(clients, quota), priors, class_sizes, rng)


def _one_class_each(class_sizes: Ints, clients: int, quota: int, rng: np.random.Generator) -> Ints:
    fair = class_sizes * clients / class_sizes.sum()
    owners = np.floor(fair).astype(np.int64)
    extra = np.argsort(owners - fair, kind="stable")[: clients - owners.sum()]
    owners[extra] += 1
    counts = np.zeros((clients, len(class_sizes)), dtype=np.int64)
    holders = np.split(rng.permutation(clients), np.cumsum(owners)[:-1])
    for label, own in enumerate(holders):
        if len(own):
            counts[own, label] = np.minimum(even(int(class_sizes[label]), len(own)), quota)
    return counts


def _fine_classes(pool: Pool) -> list[Ints]:
    """List the fine classes of each coarse class, refusing a fine class with two coarse ones."""
    groups = pool.needed_groups("pachinko")
    pairs = np.unique(np.stack([pool.labels, groups]), axis=1)
    repeated = pairs[0][1:][np.diff(pairs[0]) == 0]
    if repeated.size:
        raise ValueError(
            f"groups gives class {repeated[0]} more than one coarse class: pachinko needs data "
            "whose groups are coarse classes, such as cifar100"
        )
    return [pairs[0][pairs[1] == coarse] for coarse in np.unique(pairs[1])]
