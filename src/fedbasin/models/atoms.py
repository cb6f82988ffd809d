"""Atoms: the entries of tensor axes, and which of them must move together (see `symmetries`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import Tensor, nn

# What is known of an axis: the atom of each entry, or that it must not move, or that it is free
# to (all entries are equal, as of zeros).
FIXED = "fixed"
FREE = "free"
Axis = np.ndarray | str
Axes = list[Axis]


class SymmetryError(ValueError):
    """A network whose permutations cannot be derived, with the operation at fault."""


class Atoms:
    """What is known of every tensor of a forward pass, and which atoms are tied."""

    def __init__(self, module: nn.Module) -> None:
        self.count = 1  # atom 0 is all that must not move
        self.ties: list[np.ndarray] = []
        self.norms: list[tuple[np.ndarray, int]] = []  # channels' atoms, number of groups
        self.known: dict[int, tuple[Tensor, Axes]] = {}  # holds tensors, so that no id returns
        self.used: set[int] = set()
        self.named = dict(module.named_parameters())
        statistics = (b for b in module.buffers() if b.is_floating_point())
        for tensor in (*self.named.values(), *statistics):
            self.known[id(tensor)] = (tensor, [self.fresh(size) for size in tensor.shape])

    def fresh(self, size: int) -> np.ndarray:
        """Return new atoms."""
        self.count += size
        return np.arange(self.count - size, self.count)

    def axes(self, tensor: Tensor) -> Axes:
        """Return what is known of a tensor's axes; all are fixed in one that was never seen."""
        self.used.add(id(tensor))
        return self.known.get(id(tensor), (tensor, [FIXED] * tensor.dim()))[1]

    def keep(self, tensor: Tensor, axes: Axes) -> None:
        """Remember the axes of a result."""
        assert len(axes) == tensor.dim()
        self.known[id(tensor)] = (tensor, axes)

    def tie(self, a: Axis, b: Axis) -> Axis:
        """Let two axes move together; return what they then are."""
        if isinstance(a, str) and a == FREE:
            return b
        if isinstance(b, str):
            if b == FREE:
                return a
            self.pin(a)
            return FIXED
        if isinstance(a, str):
            self.pin(b)
            return FIXED
        self.ties.append(np.stack([a, b]))
        return a

    def pin(self, *axes: Axis) -> None:
        """Let axes never move."""
        for axis in axes:
            if isinstance(axis, np.ndarray):
                self.ties.append(np.stack([axis, np.zeros_like(axis)]))

    def fix(self, tensor: Tensor) -> None:
        """Let a tensor never move."""
        self.pin(*self.axes(tensor))


def tensors_in(args: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among the arguments of an operation."""
    tensors: list[Tensor] = []
    for each in args:
        if isinstance(each, Tensor):
            tensors.append(each)
        elif isinstance(each, list | tuple):
            tensors += tensors_in(each)
    return tensors
