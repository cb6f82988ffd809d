"""What a federation does with replies that a simulation would not meet.

Replies are checked one by one as they come in. Here the guard clips or drops far updates before
the merge, and a merge that fails leaves the server its model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from fedbasin.core.archive import ArchiveError
from fedbasin.core.method import Replies, ReplyError
from fedbasin.core.round import Gathered, Merged, Server
from fedbasin.core.tree import tensors
from fedbasin.core.vectors import shares
from fedbasin.deploy.replies import Collected, Guard, guarded

_log = logging.getLogger("flwr")
Say = Callable[[int, str], None]  # a client and why it is named


class Lenient:
    """The policy of a federation: replies that make no finite model leave the server its own."""

    def merge(
        self, server: Server, replies: Replies, attempt: Callable[[], Merged]
    ) -> Merged | None:
        """Merge, and check what came of it; None keeps the old model."""
        known = {id(leaf) for leaf in tensors(server.state)}
        try:
            merged = attempt()
            made = [leaf for leaf in tensors(merged.state) if id(leaf) not in known]
            models = (merged.served.send, merged.served.score, merged.buffers)
            for values in (*models, *made):
                if values.is_floating_point() and not values.sum().isfinite():
                    raise ReplyError("what finite replies make together is not finite")
        except (ArchiveError, OSError):  # the server's own trouble
            raise
        except Exception:  # valid replies and reports can still make a method fail
            _log.exception(
                "round %d: the merge is refused, the server keeps its model", server.round + 1
            )
            return None
        return merged


def gathered_of(
    collected: Collected, server: Server, guard: Guard | None, say: Say
) -> tuple[Gathered, frozenset[int]]:
    """Return the replies as the round takes them, and which clients they are of.

    Args:
        collected: the replies that were taken.
        server: what the clients started from.
        guard: what happens to updates that are far longer than the others.
        say: told of each client whose update is far.
    """
    replies = collected.replies
    clients = collected.counted
    far: set[int] = set()
    if guard is not None:
        replies, named = guarded(replies, server.send, guard)
        for client, reason in named:
            far.add(client)
            say(client, f"{reason}: {guard.action}ped")
    # A far update's statistics and loss are not to be trusted either, clipped or not.
    ids = collected.replies.clients
    near = torch.tensor([client not in far for client in ids.tolist()], device=ids.device)
    loss = shares(collected.replies.weights[near]) @ collected.losses[near]
    if guard is None or guard.action == "clip":
        return Gathered(replies, collected.statistics, [], loss, near if far else None), clients
    return Gathered(replies, collected.statistics[near], [], loss), clients - far
