r"""FedYogi: Yogi on the server, Adam with a second moment that moves by a bounded step.

    d  = inner(w, replies) - w                             (the round's update)
    m+ = beta1 m + (1 - beta1) d,                          m_0 = 0
    v+ = v - (1 - beta2) d^2 sign(v - d^2),                v_0 = tau^2 or 0
    w+ = w + lr m+ / (sqrt(v+) + tau)                      (all elementwise)

From v = 0 the first step is Adam's. v never falls below 0, not by rounding either: where it falls,
by at most d^2, it was above d^2.

Departures from the paper: none known. The paper asks for v_0 >= tau^2 and so is the default;
FedIMA's code and Flower start at v_0 = 0 (``first="zero"``); see `fedadam` for the combination
with averaging.
Cost: none for clients. Server: O(P) a round, two models of memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from fedbasin.core.bounds import above, within
from fedbasin.core.catalogue import entry
from fedbasin.core.method import Method
from fedbasin.core.space import Range
from fedbasin.methods.fedavg import FedAvg
from fedbasin.methods.parts.moments import AdaptiveServer, First


@entry(
    "method",
    paper="Reddi et al., ICLR 2021",
    url="https://arxiv.org/abs/2003.00295",
    is_fedavg_when={"lr": 1e12, "beta1": 0.0, "tau": 1e12, "first": "zero"},
    tunable={"lr": Range(0.001, 1.0, "log"), "tau": Range(0.0001, 0.1, "log")},
)
@dataclass(frozen=True)
class FedYogi(AdaptiveServer):
    """Yogi on the server, over the updates of any method.

    Args:
        inner: the method that makes each round's update.
        lr: the server's learning rate, eta.
        beta1: memory of the mean update.
        beta2: 1 - beta2 is how fast v follows the square of the update.
        tau: degree of adaptivity; with lr = tau -> infinity and beta1 = 0 it is the inner method.
        first: v_0, ``"tau"`` (tau^2, the paper) or ``"zero"``.
        restart: share of the rounds after which m and v start anew; 1 never.
    """

    inner: Method = field(default_factory=FedAvg)
    lr: float = above(0, default=0.01)
    beta1: float = within("[0, 1)", default=0.9)
    beta2: float = within("[0, 1)", default=0.99)
    tau: float = above(0, default=1e-3)
    first: First = "tau"
    restart: float = within("[0, 1]", words="is a share of the rounds, in [0, 1]", default=1.0)

    def square(self, before: Tensor, update: Tensor) -> Tensor:
        """Move v towards d^2, by at most (1 - beta2) d^2."""
        seen = update.square()
        return before - (1 - self.beta2) * seen * (before - seen).sign()
