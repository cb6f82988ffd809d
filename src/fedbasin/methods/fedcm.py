r"""FedCM: clients mix the direction of earlier rounds into every local step.

    client:  v <- v - eta (alpha g(v) + (1 - alpha) M)
    server:  w+ = w + eta_g sum_i p_i d_i,           d_i = y_i - x
             M+ = - sum_i p_i d_i / (eta K_i),       M_0 = 0

so M is an exponential moving average of the cohorts' gradients, M+ = alpha gbar + (1 - alpha) M,
and round 0, where M = 0, is a FedAvg round with the learning rate alpha eta. Each d_i is divided by
the learning rate of the round that made it and by the client's own number of steps.

What to watch. A client with more steps adds M more often, so under unequal data the clients with
most rows move with the momentum and the others hardly do (`steps_ratio` in the record; FedWCM-X
evens it out). Weight decay is not mixed by alpha but enters M, so its pull settles at 1/alpha times
the configured one (docs/methods/fedwcm.md measures it). |M| is in the record. FL-Simulator
divides by E n_i / B (epochs, rows, batch) instead of K_i (`counted`): with a last batch that is not
full M+ = A (alpha gbar + (1 - alpha) M), A = K_i B / (E n_i) > 1.
Adaptive optimisers on clients are refused: d_i / (eta K_i) is no gradient then.

Departures from the paper: it writes w+ = w - eta_g' M+, ours with eta_g' = eta K; K_i counts as
FedNova's a_i under local SGD momentum, where d_i / (eta K_i) would grow without bound.
Cost: two models down (w, M), one up; one model of memory and C x P more work on the server.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbasin.core.bounds import above, within
from fedbasin.core.catalogue import entry
from fedbasin.core.method import Averaging, Context, Replies, Served
from fedbasin.core.rule import LocalRule, Rules, Setting
from fedbasin.core.space import Range
from fedbasin.core.vectors import Weighting, shares
from fedbasin.methods.parts.client_momentum import (
    ClientMomentum,
    Counted,
    SharedMomentum,
    counted_rows,
    mean_direction,
    steps_counted,
    unequal_steps,
)


@dataclass(frozen=True)
class FedCMState:
    """What the server remembers."""

    momentum: Tensor  # [P] M


class FedCMNotes(NamedTuple):
    """What a round leaves in the record."""

    momentum_norm: Tensor  # |M|, of the next broadcast
    steps_ratio: Tensor  # most steps over fewest in the cohort; 1 is what the method assumes


@entry(
    "method",
    paper="Xu et al., 2021",
    url="https://arxiv.org/abs/2106.10874",
    needs=("plain_sgd",),
    is_fedavg_when={"alpha": 1.0, "server_lr": 1.0},
    down=2.0,
    tunable={"alpha": Range(0.03, 1.0, "log"), "server_lr": Range(0.3, 3.0, "log")},
)
@dataclass(frozen=True)
class FedCM(Averaging):
    """FedAvg with the server's momentum inside every client step.

    Args:
        alpha: the gradient's share in a step; 1 is FedAvg, smaller remembers longer.
        server_lr: eta_g, the server's step along the mean update.
        weighting: p_i by ``"uniform"`` (the paper) or ``"samples"``.
        counted: K_i by the ``"steps"`` a client took, or by its ``"rows"`` as FL-Simulator has it,
            under which M may grow without bound where batches are not full.
        local: further rules for the clients; those that perturb (SAM) act inside the mixture.
    """

    alpha: float = within("(0, 1]", words="must be above 0 and at most 1", default=0.1)
    server_lr: float = above(0, default=1.0)
    weighting: Weighting = "uniform"
    counted: Counted = "steps"
    local: Rules = ()

    def init(self, server: Tensor, context: Context) -> FedCMState:
        """Start with M = 0."""
        return FedCMState(torch.zeros_like(server))

    def own_rules(self) -> tuple[LocalRule, ...]:
        """Return the mixture."""
        return (ClientMomentum(),)

    def own_broadcast(self, state: FedCMState, server: Tensor, context: Context) -> tuple[Any, ...]:
        """Send M beside the model."""
        return (SharedMomentum(state.momentum, server.new_tensor(self.alpha)),)

    def cautions(self, setting: Setting) -> Iterator[str]:
        """Name unequal steps, which the method does not foresee, and a count by rows."""
        yield from super().cautions(setting)
        yield from unequal_steps(setting)
        yield from counted_rows(self.counted)

    def aggregate(
        self, state: FedCMState, server: Tensor, replies: Replies, context: Context
    ) -> tuple[Served, FedCMState]:
        """Step along the mean update and turn it into the next momentum."""
        share = shares(replies.weights, self.weighting)
        model = self.stepped(server, self.mean(replies))
        steps = steps_counted(self.counted, replies, context)
        momentum = mean_direction(replies, share, server, steps)
        counted = replies.steps[replies.weights > 0]
        notes = FedCMNotes(momentum.norm(), counted.max() / counted.min().clamp(min=1))
        return Served(send=model, score=model, notes=notes), FedCMState(momentum)
