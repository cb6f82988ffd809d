r"""Median: of every coordinate of the updates, the value in the middle.

    d_i = y_i - w
    w+  = w + median_i d_i          (each coordinate; of an even number the mean of the middle two)

All clients count alike: sample counts are claims that a hostile client is free to make.
BatchNorm statistics go through the same rule.

Departures from the paper: none known.
What to watch: on non-IID data the median drops what few clients know. `bucketing(median)` helps.
Cost: one model down, one up. Server: sorts C values a coordinate, piece by piece; no memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedbasin.core.catalogue import entry
from fedbasin.core.limits import median
from fedbasin.core.rule import Rules
from fedbasin.methods.parts.robust import Robust, by_columns


@entry(
    "method",
    paper="Yin et al., ICML 2018",
    url="https://arxiv.org/abs/1803.01498",
    is_fedavg_when="never: a median is not a mean",
    tunable="nothing: it has no number to choose",
)
@dataclass(frozen=True)
class Median(Robust):
    """Coordinate-wise median of the clients' updates.

    Args:
        local: rules for the clients, such as ``kept_momentum(beta=0.9)``.
    """

    local: Rules = ()

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Take the median of each column."""
        return by_columns(rows, median)
