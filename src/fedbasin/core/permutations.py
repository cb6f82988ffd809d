"""Re-ordering the units of a model: which entries move together, and which order fits best.

A hidden unit (a neuron, a channel, a cell of an LSTM) owns slices of several tensors: its incoming
weights, bias and normalisation, and what later layers read from it. Units of a `Group` own the
same kind of slices, so they may change places: if all their slices move together, the network is
the same function of its inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedbasin.core.rule import Setting
from fedbasin.core.vectors import Layout


@dataclass(frozen=True)
class Place:
    """Where the units of a group lie along one axis of one tensor."""

    name: str
    axis: int
    index: Tensor  # int64 [n, k]: the k entries of each unit, in an order that all units share


@dataclass(frozen=True)
class Group:
    """Units that may change places.

    With several blocks (the groups of a GroupNorm) units stay together: any order within a block,
    and whole blocks may change places. Units are numbered block after block.
    """

    places: tuple[Place, ...]
    blocks: int = 1

    @property
    def size(self) -> int:
        """How many units there are, n."""
        return len(self.places[0].index)

    @property
    def coupled(self) -> bool:
        """Whether the units own both axes of one tensor, as a recurrent layer's do."""
        names = [place.name for place in self.places]
        return len(set(names)) < len(names)


def tensor_of(models: Tensor, layout: Layout, name: str) -> Tensor:
    """Return one named tensor of all models [C, P], as a view [C, ...]."""
    shape = layout.shapes[layout.names.index(name)]
    return models[:, layout.slices[name]].view(len(models), *shape)


def rows(tensors: Tensor, place: Place) -> Tensor:
    """Return what each unit owns of tensors [C, ...], as rows [C, n, E]."""
    front = tensors.movedim(place.axis + 1, 1)
    return front[:, place.index.reshape(-1)].reshape(len(tensors), len(place.index), -1)


def reorder(model: Tensor, layout: Layout, group: Group, order: Tensor) -> None:
    """Change a model [P], so that the unit ``order[u]`` stands where unit u stood."""
    for place in group.places:
        view = tensor_of(model[None], layout, place.name)[0]
        source = torch.arange(view.shape[place.axis], device=model.device)
        source[place.index.reshape(-1)] = place.index[order].reshape(-1)
        view.copy_(view.index_select(place.axis, source))


def best_order(similarity: np.ndarray, blocks: int = 1) -> np.ndarray:
    """Return the order that maximises ``sum_u similarity[u, order[u]]``, by Hungarian assignment.

    With blocks, each pair of blocks is matched within, then blocks are matched to blocks. Where
    nothing is gained the order is left as it is.
    """
    from scipy.optimize import linear_sum_assignment  # slow to import, and few runs match neurons

    count = len(similarity)
    width = count // blocks
    parts = similarity.reshape(blocks, width, blocks, width)
    within = [
        [linear_sum_assignment(-parts[a, :, b])[1] for b in range(blocks)] for a in range(blocks)
    ]
    value = np.array(
        [
            [parts[a, np.arange(width), b, within[a][b]].sum() for b in range(blocks)]
            for a in range(blocks)
        ]
    )
    chosen = linear_sum_assignment(-value)[1]
    order = np.concatenate([b * width + within[a][b] for a, b in enumerate(chosen)])
    same = np.arange(count)
    gain = similarity[same, order].sum() - similarity[same, same].sum()
    return order if gain > 1e-9 * np.abs(similarity[same, same]).sum() else same


def best_orders(similarity: Tensor, blocks: int) -> list[np.ndarray | None]:
    """Return the best order of each client from [C, n, n]; None where it is as it stands.

    Where every unit is most like the one in its own place nothing can be gained, which the device
    finds without an assignment.
    """
    settled = (similarity.diagonal(dim1=1, dim2=2) >= similarity.amax(2)).all(1).tolist()
    orders: list[np.ndarray | None] = []
    for matrix, done in zip(similarity, settled, strict=True):
        order = None if done else best_order(matrix.double().cpu().numpy(), blocks)
        moves = order is not None and bool((order != np.arange(len(order))).any())
        orders.append(order if moves else None)
    return orders


class MatchingNotes(NamedTuple):
    """What a round that matches neurons leaves in the record."""

    moved: float  # share of units, over clients and groups, that were given another place
    units: int  # how many units a model has that could


class Orders:
    """The order of every group of every client so far, for the share of units that moved."""

    def __init__(self, clients: int, groups: Sequence[Group]) -> None:
        self.held = [[np.arange(group.size) for group in groups] for _ in range(clients)]

    def change(self, client: int, group: int, order: np.ndarray) -> None:
        """Apply a further order."""
        self.held[client][group] = self.held[client][group][order]

    def moved(self) -> float:
        """Return the share of units, over clients and groups, that left their place."""
        everywhere = [order for client in self.held for order in client]
        units = sum(len(order) for order in everywhere)
        left = sum(int((order != np.arange(len(order))).sum()) for order in everywhere)
        return left / max(units, 1)


def stale_statistics(setting: Setting) -> Iterator[str]:
    """Say why re-ordered models do not fit averaged BatchNorm statistics."""
    if setting.statistics:
        yield (
            "BatchNorm statistics keep the order of each client's own neurons; take norm='group' "
            "or sim.buffers='recalibrate'"
        )
