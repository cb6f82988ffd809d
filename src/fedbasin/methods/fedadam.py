r"""FedAdam: Adam on the server.

    d  = inner(w, replies) - w                     (the round's update)
    m+ = beta1 m + (1 - beta1) d,                  m_0 = 0
    v+ = beta2 v + (1 - beta2) d^2,                v_0 = tau^2 or 0
    w+ = w + lr m+ / (sqrt(v+) + tau)              (all elementwise)

There is no bias correction, and tau stands outside the root. Because sqrt(v) is compared with
tau, tau is to be tuned together with the clients' learning rate and steps.

Departures from the paper: none known. The paper asks for v_0 >= tau^2 and so is the default;
FedIMA's code and Flower start at v_0 = 0 (``first="zero"``). FedIMA's combination with averaging
is ``fedadam(ima, first="zero", restart=0.75)``: the optimiser steps towards the mean, and
forgets its moments when averaging starts.
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
class FedAdam(AdaptiveServer):
    """Adam on the server, over the updates of any method.

    Args:
        inner: the method that makes each round's update.
        lr: the server's learning rate, eta.
        beta1: memory of the mean update.
        beta2: memory of its square.
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
        """Forget v slowly and add d^2."""
        return self.beta2 * before + (1 - self.beta2) * update.square()
