r"""FedNova: normalise every client's update by how much it worked.

    a_i = how many gradients the update adds up to:
          K_i                                                  plain SGD
          [K_i - rho (1 - rho^K_i) / (1 - rho)] / (1 - rho)    momentum rho
          a <- (1 - eta mu) a + 1, K_i times                   proximal term mu
    w+  = w + tau sum_i p_i d_i / a_i,   d_i = y_i - w,   tau = sum_i p_i a_i

Under FedAvg a client with ten times the steps pulls ten times as hard, so the fixed point is that
of another objective; here it is not, up to O(eta). With equal a_i it is FedAvg.

a_i follows from K_i, the local momentum and the proximal rules, so `fednova(local=prox(mu=0.1))`
is normalised as the paper says. With momentum and a proximal term at once it is
l <- rho l + 1 - eta mu a, a <- a + l, exact for our local step; the authors' code adds two counters
there. Server momentum is `fedavgm(fednova)`. Adaptive optimisers on clients are refused: their
steps have no a_i.

Departures from the paper: the one above. The authors' code takes tau = sum_i p_i K_i where there is
a proximal term (``effective="steps"``). Weight decay is left out of a_i, as in the paper.
Cost: one model down, one up; O(C P) on the server, no memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedbasin.core.catalogue import entry
from fedbasin.core.method import Context, Method, Replies, Served
from fedbasin.core.rule import Proximal, Rules
from fedbasin.core.vectors import Weighting, shares, weighted_mean
from fedbasin.local.optimisers import SGD


class FedNovaNotes(NamedTuple):
    """What a round leaves in the record."""

    effective: Tensor  # tau
    length_ratio: Tensor  # most work over least in the cohort; 1 is FedAvg


@entry(
    "method",
    paper="Wang et al., NeurIPS 2020",
    url="https://arxiv.org/abs/2007.07481",
    needs=("plain_sgd",),
    is_fedavg_when="never: only while all clients of a cohort do the same amount of work",
    tunable="nothing: steps are counted, and only the clients' settings matter",
)
@dataclass(frozen=True)
class FedNova(Method):
    """Weighted mean of the clients' updates, each divided by the work behind it.

    Args:
        effective: tau, from the ``"lengths"`` a_i (the paper) or the ``"steps"`` K_i.
        weighting: p_i by ``"samples"`` or ``"uniform"``.
        local: rules for the clients; proximal ones count in a_i.
    """

    effective: Literal["lengths", "steps"] = "lengths"
    weighting: Weighting = "samples"
    local: Rules = ()

    def aggregate(
        self, state: tuple[()], server: Tensor, replies: Replies, context: Context
    ) -> tuple[Served, tuple[()]]:
        """Step along the normalised mean update."""
        share = shares(replies.weights, self.weighting)
        lengths = self._lengths(replies, context).to(share.dtype)
        tau = share @ (lengths if self.effective == "lengths" else replies.steps.to(share.dtype))
        pace = torch.where(
            lengths > 0, tau * share / lengths, 0.0
        )  # a client without a step: d = 0
        model = weighted_mean(replies.models, pace) + (1 - pace.sum()).to(server.dtype) * server
        counted = lengths[replies.weights > 0]
        notes = FedNovaNotes(tau, counted.max() / counted.min().clamp(min=1))
        return Served(send=model, score=model, notes=notes), state

    def _lengths(self, replies: Replies, context: Context) -> Tensor:
        """Return a_i [C]; the replies' own know the momentum but no proximal term."""
        proximal = [rule for rule in self.rules() if isinstance(rule, Proximal)]
        pull = sum(rule.proximal_mu for rule in proximal) * context.lr
        if not pull:
            return replies.effective_steps
        count = context.effective_steps or SGD().effective_steps
        lengths = [count(int(steps), pull) for steps in replies.steps.tolist()]
        return torch.tensor(lengths, dtype=torch.float64, device=replies.models.device)
