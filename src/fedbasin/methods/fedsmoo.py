r"""FedSMOO: FedDyn on a perturbed gradient, where the perturbations of all clients agree too.

    client, each step:
             u = g(v) - mu_i - s,   e = rho u/|u|,   mu_i <- mu_i + e - s
             v <- v - eta (g(v + e) - q_i + (v - x)/beta)          (same batch)
    client, at the end:
             q_i+ = q_i - (y_i - x)/beta;   sends m_i = mu_i - e   ("paper", e of the last step)
                                                  m_i = mu_i       ("release")
    server:  s+ = rho mbar/|mbar|,  mbar = sum_i p_i m_i,          s_0 = 0
             w+ = sum_i p_i y_i - beta 1/N sum over ALL clients of q_i+

mu_i is kept from round to round and grows with the steps a client takes. q_i is kept as
r_i = -beta q_i, see `parts/duals.py`. With one local step of new clients m_i of the "paper" is 0,
and so is s.

Departures from the paper: none known. The paper's full text was not at hand: the client's rule
follows the authors' code, m_i of the "paper" a re-implementation and that code's own comment,
which says that it drops the last perturbation.
Cost: two models down (w, s), two up (y_i, m_i); two backward passes a step; two models on each
client and two on the server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fedbasin.core.bounds import at_least, within
from fedbasin.core.catalogue import entry
from fedbasin.core.method import Averaging, Context, Replies, Served
from fedbasin.core.net import Net
from fedbasin.core.rule import Finish, Gradient, Layer, LocalRule, Rules, Start
from fedbasin.core.space import Range
from fedbasin.core.vectors import Weighting, shares, weighted_mean
from fedbasin.local.sharpness import of_length
from fedbasin.methods.parts.duals import Duals, mean_drift

Sends = Literal["paper", "release"]


class Shift(NamedTuple):
    """A vector beside a model: the server's s (shared), a client's m_i (reported)."""

    vector: Tensor  # [P]


class ShiftDual(NamedTuple):
    """What a client keeps."""

    dual: Tensor  # [P] mu_i


class ShiftCarry(NamedTuple):
    """What the rule carries through the steps."""

    shared: Tensor  # [P] s
    dual: Tensor  # [P] mu_i
    last: Tensor  # [P] e of the last step


@dataclass(frozen=True)
class AgreedShift(LocalRule):
    """Climb along the gradient less the dual of the perturbation and the server's one."""

    layer: ClassVar[Layer] = "perturb"
    rho: float
    sends: Sends

    def client_state(self, vector: Tensor) -> ShiftDual:
        """Start with mu_i = 0."""
        return ShiftDual(torch.zeros_like(vector))

    def begin(self, start: Start, net: Net) -> ShiftCarry:
        """Take s and mu_i."""
        zero = torch.zeros_like(start.vector)
        return ShiftCarry(start.shared.vector, start.client_state.dual, zero)

    def direction(
        self, carry: ShiftCarry, vector: Tensor, gradient: Gradient
    ) -> tuple[Tensor, ShiftCarry]:
        """Climb, renew mu_i, and return the gradient from there."""
        shift = of_length(self.rho, gradient(vector) - carry.dual - carry.shared)
        renewed = ShiftCarry(carry.shared, carry.dual + shift - carry.shared, shift)
        return gradient(vector + shift), renewed

    def end(self, carry: ShiftCarry, start: Start, finish: Finish) -> tuple[ShiftDual, Shift]:
        """Keep mu_i, and report m_i."""
        told = carry.dual - carry.last if self.sends == "paper" else carry.dual
        return ShiftDual(carry.dual), Shift(told)


@dataclass(frozen=True)
class FedSMOOState:
    """What the server remembers."""

    drift: Tensor  # [P] mean of all r_i
    shift: Tensor  # [P] s


@entry(
    "method",
    paper="Sun et al., ICML 2023",
    url="https://arxiv.org/abs/2305.11584",
    is_fedavg_when="never: its first round has the proximal pull",
    down=2.0,
    up=2.0,
    tunable={"rho": Range(0.01, 1.0, "log"), "beta": Range(1.0, 100.0, "log")},
)
@dataclass(frozen=True)
class FedSMOO(Averaging):
    """Duals for models and for perturbations, so that both agree across clients.

    Args:
        rho: how far uphill; 0 is FedDyn with alpha = 1/beta.
        beta: the pull towards x is 1/beta.
        sends: m_i, what a client tells of its perturbation, by ``"paper"`` or ``"release"``.
        weighting: p_i by ``"uniform"`` (the paper) or ``"samples"``.
        local: further rules for the clients.
    """

    rho: float = at_least(0, default=0.1)
    beta: float = within("(0, inf)", words="must be above 0", default=10.0)
    sends: Sends = "paper"
    weighting: Weighting = "uniform"
    local: Rules = ()

    def init(self, server: Tensor, context: Context) -> FedSMOOState:
        """Start with no drift and no shift."""
        return FedSMOOState(torch.zeros_like(server), torch.zeros_like(server))

    def own_rules(self) -> tuple[LocalRule, ...]:
        """Return the duals and, inside them, the perturbation."""
        return (Duals(1 / self.beta), AgreedShift(self.rho, self.sends))

    def own_broadcast(
        self, state: FedSMOOState, server: Tensor, context: Context
    ) -> tuple[Any, ...]:
        """Send s beside the model."""
        return (), Shift(state.shift)

    def aggregate(
        self, state: FedSMOOState, server: Tensor, replies: Replies, context: Context
    ) -> tuple[Served, FedSMOOState]:
        """Average, shift by the mean drift of all clients, and renew s."""
        share = shares(replies.weights, self.weighting)
        drift = mean_drift(state.drift, server, replies, context.able)
        model = self.mean(replies) + drift
        shift = of_length(self.rho, weighted_mean(replies.report(Shift).vector, share))
        return Served(model, model), FedSMOOState(drift, shift)
