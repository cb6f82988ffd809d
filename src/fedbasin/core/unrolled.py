"""Torch's recurrent layers written out step by step, for `vmap`.

Torch's own have no batching rule. Under `vmap` they run only where a gradient is taken with respect
to weights that are mapped as well, and an LSTM in single precision then runs client by client.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

State = tuple[Tensor, ...]  # h, and c of an LSTM
Cell = Callable[[Tensor, Tensor, State], State]  # what drives it, what the state adds, the state


def gru(driven: Tensor, added: Tensor, state: State) -> State:
    """Return h' = (1 - z) n + z h, with gates r and z and n = tanh(x_n + r h_n)."""
    x_r, x_z, x_n = driven.chunk(3, -1)
    h_r, h_z, h_n = added.chunk(3, -1)
    update = torch.sigmoid(x_z + h_z)
    new = torch.tanh(x_n + torch.sigmoid(x_r + h_r) * h_n)
    return ((1 - update) * new + update * state[0],)


def lstm(driven: Tensor, added: Tensor, state: State) -> State:
    """Return h' = s(o) tanh(c') and c' = s(f) c + s(i) tanh(g)."""
    i, f, g, o = (driven + added).chunk(4, -1)
    memory = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(memory), memory


def rnn_tanh(driven: Tensor, added: Tensor, state: State) -> State:
    """Return h' = tanh(x + h)."""
    return (torch.tanh(driven + added),)


def rnn_relu(driven: Tensor, added: Tensor, state: State) -> State:
    """Return h' = relu(x + h)."""
    return (torch.relu(driven + added),)


CELLS: dict[str, Cell] = {cell.__name__: cell for cell in (gru, lstm, rnn_tanh, rnn_relu)}


def layer(
    cell: Cell, sequence: Tensor, start: State, weights: Sequence[Tensor], biases: bool
) -> tuple[Tensor, ...]:
    """Run one layer, in one or both directions.

    Args:
        cell: one step of it.
        sequence: [B, T, d].
        start: h (and c) at the start, [directions, B, width] each.
        weights: W, R, their biases if there are any, and an LSTM's projection; by direction.
        biases: whether there are biases.

    Returns:
        The states h of all steps [B, T, ...], then h (and c) at the end, like `start`.
    """
    directions = len(start[0])
    per_direction = len(weights) // directions
    outputs = []
    ends = []
    for way in range(directions):
        state = tuple(each[way] for each in start)
        own = weights[way * per_direction : (way + 1) * per_direction]
        states, end = _one_way(cell, sequence, state, own, biases, backwards=way == 1)
        outputs.append(states)
        ends.append(end)
    return torch.cat(outputs, -1), *(torch.stack(each) for each in zip(*ends, strict=True))


def _one_way(
    cell: Cell,
    sequence: Tensor,
    state: State,
    weights: Sequence[Tensor],
    biases: bool,
    *,
    backwards: bool,
) -> tuple[Tensor, State]:
    bias_in, bias_on = weights[2:4] if biases else (None, None)
    projection = weights[-1] if len(weights) % 2 else None
    driven = F.linear(sequence, weights[0], bias_in)
    times = range(sequence.shape[1])
    states = []
    for t in reversed(times) if backwards else times:
        state = cell(driven[:, t], F.linear(state[0], weights[1], bias_on), state)
        if projection is not None:
            state = (F.linear(state[0], projection), *state[1:])
        states.append(state[0])
    if backwards:
        states.reverse()
    return torch.stack(states, 1), state
