"""What the robust rules share: a base that merges rows, and distances between rows.

A rule is a function of rows, `combine`. Updates are rows, and so are the clients' BatchNorm
statistics: both go through the same rule. Sample counts are claims of the clients. They are
ignored, except by a rule that says otherwise.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedbasin.core.method import Context, Method, Replies, ReplyError, Served
from fedbasin.core.protocols import MergesStatistics

_PIECE = 1 << 22  # numbers that are sorted or copied at once


class Robust(MergesStatistics, Method):
    """A base that merges the rows of clients by a rule that few of them cannot move far."""

    @abstractmethod
    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Merge rows [n, P] of clients with sample counts [n]; return [P]."""

    def aggregate(
        self, state: Any, server: Tensor, replies: Replies, context: Context
    ) -> tuple[Served, Any]:
        """Step along the combined update."""
        model = server + self.combine(*present_rows(replies.models - server, replies))
        return Served(send=model, score=model), state

    def merge_statistics(self, before: Tensor, replies: Replies, context: Context) -> Tensor:
        """Combine the changes of the statistics by the same rule."""
        return before + self.combine(*present_rows(replies.buffers - before, replies))


def present_rows(rows: Tensor, replies: Replies) -> tuple[Tensor, Tensor]:
    """Return one row of each client by rising client, with the clients' sample counts.

    Clients without samples are left out.
    """
    order = replies.clients.argsort()
    order = order[replies.weights[order] > 0]
    return rows[order], replies.weights[order]


def assumed_bad(hostile: float, replies: int) -> int:
    """Return f, how many of the replies are assumed hostile: the share of them, rounded down."""
    return int(hostile * replies + 1e-9)


def check_count(rule: object, replies: int, bad: int, least: int) -> None:
    """Refuse a round with too few replies for the number of hostile ones."""
    if bad and replies < least:
        raise ReplyError(
            f"{rule} needs at least {least} replies to stand {bad} hostile ones, got {replies}: "
            "raise the participation or lower hostile"
        )


def by_columns(rows: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function of columns [n, p] -> [p] piece by piece, so that copies stay small."""
    width = max(_PIECE // max(len(rows), 1), 1)
    pieces: list[Tensor] = [function(piece) for piece in rows.split(width, 1)]
    return torch.cat(pieces)


def squared_distances(rows: Tensor) -> Tensor:
    """Return the squared distances between rows [n, P] in float64, [n, n]."""
    gram = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
    for piece in rows.split(max(_PIECE // max(len(rows), 1), 1), 1):
        wide = piece.double()
        gram += wide @ wide.T
    lengths = gram.diagonal()
    # Symmetric to the bit: two rows that are each other's nearest must tie in Krum's scores.
    return (lengths[:, None] + lengths[None] - (gram + gram.T)).clamp(min=0)


def krum_scores(distances: Tensor, bad: int) -> Tensor:
    """Return the sum of each row's n - f - 2 smallest squared distances to others, [n]."""
    count = len(distances)
    neighbours = min(max(count - bad - 2, 1), count - 1)
    others = distances + torch.diag(distances.new_full((count,), math.inf))
    return others.sort(1).values[:, :neighbours].sum(1)
