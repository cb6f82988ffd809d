r"""Bulyan: let Krum choose a set of updates, then trim every coordinate of it.

    theta = n - 2 f times: the update of lowest Krum score among those left joins the set
    w+    = w + mean of the theta - 2 f values nearest the set's median      (each coordinate)

d_i = y_i - w, f = floor(hostile n). Krum's scores are formed anew for those left, with
max(1, left - f - 2) neighbours. All clients count alike, and BatchNorm statistics go through the
same rule.

Departures from the paper: f follows the number of replies.
If f > 0, a round needs 4 f + 3 replies.
Cost: one model down, one up. Server: C^2 P multiplications and a sort of C values a coordinate; the
set is a copy of theta models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedbasin.core.bounds import within
from fedbasin.core.catalogue import entry
from fedbasin.core.limits import median
from fedbasin.core.rule import Rules
from fedbasin.methods.parts.robust import (
    Robust,
    assumed_bad,
    by_columns,
    check_count,
    krum_scores,
    squared_distances,
)


@entry(
    "method",
    paper="El Mhamdi et al., ICML 2018",
    url="https://arxiv.org/abs/1802.07927",
    is_fedavg_when="never: all clients count alike; hostile = 0 is fedavg(weighting='uniform')",
    tunable="nothing: the share of hostile clients is an assumption, not a setting",
)
@dataclass(frozen=True)
class Bulyan(Robust):
    """Trimmed mean of a set of updates that Krum chose.

    Args:
        hostile: share of the replies that may be hostile, below 1/4.
        local: rules for the clients.
    """

    hostile: float = within("[0, 0.25)", default=0.1)
    local: Rules = ()

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Choose rows, then average what is near the median of each column."""
        count = len(rows)
        bad = assumed_bad(self.hostile, count)
        if not bad:
            return rows.mean(0)
        check_count(self, count, bad, 4 * bad + 3)
        chosen = rows[_chosen(squared_distances(rows), bad, count - 2 * bad)]
        near = len(chosen) - 2 * bad

        def middle(piece: Tensor) -> Tensor:
            order = (piece - median(piece)).abs().argsort(stable=True, dim=0)
            return piece.gather(0, order[:near]).mean(0)

        return by_columns(chosen, middle)


def _chosen(distances: Tensor, bad: int, size: int) -> Tensor:
    """Return which rows Krum takes, one after another."""
    left = torch.arange(len(distances), device=distances.device)
    taken = []
    for _ in range(size):
        best = int(krum_scores(distances[left][:, left], bad).argsort(stable=True)[0])
        taken.append(left[best])
        left = torch.cat([left[:best], left[best + 1 :]])
    return torch.stack(taken)
