r"""AdaBest: drift estimates that fade with age, and a server that looks ahead.

    client:  v <- v - eta (g(v) - h_i)
             h_i+ = h_i / (t - t_i) + mu (x - y_i),   t_i+ = t   (first time: h_i = 0)
    server:  a+ = sum_i p_i y_i,   w+ = a+ - beta (a - a+),   a_0 = w_0

t_i is the round in which client i last took part, so what a client remembers counts less the
longer it stayed away; a client of every round divides by 1. mu multiplies the displacement of a
whole round and so absorbs eta K. The server's term extrapolates: another momentum on top of it
(server optimisers, FedExP) extrapolates twice.

Departures from the paper: none known; `score` offers both models, as the author's simulator does.
Cost: one model down, one up; one model and one number on each client, one model on the server.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedbasin.core.bounds import at_least, within
from fedbasin.core.catalogue import entry
from fedbasin.core.method import Averaging, Context, Served
from fedbasin.core.net import Net
from fedbasin.core.rule import Finish, Gradient, LocalRule, Rules, Setting, Start, rescaled
from fedbasin.core.space import Range
from fedbasin.core.vectors import Weighting


class Estimate(NamedTuple):
    """What a client keeps."""

    bias: Tensor  # [P] h_i
    seen: Tensor  # 0-d, t_i + 1; 0 before the first time


class BiasCarry(NamedTuple):
    """What the rule carries through the steps."""

    bias: Tensor  # [P] h_i


@dataclass(frozen=True)
class FadingBias(LocalRule):
    """Subtract the client's estimate of its bias, then renew it."""

    mu: float

    def client_state(self, vector: Tensor) -> Estimate:
        """Start with h_i = 0."""
        return Estimate(torch.zeros_like(vector), vector.new_zeros(()))

    def begin(self, start: Start, net: Net) -> BiasCarry:
        """Take the estimate."""
        return BiasCarry(start.client_state.bias)

    def direction(
        self, carry: BiasCarry, vector: Tensor, gradient: Gradient
    ) -> tuple[Tensor, BiasCarry]:
        """Subtract it."""
        return gradient(vector) - carry.bias, carry

    def end(self, carry: BiasCarry, start: Start, finish: Finish) -> tuple[Estimate, tuple[()]]:
        """Let the estimate fade by its age and add this round's displacement."""
        now = start.round + 1
        faded = start.client_state.bias / (now - start.client_state.seen)
        return Estimate(faded + self.mu * (start.vector - finish.vector), now), ()

    def cautions(self, setting: Setting) -> Iterator[str]:
        """Name what local momentum and an adaptive optimiser do to the estimate."""
        if self.mu:
            yield from rescaled(setting, "the estimate h_i, made of displacements,")
        if self.mu and setting.momentum:
            yield (
                f"local.momentum = {setting.momentum} stretches the displacement that mu is "
                "multiplied with; the paper has no local momentum"
            )


@dataclass(frozen=True)
class AdaBestState:
    """What the server remembers."""

    mean: Tensor  # [P] a


@entry(
    "method",
    paper="Varno et al., ECCV 2022",
    url="https://arxiv.org/abs/2204.13170",
    is_fedavg_when={"mu": 0.0, "beta": 0.0},
    tunable={"mu": Range(0.001, 0.1, "log"), "beta": Range(0.0, 0.95)},
)
@dataclass(frozen=True)
class AdaBest(Averaging):
    """Fading drift estimates on the clients, extrapolation on the server.

    Args:
        mu: how much of a round's displacement enters h_i; 0.01 and 0.02 are used in papers.
        beta: extrapolation in [0, 1); 0.5 to 0.95 are used.
        score: the model that counts, the ``"mean"`` a or the extrapolated ``"server"`` w.
        weighting: p_i by ``"uniform"`` (the paper) or ``"samples"``.
        local: further rules for the clients.
    """

    mu: float = at_least(0, default=0.02)
    beta: float = within("[0, 1)", default=0.8)
    score: Literal["mean", "server"] = "mean"
    weighting: Weighting = "uniform"
    local: Rules = ()

    def init(self, server: Tensor, context: Context) -> AdaBestState:
        """Start with a = w."""
        return AdaBestState(server)

    def own_rules(self) -> tuple[LocalRule, ...]:
        """Return the fading estimate."""
        return (FadingBias(self.mu),)

    def serve(
        self, state: AdaBestState, server: Tensor, mean: Tensor, context: Context
    ) -> tuple[Served, AdaBestState]:
        """Extrapolate from the last mean through this one."""
        model = mean + self.beta * (mean - state.mean)
        return Served(model, mean if self.score == "mean" else model), AdaBestState(mean)
