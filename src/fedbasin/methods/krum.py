r"""Krum and Multi-Krum: keep the updates that lie closest to many others.

    d_i = y_i - w
    s_i = sum of the n - f - 2 smallest |d_i - d_j|^2, j != i      (squared distances)
    w+  = w + mean of the M updates of lowest s_i

f = floor(hostile n). M = n - f by default (Multi-Krum); M = 1 is Krum. Scores are formed once.
All clients count alike. BatchNorm statistics are chosen by the same rule, on their own: a client
with a plain model may still send bad statistics.

Departures from the paper: f follows the number of replies.
If f > 0, a round needs 2 f + 3 replies.
What to watch: M = 1 follows one client a round, which on non-IID data is no mean of anything.
Cost: one model down, one up. Server: C^2 P multiplications, no memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedbasin.core.bounds import at_least, within
from fedbasin.core.catalogue import entry
from fedbasin.core.rule import Rules
from fedbasin.methods.parts.robust import (
    Robust,
    assumed_bad,
    check_count,
    krum_scores,
    squared_distances,
)


@entry(
    "method",
    paper="Blanchard et al., NeurIPS 2017",
    url="https://arxiv.org/abs/1703.02757",
    is_fedavg_when="never: all clients count alike; hostile = 0 is fedavg(weighting='uniform')",
    tunable="nothing: the share of hostile clients is an assumption, not a setting",
)
@dataclass(frozen=True)
class Krum(Robust):
    """Mean of the updates that lie closest to many others.

    Args:
        hostile: share of the replies that may be hostile, below 1/2.
        keep: M, how many updates are averaged; 0 keeps n - f, 1 is the paper's Krum.
        local: rules for the clients.
    """

    hostile: float = within("[0, 0.5)", default=0.2)
    keep: int = at_least(0, default=0)
    local: Rules = ()

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Average the rows of lowest score."""
        count = len(rows)
        bad = assumed_bad(self.hostile, count)
        check_count(self, count, bad, 2 * bad + 3)
        keep = min(self.keep or count - bad, count)
        if keep == count:
            return rows.mean(0)
        scores = krum_scores(squared_distances(rows), bad)
        return rows[scores.argsort(stable=True)[:keep]].mean(0)
