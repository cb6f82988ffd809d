"""How a federation handles replies that do not occur in a simulation.

Replies are checked one by one as they arrive. Before the merge, the guard clips or drops updates
that are too long. If the merge fails, the server keeps its old model.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from fedbasin.core.archive import ArchiveError
from fedbasin.core.method import Replies, ReplyError
from fedbasin.core.round import Attempt, Gathered, Merged, Server
from fedbasin.core.tree import tensors
from fedbasin.deploy.audit import MergedReply
from fedbasin.deploy.replies import Collector, Excess, Guard, guarded, mean_loss
from fedbasin.deploy.wire import LARGEST, printable

_MOST_SUSPECTS = 64  # replies that are left out in turn to find the one that spoils a merge
_log = logging.getLogger("flwr")


class NothingMerged(RuntimeError):
    """A run that learns nothing: its merges fail, or all of its replies are refused."""


class Lenient:
    """The policy of a federation: if the merge fails, the server keeps its old model.

    A merge fails if it raises an error, or if it makes a model or a state that is not finite or
    beyond what clients accept. If it succeeds without one client, and without no other, that
    client is named and the others are merged.
    """

    def __init__(self) -> None:
        self.blamed: list[tuple[int, str]] = []  # clients of this round that spoil the merge
        self.failed = ""  # why the last merge that failed did

    def merge(self, server: Server, replies: Replies, attempt: Attempt) -> Merged | None:
        """Merge and check the result; None keeps the old model."""
        self.blamed = []
        try:
            return _checked(server, attempt())
        except (ArchiveError, OSError):  # an error of the server, not of the replies
            raise
        except Exception as error:  # valid replies and reports can still make a method fail
            found = self._without_one(server, replies, attempt, error)
            if found is None:
                self.failed = printable(f"{type(error).__name__}: {error}")
                _log.exception(
                    "round %d: the merge is refused, the server keeps its model", server.round + 1
                )
            return found

    def _without_one(
        self, server: Server, replies: Replies, attempt: Attempt, error: Exception
    ) -> Merged | None:
        """Return the merge without the one client that spoils it; None if it is not just one."""
        count = len(replies.clients)
        found: list[tuple[int, Merged]] = []
        for row in range(count if 3 <= count <= _MOST_SUSPECTS else 0):
            rest = torch.tensor([i for i in range(count) if i != row])
            try:
                merged = _checked(server, attempt(rest.to(replies.clients.device)))
            except (ArchiveError, OSError):
                raise
            except Exception:
                continue
            if found:
                return None  # it fails for another reason than one client's reply
            found.append((row, merged))
        if not found:
            return None
        row, merged = found[0]
        self.blamed = [(int(replies.clients[row]), printable(f"it spoils the merge: {error}"))]
        return merged


def _checked(server: Server, merged: Merged) -> Merged:
    """Refuse a merge that is not finite, or that clients would refuse to take."""
    known = {id(leaf) for leaf in tensors(server.state)}
    made = [leaf for leaf in tensors(merged.state) if id(leaf) not in known]
    models = (merged.served.send, merged.served.score, merged.buffers)
    for values in (*models, *made):
        if values.is_floating_point() and values.numel():
            low, high = torch.stack(values.aminmax()).double().tolist()
            if not max(-low, high) <= LARGEST:
                raise ReplyError(f"the merge has values from {low:g} to {high:g}")
    return merged


def merged_replies(
    taken: object,
    counted: Collection[int],
    replies: Replies,
    server: Tensor,
    keys: Mapping[int, str],
) -> dict[int, MergedReply]:
    """Return what the audit trail says of the replies that are merged, by client.

    Args:
        taken: what collected them. Masked replies have neither weight nor norm, and those that
            were averaged as they arrived have no norm.
        counted: the clients whose replies are merged.
        replies: the replies as the round takes them.
        server: the model that clients started from [P].
        keys: the fingerprint of each client's key.
    """
    weights: Mapping[int, float] = {}
    norms: dict[int, float] = {}
    if isinstance(taken, Collector):
        weights = taken.weights
        if taken.stream is None:
            clients = replies.clients.tolist()
            weights = dict(zip(clients, replies.weights.tolist(), strict=True))
            for client, model in zip(clients, replies.models, strict=True):  # one copy at a time
                norms[client] = float(torch.linalg.vector_norm(model - server))
    return {
        client: MergedReply(client, keys.get(client, ""), weights.get(client), norms.get(client))
        for client in sorted(counted)
    }


def gathered_of(replies: Replies, server: Tensor, guard: Guard | None) -> tuple[Gathered, Excess]:
    """Turn the replies that were taken into what the round merges, and say whom the guard bounds.

    Args:
        replies: the replies that were taken.
        server: the model that clients started from [P].
        guard: what happens to updates that are far longer than the others.
    """
    if guard is None:
        return Gathered(replies, [], mean_loss(replies.weights, replies.train_loss)), Excess([], [])
    bounded, excess = guarded(replies, server, guard)
    # A far update's statistics and loss are not to be trusted either, clipped or not.
    far = {client for client, _ in excess.far}
    near = torch.tensor([c not in far for c in replies.clients.tolist()], device=server.device)
    loss = mean_loss(replies.weights[near], replies.train_loss[near])
    trusted = near if far and not excess.dropped else None
    return Gathered(bounded, [], loss, trusted), excess
