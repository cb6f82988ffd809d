"""The networks of the papers; importing this room enters them in the catalogue.

A model is a function ``(shape, classes, *, hyper-parameters) -> Network``, where the shape of one
example and the number of classes come from the data.
"""

from fedbasin.models.convnets import (
    alexnet,
    cifar_cnn,
    digit_cnn,
    emnist_cnn,
    fedcda_cnn,
    fmnist_cnn,
    lenet,
    pfl_cnn,
    simple_cnn,
    vgg11,
)
from fedbasin.models.convolution import Conv2d
from fedbasin.models.custom import custom, given
from fedbasin.models.dense import logistic, mlp
from fedbasin.models.densenet import densenet121
from fedbasin.models.dropout import Dropout, key_names, number_sites
from fedbasin.models.lora import lora, with_lora
from fedbasin.models.mobilenet import mobilenetv2
from fedbasin.models.network import Network
from fedbasin.models.pretrained import hf, timm
from fedbasin.models.recurrent import shakespeare_lstm
from fedbasin.models.resnets import (
    resnet8,
    resnet18,
    resnet20,
    resnet34,
    resnet56,
    resnet110,
    wrn56_4,
)

__all__ = [
    "Conv2d",
    "Dropout",
    "Network",
    "alexnet",
    "cifar_cnn",
    "custom",
    "densenet121",
    "digit_cnn",
    "emnist_cnn",
    "fedcda_cnn",
    "fmnist_cnn",
    "given",
    "hf",
    "key_names",
    "lenet",
    "logistic",
    "lora",
    "mlp",
    "mobilenetv2",
    "number_sites",
    "pfl_cnn",
    "resnet8",
    "resnet18",
    "resnet20",
    "resnet34",
    "resnet56",
    "resnet110",
    "shakespeare_lstm",
    "simple_cnn",
    "timm",
    "vgg11",
    "with_lora",
    "wrn56_4",
]
