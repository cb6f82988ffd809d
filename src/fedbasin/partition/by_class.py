"""Dirichlet splits drawn class by class: each class says which clients get how much of it."""

from __future__ import annotations

import numpy as np

from fedbasin.core.catalogue import entry
from fedbasin.partition.by_client import client_counts
from fedbasin.partition.deal import deal, fill_up, listed, missing
from fedbasin.partition.pool import (
    Floats,
    Ints,
    Partition,
    Pool,
    cut,
    enough,
    even,
    positive,
    whole,
)

TRIES = 50  # whole draws before a minimum size is reached by moving rows instead


@entry("partition", paper="Yurochkin et al., ICML 2019", url="https://arxiv.org/abs/1905.12022")
def dirichlet(
    pool: Pool,
    clients: int,
    rng: np.random.Generator,
    *,
    alpha: float,
    minimum: int = 10,
    balance: bool = True,
) -> Partition:
    """Split every class by Dirichlet shares, with balancing and a minimum size (hetero-dir).

    For each class c in turn: q ~ Dir(alpha * 1) over the clients that hold fewer than n / N
    rows so far (over all clients without `balance`), which is Dir(alpha * 1_N) with the others
    set to zero and renormalised; the shuffled class is cut at floor(n_c * cumsum(q)). The whole
    draw is repeated until the smallest client has `minimum` rows. After 50 draws without
    success the draw that lacked the fewest rows is filled up: see `deal.fill_up` for the rule.

    Args:
        alpha: concentration; small means few clients hold a class.
        minimum: rows every client gets at least; 0 for no minimum.
        balance: whether a client that has its fair share is passed over.
    """
    whole("clients", clients)
    pool.need_classes("dirichlet")
    positive("alpha", alpha)
    whole("minimum", minimum, least=0)
    enough(pool.rows, clients, minimum)
    counts = _balanced(pool.class_sizes, clients, rng, alpha, minimum, balance)
    return deal(pool.labels, counts, rng)


@entry("partition", paper="Li et al., ICML 2023", url="https://arxiv.org/abs/2302.10911")
def class_dirichlet(
    pool: Pool, clients: int, rng: np.random.Generator, *, alpha: float
) -> Partition:
    """Split every class by Dirichlet shares, plainly: no balancing, no minimum (FedLAW).

    For each class c: q ~ Dir(alpha * 1_N), client k gets round(q_k * n_c) rows while they
    last and the last client what remains. Sizes vary widely and clients may be empty.

    Args:
        alpha: concentration; small means few clients hold a class.
    """
    whole("clients", clients)
    pool.need_classes("class_dirichlet")
    positive("alpha", alpha)
    shares = rng.dirichlet(np.full(clients, alpha), size=pool.classes)
    return deal(pool.labels, _rounded(shares, pool.class_sizes), rng)


@entry("partition", paper="Li et al., ICML 2023", url="https://arxiv.org/abs/2302.10911")
def hybrid_dirichlet(
    pool: Pool,
    clients: int,
    rng: np.random.Generator,
    *,
    alpha1: float,
    alpha2: float,
    equal: bool = False,
) -> Partition:
    """Mix two degrees of skew: half the clients by alpha1, the others by alpha2 (FedLAW Fig. 5).

    For each class: q ~ Dir(alpha1 * 1_N) of which the first H = floor(N / 2) clients keep their
    shares; what is left of the class, 1 - sum_{k<H} q_k, goes to the other N - H clients by
    Dir(alpha2 * 1). Counts are rounded as in `class_dirichlet`. With `equal` (the three-client
    toy, Fig. 12) every client takes floor(n / N) rows by its own class prior instead: the first
    half from Dir(alpha1 * 1_C), then the others from the remaining rows by Dir(alpha2 * 1_C).

    Args:
        alpha1: concentration of the first half.
        alpha2: concentration of the others.
        equal: whether all clients get the same number of rows.
    """
    whole("clients", clients, least=2)
    pool.need_classes("hybrid_dirichlet")
    positive("alpha1", alpha1)
    positive("alpha2", alpha2)
    first = clients // 2
    if equal:
        quota = pool.rows // clients
        head = client_counts(pool.class_sizes, first, quota, rng, alpha1)
        left = pool.class_sizes - head.sum(axis=0)
        tail = client_counts(left, clients - first, quota, rng, alpha2)
        return deal(pool.labels, np.concatenate([head, tail]), rng)
    kept = rng.dirichlet(np.full(clients, alpha1), size=pool.classes)[:, :first]
    others = rng.dirichlet(np.full(clients - first, alpha2), size=pool.classes)
    rest = 1.0 - kept.sum(axis=1, keepdims=True)
    shares = np.concatenate([kept, rest * others], axis=1)
    return deal(pool.labels, _rounded(shares, pool.class_sizes), rng)


@entry("partition", paper="Xiao et al., NeurIPS 2023", url="https://arxiv.org/abs/2310.07587")
def categorical_dirichlet(
    pool: Pool, clients: int, rng: np.random.Generator, *, alpha: float
) -> Partition:
    """Throw every single row to a client by the Dirichlet shares of its class (FedGraB).

    For each class: q ~ Dir(alpha * 1_N) and each row's client ~ Categorical(q). A client left
    empty is given one row by the rule of `deal.fill_up`; more clients than rows are refused.

    Args:
        alpha: concentration, called beta in the FedWCM paper.
    """
    whole("clients", clients)
    pool.need_classes("categorical_dirichlet")
    positive("alpha", alpha)
    enough(pool.rows, clients, 1)
    shares = rng.dirichlet(np.full(clients, alpha), size=pool.classes)
    counts = rng.multinomial(pool.class_sizes, shares).T
    return deal(pool.labels, fill_up(counts, 1), rng)


@entry("partition", paper="Shang et al., IJCAI 2022", url="https://arxiv.org/abs/2204.13399")
def grouped_dirichlet(
    pool: Pool,
    clients: int,
    rng: np.random.Generator,
    *,
    alpha: float,
    group: int = 10,
    equal: bool = True,
) -> Partition:
    """Split inside groups of ten clients, then cut the whole list into equal pieces (CReFF).

    The shuffled rows go to groups of `group` clients in proportion to their clients. Inside a
    group of N_g clients and n_g rows: hetero-dir as in `dirichlet`, with minimum size
    floor(n_g / N_g / 2). The lists of all clients, each sorted by class, are laid end to end and
    cut into N pieces whose sizes differ by at most one. Without `equal` that last cut is left
    out, which is the split of FedDF (Lin et al., NeurIPS 2020).

    Args:
        alpha: concentration; small means few clients hold a class.
        group: how many clients make a group; the last group may be smaller.
        equal: whether the list is cut anew into equal pieces.
    """
    whole("clients", clients)
    pool.need_classes("grouped_dirichlet")
    positive("alpha", alpha)
    whole("group", group)
    shuffled = rng.permutation(pool.rows)
    bounds = np.append(np.arange(0, clients, group), clients)
    edges = bounds * pool.rows // clients
    order = []
    sizes = []
    for members, start, stop in zip(np.diff(bounds), edges[:-1], edges[1:], strict=True):
        rows = shuffled[start:stop]
        class_sizes = np.bincount(pool.labels[rows], minlength=pool.classes)
        least = len(rows) // (2 * int(members))
        counts = _balanced(class_sizes, int(members), rng, alpha, least, balance=True)
        order.append(rows[listed(pool.labels[rows], counts, rng)])
        sizes.append(counts.sum(axis=1))
    final = even(pool.rows, clients) if equal else np.concatenate(sizes)
    return cut(np.concatenate(order), final, pool.rows)


def _balanced(
    class_sizes: Ints,
    clients: int,
    rng: np.random.Generator,
    alpha: float,
    minimum: int,
    balance: bool,
) -> Ints:
    """Draw the table of `dirichlet`, again until the minimum size holds, then fill up."""
    best = _draw(class_sizes, clients, rng, alpha, balance)
    for _ in range(TRIES - 1):
        if not missing(best, minimum):
            return best
        fresh = _draw(class_sizes, clients, rng, alpha, balance)
        best = min(best, fresh, key=lambda counts: missing(counts, minimum))
    return fill_up(best, minimum)


def _draw(
    class_sizes: Ints, clients: int, rng: np.random.Generator, alpha: float, balance: bool
) -> Ints:
    counts = np.zeros((clients, len(class_sizes)), dtype=np.int64)
    sizes = np.zeros(clients, dtype=np.int64)
    total = int(class_sizes.sum())
    for label in np.flatnonzero(class_sizes):
        # Some client is below n / N as long as rows are left, so `takers` is never empty.
        takers = np.flatnonzero(sizes * clients < total) if balance else np.arange(clients)
        shares = rng.dirichlet(np.full(len(takers), alpha))
        cuts = np.floor(np.cumsum(shares) * class_sizes[label]).astype(np.int64)
        cuts[-1] = class_sizes[label]
        counts[takers, label] = np.diff(cuts, prepend=0)
        sizes += counts[:, label]
    return counts


def _rounded(shares: Floats, class_sizes: Ints) -> Ints:
    """Turn shares [C, N] into counts [N, C]: rounded while rows last, the rest to the last."""
    cuts = np.cumsum(np.rint(shares * class_sizes[:, None]).astype(np.int64), axis=1)
    cuts = np.minimum(cuts, class_sizes[:, None])
    cuts[:, -1] = class_sizes
    return np.diff(cuts, prepend=0, axis=1).T
