"""What the networks share: normalisation, pooling, sizes, fully connected stacks, initialisers.

`GroupNorm` and `MaxPool2d` are fast where many clients train side by side on a GPU. torch's own
normalisation hands images on with positions innermost in memory, and in float32 where layers run in
halves; convolutions want channels innermost, and halves. So each would be written and read twice.
The compiler makes of torch's gradient of a pooling a search of windows by the pixels' indices. A
window of 2 x 2 that no other overlaps has one largest pixel: a number from 0 to 3 says which.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fedbasin.models.convolution import last, side_by_side

Layers = OrderedDict[str, nn.Module]
Norm = Callable[[int], nn.Module]
Shape = tuple[int, ...]  # of one example, without the batch axis


def _group_norm(channels: int, groups: int) -> nn.Module:
    if groups < 1 or channels % groups:
        raise ValueError(
            f"groups={groups} does not divide a layer of {channels} channels; "
            "choose a divisor such as groups=2"
        )
    return GroupNorm(groups, channels)


_NORMS: dict[str, Callable[[int, int], nn.Module]] = {
    "group": _group_norm,
    "batch": lambda channels, _: nn.BatchNorm2d(channels),
    "none": lambda _, __: nn.Identity(),
}


def norm_layer(norm: str, groups: int = 2) -> Norm:
    """Return the maker of a normalisation layer from its number of channels.

    Args:
        norm: "group" (independent of the batch, hence the default everywhere), "batch", or
            "none", which leaves the layer out and changes nothing else.
        groups: number of groups of "group"; the others ignore it.
    """
    make = _NORMS[one_of("norm", norm, _NORMS)]
    return lambda channels: make(channels, groups)


def image_channels(name: str, shape: Shape) -> int:
    """Return the channels of an image shape, or say that the network takes only images."""
    if len(shape) != 3:
        raise ValueError(f"{name} takes images (channels, height, width), got shape {shape}")
    return shape[0]


def one_of(field: str, value: str, allowed: Iterable[str]) -> str:
    """Return the value of a field if it is allowed, or raise an error that lists what is."""
    allowed = tuple(allowed)
    if value not in allowed:
        raise ValueError(f"{field} must be one of {', '.join(allowed)}, got {value!r}")
    return value


def output_size(name: str, layers: nn.Module, shape: Shape, hint: str = "") -> tuple[int, int]:
    """Return the height and width that a stack of convolutions and poolings makes of an image.

    A window of size k, stride s and padding p makes ``(n + 2p - k) // s + 1`` of n, hence needs
    ``(m - 1) s + k - 2p`` to make m; going backwards from m = 1 gives the smallest image.

    Args:
        name: the network, for the error message.
        layers: convolutions and poolings, walked in the order they were entered.
        shape: the image (channels, height, width).
        hint: what else the user could do, for the error message.
    """
    windows = [
        tuple(_side(getattr(layer, field)) for field in ("kernel_size", "stride", "padding"))
        for layer in layers.modules()
        if isinstance(layer, nn.Conv2d | nn.MaxPool2d | nn.AvgPool2d)
    ]
    smallest = 1
    for kernel, stride, padding in reversed(windows):
        smallest = max((smallest - 1) * stride + kernel - 2 * padding, 1)
    height, width = shape[1:]
    if min(height, width) < smallest:
        raise ValueError(
            f"{name} needs images of at least {smallest} x {smallest}, got {height} x {width}; "
            f"enlarge or pad them, or choose another model{hint}"
        )
    for kernel, stride, padding in windows:
        height, width = ((n + 2 * padding - kernel) // stride + 1 for n in (height, width))
    return height, width


def _side(size: int | tuple[int, ...]) -> int:
    """Return the side of a square window, which torch stores as a number or as a pair."""
    return size if isinstance(size, int) else size[0]


def dense_layers(inputs: int, widths: tuple[int, ...], *, relu_last: bool = True) -> Layers:
    """Return fully connected layers fc1, fc2, ... with ReLU after each (the last: `relu_last`)."""
    layers: Layers = OrderedDict()
    for i, (before, after) in enumerate(zip((inputs, *widths), widths, strict=False), start=1):
        layers[f"fc{i}"] = nn.Linear(before, after)
        if relu_last or i < len(widths):
            layers[f"fc{i}_relu"] = nn.ReLU()
    return layers


class GlobalAverage(nn.Module):
    """Average over height and width: [B, C, H, W] to [B, C]."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean of every channel."""
        return x.mean(dim=(2, 3))


def he_normal(module: nn.Module) -> None:
    """Draw every convolution from N(0, 2 / fan_out), as ResNets for ImageNet do."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")


def glorot_uniform(module: nn.Module) -> None:
    """Draw every weight from U(-a, a) with ``a = sqrt(6 / (fan_in + fan_out))``; keep biases."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)


def lecun_truncated(module: nn.Module) -> None:
    """Draw weights from N(0, 1 / fan_in) cut at two deviations and zero biases (as Haiku)."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            truncated_normal(layer.weight, 1 / math.sqrt(layer.weight[0].numel()))
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def truncated_normal(weight: Tensor, deviation: float) -> None:
    """Fill a weight from N(0, deviation^2) cut at two deviations."""
    nn.init.trunc_normal_(weight, std=deviation, a=-2 * deviation, b=2 * deviation)


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
