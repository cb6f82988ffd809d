"""Is it better, or was it luck? Two methods on the same seeds, compared pair by pair.

With one seed, all methods see the same initial model, clients, cohorts and batches, so what
two methods share cancels in the difference of a pair, and a paired test sees more than the
two spreads do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Difference:
    """Mean difference over seeds that both methods ran with."""

    pairs: int
    mean: float
    better: int  # pairs in which it is the better one
    low: float | None = None  # 95 % confidence interval of the mean
    high: float | None = None
    p: float | None = None  # two-sided paired t-test; None where it says nothing
    holm: float | None = None  # p corrected for the other tests of the same table


def least_ratio(pairs: int) -> float:
    """Return how many standard deviations the mean must be from zero for p < 0.05."""
    from scipy import stats

    return float(stats.t.ppf(0.975, pairs - 1)) / math.sqrt(pairs)


def corrected(gaps: Mapping[str, Difference | None]) -> dict[str, Difference | None]:
    """Correct the p-values of several tests by Holm's method.

    The i-th smallest of m p-values is multiplied by m - i + 1, and made no smaller than the one
    before. If p < 0.05 is called a difference, the chance of any false one is at most 5 %.
    """
    tested = {name: gap.p for name, gap in gaps.items() if gap is not None and gap.p is not None}
    least = 0.0
    adjusted: dict[str, float] = {}
    for place, name in enumerate(sorted(tested, key=lambda name: tested[name])):
        least = max(least, min(1.0, (len(tested) - place) * tested[name]))
        adjusted[name] = least
    return {
        name: None if gap is None else replace(gap, holm=adjusted.get(name))
        for name, gap in gaps.items()
    }


def paired_difference(
    ours: Mapping[int, float], theirs: Mapping[int, float], *, higher_is_better: bool = True
) -> Difference | None:
    """Compare two methods by their scores of each seed; None without a common seed.

    Student's paired t-test, which takes the differences to be roughly normal. A rank test
    (Wilcoxon) asks for less, but with 3 pairs its p-value is never below 0.25 and with 5
    never below 0.06, so it could never show a difference here.
    """
    seeds = sorted(set(ours) & set(theirs))
    if not seeds:
        return None
    gaps = np.array([ours[seed] - theirs[seed] for seed in seeds])
    mean = float(gaps.mean())
    better = int((gaps > 0).sum() if higher_is_better else (gaps < 0).sum())
    if len(gaps) < 2 or np.ptp(gaps) <= 1e-12:  # nothing to estimate a spread from
        return Difference(len(gaps), mean, better)
    from scipy import stats  # slow to import, and needed only here

    test = stats.ttest_1samp(gaps, 0.0)
    interval = test.confidence_interval(0.95)
    return Difference(
        len(gaps), mean, better, float(interval.low), float(interval.high), float(test.pvalue)
    )


@dataclass(frozen=True)
class ClientGains:
    """How many clients one method serves better than another, over all seeds that both ran with."""

    clients: int  # pairs of scores: a client counts once a seed
    gain: int
    lose: int
    seeds: int
    mean: float  # of the differences, each client of each seed counted once
    low: float | None = None  # 95 % interval of gain - lose, as a share of the clients
    high: float | None = None

    @property
    def balance(self) -> float:
        """Clients that gain minus those that lose, as a share of all."""
        return (self.gain - self.lose) / self.clients


def client_gains(
    ours: Mapping[int, np.ndarray],
    theirs: Mapping[int, np.ndarray],
    *,
    higher_is_better: bool = True,
    draws: int = 2000,
) -> ClientGains | None:
    """Compare two methods client by client; None without a client that both have a score of.

    Clients of one seed share its model and are not independent. The interval is a bootstrap that
    draws whole seeds (a cluster bootstrap), so with few seeds it is rough; with one there is none.

    Args:
        ours: the clients' scores [N] by seed; NaN where there is none.
        theirs: the other method's.
        higher_is_better: which of two scores is the better one.
        draws: bootstrap samples.
    """
    gaps = []
    for seed in sorted(set(ours) & set(theirs)):
        if len(ours[seed]) != len(theirs[seed]):
            return None
        gap = ours[seed] - theirs[seed]
        gap = gap[np.isfinite(gap)]
        if len(gap):
            gaps.append(gap if higher_is_better else -gap)
    if not gaps:
        return None
    gain = np.array([(gap > 0).sum() for gap in gaps])
    lose = np.array([(gap < 0).sum() for gap in gaps])
    size = np.array([len(gap) for gap in gaps])
    sign = 1 if higher_is_better else -1
    mean = sign * float(np.concatenate(gaps).mean())
    whole = ClientGains(int(size.sum()), int(gain.sum()), int(lose.sum()), len(gaps), mean)
    if len(gaps) < 2:
        return whole
    chosen = np.random.default_rng(0).integers(0, len(gaps), (draws, len(gaps)))
    balance = (gain - lose)[chosen].sum(1) / size[chosen].sum(1)
    low, high = np.quantile(balance, (0.025, 0.975))
    return replace(whole, low=float(low), high=float(high))
