r"""FedAdagrad: Adagrad on the server.

    d  = inner(w, replies) - w                     (the round's update)
    m+ = beta1 m + (1 - beta1) d,                  m_0 = 0
    v+ = v + d^2,                                  v_0 = tau^2 or 0
    w+ = w + lr m+ / (sqrt(v+) + tau)              (all elementwise)

v never forgets, so steps shrink with the rounds.

Departures from the paper: none known. The paper asks for v_0 >= tau^2 and so is the default;
Flower starts at v_0 = 0 (``first="zero"``) with tau = 1e-9.
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
class FedAdagrad(AdaptiveServer):
    """Adagrad on the server, over the updates of any method.

    Args:
        inner: the method that makes each round's update.
        lr: the server's learning rate, eta.
        beta1: memory of the mean update; 0 in the paper.
        tau: degree of adaptivity; with lr = tau -> infinity and beta1 = 0 it is the inner method.
        first: v_0, ``"tau"`` (tau^2, the paper) or ``"zero"``.
    """

    inner: Method = field(default_factory=FedAvg)
    lr: float = above(0, default=0.1)
    beta1: float = within("[0, 1)", default=0.0)
    tau: float = above(0, default=1e-3)
    first: First = "tau"

    def square(self, before: Tensor, update: Tensor) -> Tensor:
        """Add d^2."""
        return before + update.square()
