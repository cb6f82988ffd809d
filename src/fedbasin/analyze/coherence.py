r"""Do clients pull the same way? Li et al. (FedLAW), Definitions 5.1 and 5.2.

c_ij     = cos(g_i, g_j),                   g_i = x - y_i, client i's update of the round
c_cohort = 1/m sum_{i != j} lambda_i lambda_j c_ij
critical round: the first whose c_cohort is at most zero
heterogeneity coherence: sim(sum_i lambda_i p_i, p), p_i the class shares of client i and p
those of all data. The paper leaves sim open; here 1 - TV (TV = half the L1 distance) and cosine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import pearsonr
from torch import Tensor

from fedbasin.analyze.decomposition import mean_of_pairs


class Coherence(NamedTuple):
    """How alike the updates of one cohort are."""

    pairs: Tensor  # [C, C] c_ij
    cohort: float  # c_cohort
    mean: float  # plain mean of c_ij over pairs


class Overlap(NamedTuple):
    """How alike a cohort's class mix and that of all data are."""

    one_minus_tv: float
    cosine: float


def gradient_coherence(start: Tensor, models: Tensor, share: Tensor) -> Coherence:
    """Compare the updates of models [C, P] that began at `start` [P]; share is lambda [C]."""
    updates = (start - models).double()
    unit = updates / updates.norm(dim=1, keepdim=True).clamp(min=1e-300)
    pairs = (unit @ unit.T).cpu()
    share = share.double().cpu()
    off = share[:, None] * share * pairs
    cohort = float((off.sum() - off.diagonal().sum()) / len(models))
    return Coherence(pairs, cohort, mean_of_pairs(pairs))


def group_coherence(
    pairs: Tensor, clients: Sequence[int], groups: Sequence[frozenset[int]]
) -> dict[tuple[int, int], float]:
    """Return the mean c_ij within and between groups of client ids; NaN where no pair is there."""
    found = {}
    for a, first in enumerate(groups):
        for b, second in enumerate(groups[a:], start=a):
            values = [
                float(pairs[i, j])
                for i, one in enumerate(clients)
                for j, other in enumerate(clients)
                if i != j and one in first and other in second
            ]
            found[a, b] = float(np.mean(values)) if values else float("nan")
    return found


def critical_round(rounds: Sequence[int], coherence: Sequence[float]) -> int | None:
    """Return the first round whose coherence is at most zero, or None."""
    return next((r for r, c in zip(rounds, coherence, strict=True) if c <= 0), None)


def heterogeneity_coherence(counts: Tensor, clients: Tensor, share: Tensor) -> Overlap:
    """Compare a cohort's class mix with that of all data.

    Args:
        counts: rows by client and class, [N, classes].
        clients: ids of the cohort, [C].
        share: lambda [C].
    """
    if not counts.shape[1]:  # targets without classes have no mix
        return Overlap(float("nan"), float("nan"))
    counts = counts.double().cpu()
    everyone = counts.sum(0) / counts.sum()
    held = counts[clients.cpu()]
    mixes = held / held.sum(1, keepdim=True).clamp(min=1)
    cohort = share.double().cpu() @ mixes
    distance = (cohort - everyone).abs().sum() / 2
    cosine = cohort @ everyone / (cohort.norm() * everyone.norm())
    return Overlap(float(1 - distance), float(cosine))


class Correlation(NamedTuple):
    """What learnt aggregation weights go with (Table 11)."""

    size: float  # Pearson's r of the accumulated weight with n_i
    balance: float  # with 1 / var(p_i), the paper's heterogeneity degree
    product: float  # with n_i / var(p_i)
    clients: int  # clients counted: those that took part and whose class shares are not all equal


def accumulate(
    clients: int, cohorts: Sequence[np.ndarray], lambdas: Sequence[Sequence[float]]
) -> np.ndarray:
    """Sum each client's weights over rounds, [N]; cohorts hold the ids lambda belongs to."""
    total = np.zeros(clients)
    for round, (cohort, weights) in enumerate(zip(cohorts, lambdas, strict=True), start=1):
        if len(cohort) != len(weights):
            raise ValueError(
                f"round {round} has {len(weights)} weights for {len(cohort)} clients: they are "
                "of clients beyond the cohort, as of fedcda(merge=...), or of another run"
            )
        np.add.at(total, cohort, weights)
    return total


def correlate_weights(weights: np.ndarray, counts: np.ndarray) -> Correlation:
    """Correlate accumulated weights [N] with what clients hold, [N, classes]."""
    sizes = counts.sum(axis=1)
    shares = counts / np.maximum(sizes, 1)[:, None]
    spread = shares.var(axis=1)
    kept = (weights > 0) & (spread > 0)
    if kept.sum() < 3:
        raise ValueError(f"a correlation needs at least 3 clients with weights, got {kept.sum()}")
    balance = 1 / spread[kept]
    return Correlation(
        size=_pearson(weights[kept], sizes[kept]),
        balance=_pearson(weights[kept], balance),
        product=_pearson(weights[kept], sizes[kept] * balance),
        clients=int(kept.sum()),
    )


def _pearson(a: np.ndarray, b: np.ndarray) -> float:
    """Return Pearson's r, or NaN where one of the two is constant."""
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return float("nan")
    return float(pearsonr(a, b).statistic)
