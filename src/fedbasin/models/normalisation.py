"""A normalisation that leaves images as they lie where many clients train side by side on a GPU.

torch's own hands images on with positions innermost in memory, and in float32 where layers run in
halves; convolutions want channels innermost, and halves. So each would be written and read twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fedbasin.models.convolution import last, side_by_side


class GroupNorm(nn.GroupNorm):
    """`nn.GroupNorm`; in training of many clients on CUDA, it keeps the images' type and order."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised images of a batch [B, C, ...]."""
        if not side_by_side(self, input):
            return super().forward(input)
        found = Normalisation.apply(input, self.weight, self.bias, self.num_groups, self.eps)  # type: ignore[no-untyped-call]
        outputs: Tensor = found[0]
        return outputs


class Normalisation(torch.autograd.Function):
    """The normalisation of one client's images; `vmap` over it takes those of all at once.

    A group's statistics are over its channels and all positions; sums are in float32 at least.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, w: Tensor, bias: Tensor, groups: int, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return w (x - mean) / deviation + bias, each group's mean, and 1 / deviation."""
        wide = _grouped(x, groups)
        spread, mean = torch.var_mean(wide, (*_positions(x), -1), correction=0, keepdim=True)
        scale = torch.rsqrt(spread + eps)
        y = (wide - mean) * scale * w.unflatten(0, (groups, -1)) + bias.unflatten(0, (groups, -1))
        return _images(y, x), mean, scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keep what gradients are made of."""
        x, w, _, ctx.groups, _ = inputs
        ctx.save_for_backward(x, w, *output[1:])

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of images, weights and biases.

        With n = (x - mean) / deviation and g = w dy: dx = (g - mean(g) - n mean(g n)) / deviation.
        All sums come from those of dy and of n dy over positions, taken in one pass.
        """
        x, w, mean, scale = ctx.saved_tensors
        wide = _grouped(x, ctx.groups)
        given = _grouped(dy, ctx.groups)
        normal = (wide - mean) * scale
        weights = w.unflatten(0, (ctx.groups, -1))
        sums = [each.sum(_positions(x), keepdim=True) for each in (given, given * normal)]
        of_group = wide[0].numel() // ctx.groups
        plain, along = ((weights * each).sum(-1, keepdim=True) / of_group for each in sums)
        dx = _images((weights * given - plain - normal * along) * scale, x)
        db, dw = (each.sum(0).flatten().to(w.dtype) for each in sums)
        return last(dx), last(dw), last(db), None, None


def _grouped(x: Tensor, groups: int) -> Tensor:
    """Return images [B, C, ...] as [B, ..., G, C / G], in float32 at least."""
    whole = torch.promote_types(x.dtype, torch.float32)
    grouped: Tensor = x.movedim(1, -1).unflatten(-1, (groups, -1))
    return grouped.to(whole)


def _images(grouped: Tensor, like: Tensor) -> Tensor:
    """Undo `_grouped`."""
    return grouped.flatten(-2).movedim(-1, 1).to(like.dtype)


def _positions(x: Tensor) -> tuple[int, ...]:
    """Return the axes of positions of what `_grouped` makes of images."""
    return tuple(range(1, x.dim() - 1))
