r"""FedASAM: FedSAM with a reach that grows with the size of each weight.

    client:  T = |v| + eta for tensors whose name holds "weight", 1 for the others
             e = rho T^2 g(v)/|T g(v)|,   v <- v - lr g(v + e)           (same batch)
    server:  w+ = sum_i p_i y_i

so that rescaling two layers against each other changes nothing (eta = 0, no biases).

Departures from the paper: none known; the name rule is that of the authors' code and catches the
weights of normalisation layers too. `fedavg(local=asam(rho=..., eta=...))` is the same.
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
from fedbasin.local.sharpness import ASAM


@entry(
    "method",
    paper="Caldarola et al., ECCV 2022",
    url="https://arxiv.org/abs/2203.11834",
    is_fedavg_when={"rho": 0.0},
    tunable={"rho": Range(0.01, 1.0, "log"), "eta": Range(0.01, 1.0, "log")},
)
@dataclass(frozen=True)
class FedASAM(Averaging):
    """FedAvg with sharpness-aware clients whose reach adapts to each weight.

    Args:
        rho: how far uphill, in units of T; 0 is FedAvg. 0.7 for CNNs, 0.2 for others in papers.
        eta: reach of a weight of size zero; 0.2 with rho 0.7, 0.05 with rho 0.2.
        weighting: p_i by ``"samples"`` or ``"uniform"``.
        local: further rules for the clients.
    """

    rho: float = at_least(0, default=0.7)
    eta: float = at_least(0, default=0.2)
    weighting: Weighting = "samples"
    local: Rules = ()

    def own_rules(self) -> tuple[LocalRule, ...]:
        """Return the perturbation."""
        return (ASAM(self.rho, self.eta),)
