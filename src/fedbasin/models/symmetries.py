"""Which units of a network may change places, derived from the network itself.

One forward pass on the meta device (shapes without numbers) is watched operation by operation.
Every entry of every axis of every parameter starts as an atom of its own, and operations tie atoms
that must move together: a convolution ties its input channels to those of the layer below, a
sum ties the channels of a residual stream, a flattening ties H x W inputs of a linear layer to one
channel, an LSTM's state ties the four gates of a cell. Network inputs and outputs never move.
Atoms that are tied make a unit; units that own the same number of entries of the same axes make a
group, apart where a GroupNorm averages them apart.

Nothing here knows a network by name. An operation that `operations` does not
list raises.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedbasin.core.permutations import Group, Place
from fedbasin.models.atoms import FREE, Atoms, SymmetryError, tensors_in
from fedbasin.models.operations import HANDLERS, MAKERS


def permutations(
    module: nn.Module, example: Tensor, device: torch.device | str = "cpu"
) -> tuple[Group, ...]:
    """Return the groups of units of a network that may change places, bottom up.

    Args:
        module: the network; it is not changed.
        example: a batch of inputs, for its shape and type.
        device: where the indices are kept.
    """
    meta = copy.deepcopy(module).to("meta").eval()
    inputs = torch.empty_like(example, device="meta")
    if inputs.is_floating_point():
        inputs = inputs.to(next(meta.parameters()).dtype)
    atoms = Atoms(meta)
    with torch.no_grad(), torch.device("meta"), _Watch(atoms):
        outputs = meta(inputs)
    atoms.fix(outputs)
    return _groups(atoms, [n for n, p in meta.named_parameters() if p.requires_grad], device)


class _Watch(TorchDispatchMode):
    """Shows every operation of a forward pass to the atoms."""

    def __init__(self, atoms: Atoms) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.atoms = atoms

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::").rstrip("_")
        if name in MAKERS:
            self.atoms.keep(out, [FREE] * out.dim())
        elif name in HANDLERS:
            HANDLERS[name](self.atoms, out, *args, **(kwargs or {}))
        elif any(
            isinstance(axis, np.ndarray) for t in tensors_in(args) for axis in self.atoms.axes(t)
        ):
            raise SymmetryError(
                f"how {name} treats the order of its inputs is not known, so this network's "
                "neurons cannot be matched; choose a method that does not need permutations"
            )
        return out


def _groups(atoms: Atoms, names: Iterable[str], device: torch.device | str) -> tuple[Group, ...]:
    """Return the groups among the named parameters."""
    edges = np.concatenate([np.zeros((2, 1), np.int64), *atoms.ties], axis=1)
    graph = coo_matrix((np.ones(edges.shape[1]), edges), shape=(atoms.count, atoms.count))
    unit = connected_components(graph, directed=False)[1]
    entries: dict[int, dict[tuple[str, int], np.ndarray]] = defaultdict(dict)
    for name in names:
        tensor = atoms.named[name]
        if id(tensor) not in atoms.used:
            continue
        for axis, held in enumerate(atoms.known[id(tensor)][1]):
            _enter(entries, (name, axis), unit[held], unit[0])
    teams: dict[int, tuple[tuple[int, ...], ...]] = defaultdict(tuple)
    full: dict[tuple[int, ...], int] = {}
    for number, (held, count) in enumerate(atoms.norms):
        width = len(held) // count
        for each, team in zip(unit[held], np.arange(len(held)) // width, strict=True):
            teams[each] = (*teams[each], (number, int(team)))
            full[(number, int(team))] = width
    return _gathered(entries, teams, full, device)


def _enter(
    entries: dict[int, dict[tuple[str, int], np.ndarray]],
    place: tuple[str, int],
    units: np.ndarray,
    fixed: int,
) -> None:
    """Note which entries of an axis belong to which unit."""
    order = np.argsort(units, kind="stable")
    distinct, starts = np.unique(units[order], return_index=True)
    for each, positions in zip(distinct, np.split(order, starts[1:]), strict=True):
        if each != fixed:
            entries[int(each)][place] = positions


def _gathered(
    entries: dict[int, dict[tuple[str, int], np.ndarray]],
    teams: dict[int, tuple[tuple[int, ...], ...]],
    full: dict[tuple[int, ...], int],
    device: torch.device | str,
) -> tuple[Group, ...]:
    """Put units of one kind together; teams of a GroupNorm become blocks or groups of their own."""
    kinds: dict[Any, dict[Any, list[int]]] = defaultdict(lambda: defaultdict(list))
    for unit, held in entries.items():
        kind = tuple((place, len(positions)) for place, positions in held.items())
        kinds[kind][teams[unit]].append(unit)
    groups = []
    for by_team in kinds.values():
        # A team whose channels are all of this kind may change places with another such team.
        whole = [
            units
            for team, units in by_team.items()
            if team and all(full[each] == len(units) for each in team)
        ]
        apart = [units for units in by_team.values() if units not in whole]
        for blocks in ([whole] if whole else []) + [[units] for units in apart]:
            units = [unit for block in blocks for unit in block]
            if len(units) > 1:
                owned = [(place, [entries[u][place] for u in units]) for place in entries[units[0]]]
                indices = [(place, torch.from_numpy(np.stack(each))) for place, each in owned]
                places = tuple(Place(*place, index.to(device)) for place, index in indices)
                groups.append(Group(places, len(blocks)))
    return tuple(groups)
