"""Adam on plain tensors: a step is a function from state to state."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Adam(NamedTuple):
    """Adam's moments and how many steps it took."""

    first: Tensor
    second: Tensor
    steps: int | Tensor = 0

    @classmethod
    def at(cls, free: Tensor) -> Adam:
        """Start with moments of zero beside what is to move."""
        return cls(torch.zeros_like(free), torch.zeros_like(free))

    def step(
        self, free: Tensor, gradient: Tensor, lr: float, betas: tuple[float, float] = (0.5, 0.999)
    ) -> tuple[Tensor, Adam]:
        """Return the numbers after one step; those with zero gradients so far stay put."""
        slow, slower = betas
        first = slow * self.first + (1 - slow) * gradient
        second = slower * self.second + (1 - slower) * gradient.square()
        steps = self.steps + 1
        size = (second / (1 - slower**steps)).sqrt() + 1e-8
        return free - lr * first / (1 - slow**steps) / size, Adam(first, second, steps)
