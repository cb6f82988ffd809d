r"""FedIMA: late in training, continue from the mean of the last P global models.

Global models of successive rounds scatter around the middle of one loss basin. From round
t_s on, clients start from the mean of the last P of them and take smaller steps.

    a^t     = inner(w^t, replies)                                  (raw, kept in the window)
    w^{t+1} = 1/P sum_{s=t-P+1}^{t} a^s   if t >= t_s, else a^t    (broadcast and scored)
    eta_t   = eta_{t_s} (1 - rate)^{t - t_s}   for t >= t_s        (mild exploration)

with t_s = floor(start R). The window holds raw aggregates from round 0 on, so it is full at
t_s, and the first averaged broadcast is in round t_s + 1 (the authors' code; Algorithm 1 of
the paper is off by one there). Where the inner method sends another model than it scores (FedDyn,
FedACG, CReFF), each of the two has a window and a mean of its own.

The other decays of the paper's Table 3 are `decay`: "constant" (eta = low), "cyclic" (a
triangle between eta_{t_s} and low, period 20), "epochs" (one local epoch fewer every 20
rounds), "none" (the configured schedule continues). "step" (halved every 20 rounds) is the
release's; the paper has no row for it.

With an adaptive server there are two readings, and both are expressions: `ima(inner)` averages
the models after the server's step, and a server optimiser around `ima` steps towards the mean of
the raw client averages, as the authors' code does with FedAdam and FedYogi.

Departures from the paper: its text lets "cyclic" fall from 1e-2, the rate of round 0; here, as in
the code, it falls from eta_{t_s}, which is what decay has left by then. Where fewer than P models
exist at t_s, their mean is taken. In the
authors' code "cyclic" overshoots to twice the maximum and "epochs" restarts the learning rate
at its first value, which by itself explains that row of Table 3; here neither happens.
Cost: none for clients. Server: O(D) a round, (4P + 12) D bytes for D parameters, twice that where
another model is sent than scored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from torch import Tensor

from fedbasin.core.bounds import at_least, within
from fedbasin.core.catalogue import entry
from fedbasin.core.method import Context, Method, Plan, Replies, Served, Wrapped, Wrapper
from fedbasin.core.protocols import StartsLate, shared_prefix, state_from_prefix
from fedbasin.core.space import Range
from fedbasin.core.vectors import Part
from fedbasin.methods.fedavg import FedAvg
from fedbasin.methods.parts.trajectory import Storage, Window, empty, mean, push

Decay = Literal["exponential", "constant", "cyclic", "epochs", "step", "none"]
_PERIOD = 20


@dataclass(frozen=True)
class Windows:
    """What the server remembers."""

    scored: Window
    sent: Window  # empty, and without memory, as long as what is sent is what is scored


@entry(
    "method",
    paper="Zhou et al., IEEE TMC 2024",
    url="https://arxiv.org/abs/2305.07845",
    is_fedavg_when={"window": 1, "decay": "none"},
    tunable={"window": Range(2, 20, "log", whole=True), "start": Range(0.25, 0.9)},
)
@dataclass(frozen=True)
class IMA(StartsLate, Wrapper):
    """Continue from the mean of the last P global models, with smaller steps.

    Args:
        inner: the method that makes each round's raw model.
        window: P, how many rounds are averaged.
        start: share of the rounds after which averaging begins, t_s / R.
        decay: how the learning rate falls from t_s on.
        rate: the loss per round of the ``"exponential"`` decay.
        low: the learning rate of ``"constant"``, and the lower end of ``"cyclic"``.
        feedback: whether clients start from the mean; if not, it is only scored.
        part: average ``"all"`` parameters, the ``"head"`` or the ``"backbone"`` alone; the rest is
            the newest model's.
        storage: ``"bfloat16"`` halves the window's memory.
        on_cpu: keep the window in main memory.
    """

    averages: ClassVar[bool] = True

    inner: Method = field(default_factory=FedAvg)
    window: int = at_least(1, default=5)
    start: float = within("[0, 1]", words="is a share of the rounds, in [0, 1]", default=0.75)
    decay: Decay = "exponential"
    rate: float = within("[0, 1)", default=0.03)
    low: float = at_least(0, default=5e-5)
    feedback: bool = True
    part: Part = "all"
    storage: Storage = "same"
    on_cpu: bool = False

    def begins(self, rounds: int) -> int:
        """Return t_s, the first round that ends in a mean."""
        return int(self.start * rounds + 1e-9)

    def begin(self, server: Tensor, context: Context) -> Windows:
        """Start with empty windows."""
        scored, sent = (
            empty(self.window, like, self.storage, on_cpu=self.on_cpu)
            for like in (server, server[:0])
        )
        return Windows(scored, sent)

    def plan(self, schedule: Callable[[int], Plan], context: Context) -> Plan:
        """Train as the inner method says until t_s, then with the decay."""
        begins = self.begins(context.rounds)
        after = context.round - begins
        base = self.inner.plan(schedule, context)
        if after < 0 or self.decay == "none":
            return base
        at_start = self.inner.plan(schedule, replace(context, round=begins))
        return _decayed(self, base, at_start, after)

    def shared_prefix(self, rounds: int) -> tuple[Method, int]:
        """Equal the inner method until the first model that a mean is made of."""
        inner, common = shared_prefix(self.inner, rounds)
        return inner, min(common, max(0, self.begins(rounds) - self.window + 1))

    def state_from_prefix(self, state: Any, server: Tensor, context: Context) -> Wrapped:
        """Start with an empty window, which is full by the time it is used."""
        inner = state_from_prefix(self.inner, state, server, context)
        return Wrapped(self.begin(server, context), inner)

    def step(
        self, own: Windows, server: Tensor, fresh: Served, replies: Replies, context: Context
    ) -> tuple[Served, Windows]:
        """Remember the raw model; from t_s on hand out the window's mean instead."""
        windows = self._remembered(own, fresh)
        if self.window == 1 or context.round < self.begins(context.rounds):
            return fresh, windows
        score = context.layout.mix(self.part, mean(windows.scored), fresh.score)
        send = score if self.feedback else fresh.send
        if windows.sent.pushed:
            send = context.layout.mix(self.part, mean(windows.sent), fresh.send)
        return Served(send, score, fresh.notes), windows

    def _remembered(self, own: Windows, fresh: Served) -> Windows:
        """Push a round's models; the first that is sent and not scored parts the windows."""
        sent = own.sent
        if self.feedback and (sent.pushed or fresh.send is not fresh.score):
            sent = push(sent if sent.pushed else own.scored, fresh.send)
        return Windows(push(own.scored, fresh.score), sent)


def _decayed(ima: IMA, base: Plan, at_start: Plan, after: int) -> Plan:
    """Return the plan `after` rounds beyond t_s."""
    high = at_start.lr
    if ima.decay == "exponential":
        return replace(base, lr=high * (1 - ima.rate) ** after)
    if ima.decay == "constant":
        return replace(base, lr=ima.low)
    if ima.decay == "step":
        return replace(base, lr=high * 0.5 ** (after // _PERIOD))
    if ima.decay == "cyclic":
        place = after % _PERIOD / (_PERIOD / 2)  # 0 at the top, 1 at the bottom, then up again
        return replace(base, lr=high - (high - ima.low) * min(place, 2 - place))
    if base.epochs is None:
        raise ValueError("ima(decay='epochs') needs local.epochs; the plan is given in steps")
    return replace(base, epochs=max(1, base.epochs - after // _PERIOD))
