"""The batches of a whole cohort at once: the same rows as `batches`, as one padded tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from fedbasin.core.rng import bits, fold_in
from fedbasin.local.batches import ORDER, draw


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
