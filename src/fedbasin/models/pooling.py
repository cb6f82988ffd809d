"""Max pooling that is fast where many clients train side by side on a GPU.

The compiler makes of torch's gradient a search of windows by the pixels' indices. A window of 2 x 2
that no other overlaps has one largest pixel: a number from 0 to 3 says which.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fedbasin.models.convolution import side_by_side


class MaxPool2d(nn.MaxPool2d):
    """`nn.MaxPool2d`; in training of many clients on CUDA, windows of 2 x 2 side by side are taken
    by `Pooling`.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the largest pixel of each window of a batch [B, C, H, W]."""
        if not side_by_side(self, input) or not self._halves():
            same: Tensor = super().forward(input)
            return same
        high, wide = (size // 2 * 2 for size in input.shape[-2:])
        outputs: Tensor = Pooling.apply(input[..., :high, :wide])[0]  # type: ignore[no-untyped-call]
        return outputs

    def _halves(self) -> bool:
        """Whether it halves height and width, and does nothing else."""
        two = (2, (2, 2))
        plain = (0, (0, 0))
        apart = self.kernel_size in two and self.stride in two and self.padding in plain
        return apart and self.dilation in (1, (1, 1)) and not self.ceil_mode


class Pooling(torch.autograd.Function):
    """Largest pixels of windows of 2 x 2; of equal ones the first is taken, as torch does."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        """Return them [B, C, H / 2, W / 2], and which corner each is: 0 to 3, row by row."""
        a, b, c, d = (x[..., i::2, j::2] for i in (0, 1) for j in (0, 1))
        y = torch.maximum(torch.maximum(a, b), torch.maximum(c, d))
        return y, (a != y) * (1 + (b != y) * (1 + (c != y).to(torch.int8)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        """Keep the corners."""
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> Tensor:
        """Return the gradient of the images, with channels innermost in memory."""
        (taken,) = ctx.saved_tensors
        taken, dy = (each.permute(0, 2, 3, 1)[:, :, None, :, None] for each in (taken, dy))
        corner = torch.arange(4, dtype=torch.int8, device=dy.device).view(2, 1, 2, 1)
        inside = torch.where(taken == corner, dy, 0).flatten(1, 2).flatten(2, 3)
        return inside.permute(0, 3, 1, 2)
