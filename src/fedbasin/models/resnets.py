"""Residual networks of basic blocks: the CIFAR family (8 to 110, wide), ResNet-18 and ResNet-34."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn
from torch.nn import functional

from fedbasin.core.catalogue import entry
from fedbasin.models import parts
from fedbasin.models.convolution import Conv2d
from fedbasin.models.network import Network
from fedbasin.models.parts import Layers, Norm, Shape

HE = "He et al., CVPR 2016"
HE_URL = "https://arxiv.org/abs/1512.03385"


class ZeroPadShortcut(nn.Module):
    """He et al.'s option A: keep every `stride`-th pixel, add channels of zeros, no parameters."""

    def __init__(self, new_channels: int, stride: int) -> None:
        super().__init__()
        self.new_channels = new_channels
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """Return the thinned and widened input."""
        thinned = x[:, :, :: self.stride, :: self.stride]
        return functional.pad(thinned, (0, 0, 0, 0, 0, self.new_channels))


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions around a shortcut: ``relu(N2 C2 relu(N1 C1 x) + shortcut(x))``.

    Args:
        inputs: channels in.
        outputs: channels out.
        stride: of the first convolution and of the shortcut.
        norm: makes the normalisation layers N.
        shortcut: "conv" (1 x 1 convolution and norm) or "pad", where the shape changes.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm, shortcut: str) -> None:
        super().__init__()
        self.conv1 = Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = norm(outputs)
        self.conv2 = Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = norm(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride == 1 and inputs == outputs:
            return
        if shortcut == "pad":
            self.shortcut = ZeroPadShortcut(outputs - inputs, stride)
        else:
            convolution = Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(OrderedDict(conv=convolution, norm=norm(outputs)))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def _stages(
    inputs: int, widths: tuple[int, ...], blocks: tuple[int, ...], norm: Norm, shortcut: str
) -> Layers:
    """Return blocks named stage1_1, stage1_2, ...; each stage but the first halves the image."""
    layers: Layers = OrderedDict()
    for stage, (width, count) in enumerate(zip(widths, blocks, strict=True), start=1):
        for block in range(1, count + 1):
            stride = 2 if stage > 1 and block == 1 else 1
            layers[f"stage{stage}_{block}"] = BasicBlock(inputs, width, stride, norm, shortcut)
            inputs = width
    return layers


def _cifar_resnet(
    depth: int, shape: Shape, classes: int, norm: str, groups: int, shortcut: str, widen: int = 1
) -> Network:
    """Return a ResNet of three stages of (depth - 2) / 6 blocks with 16, 32, 64 channels."""
    inputs = parts.image_channels(f"a {depth}-layer ResNet", shape)
    parts.one_of("shortcut", shortcut, ("conv", "pad"))
    make_norm = parts.norm_layer(norm, groups)
    widths = (16 * widen, 32 * widen, 64 * widen)
    layers: Layers = OrderedDict(
        conv=Conv2d(inputs, widths[0], 3, padding=1, bias=False),
        norm=make_norm(widths[0]),
        relu=nn.ReLU(),
    )
    layers.update(_stages(widths[0], widths, ((depth - 2) // 6,) * 3, make_norm, shortcut))
    layers["average"] = parts.GlobalAverage()
    return Network(nn.Sequential(layers), nn.Linear(widths[-1], classes))


@entry("model", paper=f"{HE}; Li et al., ICML 2023 (FedLAW)", url=HE_URL)
def resnet8(
    shape: Shape, classes: int, *, norm: str = "group", groups: int = 2, shortcut: str = "conv"
) -> Network:
    """ResNet-8 for CIFAR: see `resnet20`."""
    return _cifar_resnet(8, shape, classes, norm, groups, shortcut)


@entry("model", paper=f"{HE}; FedLAW; Caldarola et al., ICCVW 2023 (WIMA, GroupNorm)", url=HE_URL)
def resnet20(
    shape: Shape, classes: int, *, norm: str = "group", groups: int = 2, shortcut: str = "conv"
) -> Network:
    """ResNet-20 for CIFAR: three stages of 16, 32, 64 channels; WIMA's with GroupNorm.

    FedLAW's networks are ``norm="batch"`` with 1 x 1 convolutions as shortcuts; He et al.'s own
    have parameter-free shortcuts (``shortcut="pad"``).

    Args:
        norm: "group" (GroupNorm of `groups` groups), "batch" or "none".
        groups: see `norm`.
        shortcut: where a stage changes the shape, "conv" or "pad" (zero channels).
    """
    return _cifar_resnet(20, shape, classes, norm, groups, shortcut)


@entry("model", paper=f"{HE}; Li et al., ICML 2023 (FedLAW)", url=HE_URL)
def resnet56(
    shape: Shape, classes: int, *, norm: str = "group", groups: int = 2, shortcut: str = "conv"
) -> Network:
    """ResNet-56 for CIFAR: see `resnet20`."""
    return _cifar_resnet(56, shape, classes, norm, groups, shortcut)


@entry("model", paper=f"{HE}; Li et al., ICML 2023 (FedLAW)", url=HE_URL)
def resnet110(
    shape: Shape, classes: int, *, norm: str = "group", groups: int = 2, shortcut: str = "conv"
) -> Network:
    """ResNet-110 for CIFAR: see `resnet20`."""
    return _cifar_resnet(110, shape, classes, norm, groups, shortcut)


@entry(
    "model",
    paper="Li et al., NeurIPS 2018; Li et al., ICML 2023 (FedLAW)",
    url="https://arxiv.org/abs/1712.09913",
)
def wrn56_4(
    shape: Shape, classes: int, *, norm: str = "group", groups: int = 2, shortcut: str = "conv"
) -> Network:
    """Wide ResNet-56-4 of FedLAW: `resnet56` with four times the channels, first layer included."""
    return _cifar_resnet(56, shape, classes, norm, groups, shortcut, widen=4)


def _stem(stem: str, inputs: int, norm: Norm) -> Layers:
    """Return the first layers of ResNet-18 and 34."""
    parts.one_of("stem", stem, ("cifar", "imagenet"))
    kernel, stride = (3, 1) if stem == "cifar" else (7, 2)
    layers: Layers = OrderedDict(
        conv=Conv2d(inputs, 64, kernel, stride, padding=kernel // 2, bias=False),
        norm=norm(64),
        relu=nn.ReLU(),
    )
    if stem == "imagenet":
        layers["pool"] = nn.MaxPool2d(3, stride=2, padding=1)
    return layers


def _resnet(
    blocks: tuple[int, ...],
    shape: Shape,
    classes: int,
    projector: int,
    stem: str,
    norm: str,
    groups: int,
) -> Network:
    """Return a ResNet of four stages with 64, 128, 256, 512 channels, He-normal convolutions."""
    make_norm = parts.norm_layer(norm, groups)
    layers = _stem(stem, parts.image_channels("a ResNet", shape), make_norm)
    layers.update(_stages(64, (64, 128, 256, 512), blocks, make_norm, "conv"))
    layers["average"] = parts.GlobalAverage()
    widths = (projector,) if projector else ()
    layers.update(parts.dense_layers(512, widths, relu_last=False))
    network = Network(nn.Sequential(layers), nn.Linear((512, *widths)[-1], classes))
    parts.he_normal(network)
    return network


@entry("model", paper=f"{HE}; Zhou et al., IEEE TMC 2024 (FedIMA)", url=HE_URL)
def resnet18(
    shape: Shape,
    classes: int,
    *,
    projector: int = 0,
    stem: str = "cifar",
    norm: str = "group",
    groups: int = 2,
) -> Network:
    """ResNet-18 with GroupNorm; FedIMA's has ``projector=128``.

    FedCDA names ResNet-18 and no more. FL-Simulator, on which the FedWCM authors build, keeps
    ImageNet's first layers on CIFAR (``stem="imagenet"``).

    Args:
        projector: width of a linear layer before the head, without ReLU; 0 leaves it out.
        stem: "cifar" (3 x 3 convolution) or "imagenet" (7 x 7, stride 2, then 3 x 3 max pooling).
        norm: "group" (GroupNorm of `groups` groups), "batch" or "none".
        groups: see `norm`.
    """
    return _resnet((2, 2, 2, 2), shape, classes, projector, stem, norm, groups)


@entry("model", paper=HE, url=HE_URL)
def resnet34(
    shape: Shape,
    classes: int,
    *,
    projector: int = 0,
    stem: str = "cifar",
    norm: str = "group",
    groups: int = 2,
) -> Network:
    """ResNet-34 with GroupNorm: see `resnet18`."""
    return _resnet((3, 4, 6, 3), shape, classes, projector, stem, norm, groups)
