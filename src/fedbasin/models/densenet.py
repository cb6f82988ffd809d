"""DenseNet-121 for CIFAR."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from fedbasin.core.catalogue import entry
from fedbasin.models import parts
from fedbasin.models.convolution import Conv2d
from fedbasin.models.network import Network
from fedbasin.models.parts import Layers, Norm, Shape


class DenseBlock(nn.Module):
    """Append g channels to the input: ``[C2 relu N2 C1 relu N1 x, x]``, C1 1 x 1 to 4g, C2 3 x 3.

    Args:
        inputs: channels in.
        growth: channels added, g.
        norm: makes the normalisation layers N.
    """

    def __init__(self, inputs: int, growth: int, norm: Norm) -> None:
        super().__init__()
        self.grow = nn.Sequential(
            OrderedDict(
                norm1=norm(inputs),
                relu1=nn.ReLU(),
                conv1=Conv2d(inputs, 4 * growth, 1, bias=False),
                norm2=norm(4 * growth),
                relu2=nn.ReLU(),
                conv2=Conv2d(4 * growth, growth, 3, padding=1, bias=False),
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the new channels followed by the old ones."""
        return torch.cat([self.grow(x), x], dim=1)


def _transition(inputs: int, norm: Norm) -> nn.Module:
    """Return the layers that halve the channels and the image between two dense stages."""
    return nn.Sequential(
        OrderedDict(
            norm=norm(inputs),
            relu=nn.ReLU(),
            conv=Conv2d(inputs, inputs // 2, 1, bias=False),
            pool=nn.AvgPool2d(2),
        )
    )


@entry(
    "model",
    paper="Huang et al., CVPR 2017; Li et al., ICML 2023 (FedLAW)",
    url="https://arxiv.org/abs/1608.06993",
)
def densenet121(shape: Shape, classes: int, *, norm: str = "group", groups: int = 2) -> Network:
    """DenseNet-121 with a 3 x 3 first convolution, growth 32; FedLAW's has ``norm="batch"``.

    Args:
        norm: "group" (GroupNorm of `groups` groups), "batch" or "none".
        groups: see `norm`.
    """
    growth = 32
    stages = (6, 12, 24, 16)
    make_norm = parts.norm_layer(norm, groups)
    channels = 2 * growth
    inputs = parts.image_channels("densenet121", shape)
    layers: Layers = OrderedDict(conv=Conv2d(inputs, channels, 3, padding=1, bias=False))
    for stage, blocks in enumerate(stages, start=1):
        for block in range(1, blocks + 1):
            layers[f"stage{stage}_{block}"] = DenseBlock(channels, growth, make_norm)
            channels += growth
        if stage < len(stages):
            layers[f"transition{stage}"] = _transition(channels, make_norm)
            channels //= 2
    layers.update(norm=make_norm(channels), relu=nn.ReLU(), average=parts.GlobalAverage())
    body = nn.Sequential(layers)
    parts.output_size("densenet121", body, shape)
    return Network(body, nn.Linear(channels, classes))
