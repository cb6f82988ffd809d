"""A model is a vector; a cohort is a matrix.

`Layout` names the parts of a vector and gives views of them for free, so that a layer-wise
rule reads `layout.views(vector)["head.weight"]` and a network runs straight from the vector.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

Weighting = Literal["samples", "uniform"]
_A, _B = "lora_A", "lora_B"  # what LoRA's matrices are called, here and in peft
Part = Literal["all", "head", "backbone"]  # of a network: its last linear layer, or the rest


@dataclass(frozen=True)
class Layout:
    """Where each named tensor lies in a flat vector.

    Args:
        names: names of the parts, in the order they lie.
        shapes: their shapes.
        head: names of the parts that belong to the last linear layer.

    `pairs` are the names of LoRA's matrices A and B that belong together, recognised by
    ``lora_A`` and ``lora_B`` in their names, as fedbasin and peft call them.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    head: tuple[str, ...] = ()
    sizes: tuple[int, ...] = field(init=False, repr=False, compare=False)  # elements of each part
    size: int = field(init=False, repr=False, compare=False)  # of the whole vector, P
    slices: Mapping[str, slice] = field(init=False, repr=False, compare=False)  # where parts lie
    pairs: tuple[tuple[str, str], ...] = field(init=False, repr=False, compare=False)  # (A, B)

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, Tensor]], head: tuple[str, ...] = ()) -> Layout:
        """Lay out named tensors one after another."""
        parts = [(name, tuple(tensor.shape)) for name, tensor in tensors]
        return cls(tuple(n for n, _ in parts), tuple(s for _, s in parts), head)

    def __post_init__(self) -> None:
        # Formed at once: a lazy property takes a lock, which a compiled step cannot trace.
        sizes = tuple(math.prod(shape) for shape in self.shapes)
        ends = [0]
        for size in sizes:
            ends.append(ends[-1] + size)
        places = zip(self.names, ends[:-1], ends[1:], strict=True)
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "size", ends[-1])
        object.__setattr__(self, "slices", {name: slice(a, b) for name, a, b in places})
        object.__setattr__(self, "pairs", _pairs(self.names))

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """Return the parts of a vector [P] as views: no copy is made."""
        if vector.shape != (self.size,):
            raise ValueError(
                f"expected a vector of {self.size} elements, got {tuple(vector.shape)}"
            )
        parts = vector.split(list(self.sizes))
        named = zip(self.names, self.shapes, parts, strict=True)
        return {name: part.view(shape) for name, shape, part in named}

    def flat(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return named tensors as one new vector [P], checked against the layout."""
        if set(tensors) != set(self.names):
            odd = sorted(set(tensors) ^ set(self.names))
            raise ValueError(f"the named tensors and the layout differ in {', '.join(odd[:5])}")
        for name, shape in zip(self.names, self.shapes, strict=True):
            if tuple(tensors[name].shape) != shape:
                raise ValueError(f"{name} has shape {tuple(tensors[name].shape)}, expected {shape}")
        if not self.names:
            return torch.zeros(0)
        return torch.cat([tensors[name].reshape(-1) for name in self.names])

    def mix(self, part: Part, inside: Tensor, outside: Tensor) -> Tensor:
        """Return `inside` on the head or on the backbone (or everywhere), `outside` elsewhere."""
        if part == "all":
            return inside
        if not self.head:
            raise ValueError(f"part={part!r} needs a network with a linear head")
        head = self.mask(self.head, inside).bool()
        return torch.where(head if part == "head" else ~head, inside, outside)

    def sums(self, vectors: Tensor) -> Tensor:
        """Return the sum over each part, [..., T] of vectors [..., P]."""
        return torch.stack([part.sum(-1) for part in vectors.split(list(self.sizes), -1)], -1)

    def spread(self, values: Tensor) -> Tensor:
        """Return one value for each part, [..., T], at every element of it, [..., P]."""
        sizes = torch.tensor(self.sizes, device=values.device)
        return values.repeat_interleave(sizes, -1, output_size=self.size)

    def mask(self, names: Iterable[str], like: Tensor) -> Tensor:
        """Return a vector [P] of ones on the named parts and zeros elsewhere."""
        ones = torch.zeros(self.size, dtype=like.dtype, device=like.device)
        for name in names:
            ones[self.slices[name]] = 1
        return ones


def _pairs(names: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Return the names of LoRA's matrices A with their B."""
    known = set(names)
    found = []
    for name in names:
        parts = name.split(".")
        if _A not in parts:
            continue
        other = ".".join(_B if part == _A else part for part in parts)
        if other in known:
            found.append((name, other))
    return tuple(found)


def shares(weights: Tensor, weighting: Weighting = "samples") -> Tensor:
    """Turn client weights [C] into shares that sum to one, computed in float64.

    ``"samples"`` is in proportion to the weights; ``"uniform"`` counts every client whose
    weight is above zero once.
    """
    amounts = weights.to(torch.float64)
    if weighting == "uniform":
        amounts = (amounts > 0).to(torch.float64)
    return amounts / amounts.sum()


def weighted_mean(models: Tensor, share: Tensor) -> Tensor:
    """Return ``share @ models`` for models [C, P]; the mean where the shares sum to one."""
    return share.to(models.dtype) @ models
