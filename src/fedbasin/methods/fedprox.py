r"""FedProx: FedAvg whose clients are pulled towards the model they received.

    client:  v <- v - eta (g(v) + mu (v - x))     minimises  f_i(v) + mu/2 |v - x|^2
    server:  w^{t+1} = sum_i p_i y_i

Departures from the paper: every client does the whole local work; the paper also lets
stragglers stop early, which the simulator's dropouts and `local.steps` cover.
Cost: one model down, one up; the client keeps x during its round.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedbasin.core.bounds import at_least
from fedbasin.core.catalogue import entry
from fedbasin.core.method import Averaging
from fedbasin.core.rule import LocalRule, Rules
from fedbasin.core.space import Range
from fedbasin.core.vectors import Weighting
from fedbasin.local.prox import Prox


@entry(
    "method",
    paper="Li et al., MLSys 2020",
    url="https://arxiv.org/abs/1812.06127",
    is_fedavg_when={"mu": 0.0},
    tunable={"mu": Range(0.0001, 1.0, "log")},
)
@dataclass(frozen=True)
class FedProx(Averaging):
    """FedAvg with a proximal term on the clients.

    Args:
        mu: strength of the pull towards x; 0 is FedAvg.
        weighting: p_i by ``"samples"`` or ``"uniform"``.
        local: further rules for the clients.
    """

    mu: float = at_least(0, default=0.01)
    weighting: Weighting = "samples"
    local: Rules = ()

    def own_rules(self) -> tuple[LocalRule, ...]:
        """Return the proximal rule."""
        return (Prox(self.mu),)
