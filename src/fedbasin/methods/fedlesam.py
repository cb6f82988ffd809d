r"""FedLESAM: sharpness-aware clients that read the way uphill off the global models they saw.

    client:  e = rho (o_i - x)/|o_i - x|  all round long (0 the first time),   o_i+ = x
             v <- v - eta g(v + e)
    server:  w+ = sum_i p_i y_i

with o_i the model that client i received when it last took part. FedLESAM-S and -D add the terms
of SCAFFOLD and FedDyn, and the rule composes: `scaffold(local=lesam(rho=0.1))` and
`feddyn(local=lesam(rho=0.1))`.

Departures from the paper: none known. The authors' code differs from the paper: it takes one number
of a flat vector for each whole tensor, divides by a sum of absolute values, and uses the last
step of the server for every client; here the paper is followed.
Cost: one model down, one up; one backward pass a step; one model on each client.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedbasin.core.bounds import at_least
from fedbasin.core.catalogue import entry
from fedbasin.core.method import Averaging
from fedbasin.core.rule import LocalRule, Rules
from fedbasin.core.space import Range
from fedbasin.core.vectors import Weighting
from fedbasin.local.sharpness import LESAM


@entry(
    "method",
    paper="Fan et al., ICML 2024",
    url="https://arxiv.org/abs/2405.18890",
    is_fedavg_when={"rho": 0.0},
    tunable={"rho": Range(0.01, 1.0, "log")},
)
@dataclass(frozen=True)
class FedLESAM(Averaging):
    """Sharpness-aware clients whose perturbation is the way back along the global models.

    Args:
        rho: how far uphill; 0 is FedAvg.
        weighting: p_i by ``"uniform"`` (the paper) or ``"samples"``.
        local: further rules for the clients.
    """

    rho: float = at_least(0, default=0.1)
    weighting: Weighting = "uniform"
    local: Rules = ()

    def own_rules(self) -> tuple[LocalRule, ...]:
        """Return the perturbation."""
        return (LESAM(self.rho),)
