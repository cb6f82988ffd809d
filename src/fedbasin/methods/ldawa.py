r"""L-DAWA: weight every layer of a client by how much it still points where the server's did.

    cos_{i,l} = <y_{i,l}, w_l> / (|y_{i,l}| |w_l|)       (l: a tensor, w: the model that was sent)
    w+_l      = sum_i p_i cos_{i,l} y_{i,l},             p_i = 1/m

The weights are not renormalised, so a layer shrinks by its mean cosine (its smallest is in the
record), and a layer that turned by more than 90 degrees is flipped, unless `clamp` stops it at 0.

Departures from the paper: a tensor that is zero on either side, or has one element, has no angle
and counts with cosine 1. Biases that start at 0 and are small for long make the cosine noisy.
Cost: one model down, one up; O(C P) on the server, no memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedbasin.core.catalogue import entry
from fedbasin.core.method import Context, Method, Replies, Served
from fedbasin.core.rule import Rules
from fedbasin.core.space import Options
from fedbasin.core.vectors import Layout, Weighting, shares


class LDAWANotes(NamedTuple):
    """What a round leaves in the record."""

    cosine_mean: Tensor  # over clients and tensors
    cosine_least: Tensor


@entry(
    "method",
    name="ldawa",
    paper="Rehman et al., ICCV 2023",
    url="https://arxiv.org/abs/2307.07393",
    is_fedavg_when="never: only if no client turns any layer",
    tunable={"clamp": Options(False, True)},
)
@dataclass(frozen=True)
class LDAWA(Method):
    """Mean of the clients' layers, each weighted by its cosine to the model that was sent.

    Args:
        clamp: whether negative cosines count as 0.
        weighting: p_i by ``"uniform"`` (the paper) or ``"samples"``.
        local: rules for the clients.
    """

    clamp: bool = False
    weighting: Weighting = "uniform"
    local: Rules = ()

    def aggregate(
        self, state: tuple[()], server: Tensor, replies: Replies, context: Context
    ) -> tuple[Served, tuple[()]]:
        """Average the layers, turned ones less."""
        cosine = cosines(replies.models, server, context.layout)
        if self.clamp:
            cosine = cosine.clamp(min=0)
        share = shares(replies.weights, self.weighting).to(server.dtype)
        model = (context.layout.spread(share[:, None] * cosine) * replies.models).sum(0)
        counted = cosine[replies.weights > 0]
        notes = LDAWANotes(counted.mean(), counted.min())
        return Served(send=model, score=model, notes=notes), state


def cosines(models: Tensor, server: Tensor, layout: Layout) -> Tensor:
    """Return the cosine of every tensor of models [C, P] to the server's, [C, T]; 1 without one."""
    lengths = layout.sums(models.square()).sqrt() * layout.sums(server.square()).sqrt()
    angled = (lengths > 0) & (torch.tensor(layout.sizes, device=server.device) > 1)
    inner = layout.sums(models * server)
    return torch.where(angled, inner / lengths.where(angled, 1.0), 1.0)
