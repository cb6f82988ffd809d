"""MobileNetV2 with GroupNorm."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from fedbasin.core.catalogue import entry
from fedbasin.models import parts
from fedbasin.models.convolution import Conv2d
from fedbasin.models.dropout import Dropout
from fedbasin.models.network import Network
from fedbasin.models.parts import Layers, Norm, Shape

# Stages of the paper's Table 2: expansion t, channels c, blocks n, stride s of the first block.
_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def _convolution(
    inputs: int, outputs: int, norm: Norm, *, kernel: int = 1, stride: int = 1, groups: int = 1
) -> list[nn.Module]:
    """Return a convolution without bias and its normalisation layer."""
    padding = kernel // 2
    conv = Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=False)
    return [conv, norm(outputs)]


class InvertedResidual(nn.Module):
    """Widen by 1 x 1, filter each channel by 3 x 3, narrow by 1 x 1; add the input if shapes agree.

    Args:
        inputs: channels in.
        outputs: channels out.
        expansion: widening factor; 1 leaves the first convolution out.
        stride: of the 3 x 3 convolution.
        norm: makes the normalisation layers.
    """

    def __init__(self, inputs: int, outputs: int, expansion: int, stride: int, norm: Norm) -> None:
        super().__init__()
        wide = inputs * expansion
        widen = [*_convolution(inputs, wide, norm), nn.ReLU6()] if expansion > 1 else []
        self.branch = nn.Sequential(
            *widen,
            *_convolution(wide, wide, norm, kernel=3, stride=stride, groups=wide),
            nn.ReLU6(),
            *_convolution(wide, outputs, norm),
        )
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        y: Tensor = self.branch(x)
        return x + y if self.residual else y


@entry(
    "model",
    paper="Sandler et al., CVPR 2018; Caldarola et al., ICCVW 2023 (WIMA)",
    url="https://arxiv.org/abs/1801.04381",
)
def mobilenetv2(
    shape: Shape,
    classes: int,
    *,
    stem: str = "imagenet",
    dropout: float = 0.0,
    norm: str = "group",
    groups: int = 2,
) -> Network:
    """MobileNetV2 with GroupNorm, width 1; WIMA starts it from ImageNet weights, this from random.

    Args:
        stem: "imagenet" shrinks the image 32-fold; "cifar" 8-fold, without the first two strides.
        dropout: probability before the head.
        norm: "group" (GroupNorm of `groups` groups), "batch" or "none".
        groups: see `norm`.
    """
    first_stride = 1 if parts.one_of("stem", stem, ("imagenet", "cifar")) == "cifar" else 2
    make_norm = parts.norm_layer(norm, groups)
    inputs = parts.image_channels("mobilenetv2", shape)
    channels = 32
    layers: Layers = OrderedDict(
        conv=Conv2d(inputs, channels, 3, first_stride, padding=1, bias=False),
        norm=make_norm(channels),
        relu=nn.ReLU6(),
    )
    for stage, (expansion, width, count, stride) in enumerate(_STAGES, start=1):
        for block in range(1, count + 1):
            step = stride if block == 1 else 1
            if block == 1 and stage == 2:
                step = min(stride, first_stride)
            layers[f"stage{stage}_{block}"] = InvertedResidual(
                channels, width, expansion, step, make_norm
            )
            channels = width
    layers["last"] = nn.Sequential(*_convolution(channels, 1280, make_norm), nn.ReLU6())
    layers["average"] = parts.GlobalAverage()
    if dropout:
        layers["dropout"] = Dropout(dropout)
    return Network(nn.Sequential(layers), nn.Linear(1280, classes))
