"""How a federation handles replies that do not occur in a simulation.

Replies are checked one by one as they arrive. Before the merge, the guard clips or drops updates
that are too long. If the merge fails, the server keeps its old model.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fedbasin.core.archive import ArchiveError
from fedbasin.core.method import Replies, ReplyError
from fedbasin.core.round import Attempt, Gathered, Merged, Server
from fedbasin.core.tree import tensors
from fedbasin.deploy.audit import MergedReply
from fedbasin.deploy.replies import Collected, Collector, Guard, guarded, mean_loss
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


class Guarded(NamedTuple):
    """The replies as the round takes them."""

    gathered: Gathered
    clients: frozenset[int]  # whose replies are merged
    far: list[tuple[int, str]]  # clients whose update is far longer than the others', and why
    heavy: list[tuple[int, str]]  # clients that count for fewer samples than they state


def merged_replies(
    taken: object, guarded: Guarded, server: Tensor, keys: Mapping[int, str]
) -> dict[int, MergedReply]:
    """Return what the audit trail says of the replies that are merged, by client.

    Args:
        taken: what collected them. Masked replies have neither weight nor norm, and those that
            were averaged as they arrived have no norm.
        guarded: the replies as the round takes them.
        server: the model that clients started from [P].
        keys: the fingerprint of each client's key.
    """
    weights: Mapping[int, float] = {}
    norms: dict[int, float] = {}
    if isinstance(taken, Collector):
        weights = taken.weights
        if taken.stream is None:
            replies = guarded.gathered.replies
            clients = replies.clients.tolist()
            weights = dict(zip(clients, replies.weights.tolist(), strict=True))
            for client, model in zip(clients, replies.models, strict=True):  # one copy at a time
                norms[client] = float(torch.linalg.vector_norm(model - server))
    return {
        client: MergedReply(client, keys.get(client, ""), weights.get(client), norms.get(client))
        for client in sorted(guarded.clients)
    }


def gathered_of(collected: Collected, server: Tensor, guard: Guard | None) -> Guarded:
    """Turn the replies that were taken into what the round merges.

    Args:
        collected: the replies that were taken.
        server: the model that clients started from [P].
        guard: what happens to updates that are far longer than the others.
    """
    replies = collected.replies
    named: list[tuple[int, str]] = []
    heavy: list[tuple[int, str]] = []
    if guard is not None:
        replies, lengths, heavy = guarded(replies, server, guard)
        named = [(client, f"{length}: {guard.action}ped") for client, length in lengths]
    far = {client for client, _ in named}
    # A far update's statistics and loss are not to be trusted either, clipped or not.
    ids = collected.replies.clients
    near = torch.tensor([client not in far for client in ids.tolist()], device=ids.device)
    loss = mean_loss(collected.replies.weights[near], collected.losses[near])
    if guard is not None and guard.action == "drop":
        gathered = Gathered(replies, collected.statistics[near], [], loss)
        return Guarded(gathered, collected.counted - far, named, heavy)
    trusted = near if far else None
    gathered = Gathered(replies, collected.statistics, [], loss, trusted)
    return Guarded(gathered, collected.counted, named, heavy)
