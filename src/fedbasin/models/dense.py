"""Networks of fully connected layers; they take inputs of any shape."""

from __future__ import annotations

import math
from collections import OrderedDict

from torch import nn

from fedbasin.core.catalogue import entry
from fedbasin.models.network import Network
from fedbasin.models.parts import Layers, Shape, dense_layers


@entry("model")
def logistic(shape: Shape, classes: int) -> Network:
    """Linear softmax regression: the head alone, on the flattened input."""
    return Network(nn.Flatten(), nn.Linear(math.prod(shape), classes))


@entry(
    "model",
    paper="McMahan et al., AISTATS 2017 (2NN); Li et al., ICML 2023 (FedLAW)",
    url="https://arxiv.org/abs/1602.05629",
)
def mlp(shape: Shape, classes: int, *, widths: tuple[int, ...] = (200, 200)) -> Network:
    """Multi-layer perceptron, on 28 x 28 images 784-200-200-classes.

    Args:
        widths: of the hidden layers, each followed by ReLU.
    """
    inputs = math.prod(shape)
    layers: Layers = OrderedDict(flat=nn.Flatten(), **dense_layers(inputs, widths))
    return Network(nn.Sequential(layers), nn.Linear((inputs, *widths)[-1], classes))
