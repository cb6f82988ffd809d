"""Which samples a client sees in which step: the same for every method and every engine.

Epoch e of a client shuffles its rows by sorting a keyed hash of the row numbers, then cuts
them into batches; the last, partial batch is kept. A plan in steps takes the first `steps`
batches of that endless stream.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fedbasin.core.method import Plan
from fedbasin.core.rng import bits, fold_in

# A client's key is folded with one of these, so its batches, augmentation and dropout differ.
ORDER = 1
AUGMENT = 2
DROPOUT = 3


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


def epoch_order(key: Tensor, epoch: int, rows: int, chances: Tensor | None = None) -> Tensor:
    """Return the order [n] in which one epoch visits a client's rows, or n rows drawn by chance."""
    counter = torch.arange(rows, device=key.device)
    drawn = bits(fold_in(fold_in(key, ORDER), epoch), counter)
    if chances is None:
        return torch.argsort(drawn, stable=True)
    return draw(drawn, chances)


def epoch_orders(key: Tensor, epochs: int, rows: int, chances: Tensor | None = None) -> Tensor:
    """Return the orders [epochs, n] of several passes at once, as `epoch_order` gives each."""
    passes = torch.arange(epochs, device=key.device)
    keys = fold_in(fold_in(key, ORDER).expand(epochs, 2), passes)
    counter = torch.arange(rows, device=key.device).expand(epochs, rows)
    drawn = bits(keys, counter)
    if chances is None:
        return torch.argsort(drawn, dim=1, stable=True)
    return draw(drawn, chances.expand(epochs, rows))


def draw(drawn: Tensor, chances: Tensor) -> Tensor:
    """Turn 32 random bits [..., n] into row numbers that appear in proportion to the chances."""
    below = chances.to(torch.float64).cumsum(-1)
    at = (drawn.to(torch.float64) + 0.5) / (1 << 32) * below[..., -1:]
    return torch.searchsorted(below, at).clamp(max=chances.shape[-1] - 1)


def batches(
    key: Tensor, plan: Plan, rows: int, batch: int, chances: Tensor | None = None
) -> list[Tensor]:
    """Return the row numbers of every local step of one client.

    Args:
        key: int64 [2], the client's key of this round.
        plan: how long it trains.
        rows: how many rows it holds.
        batch: batch size, B.
        chances: [n] how likely each row is, for clients that draw with replacement.
    """
    total = count_steps(plan, rows, batch)
    if not total:
        return []
    epochs = math.ceil(total / steps_per_epoch(rows, batch))
    orders = epoch_orders(key, epochs, rows, chances)
    return [index for order in orders for index in order.split(batch)][:total]


def proxy_batches(key: Tensor, epoch: int, rows: int, batch: int) -> Iterator[Tensor | None]:
    """Yield the rows of each step of one pass over the server's own rows; None is all of them."""
    if rows <= batch:
        yield None
    else:
        yield from epoch_order(key, epoch, rows).split(batch)


def cohort_rows(
    keys: Tensor,
    sizes: Tensor,
    steps: Tensor,
    batch: int,
    most_steps: int,
    most_rows: int,
    epochs: int,
    chances: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return row numbers [C, K, B] within each client and which of them are real.

    Args:
        keys: int64 [C, 2], the clients' keys of this round.
        sizes: int64 [C], rows of each client.
        steps: int64 [C], local steps of each client.
        batch: batch size, B.
        most_steps: K, the largest number of steps.
        most_rows: the largest number of rows.
        epochs: the largest number of passes that a client's steps take, begun ones included.
        chances: [C, most_rows] for clients that draw with replacement; 0 beyond their rows.
    """
    device = keys.device
    passes = torch.div(sizes + batch - 1, batch, rounding_mode="floor").clamp(min=1)  # an epoch
    counter = torch.arange(most_rows, device=device).expand(len(sizes), most_rows)
    beyond = counter >= sizes[:, None]
    ordered = fold_in(keys, ORDER)
    orders = []
    for epoch in range(epochs):
        drawn = bits(fold_in(ordered, epoch), counter)
        if chances is None:
            orders.append(torch.argsort(drawn.masked_fill(beyond, 1 << 32), dim=1, stable=True))
        else:
            orders.append(draw(drawn, chances))
    order = torch.stack(orders, 1).view(len(sizes), -1)  # [C, epochs * rows]
    number = torch.arange(most_steps, device=device)
    epoch_of = torch.div(number[None], passes[:, None], rounding_mode="floor")
    first = (number[None] % passes[:, None]) * batch
    place = first[..., None] + torch.arange(batch, device=device)
    real = (place < sizes[:, None, None]) & (number[None, :, None] < steps[:, None, None])
    at = epoch_of.clamp(max=epochs - 1)[..., None] * most_rows + place.clamp(max=most_rows - 1)
    rows = torch.gather(order, 1, at.view(len(sizes), -1)).view(at.shape)
    return rows.masked_fill(~real, 0), real
