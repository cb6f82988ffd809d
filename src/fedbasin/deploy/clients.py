"""Which node is which client.

Flower's node ids are new in every run, so they can neither be drawn by seed nor remembered.
Clients are known by their partition id. Every new node is asked who it is. A node that does not
answer is asked again after longer and longer pauses.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from flwr.app import ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from torch import Tensor

from fedbasin.core.limits import limit_of
from fedbasin.deploy.audit import Refusal
from fedbasin.deploy.bounds import MOST_CLIENTS, MOST_NUMBERS, MOST_ROWS, check_size
from fedbasin.deploy.frozen import FrozenParts
from fedbasin.deploy.mail import GaveUp, Mailbox
from fedbasin.deploy.seats import Seats
from fedbasin.deploy.wire import Refused, fault, from_flower, number, the_record

ASK = "fedbasin-ask"  # the key that says what a query is about
_FIRST_PAUSE = 1.0  # seconds before an unidentified node is asked again; it doubles each time
_LONGEST_PAUSE = 600.0  # the most seconds before it is asked again
_MOST_REFUSALS = 10_000  # that are kept between two rounds
_MOST_TOLD = 3  # reasons, and clients for each, that an error names
_GRACE = 10.0  # seconds that a new node has beyond twice what the slowest answer took
_log = logging.getLogger("flwr")


class TooFewNodes(RuntimeError):
    """A federation that has too few nodes, or too few whose answers it can use."""


def reasons_of(failed: Mapping[int, str]) -> str:
    """Return which clients failed and why, in one line: the first few."""
    by_reason: dict[str, list[str]] = {}
    for client, why in sorted(failed.items()):
        by_reason.setdefault(why, []).append(f"client {client}")
    return _first([f"{_first(whose)}: {why}" for why, whose in by_reason.items()], "; ")


def _first(told: Sequence[str], between: str = ", ") -> str:
    """Return the first few of many, and how many there are beside them."""
    more = len(told) - _MOST_TOLD
    return between.join([*told[:_MOST_TOLD], *([f"{more} more"] if more > 0 else [])])


@dataclass(frozen=True)
class NodeIdentity:
    """What a node states about itself."""

    client: int  # partition id
    examples: int
    counts: tuple[int, ...] = ()  # rows by class, where clients show them
    total: int = 0  # num-partitions: how many clients there are


@dataclass
class Clients:
    """The nodes of a federation and the clients they are.

    Args:
        mail: the way to the nodes.
        counts: whether nodes are asked for their rows by class.
        patience: seconds that a query or a missing node is waited for.
        total: how many clients there are in all, N; 0 where nodes have to say.
        before: N of the resumed run; unidentified nodes are numbered within it.
        frozen: parts of the model that do not learn, and which nodes hold them.
        classes: how many classes there are; 0 where the server does not know.
        most_rows: how many rows a client may state.
        seats: which node key holds which client's number; None binds no keys.
        secure: whether nodes say only that they hold rows, and not how many.
    """

    mail: Mailbox
    counts: bool = False
    patience: float = 600.0
    total: int = 0
    before: int = 0
    frozen: FrozenParts = field(default_factory=FrozenParts)
    classes: int = 0
    most_rows: int = MOST_ROWS
    seats: Seats | None = None
    secure: bool = False
    anonymous: bool = False  # whether nodes do not say who they are
    _identities: dict[int, NodeIdentity] = field(default_factory=dict)  # by node
    _open: dict[str, int] = field(default_factory=dict)  # questions without an answer, by message
    _pause: dict[int, tuple[float, float]] = field(default_factory=dict)  # when to ask, then wait
    _nameless: dict[int, str] = field(default_factory=dict)  # nodes that cannot say, and why
    _silent: set[int] = field(default_factory=set)  # nodes that left a message unanswered
    _slowest: float = -1.0  # seconds that an answer took; below 0 before the first
    _keys: dict[int, str] = field(default_factory=dict)  # fingerprints by node
    _odd: set[int] = field(default_factory=set)  # nodes that are left out for what they said
    _votes: dict[int, int] = field(default_factory=dict)  # how many clients each node counts
    _refusals: list[Refusal] = field(default_factory=list)  # since they were last taken

    def wait(self, least: int, *, empty: bool = False, refused: bool = False) -> dict[int, int]:
        """Wait until enough nodes are online; return them as `online` does.

        Args:
            least: how many are enough.
            empty: whether clients without data count.
            refused: whether nodes that are left out for their answers count as well.
        """
        began = time.monotonic()
        said = -10.0
        while len(online := self.online(empty=empty)) + refused * len(self._odd) < least:
            if self._number_all(least):
                continue
            waited = time.monotonic() - began
            if waited > self.patience:
                raise TooFewNodes(
                    f"{len(online)} clients are connected, {least} are needed, and none came in "
                    f"{self.patience:g} s; start more SuperNodes or ask for fewer"
                )
            if waited - said >= 10:
                said = waited
                _log.info(
                    "Waiting for nodes to connect: %d connected (minimum required: %d).",
                    len(online),
                    least,
                )
            time.sleep(1)
        return online

    def everyone(self) -> dict[int, int]:
        """Wait for all clients, also those without data; after `patience`, take those that came."""
        try:
            return self.wait(self.total, empty=True, refused=True)
        except TooFewNodes as error:
            _log.warning("%s; the class counts of clients that did not come are not known", error)
            return self.online(empty=True)

    def online(self, *, empty: bool = False) -> dict[int, int]:
        """Return the node of every client that is online and holds data, or is `empty`."""
        nodes = self.mail.nodes()
        listed = set(nodes)
        new = [n for n in nodes if n not in self._identities]
        if new:
            self._ask(new, listed)
        # A client that came back has a new node: the one that was seen last speaks for it.
        return {
            identity.client: node
            for node, identity in self._identities.items()
            if node in listed and (empty or identity.examples > 0)
        }

    def heard(self, node: int, *, answered: bool) -> None:
        """Note whether a node answered. One that did not may be replaced by another node."""
        if answered:
            self._silent.discard(node)
        else:
            self._silent.add(node)

    def silent(self, node: int) -> bool:
        """Whether a node left the last message unanswered, so that it may be asked again."""
        return node in self._silent

    def stated(self, client: int) -> int | None:
        """Return how many rows a client stated; None if it stated none."""
        return None if self.anonymous else self._examples().get(client)

    def who(self, node: int) -> str:
        """Name a node by its client, where that is known."""
        client = self.client(node)
        return f"node {node}" if client is None else f"client {client} (node {node})"

    def key(self, node: int) -> str:
        """Return the fingerprint of a node's key; empty where Flower does not tell it."""
        return self._keys.get(node, "")

    def refuse(self, node: int, reason: str) -> None:
        """Note for the audit trail that an answer of a node was not used."""
        self._refusals.append(self.refusal(node, reason))
        del self._refusals[:-_MOST_REFUSALS]

    def refusal(self, node: int, reason: str) -> Refusal:
        """Return what the audit trail says of a node's message."""
        return Refusal(self.client(node), node, self.key(node), reason)

    def refusals(self) -> list[Refusal]:
        """Return what was noted since this was last called."""
        noted = self._refusals
        self._refusals = []
        return noted

    def client(self, node: int) -> int | None:
        """Return the client of a node."""
        identity = self._identities.get(node)
        return None if identity is None else identity.client

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
        self, nodes: Mapping[int, int], content: RecordDict, timeout: float, most: int
    ) -> tuple[dict[int, RecordDict], dict[int, str]]:
        """Put one question to clients; return the answers, and why others gave none.

        Args:
            nodes: the node of each client that is asked.
            content: the question.
            timeout: seconds that an answer is waited for.
            most: bytes that an answer may take.
        """
        contents = {node: self.frozen.content_for(node, content) for node in nodes.values()}
        sent = self.mail.send(
            [Message(c, node, MessageType.QUERY, ttl=timeout) for node, c in contents.items()]
        )
        whose = {node: client for client, node in nodes.items()}
        answers: dict[int, RecordDict] = {}
        failed = dict.fromkeys(nodes, "it was not reached")
        self._silent.update(nodes.values())  # until they answer
        for reply in self.mail.replies(sent, timeout):
            if isinstance(reply, GaveUp):
                self.heard(reply.node, answered=reply.unreadable)
                failed[whose[reply.node]] = reply.reason
                continue
            node = sent[reply.metadata.reply_to_message_id]
            client = whose[node]
            self.heard(node, answered=not from_flower(reply))
            if reply.has_error():
                failed[client] = fault(reply)
                continue
            try:
                check_size(reply.content, most)
                answers[client] = reply.content
            except Refused as reason:
                failed[client] = str(reason)
        return answers, {client: why for client, why in failed.items() if client not in answers}

    def examples(self, client: int) -> int:
        """Return how many rows a client holds; 0 where it is not known."""
        return self._examples().get(client, 0)

    def rows(self) -> int:
        """Return how many rows all known clients hold together."""
        return sum(self._examples().values())

    def mean_examples(self) -> float:
        """Return the mean number of rows of clients that hold rows; 0 if they do not state it."""
        unknown = self.anonymous or self.secure
        holding = sum(rows > 0 for rows in self._examples().values())
        return 0.0 if unknown else self.rows() / max(holding, 1)

    def holders(self) -> int:
        """Return how many of all clients hold rows; 0 where some have not stated it."""
        told = self._examples()
        unknown = self.anonymous or self.secure or len(told) < self.total
        return 0 if unknown else sum(rows > 0 for rows in told.values())

    def _examples(self) -> dict[int, int]:
        return {identity.client: identity.examples for identity in self._identities.values()}

    def class_counts(self, weight: float | None = None) -> Tensor:
        """Wait for all clients and return their rows by class [N, classes], as they show them.

        Clients that do not come, or are left out for their answers, count as holding no rows.

        Args:
            weight: how many times the median number of rows a client may count for.
        """
        self.everyone()
        _log.warning("The server sees every client's class counts: the method asks for them")
        shown = {one.client: one.counts for one in self._identities.values() if one.counts}
        widths = Counter(len(counts) for counts in shown.values())
        if not widths:
            raise TooFewNodes("no client shows its class counts; their app must say counts='plain'")
        width = self.classes or max(widths, key=lambda width: (widths[width], width))
        table = torch.zeros(self.total, width, dtype=torch.int64)
        for client, counts in shown.items():
            if len(counts) == width:
                table[client] = torch.tensor(counts)
            else:
                what = "client %d counts rows of %d classes, expected %d: it counts for none"
                _log.warning(what, client, len(counts), width)
        missing = sorted(set(range(self.total)) - shown.keys())
        if missing:
            _log.warning("clients %s do not show their class counts: they count for none", missing)
        rows = table.sum(1)
        if weight is not None:
            limit = float(limit_of(rows.double(), weight, lower=True).most)
            part = (limit / rows.clamp(min=1)).clamp(max=1.0)
            table = (table * part[:, None]).round().to(torch.int64)
        return table

    def _ask(self, nodes: list[int], listed: set[int]) -> None:
        """Ask nodes who they are if their pause is over, and read the answers that have come.

        Only new nodes are waited for, and only briefly once others have answered. Answers that
        take longer are read at a later call.
        """
        config = ConfigRecord({ASK: "who", "class-counts": self.counts, "secure": self.secure})
        query = RecordDict({"config": config})
        now = time.monotonic()
        due = [n for n in nodes if self._pause.get(n, (0.0, 0.0))[0] <= now]
        new = any(n not in self._pause for n in due)
        messages = [Message(query, node, MessageType.QUERY, ttl=self.patience) for node in due]
        asked = set(nodes)
        sent = {i: n for i, n in self._open.items() if n in asked} | self.mail.send(messages)
        there = listed - self._silent
        held = {s.client: n for n, s in self._identities.items() if n in there}
        answered = set()
        nameless = []
        stated: list[tuple[int, Any]] = []
        odd: dict[int, str] = {}  # why nodes are left out
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
                if node in self._identities:
                    continue  # it was asked twice, and both answers came now
                if reply.has_error():
                    self._nameless[node] = fault(reply)
                    nameless.append(node)
                else:
                    check_size(reply.content, MOST_NUMBERS + 8 * self.classes)
                    stated.append((node, the_record(reply.content, MetricRecord)))
                    self._votes[node] = _total(stated[-1][1])
            except Refused as reason:  # asked again: a repaired node with a key has its old id
                odd[node] = str(reason)
        nameless += self._register_all(stated, held, odd)
        for node, why in odd.items():
            self._nameless.pop(node, None)
            _log.warning("node %d is left out, its answer is wrong: %s", node, why)
            self.refuse(node, why)
        self._odd = (self._odd | odd.keys()) & listed - self._identities.keys()
        self._open = {i: n for i, n in sent.items() if i not in answered}
        self.mail.still_awaited(self._open)
        if self.anonymous:
            self._number(nameless)
        for node in due:
            pause = 2 * self._pause.get(node, (0.0, _FIRST_PAUSE / 2))[1]
            self._pause[node] = (time.monotonic() + pause, min(pause, _LONGEST_PAUSE))
            if node not in self._identities and node not in odd and not self.anonymous:
                why = self._nameless.get(node, "no answer yet, or another has its place")
                _log.warning("node %d does not say which client it is: %s", node, why)

    def _register_all(
        self, stated: list[tuple[int, Any]], held: dict[int, int], odd: dict[int, str]
    ) -> list[int]:
        """Take nodes as the clients they say they are; note why some are left out.

        Returns:
            The nodes that held a client's number provisionally.
        """
        if stated:
            self._keys |= self.mail.keys()
        self._count_clients()
        replaced = []
        for node, facts in stated:
            try:
                replaced += self._register(node, self._identity(facts), held)
            except Refused as reason:
                odd[node] = str(reason)
        return replaced

    def _register(self, node: int, identity: NodeIdentity, held: dict[int, int]) -> list[int]:
        """Take a node as the client it says it is, unless another node is that client.

        Returns:
            The node that held the client's number provisionally, if there was one.
        """
        key = self.key(node)
        if self.seats is not None:
            refusal = self.seats.refusal(key, identity.client) if key else "it shows no key"
            if refusal is not None:
                raise Refused(f"it says it is client {identity.client}: {refusal}")
        holder = held.get(identity.client)
        if holder is not None and holder not in self._nameless:
            _log.warning(
                "node %d says it is client %d, as node %d does: it is left out while that one is "
                "connected; give every SuperNode a partition-id of its own",
                node,
                identity.client,
                holder,
            )
            return []
        if self.seats is not None:
            self.seats.bind(key, identity.client)
        self._nameless.pop(node, None)
        self._identities[node] = identity
        if not identity.examples:
            what = "client %d (node %d) says that it holds no rows: it is not asked to train"
            _log.warning(what, identity.client, node)
        held[identity.client] = node
        if holder is not None:
            del self._identities[holder]
        return [] if holder is None else [holder]

    def _count_clients(self) -> None:
        """Take the number of clients that most nodes count, unless the app states it."""
        if not self.total and self._votes:
            votes = Counter(self._votes.values())
            self.total = max(votes, key=lambda total: (votes[total], total))

    def _identity(self, facts: Any) -> NodeIdentity:
        total = _total(facts)
        client = _whole(facts, "partition-id")
        if self.total and total != self.total:
            raise Refused(f"it counts {total} clients, the others {self.total}")
        if client >= total:
            raise Refused(f"partition-id {client} is not below num-partitions {total}")
        rows = _whole(facts, "num-examples")
        if rows > self.most_rows:
            raise Refused(f"num-examples is {rows}, expected at most {self.most_rows}")
        counts = facts.get("class-counts", [])
        if not isinstance(counts, list) or not all(isinstance(n, int) and n >= 0 for n in counts):
            raise Refused("class-counts must be whole numbers of at least 0")
        if counts and self.classes and len(counts) != self.classes:
            raise Refused(f"class-counts has {len(counts)} numbers, expected {self.classes}")
        if counts and sum(counts) != rows:
            raise Refused(f"class-counts add up to {sum(counts)}, num-examples is {rows}")
        return NodeIdentity(client, rows, tuple(counts), total)

    def _number_all(self, least: int) -> bool:
        """Number the nodes if enough are connected and none of them says who it is."""
        listed = set(self.mail.nodes())
        # An error may pass: only who was asked twice, so that its pause has grown, cannot say.
        nodes = [n for n in self._nameless if n in listed and self._pause[n][1] > _FIRST_PAUSE]
        if self.anonymous or self._identities or len(nodes) < max(least, 1):
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
        """Give the free client numbers to nodes that cannot say who they are."""
        online = set(self.mail.nodes())
        taken = {one.client for node, one in self._identities.items() if node in online}
        free = iter(sorted(set(range(self.total)) - taken))
        for node in sorted(nodes):
            client = next(free, None)
            if client is None:
                _log.warning(
                    "node %d joins beyond the %d counted, and waits for a place", node, self.total
                )
            else:
                self._identities[node] = NodeIdentity(client, 1)


def _whole(facts: Any, key: str, least: int = 0) -> int:
    """Return a whole number of a record: 1e-300 rows are not none, and 2.7 are not two."""
    value = number(facts, key, least=least)
    if value != int(value):
        raise Refused(f"{key} is {value:g}, expected a whole number")
    return int(value)


def _total(facts: Any) -> int:
    total = _whole(facts, "num-partitions", least=1)
    if total > MOST_CLIENTS:
        raise Refused(f"num-partitions is {total}, expected at most {MOST_CLIENTS}")
    return total
