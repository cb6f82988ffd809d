"""The last linear layer as one matrix, for methods that work on features.

logits = [h, 1] A^T,   A = [W, b]   of shape [classes, d + 1]; [classes, d] without a bias
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedbasin.core.vectors import Layout


@dataclass(frozen=True)
class Head:
    """Where the last linear layer lies in a vector.

    Args:
        weight: its place.
        bias: and that of its bias, where it has one.
        classes: number of logits, C.
        width: number of features, d.
    """

    weight: slice
    bias: slice | None
    classes: int
    width: int

    @classmethod
    def of(cls, layout: Layout) -> Head:
        """Find the head; a network without one is told what is missing."""
        shapes = dict(zip(layout.names, layout.shapes, strict=True))
        weights = [name for name in layout.head if len(shapes[name]) == 2]
        biases = [name for name in layout.head if len(shapes[name]) == 1]
        if len(weights) != 1 or len(biases) > 1 or len(layout.head) != len(weights) + len(biases):
            raise ValueError(
                "this method works on features and the last layer: the network needs `features` "
                "and a linear `head`, as the catalogue's networks have"
            )
        bias = layout.slices[biases[0]] if biases else None
        return cls(layout.slices[weights[0]], bias, *shapes[weights[0]])

    def matrix(self, vector: Tensor) -> Tensor:
        """Return A of a model [P] or of several [..., P]."""
        weight: Tensor = vector[..., self.weight].unflatten(-1, (self.classes, self.width))
        if self.bias is None:
            return weight
        return torch.cat([weight, vector[..., self.bias, None]], -1)

    def put(self, vector: Tensor, matrix: Tensor) -> Tensor:
        """Return the model [P] with another head."""
        parts = [(self.weight, matrix[:, : self.width].reshape(-1))]
        if self.bias is not None:
            parts.append((self.bias, matrix[:, self.width]))
        pieces = []
        done = 0
        for place, part in sorted(parts, key=lambda p: p[0].start):
            pieces += [vector[done : place.start], part]
            done = place.stop
        return torch.cat([*pieces, vector[done:]])

    def inputs(self, features: Tensor) -> Tensor:
        """Return [h, 1] for features [..., d], or h where there is no bias."""
        if self.bias is None:
            return features
        return torch.cat([features, torch.ones_like(features[..., :1])], -1)
