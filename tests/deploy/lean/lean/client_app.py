"""Clients of 20, 25, 30, ... made-up rows."""

import numpy as np
import torch
from torch import nn

from fedbasin.deploy import client_app
from fedbasin.local.train import Shard


def model() -> nn.Module:
    """Return the network, always with the same weights."""
    net = nn.Linear(4, 3)
    with torch.no_grad():
        net.weight.copy_(torch.linspace(-1, 1, 12).reshape(3, 4))
        net.bias.zero_()
    return net


def rows(client: int, clients: int) -> Shard:
    """Return the rows of a client."""
    draws = np.random.default_rng(client)
    labels = draws.integers(0, 3, 20 + 5 * client)
    inputs = draws.integers(0, 256, (len(labels), 4)).astype(np.uint8)
    return Shard(torch.from_numpy(inputs), torch.from_numpy(labels))


app = client_app(model, rows, classes=3, batch=8)
