r"""Server SWA: the mean of models taken at the ends of learning-rate cycles, scored only.

From round t_s = floor(start R) on, client learning rates run through cycles of c rounds,

    s = ((t - t_s) mod c + 1) / c,   eta_t = (1 - s) eta + s ratio eta,

and after each cycle the global model joins the mean

    u <- (q u + w) / (q + 1),  q <- q + 1,   when (t - t_s + 1) mod c = 0.

Training continues from w. Once u exists, it is scored. With `feedback` clients continue from the
mean after each cycle (server averaging). If the inner method sends another model than it scores,
that is the mean of the models it sends. A cycle whose last round brings no reply adds nothing.

Departures from the paper: the authors' release takes its snapshot after the first, largest-lr
round of a cycle; here it is taken at the end, as the paper says. Cycles start at t_s.
Cost: none for clients. Server: O(P) at the end of a cycle, 8P bytes, 16P with `feedback`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedbasin.core.bounds import at_least, within
from fedbasin.core.catalogue import entry
from fedbasin.core.method import Context, Method, Plan, Replies, Served, Wrapper
from fedbasin.core.space import Range
from fedbasin.core.vectors import Part
from fedbasin.methods.fedavg import FedAvg
from fedbasin.methods.parts.trajectory import RunningMean


@dataclass(frozen=True)
class Means:
    """What the server remembers."""

    scored: RunningMean
    sent: RunningMean  # of nothing without feedback


@entry(
    "method",
    paper="Caldarola et al., ECCV 2022",
    url="https://arxiv.org/abs/2203.11834",
    is_fedavg_when={"start": 1.0},
    tunable={"start": Range(0.25, 0.9), "cycle": Range(1, 20, "log", whole=True)},
)
@dataclass(frozen=True)
class SWA(Wrapper):
    """Score the mean of models taken at the ends of learning-rate cycles.

    Args:
        inner: the method that makes each round's model.
        start: share of the rounds after which cycles begin, t_s / R; 1 is the inner method.
        cycle: c, rounds in a cycle; 1 leaves the learning rate alone.
        ratio: the learning rate at the end of a cycle, as a share of that at its start.
        feedback: whether clients start from the mean after a cycle; if not, it is only scored.
        part: average ``"all"`` parameters, the ``"head"`` or the ``"backbone"`` alone; the rest is
            the newest model's.
    """

    averages: ClassVar[bool] = True

    inner: Method = field(default_factory=FedAvg)
    start: float = within("[0, 1]", words="is a share of the rounds, in [0, 1]", default=0.75)
    cycle: int = at_least(1, default=10)
    ratio: float = at_least(0, default=0.01)
    feedback: bool = False
    part: Part = "all"

    def begins(self, context: Context) -> int:
        """Return t_s, the first round of the first cycle."""
        return int(self.start * context.rounds + 1e-9)

    def begin(self, server: Tensor, context: Context) -> Means:
        """Start with no snapshot."""
        remembered = (server, server if self.feedback else server[:0])
        return Means(
            *(RunningMean(like.new_zeros(len(like), dtype=torch.float64), 0) for like in remembered)
        )

    def plan(self, schedule: Callable[[int], Plan], context: Context) -> Plan:
        """Run the learning rate through cycles from t_s on."""
        base = self.inner.plan(schedule, context)
        after = context.round - self.begins(context)
        if after < 0 or self.cycle == 1:
            return base
        share = (after % self.cycle + 1) / self.cycle
        return replace(base, lr=base.lr * (1 - share + share * self.ratio))

    def step(
        self, own: Means, server: Tensor, fresh: Served, replies: Replies, context: Context
    ) -> tuple[Served, Means]:
        """Take a snapshot at the end of a cycle."""
        after = context.round - self.begins(context)
        ends = after >= 0 and (after + 1) % self.cycle == 0
        if ends:
            sent = own.sent.push(fresh.send) if self.feedback else own.sent
            own = Means(own.scored.push(fresh.score), sent)
        mix = context.layout.mix
        score, send = fresh.score, fresh.send
        if own.scored.count:
            score = mix(self.part, own.scored.mean(score), score)
        if ends and self.feedback:
            send = mix(self.part, own.sent.mean(send), send)
        return Served(send, score, fresh.notes), own
