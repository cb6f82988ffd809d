r"""FedMA at fixed width: put every client's neurons in the server's order, then merge.

Two networks that differ only in the order of their hidden units are the same function, but their
mean is neither. For every client, group after group of units, with W the tensors that units own:

    pi_g = argmax_pi  sum_W <W_reference, pi(W_i)>        (Hungarian assignment; all other
                                                           groups as they now stand)

until nothing changes; then the inner method merges the re-ordered models. All slices of a unit
move together: incoming weights, bias, normalisation, outgoing weights (H x W inputs of a linear
layer to a channel, four gates to an LSTM cell). A residual stream is one group. Under GroupNorm
units change places within a norm group, and whole norm groups with each other.

Because |pi(W)| does not depend on pi, the largest inner product is the least squared distance.

This is not the full FedMA: no new neurons (width is fixed), one exchange a round instead of one a
layer, no Gaussian prior, no per-class mean of the last layer, and partial participation. The
paper's own needs plain networks without normalisation or shortcuts.
What to watch: clients that start from one model mostly keep its order, and then this is the inner
method. The share of units that moved is in the record.
Only models are re-ordered, not what rules keep on clients or report (SCAFFOLD's variates).
Cost: none for clients. Server, a sweep: C x P multiplications times the width of a group, and
C Hungarian assignments O(n^3) on the CPU for groups of n units; none where every unit is most like
the one in its own place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from fedbasin.core.bounds import at_least
from fedbasin.core.catalogue import entry
from fedbasin.core.method import Context, Method, Replies, Served, Wrapped, Wrapper
from fedbasin.core.permutations import (
    Group,
    MatchingNotes,
    Orders,
    best_orders,
    reorder,
    rows,
    stale_statistics,
    tensor_of,
)
from fedbasin.core.rule import Setting
from fedbasin.core.space import Options
from fedbasin.core.vectors import Layout
from fedbasin.methods.fedavg import FedAvg


@entry(
    "method",
    name="fedma",
    paper="Wang et al., ICLR 2020",
    url="https://arxiv.org/abs/2002.06440",
    needs=("permutations",),
    is_fedavg_when={"sweeps": 0},
    exempt={
        "law_differs_by_default": "clients that start from one model keep its order of neurons, "
        "on the toy federation all of them"
    },
    tunable={"reference": Options("server", "client")},
)
@dataclass(frozen=True)
class FedMA(Wrapper):
    """Put the clients' neurons in the reference's order before any method merges them.

    Args:
        inner: the method that merges.
        reference: whose order is taken, the ``"server"``'s or that of the cohort's first
            ``"client"`` (the one of lowest id).
        sweeps: how often all groups are gone through at most; 0 is the inner method.
    """

    inner: Method = field(default_factory=FedAvg)
    reference: Literal["server", "client"] = "server"
    sweeps: int = at_least(0, default=20)

    def aggregate(
        self, state: Wrapped, server: Tensor, replies: Replies, context: Context
    ) -> tuple[Served, Wrapped]:
        """Re-order the replies, then merge with the inner method."""
        groups = context.need("permutations", self)
        reference = server
        if self.reference == "client":
            present = torch.where(replies.weights > 0, replies.clients, replies.clients.max() + 1)
            reference = replies.models[present.argmin()]
        models, orders = matched(replies.models, reference, context.layout, groups, self.sweeps)
        served, inner = self.inner.aggregate(
            state.inner, server, replace(replies, models=models), context
        )
        notes = MatchingNotes(orders.moved(), sum(group.size for group in groups))
        return served.noted(notes), Wrapped((), inner)

    def streams(self) -> None:
        """Match single models, which an average no longer has."""
        return None

    def cautions(self, setting: Setting) -> Iterator[str]:
        """Name statistics that keep the old order."""
        yield from super().cautions(setting)
        yield from stale_statistics(setting)


def matched(
    models: Tensor, reference: Tensor, layout: Layout, groups: tuple[Group, ...], sweeps: int
) -> tuple[Tensor, Orders]:
    """Return models [C, P] in the order in which they are most like the reference [P]."""
    orders = Orders(len(models), groups)
    new = models.clone() if sweeps else models
    for _ in range(sweeps):
        changed = False
        for g, group in enumerate(groups):
            similarity = _similarity(new, reference, layout, group)
            for c, order in enumerate(best_orders(similarity, group.blocks)):
                if order is None:
                    continue
                index = torch.from_numpy(order).to(new.device)
                before = new[c].clone() if group.coupled else None
                reorder(new[c], layout, group, index)
                # With both axes of a tensor in the group, the assignment is a guess: look.
                if before is not None and not _closer(new[c], before, reference):
                    new[c] = before
                    continue
                orders.change(c, g, order)
                changed = True
        if not changed:
            break
    return new, orders


def _similarity(models: Tensor, reference: Tensor, layout: Layout, group: Group) -> Tensor:
    """Return the inner products of the reference's units with each model's, [C, n, n]."""
    total = torch.zeros((), dtype=torch.float64, device=models.device)
    for place in group.places:
        theirs = rows(tensor_of(models, layout, place.name), place).double()
        ours = rows(tensor_of(reference[None], layout, place.name), place).double()
        total = total + ours @ theirs.transpose(1, 2)
    return total


def _closer(candidate: Tensor, model: Tensor, reference: Tensor) -> bool:
    """Whether a re-ordered model is clearly more like the reference."""
    gain = (candidate - model).double() @ reference.double()
    return bool(gain > 1e-9 * reference.double().square().sum())
