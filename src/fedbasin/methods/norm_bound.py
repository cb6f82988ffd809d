r"""Norm bounding: shorten what is longer than most, before any method sees it.

    d_i <- d_i min(1, S / |d_i|),   d_i = y_i - w
    S = bound, or times x the cohort's median |d_i|                     (bound = 0)

Whatever else a client sends is bounded too, or it could do what its model may not:

    reports, gradients (Mime), BatchNorm statistics      to times x their median length
    sample counts                                        to at most claims x their median
    step counts (FedNova divides by them) and losses     to within claims x of their median

`action="drop"` leaves out clients whose update is too long instead of shortening it.

Departures from the paper: the bounds on everything but the model. Put it outermost: wrappers
around it see the replies as they came.
What to watch: it does not stop attacks whose updates are short (ALIE); the inner rule has to.
Cost: none for clients. Server: a copy of the replies, no memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedbasin.core.bounds import at_least
from fedbasin.core.catalogue import entry
from fedbasin.core.limits import limit_of, median
from fedbasin.core.method import Context, Method, Probe, Replies, Served, Wrapped, Wrapper
from fedbasin.core.protocols import MergesStatistics, merge_statistics
from fedbasin.core.space import Range
from fedbasin.core.tree import mapped
from fedbasin.methods.fedavg import FedAvg


class NormBoundNotes(NamedTuple):
    """What a round leaves in the record."""

    norm_bound: Tensor  # S
    too_long: Tensor  # share of the updates that were longer


@entry(
    "method",
    name="norm_bound",
    paper="Sun et al., 2019",
    url="https://arxiv.org/abs/1911.07963",
    is_fedavg_when={"times": float("inf"), "claims": float("inf")},
    tunable={"times": Range(1.0, 4.0, "log")},
)
@dataclass(frozen=True)
class NormBound(MergesStatistics, Wrapper):
    """Bound the length of all that clients send before any method merges it.

    Args:
        inner: the method that merges.
        times: how many times the median length something may be; infinity bounds nothing.
        bound: the largest length of an update; 0 takes `times` of the cohort's median.
        claims: how many times the median a sample count may be; infinity bounds none.
        action: ``"clip"`` a long update, or ``"drop"`` its client for the round.
    """

    inner: Method = field(default_factory=FedAvg)
    times: float = at_least(1, default=1.0)
    bound: float = at_least(0, default=0.0)
    claims: float = at_least(1, default=5.0)
    action: Literal["clip", "drop"] = "clip"

    def aggregate(
        self, state: Wrapped, server: Tensor, replies: Replies, context: Context
    ) -> tuple[Served, Wrapped]:
        """Bound the replies, then merge them with the inner method."""
        present = replies.weights > 0
        lengths = (replies.models - server).norm(dim=1)
        limit = lengths.new_tensor(self.bound) if self.bound else self._limit(lengths, present)
        near = replace(replies, models=_shortened(replies.models, lengths, limit, server))
        near = self._bounded(near, lengths, limit, present)
        if context.probe is not None:
            context = replace(context, probe=self._probe(context.probe))
        served, inner = self.inner.aggregate(state.inner, server, near, context)
        notes = NormBoundNotes(limit, (lengths > limit)[present].double().mean())
        return served.noted(notes), Wrapped((), inner)

    def merge_statistics(self, before: Tensor, replies: Replies, context: Context) -> Tensor:
        """Bound how far the clients' statistics moved, then merge as the inner method does."""
        present = replies.weights > 0
        lengths = (replies.buffers - before).norm(dim=1)
        limit = self._limit(lengths, present)
        near = replace(replies, buffers=_shortened(replies.buffers, lengths, limit, before))
        near = self._bounded(near, lengths, limit, present)
        return merge_statistics(self.inner, before, near, context)

    def streams(self) -> None:
        """Every reply counts."""
        return None

    def _limit(self, lengths: Tensor, present: Tensor) -> Tensor:
        return limit_of(lengths, self.times, present).most

    def _bounded(
        self, replies: Replies, lengths: Tensor, limit: Tensor, present: Tensor
    ) -> Replies:
        """Bound what comes beside the rows; in "drop", leave out clients that are too long."""

        def report(column: Tensor) -> Tensor:
            if not column.is_floating_point():
                return column
            reported = column.flatten(1).norm(dim=1) if column.dim() > 1 else column.abs()
            return _shortened(column, reported, self._limit(reported, present))

        rows = limit_of(replies.weights, self.claims).most
        bounded = replace(
            replies,
            weights=torch.where(replies.weights > rows, rows, replies.weights),
            steps=self._claimed(replies.steps, present),
            lr_sum=self._claimed(replies.lr_sum, present),
            effective_steps=self._claimed(replies.effective_steps, present),
            last_loss=self._claimed(replies.last_loss, present),
            train_loss=self._claimed(replies.train_loss, present),
            reports=mapped(report, replies.reports),
        )
        short = torch.nonzero(~(lengths > limit))[:, 0]
        if self.action == "drop" and len(short):
            return bounded.take(short)
        return bounded

    def _claimed(self, numbers: Tensor, present: Tensor) -> Tensor:
        """Return numbers no farther from their median than the claims that are believed."""
        if math.isinf(self.claims):
            return numbers
        usual = median(numbers[present])
        ends = torch.stack([usual / self.claims, usual * self.claims])
        return numbers.clamp(ends.min(), ends.max())

    def _probe(self, probe: Probe) -> Probe:
        """Return the clients' gradients and counts with the same bounds."""
        present = probe.weights > 0
        lengths = probe.gradients.norm(dim=1)
        rows = limit_of(probe.weights, self.claims).most
        return Probe(
            _shortened(probe.gradients, lengths, self._limit(lengths, present)),
            torch.where(probe.weights > rows, rows, probe.weights),
        )


def _shortened(
    rows: Tensor, lengths: Tensor, limit: Tensor, origin: Tensor | None = None
) -> Tensor:
    """Return rows [C, ...] no farther than the limit from the origin (zero by default)."""
    far = lengths > limit
    scale = torch.where(far, limit / lengths, torch.ones_like(lengths))
    scale = scale.reshape(-1, *[1] * (rows.dim() - 1))
    start = torch.zeros_like(rows[0]) if origin is None else origin
    return torch.where(far.reshape(scale.shape), start + (rows - start) * scale, rows)
