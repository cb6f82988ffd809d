"""Plain convolutional networks: convolutions and poolings, fully connected layers, a linear head.

Every network takes the shape (channels, height, width) of an image and the number of classes
from the data. Where a paper's table and its authors' code differ, the code made the published
numbers and is followed; the docstrings say so and how to build the other.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from fedbasin.core.catalogue import entry
from fedbasin.models import parts
from fedbasin.models.convolution import Conv2d
from fedbasin.models.dropout import Dropout
from fedbasin.models.network import Network
from fedbasin.models.parts import Layers, MaxPool2d, Norm, Shape

FEDIMA = "Zhou et al., IEEE TMC 2024 (FedIMA)"
FEDIMA_URL = "https://arxiv.org/abs/2305.07845"
FEDLAW = "Li et al., ICML 2023 (FedLAW)"
FEDLAW_URL = "https://arxiv.org/abs/2302.10911"


class Conv(NamedTuple):
    """A convolution, and the max pooling of stride 2 that follows it (window 0: none)."""

    channels: int
    kernel: int
    stride: int = 1
    padding: int = 0
    pool: int = 0


def _convnet(
    name: str,
    shape: Shape,
    classes: int,
    convolutions: list[Conv],
    widths: tuple[int, ...] = (),
    *,
    norm: Norm | None = None,
    relu_last: bool = True,
    dropout: tuple[float, ...] = (0.0, 0.0),
    hint: str = "",
) -> Network:
    """Return convolution, norm, pooling, ReLU for each entry, then hidden layers and the head.

    Args:
        name: the network, for error messages.
        shape: of an image.
        classes: outputs of the head.
        convolutions: in order.
        widths: of the hidden fully connected layers.
        norm: makes the normalisation behind every convolution; None has none.
        relu_last: whether a ReLU follows the last hidden layer too.
        dropout: probabilities behind the last pooling and before the head.
        hint: what else to do about an image that is too small.
    """
    channels = parts.image_channels(name, shape)
    layers: Layers = OrderedDict()
    for i, (outputs, kernel, stride, padding, pool) in enumerate(convolutions, start=1):
        layers[f"conv{i}"] = Conv2d(channels, outputs, kernel, stride, padding)
        if norm:
            layers[f"norm{i}"] = norm(outputs)
        if pool:
            layers[f"pool{i}"] = MaxPool2d(pool, stride=2)
        # ReLU and max commute, in values and gradients, and behind the max there is less to do
        layers[f"conv{i}_relu"] = nn.ReLU()
        channels = outputs
    height, width = parts.output_size(name, nn.Sequential(layers), shape, hint)
    flat = channels * height * width
    layers["flat"] = nn.Flatten()  # before dropping: a mask lies row by row, channels need not
    layers.update(_dropout("dropout1", dropout[0]))
    layers.update(parts.dense_layers(flat, widths, relu_last=relu_last))
    layers.update(_dropout("dropout2", dropout[1]))
    return Network(nn.Sequential(layers), nn.Linear((flat, *widths)[-1], classes))


def _dropout(name: str, p: float) -> dict[str, nn.Module]:
    """Return a dropout layer, or none for p = 0, so that only networks that drop carry keys."""
    return {name: Dropout(p)} if p else {}


@entry("model", paper=FEDIMA, url=FEDIMA_URL)
def fmnist_cnn(
    shape: Shape,
    classes: int,
    *,
    channels: tuple[int, ...] = (32, 32),
    widths: tuple[int, ...] = (384, 128),
) -> Network:
    """FedIMA's CNN for Fashion-MNIST: two 5 x 5 convolutions, 512-384-128-classes.

    Table 4 prints no ReLU behind the 128 features; the authors' code has one, and so has this.

    Args:
        channels: of the convolutions, each followed by ReLU and 2 x 2 max pooling.
        widths: of the hidden fully connected layers, each followed by ReLU.
    """
    return _convnet("fmnist_cnn", shape, classes, [Conv(c, 5, pool=2) for c in channels], widths)


@entry("model", paper=FEDIMA, url=FEDIMA_URL)
def cifar_cnn(
    shape: Shape,
    classes: int,
    *,
    channels: tuple[int, ...] = (64, 64),
    widths: tuple[int, ...] = (384, 128),
) -> Network:
    """FedIMA's CNN for CIFAR-10: two 5 x 5 convolutions, 1600-384-128-classes.

    As in `fmnist_cnn` the features pass a ReLU. ``widths=(384, 192)`` is the CNN of FedDyn and
    of the simulators built on it.

    Args:
        channels: of the convolutions, each followed by ReLU and 2 x 2 max pooling.
        widths: of the hidden fully connected layers, each followed by ReLU.
    """
    return _convnet("cifar_cnn", shape, classes, [Conv(c, 5, pool=2) for c in channels], widths)


@entry("model", paper=FEDIMA, url=FEDIMA_URL)
def digit_cnn(
    shape: Shape,
    classes: int,
    *,
    widths: tuple[int, ...] = (384, 128),
    pools: int = 3,
    norm: str = "group",
    groups: int = 2,
) -> Network:
    """FedIMA's CNN for Digit-Five: three padded 5 x 5 convolutions (64, 64, 128) with GroupNorm.

    At 28 x 28 the code has 1152-384-128. Table 4 prints 6272-2048-128, which three poolings
    cannot give; ``pools=2, widths=(2048, 128)`` builds it. The features pass no ReLU.

    Args:
        widths: of the hidden fully connected layers, ReLU between them.
        pools: how many of the convolutions, from the first, a 2 x 2 max pooling follows.
        norm: "group" (GroupNorm of `groups` groups), "batch" or "none".
        groups: see `norm`.
    """
    convolutions = [
        Conv(c, 5, padding=2, pool=2 if i < pools else 0) for i, c in enumerate((64, 64, 128))
    ]
    make_norm = parts.norm_layer(norm, groups)
    return _convnet(
        "digit_cnn", shape, classes, convolutions, widths, norm=make_norm, relu_last=False
    )


@entry("model", paper=FEDIMA, url=FEDIMA_URL)
def vgg11(
    shape: Shape, classes: int, *, projector: int = 128, norm: str = "group", groups: int = 2
) -> Network:
    """VGG-11 with GroupNorm and FedIMA's linear projector in place of the wide hidden layers.

    Args:
        projector: width of the linear layer before the head, without ReLU; 0 leaves it out.
        norm: "group" (GroupNorm of `groups` groups), "batch" or "none".
        groups: see `norm`.
    """
    channels = (64, 128, 256, 256, 512, 512, 512, 512)
    pools = (2, 2, 0, 2, 0, 2, 0, 2)
    convolutions = [Conv(c, 3, 1, 1, pool) for c, pool in zip(channels, pools, strict=True)]
    widths = (projector,) if projector else ()
    make_norm = parts.norm_layer(norm, groups)
    return _convnet("vgg11", shape, classes, convolutions, widths, norm=make_norm, relu_last=False)


_ALEXNET_STEMS = {"imagenet": Conv(64, 11, 4, 2, pool=3), "cifar": Conv(64, 5, 1, 2, pool=3)}


@entry("model", paper=f"{FEDIMA}; {FEDLAW}", url=FEDIMA_URL)
def alexnet(
    shape: Shape,
    classes: int,
    *,
    widths: tuple[int, ...] = (1024, 512),
    stem: str = "imagenet",
    norm: str = "group",
    groups: int = 2,
) -> Network:
    """AlexNet (64, 192, 384, 256, 256) with a normalisation behind every convolution, no dropout.

    FedIMA's text has 2 groups and 4096-4096-512 hidden units (``widths=(4096, 4096, 512)``);
    its code has 32 groups (``groups=32``) and 1024-512. FedLAW trains an AlexNet on CIFAR that
    it does not publish; ``stem="cifar"`` is our choice for images of 15 x 15 and more.

    Args:
        widths: of the hidden fully connected layers, each followed by ReLU.
        stem: first convolution, "imagenet" (11 x 11, stride 4) or "cifar" (5 x 5, stride 1).
        norm: "group" (GroupNorm of `groups` groups), "batch" or "none".
        groups: see `norm`.
    """
    convolutions = [
        _ALEXNET_STEMS[parts.one_of("stem", stem, _ALEXNET_STEMS)],
        Conv(192, 5, padding=2, pool=3),
        Conv(384, 3, padding=1),
        Conv(256, 3, padding=1),
        Conv(256, 3, padding=1, pool=3),
    ]
    hint = ", or stem='cifar'" if stem == "imagenet" else ""
    make_norm = parts.norm_layer(norm, groups)
    return _convnet("alexnet", shape, classes, convolutions, widths, norm=make_norm, hint=hint)


@entry(
    "model",
    paper="Wang et al., ICLR 2024 (FedCDA); McMahan et al., AISTATS 2017",
    url="https://openreview.net/forum?id=nbPGqeH3lt",
)
def fedcda_cnn(shape: Shape, classes: int) -> Network:
    """FedCDA's CNN for Fashion-MNIST: two padded 5 x 5 convolutions (32, 64), 3136-512-classes.

    The paper describes McMahan's MNIST CNN word for word and says nothing of padding; padding 2
    gives the 1,663,370 parameters McMahan et al. state for it.
    """
    convolutions = [Conv(c, 5, padding=2, pool=2) for c in (32, 64)]
    return _convnet("fedcda_cnn", shape, classes, convolutions, (512,))


@entry("model", paper=FEDLAW, url=FEDLAW_URL)
def lenet(shape: Shape, classes: int) -> Network:
    """FedLAW's LeNet for Fashion-MNIST: two padded 5 x 5 convolutions (16, 32) and the head."""
    return _convnet("lenet", shape, classes, [Conv(c, 5, padding=2, pool=2) for c in (16, 32)])


@entry("model", paper=FEDLAW, url=FEDLAW_URL)
def simple_cnn(shape: Shape, classes: int) -> Network:
    """FedLAW's SimpleCNN for CIFAR: three 3 x 3 convolutions (32, 64, 64), 1024-64-classes.

    The text has one pooling, but 64 x 4 x 4 features of a 32 x 32 image take the two of the code.
    """
    convolutions = [Conv(32, 3, pool=2), Conv(64, 3, pool=2), Conv(64, 3)]
    return _convnet("simple_cnn", shape, classes, convolutions, (64,))


def _dropout_cnn(
    name: str,
    shape: Shape,
    classes: int,
    dropout: tuple[float, ...],
    initialise: Callable[[nn.Module], None],
) -> Network:
    """Return two 3 x 3 convolutions (32, 64), pooling, dropout, 128 units, dropout, head."""
    if len(dropout) != 2:
        raise ValueError(f"dropout takes two probabilities, got {dropout}")
    convolutions = [Conv(32, 3), Conv(64, 3, pool=2)]
    network = _convnet(name, shape, classes, convolutions, (128,), dropout=dropout)
    initialise(network)
    return network


@entry(
    "model",
    paper="Reddi et al., ICLR 2021; FedJAX, used by Caldarola et al., ICCVW 2023 (WIMA)",
    url="https://arxiv.org/abs/2003.00295",
)
def emnist_cnn(shape: Shape, classes: int, *, dropout: tuple[float, ...] = (0.25, 0.5)) -> Network:
    """FedJAX's CNN for (F)EMNIST: two 3 x 3 convolutions (32, 64), 9216-128-classes, dropout.

    Weights start as in FedJAX: truncated N(0, 1 / fan_in), biases zero.

    Args:
        dropout: probabilities behind the pooling and behind the hidden layer.
    """
    return _dropout_cnn("emnist_cnn", shape, classes, dropout, parts.lecun_truncated)


@entry(
    "model",
    paper="Granqvist et al., NeurIPS 2024 (pfl-research)",
    url="https://arxiv.org/abs/2404.06430",
)
def pfl_cnn(shape: Shape, classes: int, *, dropout: tuple[float, ...] = (0.25, 0.5)) -> Network:
    """pfl-research's CNN for CIFAR-10: two 3 x 3 convolutions (32, 64), 12544-128-classes, dropout.

    The layers are those of `emnist_cnn`; weights start Glorot uniform, biases as in torch.

    Args:
        dropout: probabilities behind the pooling and behind the hidden layer.
    """
    return _dropout_cnn("pfl_cnn", shape, classes, dropout, parts.glorot_uniform)
