"""The cohort of one round: which clients were asked, answered, or are asked as replacements."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from torch import Tensor

from fedbasin.core.method import Plan, Replies
from fedbasin.core.round import Traffic
from fedbasin.core.tree import tensors
from fedbasin.deploy.audit import Refusal
from fedbasin.deploy.clients import Clients, TooFewNodes, reasons_of
from fedbasin.deploy.mail import GaveUp
from fedbasin.deploy.replies import Collector
from fedbasin.deploy.wire import Refused, content_bytes, fault, from_flower, write_tree

MERGED = "merged"  # the record that says which round of a client was merged last
_MOST_REASONS = 10_000  # that are counted apart
_log = logging.getLogger("flwr")


def content_of(
    given: Mapping[str, ArrayRecord | ConfigRecord],
    round: int,
    plan: Plan,
    shared: Any,
    run: Mapping[str, str | int],
) -> RecordDict:
    """Return what every client of a cohort is sent.

    Args:
        given: the model and the user's settings, under the keys that clients look for.
        round: the round's number, from 1.
        plan: how they train; any Flower client finds its learning rate under ``lr``.
        shared: what the method broadcasts.
        run: the run's method, name and seed, for clients of fedbasin.
    """
    content = RecordDict(dict(given))
    for key, record in given.items():
        if isinstance(record, ConfigRecord):
            facts: dict[str, Any] = {"server-round": round, "lr": plan.lr}
            facts |= {"local-epochs": plan.epochs or 0, "local-steps": plan.steps or 0}
            facts |= {f"fedbasin-{name}": value for name, value in run.items()}
            content[key] = ConfigRecord({**record, **facts})
    if tensors(shared):
        content["shared"], content["shared-shape"] = write_tree(shared)
    return content


class TakesReplies(Protocol):
    """Collects a round's replies, in plain or masked."""

    bytes_up: int

    @property
    def clients(self) -> set[int]:
        """Whose replies were taken."""
        ...

    @property
    def counted(self) -> frozenset[int]:
        """The clients whose replies weigh something; without any there is nothing to merge."""
        ...

    def __len__(self) -> int: ...

    def take(self, client: int, node: int, reply: Message, rows: int | None = None) -> None:
        """Check a reply and take it, or refuse it with the reason."""
        ...

    def agreed(self) -> int:
        """Return how many replies report alike."""
        ...

    def outvoted(self, *, last: bool) -> list[int]:
        """Drop replies whose report has another structure than the majority's; return whose."""
        ...

    def outlying(self) -> list[tuple[int, str]]:
        """Drop replies whose loss or report is far beyond the cohort's; return whose, and why."""
        ...


@dataclass
class Cohort:
    """The clients of a round.

    Args:
        round: the round's number, from 1.
        clients: which node is which client.
        collector: takes the replies.
        tally: counts what is refused in all rounds, by client and reason.
        content: what every client is sent.
        merged: the last round of each client that was merged, which it is sent, too.
        asked: the node of each client that was asked.
        least: how many good replies the round waits for.
        timeout: seconds a reply is waited for.
        patience: further seconds in which too few replies may become enough.
        votes: whether what most clients send decides about the others.
    """

    round: int
    clients: Clients
    collector: TakesReplies
    tally: Counter[str]
    content: RecordDict
    merged: Tensor  # [N]
    asked: dict[int, int]
    least: int
    timeout: float
    patience: float
    votes: bool = True
    bytes_down: int = 0
    refused: int = 0
    refusals: list[Refusal] = field(default_factory=list)
    _failed: dict[int, str] = field(default_factory=dict)  # clients not asked again, and why
    _sent: dict[str, int] = field(default_factory=dict)  # the node of each message

    def messages(self, chosen: Iterable[int]) -> list[Message]:
        """Return what is sent to clients that were asked."""
        made = []
        for client in chosen:
            own = ConfigRecord({"round": int(self.merged[client])})
            node = self.asked[client]
            content = RecordDict({**self.content, MERGED: own})
            content = self.clients.frozen.content_for(node, content)
            ttl = 2 * self.timeout
            made.append(Message(content, node, MessageType.TRAIN, ttl=ttl))
            self.bytes_down += content_bytes(content)
        return made

    def replies(self, messages: list[Message]) -> Iterator[Message]:
        """Yield replies as they arrive, and ask again while there are too few."""
        began = time.monotonic()
        said = -10.0
        sent = self.clients.send(messages)
        while True:
            self._sent |= sent
            for arrived in self.clients.replies(sent, self.timeout):
                if isinstance(arrived, GaveUp):
                    if arrived.unreadable:
                        self.refuse(self.clients.client(arrived.node), arrived.node, arrived.reason)
                    else:
                        self._gave_up(arrived.node, arrived.reason)
                    continue
                reply = [arrived]
                del arrived  # or two models would be in memory while the next one arrives
                yield reply.pop()
            self._outvote(last=False)
            missing = self.least - self.collector.agreed()
            if missing <= 0:
                return
            waited = time.monotonic() - began
            nobody = self.hopeless(self.collector.clients)
            if nobody or waited > self.timeout + self.patience:
                usable = f"{self.least - missing} of {self.least} replies can be used"
                raise self.too_few(usable, None if nobody else waited)
            if waited - said >= 10:
                said = waited
                _log.info(
                    "round %d: received %d replies, waiting for %d more (minimum: %d)",
                    self.round,
                    self.least - missing,
                    missing,
                    self.least,
                )
            sent = self.clients.send(self._again(missing))
            if not sent:
                time.sleep(1)

    def collect(self, replies: Iterable[Message]) -> None:
        """Take good replies. Refuse the others with the client and the reason."""
        for reply in replies:
            node = self._sent.get(reply.metadata.reply_to_message_id, reply.metadata.src_node_id)
            if from_flower(reply):
                self._gave_up(node, fault(reply))
                continue
            client = self.clients.client(node)
            self.clients.heard(node, answered=True)
            self.clients.frozen.heard(node, None if reply.has_error() else reply.content)
            try:
                if reply.has_error():
                    self._error(client, node, reply)
                elif client is None or client not in self.asked:
                    raise Refused("it was not asked in this round")
                else:
                    self.collector.take(
                        client, self.asked[client], reply, self.clients.stated(client)
                    )
            except Refused as reason:
                self.refuse(client, node, str(reason))
            del reply  # or two models would be in memory while the next one arrives
        self._outvote(last=True)

    @property
    def count(self) -> int:
        """How many replies were taken."""
        return len(self.collector)

    def collected(self, server: Tensor) -> Replies | None:
        """Return the replies that were taken, once; None if none of them weighs anything."""
        assert isinstance(self.collector, Collector)  # masked replies are opened in `secure`
        return self.collector.finish(server) if self.collector.counted else None

    def traffic(self) -> Traffic:
        """Return what was sent and received in this round."""
        return Traffic(
            replies=self.count,
            dropped=len(self.asked) - self.count,
            refused=self.refused,
            bytes_down=self.bytes_down,
            bytes_up=self.collector.bytes_up,
        )

    def refuse(self, client: int | None, node: int, reason: str) -> None:
        """Count and log a reply that is not used. Its client is not asked again this round."""
        self._name(client, node, reason)
        if client is not None and client not in self.collector.clients:
            self._failed[client] = reason

    def hopeless(self, good: Collection[int]) -> bool:
        """Whether waiting is of no use: all who were asked have answered, and nobody is left.

        Clients that are not connected may still come. They are waited for if there is a good
        answer: where all answers are refused, theirs would be refused, too.

        Args:
            good: clients whose answers were taken.
        """
        done = self._failed.keys() | set(good)
        left = (self.asked.keys() | self.clients.online().keys()) - done
        known = done | self.clients.online(empty=True).keys()
        may_come = bool(good) and len(known) < self.clients.total
        return bool(done) and not left and not may_come

    def too_few(self, usable: str, waited: float | None) -> TooFewNodes:
        """Return the error of a round that has too few good answers, with why others were refused.

        Args:
            usable: how many are good.
            waited: seconds that others were waited for; None where nobody is left to ask.
        """
        why = self.reasons()
        if waited is None:
            why = why or "their reports are shaped differently"
            return TooFewNodes(
                f"round {self.round}: {usable}, and nobody is left to ask: {why}; correct this and "
                "start the run again"
            )
        why = f" ({why})" if why else ""
        return TooFewNodes(
            f"round {self.round}: {usable} after {waited:.0f} s{why}; start the run again when "
            "enough clients are connected"
        )

    def reasons(self) -> str:
        """Return who was refused in this round and why: the first few, in one line."""
        return reasons_of(self._failed)

    def _outvote(self, *, last: bool) -> None:
        """Reject reports unlike the majority's, at last also losses and reports far beyond."""
        if not self.votes:
            return
        why = "its report is shaped unlike the other clients'"
        for client in self.collector.outvoted(last=last):
            self.refuse(client, self.asked[client], why)
        if last:
            for client, why in self.collector.outlying():
                self.refuse(client, self.asked[client], why)

    def name_late(self) -> None:
        """Count and log replies to earlier rounds. Their clients may answer this one."""
        for node in self.clients.late():
            self._name(self.clients.client(node), node, "it came too late")

    def _name(self, client: int | None, node: int, reason: str) -> None:
        who = f"node {node}" if client is None else f"client {client}"
        self.refused += 1
        self.refusals.append(Refusal(client, node, self.clients.key(node), reason))
        self.tally[f"{who}: {reason}" if len(self.tally) < _MOST_REASONS else who] += 1
        what = "round %d: refused the reply of %s (node %d): %s"
        _log.warning(what, self.round, who, node, reason)

    def _error(self, client: int | None, node: int, reply: Message) -> None:
        what = "\t> Received error in reply from node %d (client %s): %s"
        why = fault(reply)
        _log.warning(what, node, client, why)
        if client is not None:
            self._failed[client] = why

    def _again(self, missing: int) -> list[Message]:
        """Return messages to clients in place of those that did not answer."""
        online = self.clients.online()
        done = self.collector.clients | self._failed.keys()
        free = [c for c in online if c not in done]
        chosen = sorted(free, key=lambda client: (client not in self.asked, client))[:missing]
        if chosen:
            _log.info("round %d: asking clients %s for the missing replies", self.round, chosen)
        self.asked |= {client: online[client] for client in chosen}
        return self.messages(chosen)

    def _gave_up(self, node: int, reason: str) -> None:
        client = self.clients.client(node)
        self.clients.heard(node, answered=False)
        what = "round %d: no reply from client %s (node %d): %s"
        _log.warning(what, self.round, client, node, reason)
