r"""GAMF: match the neurons of all clients with each other at once, by annealed soft assignments.

P_i is a soft permutation of client i's units of one group into common places, identity at first and
always for the client of lowest id. Inputs and outputs never move. Group after group, client after
client, with R the rows that units own, the other groups in their common places,

    K_ij = exp(-D(R_i, R_j) below) + exp(-D(R_i, R_j) above)      (n x n, affinity of units)
    A_i  = sum_{j != i} K_ij P_j,      P_i = Sinkhorn(A_i / tau)

for tau falling from `tau` to `tau_end` by `decay` with ever more Sinkhorn iterations; then P_i by
Hungarian assignment of A_i until nothing changes. "Below" is what a unit owns along the first axis
of tensors (incoming weights, bias, normalisation), "above" along others (outgoing weights); D is
the squared distance of two rows over its mean. The inner method merges, in the paper by the plain
mean.

Departures from the paper: rows instead of single edges (the exact form needs memory of the
fourth power of the width), and D in units of its mean; biases, normalisation and residual streams
move along, as the authors' code has none. If the last stage would leave the models as they came the
annealing is left out (on the digits images it then found the same), and a result that makes the
clients' models less like each other than they came is not taken. `joint=False` matches all to the
first client alone.
Not to be confused with the release's `fusion`, which returns the identity.
What to watch, and what is not re-ordered: as in `fedma`.
Cost: none for clients. Server: for each group and level of tau, C^2 distance matrices of n x n over
the rows and C Sinkhorn scalings; seconds to minutes a round for ResNets on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from fedbasin.core.bounds import at_least, within
from fedbasin.core.catalogue import entry
from fedbasin.core.method import Context, Method, Replies, Served, Wrapped, Wrapper
from fedbasin.core.permutations import (
    Group,
    MatchingNotes,
    Orders,
    Place,
    best_orders,
    reorder,
    rows,
    stale_statistics,
    tensor_of,
)
from fedbasin.core.rule import Setting
from fedbasin.core.space import Range
from fedbasin.core.vectors import Layout
from fedbasin.methods.fedavg import FedAvg


@entry(
    "method",
    name="gamf",
    paper="Liu et al., ICML 2022",
    url="https://proceedings.mlr.press/v162/liu22k.html",
    needs=("permutations",),
    is_fedavg_when={"sweeps": 0},
    tunable={"tau": Range(0.01, 0.5, "log")},
)
@dataclass(frozen=True)
class GAMF(Wrapper):
    """Match the neurons of all clients with each other before any method merges them.

    Args:
        inner: the method that merges; the paper's is the uniform mean.
        tau: temperature of the first level.
        decay: its factor from level to level.
        tau_end: temperature at which annealing ends.
        sweeps: Hungarian sweeps at most; 0 is the inner method.
        joint: whether all clients are matched with each other, or each with the first alone.
    """

    inner: Method = field(default_factory=lambda: FedAvg("uniform"))
    tau: float = 0.05
    decay: float = within("(0, 1)", words="must be above 0 and below 1", default=0.9)
    tau_end: float = 0.005
    sweeps: int = at_least(0, default=20)
    joint: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.tau_end <= self.tau:
            raise ValueError(f"tau_end must be above 0 and at most tau, got {self.tau_end}")

    def aggregate(
        self, state: Wrapped, server: Tensor, replies: Replies, context: Context
    ) -> tuple[Served, Wrapped]:
        """Match the replies, then merge with the inner method."""
        groups = context.need("permutations", self)
        # In the order of ids, so that the replies' order decides nothing.
        counted = torch.nonzero(replies.weights > 0)[:, 0]
        counted = counted[replies.clients[counted].argsort()]
        models = replies.models
        moved = 0.0
        if self.sweeps and groups and len(counted) > 1:
            matched, orders = Matching(self, models[counted], context.layout, groups).run()
            models = models.index_copy(0, counted, matched)
            moved = orders.moved()
        served, inner = self.inner.aggregate(
            state.inner, server, replace(replies, models=models), context
        )
        notes = MatchingNotes(moved, sum(group.size for group in groups))
        return served.noted(notes), Wrapped((), inner)

    def streams(self) -> None:
        """Match single models, which an average no longer has."""
        return None

    def cautions(self, setting: Setting) -> Iterator[str]:
        """Name statistics that keep the old order."""
        yield from super().cautions(setting)
        yield from stale_statistics(setting)

    def levels(self) -> list[float]:
        """Return the temperatures of the annealing."""
        temperatures = [self.tau]
        while temperatures[-1] * self.decay >= self.tau_end:
            temperatures.append(temperatures[-1] * self.decay)
        return temperatures


class Matching:
    """One cohort's soft permutations, [C, n, n] for each group: client's unit to common place."""

    def __init__(
        self, method: GAMF, models: Tensor, layout: Layout, groups: tuple[Group, ...]
    ) -> None:
        self.method = method
        self.models = models
        self.layout = layout
        self.groups = groups
        like = torch.float32 if models.dtype != torch.float64 else torch.float64
        self.soft = [
            torch.eye(g.size, dtype=like, device=models.device).repeat(len(models), 1, 1)
            for g in groups
        ]
        self.owners: dict[str, list[tuple[int, Place]]] = {}
        for g, group in enumerate(groups):
            for place in group.places:
                self.owners.setdefault(place.name, []).append((g, place))

    def run(self) -> tuple[Tensor, Orders]:
        """Return the models in common places, and how they got there."""
        if any(self._unsettled(g) for g in range(len(self.groups))):
            self.anneal()
        return self.harden()

    def anneal(self) -> None:
        """Lower the temperature, one sweep over groups and clients a level.

        In the first sweep a client hears only those that were placed before it.
        """
        for level, tau in enumerate(self.method.levels()):
            for g in range(len(self.groups)):
                sides = self._sides(g)
                for i in range(1, len(self.models)):
                    heard = range(i) if level == 0 else range(len(self.models))
                    affinity = self._affinity(g, i, sides, heard)
                    self.soft[g][i] = sinkhorn(affinity / tau, 10 + level)

    def harden(self) -> tuple[Tensor, Orders]:
        """Assign until nothing changes; keep what came if that is not worse."""
        everyone = range(len(self.models))
        for _ in range(self.method.sweeps):
            changed = False
            for g, group in enumerate(self.groups):
                sides = self._sides(g)
                for i in range(1, len(self.models)):
                    order = self._hard(self._affinity(g, i, sides, everyone), group)
                    changed |= not torch.equal(order, self.soft[g][i])
                    self.soft[g][i] = order
            if not changed:
                break
        new = self.models.clone()
        orders = Orders(len(self.models), self.groups)
        for g, group in enumerate(self.groups):
            for i in range(1, len(new)):
                order = self.soft[g][i].argmax(0)  # which unit stands in each common place
                reorder(new[i], self.layout, group, order)
                orders.change(i, g, order.cpu().numpy())
        # sum_{i != j} <y_i, y_j> = |sum_i y_i|^2 - sum_i |y_i|^2, and the norms stay.
        if new.double().sum(0).norm() < self.models.double().sum(0).norm():
            return self.models, Orders(len(new), self.groups)
        return new, orders

    def _hard(self, affinity: Tensor, group: Group) -> Tensor:
        """Return the best permutation matrix [n, n] for an affinity of units to places."""
        (best,) = best_orders(affinity.T[None], group.blocks)
        order = np.arange(group.size) if best is None else best
        # Row p of a reordered identity says which unit stands in place p.
        return torch.eye(len(order), dtype=affinity.dtype, device=affinity.device)[
            torch.from_numpy(order).to(affinity.device)
        ].T

    def _unsettled(self, g: int) -> bool:
        """Whether an assignment would move some unit of a group."""
        sides = self._sides(g)
        everyone = range(len(self.models))
        affinity = torch.stack([self._affinity(g, i, sides, everyone) for i in everyone])
        orders = best_orders(affinity.transpose(1, 2), self.groups[g].blocks)
        return any(order is not None for order in orders)

    def _affinity(self, g: int, i: int, sides: list[Tensor], heard: range) -> Tensor:
        """Return A_i [n, n]: unit of client i to common place, by the clients that are heard."""
        others = [j for j in heard if j != i]
        if not self.method.joint:
            others = [0] if i else others
        total = torch.zeros_like(self.soft[g][i])
        for side in sides:
            near = torch.exp(-distances(side[i], side[others]))
            total = total + (near @ self.soft[g][others]).sum(0)
        return total

    def _sides(self, g: int) -> list[Tensor]:
        """Return the rows below and above, [C, n, E], all other groups in their common places."""
        below: list[Tensor] = []
        above: list[Tensor] = []
        for place in self.groups[g].places:
            part = rows(self._others_placed(g, place), place)
            if place.axis == 0:
                below.append(part)
            else:
                above.append(part)
        return [torch.cat(side, 2) for side in (below, above) if side]

    def _others_placed(self, g: int, place: Place) -> Tensor:
        """Return a tensor [C, ...] with its other axes in common places."""
        tensor = tensor_of(self.models, self.layout, place.name).to(self.soft[g].dtype)
        for h, other in self.owners[place.name]:
            if other.axis == place.axis:
                continue
            front = tensor.movedim(other.axis + 1, 1)
            placed = self.soft[h].transpose(1, 2) @ rows(tensor, other)
            index = other.index.reshape(-1)
            front = front.index_copy(
                1, index, placed.reshape(len(front), len(index), *front.shape[2:])
            )
            tensor = front.movedim(1, other.axis + 1)
        return tensor


def distances(row: Tensor, others: Tensor) -> Tensor:
    """Return the squared distances of rows [n, E] to those of others [M, n, E], over their mean."""
    lengths = row.square().sum(1)
    theirs = others.square().sum(2)
    square = lengths[None, :, None] + theirs[:, None, :] - 2 * row @ others.transpose(1, 2)
    square = square.clamp(min=0)
    return square / square.mean().clamp(min=torch.finfo(square.dtype).tiny)


def sinkhorn(scores: Tensor, iterations: int) -> Tensor:
    """Return the matrix exp(scores) [n, n] scaled until rows and columns sum to one."""
    log = scores
    for _ in range(iterations):
        log = log - log.logsumexp(1, keepdim=True)
        log = log - log.logsumexp(0, keepdim=True)
    return log.exp()
