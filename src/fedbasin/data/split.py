"""Cutting rows once: a held-out test share, and the server's proxy set."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedbasin.data.dataset import DataError, Dataset, Rows, Splits

HOLDOUT_SEED = 2023


def held_out(strata: NDArray[np.int64], share: float) -> NDArray[np.bool_]:
    """Mark the rows that become the test split of a dataset published without one.

    Every stratum s (a class, a writer, a domain and class) gives floor(share * n_s) of its n_s
    rows. The draw uses a fixed seed, so that everyone's test split is the same.

    Args:
        strata: int64 [n], the stratum of each row.
        share: the fraction of each stratum to hold out.
    """
    rng = np.random.default_rng(HOLDOUT_SEED)
    mask = np.zeros(len(strata), dtype=np.bool_)
    order = np.argsort(strata, kind="stable")
    starts = np.flatnonzero(np.diff(strata[order], prepend=strata[order][:1] - 1))
    for rows in np.split(order, starts[1:]):
        mask[rng.permutation(rows)[: int(share * len(rows) + 1e-9)]] = True
    return mask


def split(
    dataset: Dataset,
    *,
    proxy_per_class: int = 0,
    proxy_rows: int = 0,
    proxy_from: Literal["train", "test"] = "train",
    rng: np.random.Generator,
) -> Splits:
    """Cut a proxy set out of the training (or test) rows.

    The proxy rows leave the split they came from, so no row is both proxy and trained on,
    or both proxy and scored.

    Args:
        dataset: what to cut.
        proxy_per_class: rows of each class the server holds; 0 for none.
        proxy_rows: rows the server holds, drawn from all alike whatever their class; 0 for none.
            At most one of the two may be set.
        proxy_from: ``"train"``, or ``"test"`` as in the FedLAW paper.
        rng: draws the proxy rows.
    """
    if proxy_from not in ("train", "test"):
        raise ValueError(f"proxy_from must be 'train' or 'test', got {proxy_from!r}")
    asked = {"proxy_per_class": proxy_per_class, "proxy_rows": proxy_rows}
    for name, count in asked.items():
        if count < 0:
            raise ValueError(f"{name} must be 0 or more, got {count}")
    if proxy_per_class and proxy_rows:
        raise ValueError(
            f"proxy_per_class is {proxy_per_class} and proxy_rows is {proxy_rows}: set one of them"
        )
    if not proxy_per_class and not proxy_rows:
        return Splits(dataset.train, None, dataset.test)
    pool = dataset.train if proxy_from == "train" else dataset.test
    if proxy_rows:
        chosen = _any(dataset, pool, proxy_rows, proxy_from, rng)
    else:
        chosen = _balanced(dataset, pool, proxy_per_class, proxy_from, rng)
    mask = np.zeros(len(pool), dtype=np.bool_)
    mask[chosen] = True
    if mask.all():
        raise DataError(
            f"proxy_per_class={proxy_per_class} takes every {proxy_from} row of {dataset.name}; "
            "ask for fewer rows per class"
        )
    proxy, rest = pool.take(np.flatnonzero(mask)), pool.take(np.flatnonzero(~mask))
    if proxy_from == "train":
        return Splits(rest, proxy, dataset.test)
    return Splits(dataset.train, proxy, rest)


def _any(
    dataset: Dataset, pool: Rows, count: int, where: str, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Draw from all rows, whatever their class, without replacement."""
    if count >= len(pool):
        raise DataError(
            f"proxy_rows={count}, but {dataset.name} has only {len(pool)} {where} rows; ask for "
            "fewer, so that some are left"
        )
    return rng.choice(len(pool), count, replace=False)


def _balanced(
    dataset: Dataset, pool: Rows, per_class: int, where: str, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Draw the same number of rows of every class, without replacement."""
    if not dataset.classes:
        raise DataError(
            f"proxy_per_class={per_class}, but the targets of {dataset.name} have no classes; set "
            "proxy_rows (data.proxy_rows) to the number of rows the server holds"
        )
    counts = np.bincount(pool.labels, minlength=len(dataset.classes))
    if counts.min() < per_class:
        poorest = int(counts.argmin())
        raise DataError(
            f"proxy_per_class={per_class}, but class {dataset.classes[poorest]!r} of "
            f"{dataset.name} has only {counts[poorest]} {where} rows; ask for fewer"
        )
    by_class = np.split(np.argsort(pool.labels, kind="stable"), np.cumsum(counts)[:-1])
    return np.concatenate([rng.choice(rows, per_class, replace=False) for rows in by_class])
