"""How far a client's number may be above the others': a limit at some times their median."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor


class Limit(NamedTuple):
    """What is usual among clients, and the most that one of them may have."""

    usual: Tensor  # the median
    most: Tensor


def limit_of(
    values: Tensor,
    times: float,
    counted: Tensor | None = None,
    *,
    least: int = 1,
    plus: float = 0.0,
    lower: bool = False,
) -> Limit:
    """Return the limit of clients' values [C], times * (median + plus).

    Args:
        values: one number of each client.
        times: how many times the median a value may be.
        counted: whose values the median is taken of, bool [C]; by default those above zero.
        least: with fewer values than so many, median and limit are infinite.
        plus: is added to the median, for values that may all be near zero.
        lower: how `median` treats an even number of values.
    """
    if counted is None:
        counted = values > 0
    known = values[counted]
    usual = values.new_tensor(math.inf) if len(known) < least else median(known, lower=lower)
    return Limit(usual, times * (usual + plus))


def median(rows: Tensor, *, lower: bool = False) -> Tensor:
    """Return the median of each column.

    Of an even number of rows it is the mean of the two middle, or the lower of them.
    """
    ordered = rows.sort(0).values
    below = ordered[(len(rows) - 1) // 2]
    return below if lower else (below + ordered[len(rows) // 2]) / 2
