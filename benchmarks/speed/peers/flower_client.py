"""What a Flower client does, in a module of its own: Ray's actors import it and keep its rows."""

from functools import lru_cache

import torch
from torch import nn

from peers import networks, work
from peers.work import pixels


@lru_cache(maxsize=1)
def loaded(path: str):
    """Return the work with its network and rows, once in each actor."""
    torch.set_num_threads(1)
    found = work.read(path)
    inputs = torch.from_numpy(pixels(found.inputs))
    return found.shape, networks.network(found), inputs, torch.from_numpy(found.labels)


def train(path: str, client: int, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Train one client from a state dict and return its state dict."""
    shape, net, inputs, labels = loaded(path)
    net.load_state_dict(state)
    optimiser = torch.optim.SGD(net.parameters(), lr=shape.lr, momentum=shape.momentum)
    for rows in torch.randperm(shape.rows).split(shape.batch):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(inputs[client][rows]), labels[client][rows]).backward()
        optimiser.step()
    return net.state_dict()
