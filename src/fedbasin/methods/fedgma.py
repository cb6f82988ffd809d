r"""FedGMA: keep of the update what the clients agree on, parameter by parameter.

    d    = inner(w, replies) - w,   d_i = y_i - w           (the round's update)
    A    = | sum_i q_i sign(d_i) |                          (agreement, in [0, 1])
    mask = 1 where A >= threshold, elsewhere A  ("soft") or 0  ("hard")
    w+   = w + lr mask d                                    (all elementwise)

q_i is one vote a client ("clients") or n_i / sum n ("samples"). An inner server optimiser's step
is masked as in the paper, `fedgma(fedadam)`; `fedadam(fedgma)` steps along the masked update.

Departures from the paper: none known. FedIMA's release loads the plain mean first and then takes
1e-4 / m of masked differences off, so its rows are FedAvg's; run `fedavg` for them.
What to watch: sign(0) = 0, so parameters that a client does not move lower the agreement; with one
or two clients a round the vote says little. The mean of the mask is in the record.
Cost: none for clients. Server: O(C P) a round, no memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedbasin.core.bounds import above, within
from fedbasin.core.catalogue import entry
from fedbasin.core.method import Context, Method, Replies, Served, Wrapper
from fedbasin.core.space import Range
from fedbasin.core.vectors import shares, weighted_mean
from fedbasin.methods.fedavg import FedAvg


class FedGMANotes(NamedTuple):
    """What a round leaves in the record."""

    mask_mean: Tensor  # share of the update that is kept, over parameters
    agreed: Tensor  # share of the parameters at or above the threshold


@entry(
    "method",
    paper="Tenison et al., TMLR 2023",
    url="https://arxiv.org/abs/2201.11986",
    is_fedavg_when={"threshold": 0.0, "lr": 1.0},
    tunable={"threshold": Range(0.0, 1.0), "lr": Range(0.3, 3.0, "log")},
)
@dataclass(frozen=True)
class FedGMA(Wrapper):
    """Mask the update of any method where the clients' signs disagree.

    Args:
        inner: the method that makes each round's update.
        threshold: agreement from which a parameter moves fully; 0 is the inner method.
        mask: below it, move by the agreement (``"soft"``) or not at all (``"hard"``).
        vote: one vote for each of the ``"clients"``, or in proportion to ``"samples"``.
        lr: eta_g, the server's step along the masked update.
    """

    inner: Method = field(default_factory=FedAvg)
    threshold: float = within("[0, 1]", default=0.8)
    mask: Literal["soft", "hard"] = "soft"
    vote: Literal["clients", "samples"] = "clients"
    lr: float = above(0, default=1.0)

    def streams(self) -> None:
        """Every reply counts."""
        return None

    def step(
        self, own: tuple[()], server: Tensor, fresh: Served, replies: Replies, context: Context
    ) -> tuple[Served, tuple[()]]:
        """Step along the masked update."""
        votes = shares(replies.weights, "uniform" if self.vote == "clients" else "samples")
        agreement = weighted_mean((replies.models - server).sign(), votes).abs()
        # All clients agreeing may add up to a little less than 1.
        agreed = agreement >= self.threshold - 1e-6
        below = agreement if self.mask == "soft" else torch.zeros_like(agreement)
        mask = torch.where(agreed, 1.0, below)
        notes = FedGMANotes(mask.mean(), agreed.to(mask.dtype).mean())
        return fresh.moved(server + self.lr * mask * (fresh.send - server)).noted(notes), own
