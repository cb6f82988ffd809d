"""What the networks share: normalisation by name, sizes, fully connected stacks, initialisers."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable

from torch import Tensor, nn

from fedbasin.models.normalisation import GroupNorm

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
