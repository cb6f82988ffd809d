"""Long-tailed data: thin the classes before any partition."""

from __future__ import annotations

import math

import numpy as np

from fedbasin.partition.deal import listed
from fedbasin.partition.pool import Ints, Pool, whole


def longtail(labels: Ints, classes: int, imbalance: float, rng: np.random.Generator) -> Ints:
    """Thin the classes so that their sizes fall off exponentially; return the rows kept, sorted.

    Class c keeps n_c = floor(n_max * imbalance^(c / (C - 1))) random rows, c = 0..C-1, where
    n_max is the size of the largest class: at most what the class has, at least one row.
    Test data stay balanced.

    Args:
        labels: int64 [n], the class of each row.
        classes: C, how many classes there are.
        imbalance: smallest over largest class, in (0, 1]; 1 keeps balanced data as they are.
        rng: chooses the rows.
    """
    whole("classes", classes)
    if not (math.isfinite(imbalance) and 0 < imbalance <= 1):
        hint = f"; a factor of {imbalance:g} is written {1 / imbalance:g}" if imbalance > 1 else ""
        raise ValueError(
            f"imbalance is {imbalance!r}: give smallest over largest class, in (0, 1]{hint}"
        )
    had = Pool(labels, classes).class_sizes
    fall = np.arange(classes) / max(classes - 1, 1)
    wanted = np.floor(had.max() * imbalance**fall + 1e-9).astype(np.int64)
    keep = np.minimum(np.maximum(wanted, 1), had)
    return np.sort(listed(np.asarray(labels), keep[None, :], rng))


def evened(labels: Ints, classes: int) -> Ints:
    """Repeat rows until every class that is there has as many as the largest; return them sorted.

    The rows of a class are repeated in turn, so that none comes twice more often than another.

    Args:
        labels: int64 [n], the class of each row.
        classes: C, how many classes there are.
    """
    whole("classes", classes)
    most = int(Pool(labels, classes).class_sizes.max())
    by_class = [np.flatnonzero(np.asarray(labels) == label) for label in range(classes)]
    return np.sort(np.concatenate([np.resize(rows, most) for rows in by_class if rows.size]))
