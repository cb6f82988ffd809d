"""Which samples a client sees in which step: the same for every method and every engine.

Epoch e of a client shuffles its rows by sorting a keyed hash of the row numbers, then cuts
them into batches; the last, partial batch is kept. A plan in steps takes the first `steps`
batches of that endless stream.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedbasin.core.method import Plan
from fedbasin.core.rng import bits, fold_in

# A client's key is folded with one of these, so its batches, augmentation and dropout differ.
ORDER, AUGMENT, DROPOUT = 1, 2, 3


def steps_per_epoch(rows: int, batch: int) -> int:
    """Count the batches of one pass: ceil(n / B)."""
    return math.ceil(rows / batch)


def count_steps(plan: Plan, rows: int, batch: int) -> int:
    """Count the local steps K_i of a client with n rows."""
    if rows == 0:
        return 0
    if plan.steps is not None:
        return plan.steps
    assert plan.epochs is not None
    return plan.epochs * steps_per_epoch(rows, batch)


def epoch_order(key: Tensor, epoch: int, rows: int) -> Tensor:
    """Return the order [n] in which one epoch visits a client's rows."""
    counter = torch.arange(rows, device=key.device)
    return torch.argsort(bits(fold_in(fold_in(key, ORDER), epoch), counter), stable=True)


def batches(key: Tensor, plan: Plan, rows: int, batch: int) -> list[Tensor]:
    """Return the row numbers of every local step of one client.

    Args:
        key: int64 [2], the client's key of this round.
        plan: how long it trains.
        rows: how many rows it holds.
        batch: batch size, B.
    """
    total, epoch = count_steps(plan, rows, batch), 0
    found: list[Tensor] = []
    while len(found) < total:
        found.extend(epoch_order(key, epoch, rows).split(batch))
        epoch += 1
    return found[:total]
