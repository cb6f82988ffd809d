"""One step of one rule on a toy network in float64, and the numerical gradient of an objective."""

import numpy as np
import torch
from torch import nn

from fedbasin.core.net import Net
from fedbasin.core.rng import root
from fedbasin.core.rule import Batch, Start
from fedbasin.local import SGD
from fedbasin.local.step import Point, step

KEY = root(5).tensor()


class Small(nn.Module):
    """Four inputs, five features, three classes."""

    def __init__(self, bias=True):
        super().__init__()
        self.hidden = nn.Linear(4, 5)
        self.head = nn.Linear(5, 3, bias=bias)

    def features(self, x):
        return torch.tanh(self.hidden(x))

    def forward(self, x):
        return self.head(self.features(x))


def small_net(bias=True):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Net(Small(bias), dtype=torch.float64)


def small_batch(labels=(0, 2, 2, 1, 0, 2), padding=0):
    """Drawn inputs; padded rows repeat the first one and have no weight."""
    rng = np.random.default_rng(3)
    inputs = torch.from_numpy(rng.normal(size=(len(labels), 4)))
    weight = torch.cat([torch.ones(len(labels)), torch.zeros(padding)]).double()
    inputs = torch.cat([inputs, inputs[:1].repeat(padding, 1)])
    labels = torch.tensor([*labels, *(labels[:1] * padding)])
    return Batch(inputs, labels, weight)


def start_with(vector, counts=(2, 1, 3), shared=(), own=(), survey=(), round=1.0, epoch_steps=2.0):
    number = torch.tensor
    counts = number(counts, dtype=vector.dtype)
    return Start(
        vector=vector,
        shared=shared,
        client_state=own,
        round=number(round),
        lr=number(0.1),
        steps=number(4.0),
        epoch_steps=number(epoch_steps),
        examples=counts.sum(),
        class_counts=counts,
        survey=survey,
        buffers=vector.new_zeros(0),
    )


def direction_of(rule, net, batch, start, at, lr=1.0):
    """The displacement of one step of size 1 from `at`, and the carry after it."""
    point = Point(at, (), at.new_zeros(0), (rule.begin(start, net),))
    after, _ = step(point, batch, lr, KEY, net=net, rules=(rule,), optimiser=SGD())
    return at - after.vector, after.carries[0]


def numerical_gradient(objective, point, width=1e-6):
    found = torch.zeros_like(point)
    for i in range(len(point)):
        nudge = torch.zeros_like(point)
        nudge[i] = width
        found[i] = (objective(point + nudge) - objective(point - nudge)) / (2 * width)
    return found
