r"""WIMA: score the mean of the last W global models; clients never see it.

Under heterogeneous data the global model leans towards the clients seen last. Averaging it
over a window of rounds removes that lean at no cost to clients or communication.

    w^{t+1}    = inner(w^t, replies)                              (broadcast)
    wbar^{t+1} = 1/m sum_{s=t+2-m}^{t+1} w^s,  m = min(W, t+1)    (scored; eq. 4)

For a server that steps w^{t+1} = w^t - d^t this is eq. 6/7 of the paper,
wbar = w^{t'} - sum_tau ((t' + W - tau) / W) d^tau: the oldest step counts 1, the newest 1/W.

Departures from the paper: before W rounds the mean of what there is; the paper defines eq. 4
only for a full window. `part` is its Table 5 (head or feature extractor alone). `stride` is ours:
only every s-th model joins the window, which then spans W s rounds in the memory of W (LAWA).
Cost: none for clients. Server: O(P) a round; W x 4P bytes (2P with bfloat16) + 12P, on the
device or in main memory: W = 370 of 5 M parameters is 7.5 GB, 3.8 GB in bfloat16 (measured with
what a round makes: 7.9 and 4.0 GB, benchmarks/methods/window_memory.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from fedbasin.core.bounds import at_least
from fedbasin.core.catalogue import entry
from fedbasin.core.method import Context, Method, Replies, Served, Wrapper
from fedbasin.core.space import Range
from fedbasin.core.vectors import Part
from fedbasin.methods.fedavg import FedAvg
from fedbasin.methods.parts.trajectory import Storage, Window, empty, mean, push


@entry(
    "method",
    paper="Caldarola et al., ICCV Workshops 2023",
    url="https://arxiv.org/abs/2310.01366",
    is_fedavg_when={"window": 1, "stride": 1},
    tunable={"window": Range(2, 100, "log", whole=True)},
)
@dataclass(frozen=True)
class WIMA(Wrapper):
    """Score the mean of the last W global models of any method.

    Args:
        inner: the method that makes each round's model.
        window: W, how many rounds are averaged; 1 is the inner method itself.
        part: average ``"all"`` parameters, the ``"head"`` or the ``"backbone"`` alone; the rest is
            the newest model's.
        stride: s, the mean is of every s-th round's model; the newest is scored before the first.
        storage: ``"bfloat16"`` halves the window's memory.
        on_cpu: keep the window in main memory.
    """

    averages: ClassVar[bool] = True

    inner: Method = field(default_factory=FedAvg)
    window: int = at_least(1, default=100)
    part: Part = "all"
    stride: int = at_least(1, default=1)
    storage: Storage = "same"
    on_cpu: bool = False

    def begin(self, server: Tensor, context: Context) -> Window:
        """Start with an empty window; the initial model is never in it."""
        return empty(self.window, server, self.storage, on_cpu=self.on_cpu)

    def step(
        self, own: Window, server: Tensor, fresh: Served, replies: Replies, context: Context
    ) -> tuple[Served, Window]:
        """Score the window's mean."""
        joins = (context.round + 1) % self.stride == 0
        window = push(own, fresh.score) if joins else own
        score = fresh.score
        if window.filled and (self.window > 1 or self.stride > 1):
            score = context.layout.mix(self.part, mean(window), fresh.score)
        return Served(fresh.send, score, fresh.notes), window
