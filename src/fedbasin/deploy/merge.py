"""How a federation handles replies that do not occur in a simulation.

Replies are checked one by one as they arrive. Before the merge, the guard clips or drops updates
that are too long. If the merge fails, the server keeps its old model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fedbasin.core.archive import ArchiveError
from fedbasin.core.method import Replies, ReplyError
from fedbasin.core.round import Gathered, Merged, Server
from fedbasin.core.tree import tensors
from fedbasin.core.vectors import shares
from fedbasin.deploy.replies import Collected, Guard, guarded

_log = logging.getLogger("flwr")


class Lenient:
    """The policy of a federation: if the merge fails, the server keeps its old model."""

    def merge(
        self, server: Server, replies: Replies, attempt: Callable[[], Merged]
    ) -> Merged | None:
        """Merge and check the result; None keeps the old model."""
        known = {id(leaf) for leaf in tensors(server.state)}
        try:
            merged = attempt()
            made = [leaf for leaf in tensors(merged.state) if id(leaf) not in known]
            models = (merged.served.send, merged.served.score, merged.buffers)
            for values in (*models, *made):
                if values.is_floating_point() and not values.sum().isfinite():
                    raise ReplyError("the replies are finite, their merge is not")
        except (ArchiveError, OSError):  # an error of the server, not of the replies
            raise
        except Exception:  # valid replies and reports can still make a method fail
            _log.exception(
                "round %d: the merge is refused, the server keeps its model", server.round + 1
            )
            return None
        return merged


class Guarded(NamedTuple):
    """The replies as the round takes them."""

    gathered: Gathered
    clients: frozenset[int]  # whose replies are merged
    far: list[tuple[int, str]]  # clients whose update is far longer than the others', and why


def gathered_of(collected: Collected, server: Tensor, guard: Guard | None) -> Guarded:
    """Turn the replies that were taken into what the round merges.

    Args:
        collected: the replies that were taken.
        server: the model that clients started from [P].
        guard: what happens to updates that are far longer than the others.
    """
    replies = collected.replies
    named: list[tuple[int, str]] = []
    if guard is not None:
        replies, lengths = guarded(replies, server, guard)
        named = [(client, f"{length}: {guard.action}ped") for client, length in lengths]
    far = {client for client, _ in named}
    # A far update's statistics and loss are not to be trusted either, clipped or not.
    ids = collected.replies.clients
    near = torch.tensor([client not in far for client in ids.tolist()], device=ids.device)
    loss = shares(collected.replies.weights[near]) @ collected.losses[near]
    if guard is not None and guard.action == "drop":
        gathered = Gathered(replies, collected.statistics[near], [], loss)
        return Guarded(gathered, collected.counted - far, named)
    trusted = near if far else None
    gathered = Gathered(replies, collected.statistics, [], loss, trusted)
    return Guarded(gathered, collected.counted, named)
