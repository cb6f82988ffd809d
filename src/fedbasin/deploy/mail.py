"""Sends messages and yields replies one at a time as they arrive.

Flower's own `send_and_receive` returns once all replies are in memory. Here replies are handed
over one by one, so that a server that averages as they arrive holds one model at a time, and a
node that went offline is not waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from flwr.app import Message
from flwr.serverapp import Grid
from google.protobuf.message import DecodeError

from fedbasin.deploy.seats import fingerprint
from fedbasin.deploy.wire import printable

_ONLINE_EVERY = 5.0  # seconds between looks at who is online


@dataclass(frozen=True)
class GaveUp:
    """A message that is not waited for any more."""

    node: int
    reason: str
    unreadable: bool = False  # whether a reply came that cannot be used


@dataclass
class Mailbox:
    """The messages that wait for a reply.

    Args:
        grid: Flower's way to the nodes.
        poll: seconds between looks at what came in.
        late: ids of messages that were given up, with the node each was for.
    """

    grid: Grid
    poll: float = 0.3
    late: dict[str, int] = field(default_factory=dict)

    def nodes(self) -> list[int]:
        """Return the nodes that are online."""
        return list(self.grid.get_node_ids())

    def keys(self) -> dict[int, str]:
        """Return the fingerprint of each node's key, where Flower tells it."""
        try:
            nodes = list(self.grid.get_nodes())
        except (AttributeError, NotImplementedError):  # a grid that knows ids alone
            return {}
        return {n.node_id: fingerprint(n.public_key) for n in nodes if n.public_key}

    def send(self, messages: Sequence[Message]) -> dict[str, int]:
        """Send messages; return the node of each by the message's id."""
        if not messages:
            return {}
        self.grid.push_messages(messages)
        sent = {m.metadata.message_id: m.metadata.dst_node_id for m in messages}
        sent.pop("", None)  # not taken by the server: counts as unanswered
        return sent

    def replies(
        self,
        sent: dict[str, int],
        timeout: float,
        enough: Callable[[], bool] = lambda: False,
    ) -> Iterator[Message | GaveUp]:
        """Yield replies, and which messages are given up, until there are `enough`."""
        waiting = dict(sent)
        deadline = time.monotonic() + timeout
        looked = time.monotonic()
        while waiting:
            idle = True
            for message_id in list(waiting):
                arrived, why = self._pulled(message_id, sent[message_id])
                idle &= not arrived and why is None
                if why is not None:
                    waiting.pop(message_id, None)
                    yield GaveUp(sent[message_id], why, unreadable=True)
                while arrived:
                    waiting.pop(message_id, None)
                    yield arrived.pop(0)  # no name keeps it alive while the next one comes
            now = time.monotonic()
            if not waiting:
                return
            if now > deadline or enough():
                yield from self._give_up(waiting, list(waiting), f"no reply in {timeout:g} s")
                return
            if now - looked > _ONLINE_EVERY:
                looked = now
                online = set(self.nodes())
                gone = [i for i, node in waiting.items() if node not in online]
                yield from self._give_up(waiting, gone, "the node went offline")
            if idle:
                time.sleep(self.poll)

    def _pulled(self, message_id: str, node: int) -> tuple[list[Message], str | None]:
        """Return the replies to one message, or why they cannot be used.

        The node wrote the content of a reply; Flower checks only its envelope.
        """
        try:
            arrived = list(self.grid.pull_messages([message_id]))
        except (AttributeError, LookupError, TypeError, ValueError, DecodeError) as error:
            return [], printable(f"its reply cannot be read: {error}")
        for reply in arrived:
            own = reply.has_error() or reply.metadata.src_node_id == node
            if not own or reply.metadata.reply_to_message_id != message_id:
                return [], "its reply bears the address of another"
        return arrived, None

    def stragglers(self) -> Iterator[tuple[int, Message]]:
        """Yield replies to messages that were given up before, with the node."""
        for message_id, node in list(self.late.items()):
            arrived, why = self._pulled(message_id, node)
            if arrived or why is not None:
                del self.late[message_id]
            yield from ((node, reply) for reply in arrived if not reply.has_error())

    def still_awaited(self, message_ids: Iterable[str]) -> None:
        """Wait again for messages that were given up: their replies are not late."""
        for message_id in message_ids:
            self.late.pop(message_id, None)

    def _give_up(self, waiting: dict[str, int], lost: Sequence[str], reason: str) -> list[GaveUp]:
        nodes = []
        for message_id in lost:
            node = waiting.pop(message_id)
            self.late[message_id] = node
            nodes.append(node)
        return [GaveUp(node, reason) for node in nodes]
