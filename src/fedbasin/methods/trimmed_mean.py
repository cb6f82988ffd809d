r"""Trimmed mean: of every coordinate, the mean without the largest and the smallest values.

    d_i = y_i - w
    w+  = w + mean of the n - 2 f middle values of d_i          (each coordinate)

f = floor(hostile n) values are dropped on either side. All clients count alike, and BatchNorm
statistics go through the same rule.

Departures from the paper: f follows the number of replies, so that cohorts may differ in size.
(The code released with ALIE keeps the n - f - 1 values nearest the median instead.)
Cost: one model down, one up. Server: sorts C values a coordinate, piece by piece; no memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedbasin.core.bounds import within
from fedbasin.core.catalogue import entry
from fedbasin.core.rule import Rules
from fedbasin.methods.parts.robust import Robust, assumed_bad, by_columns


@entry(
    "method",
    name="trimmed_mean",
    paper="Yin et al., ICML 2018",
    url="https://arxiv.org/abs/1803.01498",
    is_fedavg_when="never: all clients count alike; hostile = 0 is fedavg(weighting='uniform')",
    tunable="nothing: the share of hostile clients is an assumption, not a setting",
)
@dataclass(frozen=True)
class TrimmedMean(Robust):
    """Mean of the middle values of every coordinate of the updates.

    Args:
        hostile: share of the replies that may be hostile, below 1/2.
        local: rules for the clients.
    """

    hostile: float = within("[0, 0.5)", default=0.2)
    local: Rules = ()

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Average what is left of each column."""
        count = len(rows)
        drop = assumed_bad(self.hostile, count)

        def middle(piece: Tensor) -> Tensor:
            return piece.sort(0).values[drop : count - drop].mean(0)

        return by_columns(rows, middle)
