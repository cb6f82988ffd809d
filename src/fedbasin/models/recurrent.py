"""The recurrent network for next-character prediction, with an LSTM that `vmap` can take."""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
from torch import Tensor, nn

from fedbasin.core.catalogue import entry
from fedbasin.models.network import Network
from fedbasin.models.parts import Shape, lecun_truncated, truncated_normal


class LSTM(nn.Module):
    """An LSTM layer written as a loop over time, because `torch.nn.LSTM` has no batching rule.

    With ``[i, g, f, o] = W x_t + R h + b``: ``c' = s(f + 1) c + s(i) tanh(g)`` and
    ``h' = s(o) tanh(c')``, s the logistic function; c and h start at zero. This is Haiku's cell:
    one bias, and 1 added to the forget gate. W and R start from truncated N(0, 1 / (d + h)).

    Args:
        inputs: width d of the input.
        hidden: width h of the state.
    """

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.input = nn.Linear(inputs, 4 * hidden)
        self.recurrent = nn.Linear(hidden, 4 * hidden, bias=False)
        for layer in (self.input, self.recurrent):
            truncated_normal(layer.weight, 1 / math.sqrt(inputs + hidden))
        nn.init.zeros_(self.input.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the states h of all steps, [B, T, h], for a sequence [B, T, d]."""
        driven = self.input(x)
        h = c = x.new_zeros(x.shape[0], self.recurrent.in_features)
        states = []
        for t in range(x.shape[1]):
            i, g, f, o = (driven[:, t] + self.recurrent(h)).chunk(4, dim=-1)
            c = torch.sigmoid(f + 1) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            states.append(h)
        return torch.stack(states, dim=1)


class LastStep(nn.Module):
    """Keep the last step of a sequence: [B, T, d] to [B, d]."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the last step."""
        return x[:, -1]


@entry(
    "model",
    paper="McMahan et al., AISTATS 2017; FedJAX, used by Caldarola et al., ICCVW 2023 (WIMA)",
    url="https://arxiv.org/abs/1602.05629",
)
def shakespeare_lstm(
    shape: Shape, classes: int, *, embedding: int = 8, hidden: int = 256, layers: int = 2
) -> Network:
    """FedJAX's character LSTM: embedding 8, two LSTM layers of 256, logits for the next character.

    Input is a batch of int64 tokens [B, T] below the number of classes. FedJAX passes each layer's
    output through a tanh, so has this; its loss counts every position, here only the last.
    The loop over time is unrolled by ``torch.compile``, which takes minutes: ``compiles=False``.

    Args:
        embedding: width of a character's vector.
        hidden: width of an LSTM layer.
        layers: number of LSTM layers.
    """
    if len(shape) != 1:
        raise ValueError(f"shakespeare_lstm takes token sequences (length,), got shape {shape}")
    characters = nn.Embedding(classes, embedding)
    truncated_normal(characters.weight, 1.0)
    body = nn.Sequential(OrderedDict(embedding=characters))
    inputs = embedding
    for i in range(1, layers + 1):
        body.add_module(f"lstm{i}", LSTM(inputs, hidden))
        body.add_module(f"lstm{i}_tanh", nn.Tanh())
        inputs = hidden
    body.add_module("last", LastStep())
    head = nn.Linear(inputs, classes)
    lecun_truncated(head)
    return Network(body, head, compiles=False)
