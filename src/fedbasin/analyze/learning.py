r"""What a learning curve says beyond its end: no tensors, records only.

smoothed     Savitzky-Golay filter, length 10, order 2                  (Zhou et al., Figure 7)
roughness    mean |a_{t+1} - a_t| between scored rounds                 (Caldarola et al., Fig. 1)
drop         the largest change for the worse from one scored round to the next
area         mean of the headline over the rounds, by the trapezium rule
equivalent   the participation at which the reference method ends as well (WIMA, Figure 3)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.signal import savgol_filter

from fedbasin.core.record import Headline, RoundRecord, mean_of_last, rounds_to_target


class CurveStatistics(NamedTuple):
    """One learning curve in numbers; None where it has none."""

    rounds: np.ndarray  # [T] the scored ones
    values: np.ndarray  # [T] the headline metric
    smoothed: np.ndarray  # [T]
    final: float | None  # mean of the last 10 rounds
    rounds_to_target: int | None
    roughness: float | None
    drop: float | None
    area: float | None


def smooth(values: np.ndarray, length: int = 11, order: int = 2) -> np.ndarray:
    """Return Savitzky-Golay smoothed values; a curve shorter than the filter stays as it is."""
    if len(values) < length:
        return values
    filtered: np.ndarray = savgol_filter(values, length, order)
    return filtered


def curve_statistics(
    records: Sequence[RoundRecord], target: float | None, headline: Headline | None = None
) -> CurveStatistics:
    """Describe the learning curve of a run's records; without a target none is reached."""
    headline = headline or Headline()
    every = [(record.round, record.metric(headline.name)) for record in records]
    scored = [(round, value) for round, value in every if value is not None]
    rounds = np.array([round for round, _ in scored])
    values = np.array([value for _, value in scored], dtype=float)
    steps = np.diff(values)
    falls = -steps if headline.higher_is_better else steps
    span = rounds[-1] - rounds[0] if len(rounds) > 1 else 0
    return CurveStatistics(
        rounds,
        values,
        smooth(values),
        mean_of_last(records, metric=headline.name),
        None if target is None else rounds_to_target(records, target, headline=headline),
        float(np.abs(steps).mean()) if len(steps) else None,
        float(max(0.0, falls.max())) if len(steps) else None,
        float(np.trapezoid(values, rounds) / span) if span else None,
    )


def participation_equivalent(
    participation: Sequence[float],
    scores: Sequence[float],
    reached: float,
    *,
    higher_is_better: bool = True,
) -> float | None:
    """Return the participation at which a reference method reaches a score.

    The reference's scores are joined by straight lines over its participation. None where the
    score is better than all of them; the lowest participation where it is worse than the first.
    """
    sign = 1 if higher_is_better else -1
    reached = sign * reached
    order = np.argsort(participation)
    clients = np.asarray(participation)[order]
    height = sign * np.asarray(scores)[order]
    if reached <= height[0]:
        return float(clients[0])
    for left in range(len(clients) - 1):
        low = height[left]
        high = height[left + 1]
        if low < reached <= high:
            share = (reached - low) / (high - low)
            return float(clients[left] + share * (clients[left + 1] - clients[left]))
    return None
