"""Which node is which client.

Flower's node ids are new in every run, so they can neither be drawn by seed nor remembered.
Clients are known by their partition id: every new node is asked once who it is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from flwr.app import ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from torch import Tensor

from fedbasin.deploy.mail import Mailbox
from fedbasin.deploy.wire import Refused, fault, number, the_record

ASK = "fedbasin-ask"  # the key that says what a query is about
_log = logging.getLogger("flwr")


class TooFewNodes(RuntimeError):
    """A federation that has not enough nodes, after waiting for them."""


@dataclass(frozen=True)
class Seat:
    """What a node said about itself."""

    client: int  # partition id
    examples: int
    counts: tuple[int, ...] = ()  # rows by class, where clients show them


@dataclass
class Clients:
    """The nodes of a federation and the clients they are.

    Args:
        mail: the way to the nodes.
        counts: whether nodes are asked for their rows by class.
        patience: seconds that a query or a missing node is waited for.
    """

    mail: Mailbox
    counts: bool = False
    patience: float = 600.0
    total: int = 0  # how many clients there are in all, N
    anonymous: bool = False  # whether nodes do not say who they are
    _seats: dict[int, Seat] = field(default_factory=dict)  # by node
    _ignored: set[int] = field(default_factory=set)

    def wait(self, least: int) -> dict[int, int]:
        """Return the node of every client that is online and holds data, once there are enough."""
        began = time.monotonic()
        said = -10.0
        while len(found := self.online()) < least:
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

    def online(self) -> dict[int, int]:
        """Return the node of every client that is online and holds data."""
        nodes = list(self.mail.grid.get_node_ids())
        new = [n for n in nodes if n not in self._seats and n not in self._ignored]
        if new:
            self._ask(new)
        # A client that came back has a new node: the one that was seen last speaks for it.
        seats = {n: s for n, s in self._seats.items() if n in set(nodes)}
        return {s.client: n for n, s in seats.items() if s.examples > 0}

    def client(self, node: int) -> int | None:
        """Return the client of a node."""
        seat = self._seats.get(node)
        return None if seat is None else seat.client

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

        def gave_up(node: int, reason: str) -> None:
            failed[whose[node]] = reason

        for reply in self.mail.replies(sent, timeout, gave_up):
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
        return 0.0 if self.anonymous else self.rows() / max(self.total, 1)

    def class_counts(self) -> Tensor:
        """Wait for all clients and return their rows by class [N, classes], as they show them."""
        self.wait(self.total)
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

    def _ask(self, nodes: list[int]) -> None:
        """Ask new nodes who they are; where none can say, number them as they come."""
        config = ConfigRecord({ASK: "who", "class-counts": self.counts})
        query = RecordDict({"config": config})
        messages = [Message(query, node, MessageType.QUERY, ttl=self.patience) for node in nodes]
        answers: dict[int, Seat] = {}
        failed: dict[int, str] = {}

        def gave_up(node: int, reason: str) -> None:
            failed[node] = reason

        sent = self.mail.send(messages)
        for reply in self.mail.replies(sent, self.patience, gave_up):
            node = sent[reply.metadata.reply_to_message_id]
            try:
                if reply.has_error():
                    raise Refused(fault(reply))
                answers[node] = self._seat(the_record(reply.content, MetricRecord))
            except Refused as reason:
                failed[node] = str(reason)
        if self.anonymous or (failed and not answers and not self._seats):
            self._number(nodes, failed)
            return
        self._seats |= answers
        for node, why in failed.items():
            self._ignored.add(node)
            _log.warning("node %d does not say which client it is, and is left out: %s", node, why)

    def _seat(self, facts: Any) -> Seat:
        total = int(number(facts, "num-partitions", least=1))
        client = int(number(facts, "partition-id", least=0))
        if self.total and total != self.total:
            raise Refused(f"it counts {total} clients, the others {self.total}")
        if client >= total:
            raise Refused(f"partition-id {client} is not below num-partitions {total}")
        self.total = total
        counts = facts.get("class-counts", [])
        if not isinstance(counts, list) or not all(isinstance(n, int) and n >= 0 for n in counts):
            raise Refused("class-counts must be whole numbers of at least 0")
        return Seat(client, int(number(facts, "num-examples", least=0)), tuple(counts))

    def _number(self, nodes: Iterable[int], failed: dict[int, str]) -> None:
        """Give nodes that cannot say who they are the numbers that are free."""
        if not self.anonymous:
            self.anonymous, self.total = True, len(failed)
            _log.warning(
                "No node says which client it is, so they are numbered as they come, and cohorts "
                "cannot be repeated by seed; fedbasin's ClientApp answers. (%s)",
                next(iter(failed.values())),
            )
        online = set(self.mail.grid.get_node_ids())
        taken = {seat.client for node, seat in self._seats.items() if node in online}
        free = iter(sorted(set(range(self.total)) - taken))
        for node in sorted(nodes):
            client = next(free, None)
            if client is None:
                self._ignored.add(node)
                _log.warning(
                    "node %d joins beyond the %d counted, and is left out", node, self.total
                )
            else:
                self._seats[node] = Seat(client, 1)
