r"""Centered clipping: the mean of the updates, each moved towards the last aggregate.

    v_0 = 0,  d_i = y_i - w
    L times:  v <- v + 1/n sum_i (d_i - v) min(1, tau / |d_i - v|)
    w+ = w + v,   v is kept for the next round

One client moves v by at most L tau / n. All clients count alike. BatchNorm statistics, whose scale
has nothing to do with tau, are merged by their median.

It is meant for clients that send a momentum, `centered_clipping(local=kept_momentum(beta=0.9))`
with one step a round: then honest updates differ less, and v is a good centre.

Departures from the paper: none known. The paper's tau is for gradients: for updates it is
multiplied by the learning rate (and grows with the number of steps).
What to watch: a large tau is the plain mean. The record has the share that was clipped.
Cost: one model down, one up. Server: L passes over C x P numbers, one model of memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedbasin.core.bounds import above, at_least
from fedbasin.core.catalogue import entry
from fedbasin.core.limits import median
from fedbasin.core.method import Context, Method, Replies, Served
from fedbasin.core.protocols import MergesStatistics
from fedbasin.core.rule import Rules
from fedbasin.core.space import Range
from fedbasin.core.vectors import Weighting
from fedbasin.methods.parts.robust import by_columns, present_rows


@dataclass(frozen=True)
class CenteredClippingState:
    """What the server remembers."""

    centre: Tensor  # [P] v


class CenteredClippingNotes(NamedTuple):
    """What a round leaves in the record."""

    clipped: Tensor  # share of the updates farther than tau from the centre, in the last pass


@entry(
    "method",
    name="centered_clipping",
    paper="Karimireddy et al., ICML 2021",
    url="https://arxiv.org/abs/2012.10333",
    is_fedavg_when={"tau": float("inf"), "iterations": 1},
    tunable={"tau": Range(0.01, 10.0, "log"), "iterations": Range(1, 5, whole=True)},
)
@dataclass(frozen=True)
class CenteredClipping(MergesStatistics, Method):
    """Mean of the updates, clipped around the last aggregate.

    Args:
        tau: the largest distance of an update from the centre; infinity is the mean.
        iterations: L, how often the centre is moved in a round.
        local: rules for the clients, such as ``kept_momentum(beta=0.9)``.
    """

    weighting: ClassVar[Weighting] = "uniform"
    tau: float = above(0, default=0.1)
    iterations: int = at_least(1, default=1)
    local: Rules = ()

    def init(self, server: Tensor, context: Context) -> CenteredClippingState:
        """Start with the centre at no update."""
        return CenteredClippingState(torch.zeros_like(server))

    def aggregate(
        self, state: CenteredClippingState, server: Tensor, replies: Replies, context: Context
    ) -> tuple[Served, CenteredClippingState]:
        """Move the centre towards the updates, none of them by more than tau."""
        updates, _ = present_rows(replies.models - server, replies)
        centre = state.centre
        for _ in range(self.iterations):
            apart = updates - centre
            lengths = apart.norm(dim=1)
            far = lengths > self.tau
            scale = torch.where(far, self.tau / lengths, torch.ones_like(lengths))
            centre = centre + scale @ apart / len(apart)
        model = server + centre
        notes = CenteredClippingNotes(far.to(server.dtype).mean())
        return Served(model, model, notes), CenteredClippingState(centre)

    def merge_statistics(self, before: Tensor, replies: Replies, context: Context) -> Tensor:
        """Take the median of the clients' statistics."""
        changes, _ = present_rows(replies.buffers - before, replies)
        return before + by_columns(changes, median)
