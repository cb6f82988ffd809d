r"""FedSAM: FedAvg whose clients take their gradients a little way uphill.

    client:  e = rho g(v)/|g(v)|,   v <- v - eta g(v + e)     (same batch, norm over all parameters)
    server:  w+ = sum_i p_i y_i

Departures from the paper: none known. `fedavg(local=sam(rho=...))` is the same.
Cost: one model down, one up; two backward passes a step.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedbasin.core.bounds import at_least
from fedbasin.core.catalogue import entry
from fedbasin.core.method import Averaging
from fedbasin.core.rule import LocalRule, Rules
from fedbasin.core.space import Range
from fedbasin.core.vectors import Weighting
from fedbasin.local.sharpness import SAM


@entry(
    "method",
    paper="Qu et al., ICML 2022; Caldarola et al., ECCV 2022",
    url="https://arxiv.org/abs/2206.02618",
    is_fedavg_when={"rho": 0.0},
    tunable={"rho": Range(0.01, 1.0, "log")},
)
@dataclass(frozen=True)
class FedSAM(Averaging):
    """FedAvg with sharpness-aware clients.

    Args:
        rho: how far uphill; 0 is FedAvg, 0.1 is usual.
        weighting: p_i by ``"samples"`` or ``"uniform"``.
        local: further rules for the clients.
    """

    rho: float = at_least(0, default=0.1)
    weighting: Weighting = "samples"
    local: Rules = ()

    def own_rules(self) -> tuple[LocalRule, ...]:
        """Return the perturbation."""
        return (SAM(self.rho),)
