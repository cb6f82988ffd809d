"""Which node is which client.

Flower's node ids are new in every run, so they can neither be drawn by seed nor remembered.
Clients are known by their partition id: every new node is asked who it is, and asked again
after ever longer pauses until it has said so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from flwr.app import ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from torch import Tensor

from fedbasin.deploy.mail import GaveUp, Mailbox
from fedbasin.deploy.wire import Refused, fault, number, the_record

ASK = "fedbasin-ask"  # the key that says what a query is about
_FIRST_PAUSE = 1.0  # seconds until a node that did not say who it is is asked again
_LONGEST_PAUSE = 600.0  # to which that time doubles
_GRACE = 10.0  # seconds that a new node has beyond twice what the slowest answer took
_log = logging.getLogger("flwr")


class TooFewNodes(RuntimeError):
    """A federation that has not enough nodes, after waiting for them."""


@dataclass(frozen=True)
class Seat:
    """What a node said about itself."""

    client: int  # partition id
    examples: int
    counts: tuple[int, ...] = ()  # rows by class, where clients show them
    total: int = 0  # how many clients it counts


@dataclass
class Clients:
    """The nodes of a federation and the clients they are.

    Args:
        mail: the way to the nodes.
        counts: whether nodes are asked for their rows by class.
        patience: seconds that a query or a missing node is waited for.
        total: how many clients there are in all, N; 0 where nodes have to say.
        before: N of the run that is gone on with, which nodes without a name keep to.
    """

    mail: Mailbox
    counts: bool = False
    patience: float = 600.0
    total: int = 0
    before: int = 0
    anonymous: bool = False  # whether nodes do not say who they are
    _seats: dict[int, Seat] = field(default_factory=dict)  # by node
    _open: dict[str, int] = field(default_factory=dict)  # questions without an answer, by message
    _pause: dict[int, tuple[float, float]] = field(default_factory=dict)  # when to ask, then wait
    _nameless: dict[int, str] = field(default_factory=dict)  # nodes that cannot say, and why
    _silent: set[int] = field(default_factory=set)  # nodes that left a message unanswered
    _slowest: float = -1.0  # seconds that an answer took; below 0 before the first

    def wait(self, least: int, *, empty: bool = False) -> dict[int, int]:
        """Return the nodes that `online` does, once there are enough."""
        began = time.monotonic()
        said = -10.0
        while len(found := self.online(empty=empty)) < least:
            if self._number_all(least):
                continue
            waited = time.monotonic() - began
            if waited > self.patience:
                raise TooFewNodes(
                    f"{len(found)} clients are connected, {least} are needed, and none came in "
                    f"{self.patience:g} s; start more SuperNodes or ask for fewer"
                )
            if waited - said >= 10:
                said = waited
                _log.info(
                    "Waiting for nodes to connect: %d connected (minimum required: %d).",
                    len(found),
                    least,
                )
            time.sleep(1)
        return found

    def online(self, *, empty: bool = False) -> dict[int, int]:
        """Return the node of every client that is online and holds data, or is `empty`."""
        nodes = self.mail.nodes()
        listed = set(nodes)
        new = [n for n in nodes if n not in self._seats]
        if new:
            self._ask(new, listed)
        # A client that came back has a new node: the one that was seen last speaks for it.
        seats = {n: s for n, s in self._seats.items() if n in listed}
        return {s.client: n for n, s in seats.items() if empty or s.examples > 0}

    def heard(self, node: int, *, answered: bool) -> None:
        """Note whether a node answered: one that did not may lose its seat to another."""
        if answered:
            self._silent.discard(node)
        else:
            self._silent.add(node)

    def client(self, node: int) -> int | None:
        """Return the client of a node."""
        seat = self._seats.get(node)
        return None if seat is None else seat.client

    def send(self, messages: Sequence[Message]) -> dict[str, int]:
        """Send messages; return the node of each by the message's id."""
        return self.mail.send(messages)

    def replies(self, sent: dict[str, int], timeout: float) -> Iterator[Message | GaveUp]:
        """Yield replies as they arrive, and which messages are given up."""
        return self.mail.replies(sent, timeout)

    def late(self) -> list[int]:
        """Return the nodes whose replies to earlier messages have come by now."""
        return [node for node, _ in self.mail.stragglers()]

    def ask(
        self, nodes: Mapping[int, int], content: RecordDict, timeout: float
    ) -> tuple[dict[int, RecordDict], dict[int, str]]:
        """Put one question to clients; return the answers, and why others gave none."""
        sent = self.mail.send(
            [Message(content, node, MessageType.QUERY, ttl=timeout) for node in nodes.values()]
        )
        whose = {node: client for client, node in nodes.items()}
        found: dict[int, RecordDict] = {}
        failed = dict.fromkeys(nodes, "it was not reached")
        for reply in self.mail.replies(sent, timeout):
            if isinstance(reply, GaveUp):
                failed[whose[reply.node]] = reply.reason
                continue
            client = whose[sent[reply.metadata.reply_to_message_id]]
            if reply.has_error():
                failed[client] = fault(reply)
            else:
                found[client] = reply.content
        return found, {client: why for client, why in failed.items() if client not in found}

    def examples(self, client: int) -> int:
        """Return how many rows a client holds; 0 where it is not known."""
        return {s.client: s.examples for s in self._seats.values()}.get(client, 0)

    def rows(self) -> int:
        """Return how many rows all known clients hold together."""
        return sum({s.client: s.examples for s in self._seats.values()}.values())

    def mean_examples(self) -> float:
        """Return how many rows a client holds in the mean; 0 where clients do not say."""
        known = {seat.client for seat in self._seats.values()}
        return 0.0 if self.anonymous else self.rows() / max(len(known), 1)

    def class_counts(self) -> Tensor:
        """Wait for all clients and return their rows by class [N, classes], as they show them."""
        self.wait(self.total, empty=True)
        _log.warning("The server sees every client's class counts: the method asks for them")
        known = {seat.client: seat.counts for seat in self._seats.values()}
        missing = [client for client in range(self.total) if not known.get(client)]
        widths = {len(counts) for counts in known.values()}
        if missing or len(widths) != 1:
            raise TooFewNodes(
                f"client {missing[0] if missing else 'of another width'} did not show its class "
                "counts; all clients must be connected and their app must say counts='plain'"
            )
        return torch.tensor([known[client] for client in range(self.total)])

    def _ask(self, nodes: list[int], listed: set[int]) -> None:
        """Ask nodes who they are where it is time to, and take what was answered since.

        Only new nodes are waited for, not for long once others have answered; what takes longer is
        taken at a later look.
        """
        config = ConfigRecord({ASK: "who", "class-counts": self.counts})
        query = RecordDict({"config": config})
        now = time.monotonic()
        due = [n for n in nodes if self._pause.get(n, (0.0, 0.0))[0] <= now]
        new = any(n not in self._pause for n in due)
        messages = [Message(query, node, MessageType.QUERY, ttl=self.patience) for node in due]
        asked = set(nodes)
        sent = {i: n for i, n in self._open.items() if n in asked} | self.mail.send(messages)
        there = listed - self._silent
        held = {s.client: n for n, s in self._seats.items() if n in there}
        answered = set()
        nameless = []
        odd = set()
        # Half of the patience is left to ask again those whose message was lost.
        waits = self.patience / 2 if new else 0.0

        def enough() -> bool:
            return 0 <= 2 * self._slowest < time.monotonic() - now - _GRACE

        for reply in self.mail.replies(sent, waits, enough):
            if isinstance(reply, GaveUp):
                continue  # asked again at a later look
            self._slowest = max(self._slowest, time.monotonic() - now)
            answered.add(reply.metadata.reply_to_message_id)
            node = sent[reply.metadata.reply_to_message_id]
            try:
                if node in self._seats:
                    continue  # it was asked twice, and both answers came now
                if reply.has_error():
                    self._nameless[node] = fault(reply)
                    nameless.append(node)
                else:
                    seat = self._seat(the_record(reply.content, MetricRecord))
                    nameless += self._sit(node, seat, held)
            except Refused as reason:  # asked again: one with a key is mended under its old id
                self._nameless.pop(node, None)
                odd.add(node)
                _log.warning("node %d is left out, for what it says of itself: %s", node, reason)
        self._open = {i: n for i, n in sent.items() if i not in answered}
        self.mail.still_awaited(self._open)
        if self.anonymous:
            self._number(nameless)
        for node in due:
            pause = 2 * self._pause.get(node, (0.0, _FIRST_PAUSE / 2))[1]
            self._pause[node] = (time.monotonic() + pause, min(pause, _LONGEST_PAUSE))
            if node not in self._seats and node not in odd and not self.anonymous:
                why = self._nameless.get(node, "no answer yet, or another has its place")
                _log.warning("node %d does not say which client it is: %s", node, why)

    def _sit(self, node: int, seat: Seat, held: dict[int, int]) -> list[int]:
        """Give a node its seat unless another holds it; return who had it only by a number."""
        self.total = self.total or seat.total
        holder = held.get(seat.client)
        if holder is not None and holder not in self._nameless:
            _log.warning(
                "node %d says it is client %d, as node %d does: it is left out while that one is "
                "connected; give every SuperNode a partition-id of its own",
                node,
                seat.client,
                holder,
            )
            return []
        self._nameless.pop(node, None)
        self._seats[node] = seat
        held[seat.client] = node
        if holder is not None:
            del self._seats[holder]
        return [] if holder is None else [holder]

    def _seat(self, facts: Any) -> Seat:
        total = int(number(facts, "num-partitions", least=1))
        client = int(number(facts, "partition-id", least=0))
        if self.total and total != self.total:
            raise Refused(f"it counts {total} clients, the others {self.total}")
        if client >= total:
            raise Refused(f"partition-id {client} is not below num-partitions {total}")
        rows = int(number(facts, "num-examples", least=0))
        counts = facts.get("class-counts", [])
        if not isinstance(counts, list) or not all(isinstance(n, int) and n >= 0 for n in counts):
            raise Refused("class-counts must be whole numbers of at least 0")
        if counts and sum(counts) != rows:
            raise Refused(f"class-counts add up to {sum(counts)}, num-examples is {rows}")
        return Seat(client, rows, tuple(counts), total)

    def _number_all(self, least: int) -> bool:
        """Where as many nodes as are needed are there and none says who it is, number them."""
        listed = set(self.mail.nodes())
        # An error may pass: only who was asked twice, so that its pause has grown, cannot say.
        nodes = [n for n in self._nameless if n in listed and self._pause[n][1] > _FIRST_PAUSE]
        if self.anonymous or self._seats or len(nodes) < max(least, 1):
            return False
        self.anonymous = True
        self.total = self.before or len(nodes)
        _log.warning(
            "No node says which client it is, so they are numbered as they come, and cohorts "
            "cannot be repeated by seed; fedbasin's ClientApp answers. (%s)",
            self._nameless[nodes[0]],
        )
        self._number(nodes)
        return True

    def _number(self, nodes: Iterable[int]) -> None:
        """Give nodes that cannot say who they are the numbers that are free."""
        online = set(self.mail.nodes())
        taken = {seat.client for node, seat in self._seats.items() if node in online}
        free = iter(sorted(set(range(self.total)) - taken))
        for node in sorted(nodes):
            client = next(free, None)
            if client is None:
                _log.warning(
                    "node %d joins beyond the %d counted, and waits for a place", node, self.total
                )
            else:
                self._seats[node] = Seat(client, 1)
