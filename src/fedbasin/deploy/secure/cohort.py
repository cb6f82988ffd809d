"""The cohort of a round under secure aggregation: the protocol's messages."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from torch import Tensor

from fedbasin.core.method import Replies
from fedbasin.core.vectors import Layout
from fedbasin.deploy.bounds import MOST_NUMBERS, check_size
from fedbasin.deploy.clients import ASK
from fedbasin.deploy.cohort import Cohort
from fedbasin.deploy.mail import GaveUp
from fedbasin.deploy.secure.client import KEYS, MAIL, NUMBERS, SHARES, UNMASK, WORDS
from fedbasin.deploy.secure.quantise import Sums, rounding
from fedbasin.deploy.secure.server import RoundFailed, ServerProtocol
from fedbasin.deploy.secure.settings import SECURE
from fedbasin.deploy.secure.update import reply_of
from fedbasin.deploy.wire import Refused, content_bytes, fault, from_flower, read_array, the_record

_MOST_FOR_ONE = 1024  # bytes of shares and hashes for one other client
_log = logging.getLogger("flwr")


@dataclass
class MaskedCollector:
    """Adds masked replies up, one after another.

    Args:
        protocol: the round's protocol.
        round: finished rounds when the cohort was asked.
    """

    protocol: ServerProtocol
    round: int
    bytes_up: int = 0

    @property
    def clients(self) -> set[int]:
        """Whose replies were taken."""
        return set(self.protocol.survivors)

    def __len__(self) -> int:
        return len(self.protocol.survivors)

    @property
    def counted(self) -> frozenset[int]:
        """The clients whose words were added up."""
        return frozenset(self.protocol.survivors)

    def take(self, client: int, node: int, reply: Message, rows: int | None = None) -> None:
        """Check a reply and add it, or refuse it with the reason.

        `rows`, how many the client stated, plays no part: the server does not see its count.
        """
        if reply.metadata.src_node_id != node:
            raise Refused(f"it comes from node {reply.metadata.src_node_id}, node {node} was asked")
        size = check_size(reply.content, 4 * self.protocol.size + MOST_NUMBERS)
        told = the_record(reply.content, MetricRecord)
        for key, expected in (("server-round", self.round + 1), ("partition-id", client)):
            if told.get(key) != expected:
                raise Refused(f"it is for {key} {told.get(key)}, expected {expected}")
        arrays: ArrayRecord = the_record(reply.content, ArrayRecord, SECURE)
        if set(arrays) != {WORDS, NUMBERS}:
            raise Refused(f"its arrays are {sorted(arrays)[:5]}, expected {WORDS} and {NUMBERS}")
        self.protocol.take_masked(client, read_array(arrays[WORDS]), read_array(arrays[NUMBERS]))
        self.bytes_up += size

    def agreed(self) -> int:
        """Return how many replies were taken."""
        return len(self)

    def outvoted(self, *, last: bool) -> list[int]:
        """Return nobody: no reply has a structure of its own."""
        return []

    def outlying(self) -> list[tuple[int, str]]:
        """Return nobody: the server sees no single loss or report."""
        return []


@dataclass
class SecureCohort(Cohort):
    """A cohort whose replies are added up masked.

    Args:
        protocol: the round's protocol, which has not begun.
        buffers: the statistics that clients start from [Q].
        statistics: the parts of these.
    """

    protocol: ServerProtocol = field(kw_only=True)
    buffers: Tensor = field(kw_only=True)
    statistics: Layout = field(kw_only=True)
    failed: str = ""  # why the round has no sum
    sums: Sums | None = None
    _silent: set[int] = field(default_factory=set)  # clients that left a question unanswered

    def messages(self, chosen: Iterable[int]) -> list[Message]:
        """Agree on keys and shares, then return what is sent to clients that train."""
        drawn = len(self.asked)
        needed = self.protocol.session.threshold
        try:
            if drawn < needed:
                raise RoundFailed(f"{drawn} clients were drawn, {needed} are needed")
            self._agree_on_keys()
            self._deal_shares()
        except RoundFailed as reason:
            self._fail(reason)
            return []
        made = super().messages(self.protocol.masking)
        for client, message in zip(self.protocol.masking, made, strict=True):
            message.content[SECURE] = self.protocol.session.record()
            message.content[MAIL] = mail = self.protocol.shares_for(client)
            self.bytes_down += content_bytes(RecordDict({MAIL: mail}))
        return made

    def replies(self, messages: list[Message]) -> Iterator[Message]:
        """Yield replies as they arrive. Nobody can be asked in place of a lost client."""
        _log.info("round %d: train: asking %d clients", self.round, len(messages))
        sent = self.clients.send(messages)
        self._sent |= sent
        for arrived in self.clients.replies(sent, self.timeout):
            if isinstance(arrived, GaveUp):
                self._gave_up(arrived.node, arrived.reason)
                continue
            reply = [arrived]
            del arrived  # or two updates would be in memory while the next one arrives
            yield reply.pop()

    def collected(self, server: Tensor) -> Replies | None:
        """Open the sum and return it as one reply, once; None if the round has none."""
        if self.failed:
            return None
        protocol = self.protocol
        try:
            protocol.close_masked()
            self._unmask()
            words, sums = protocol.open()
            if sums is None:
                raise RoundFailed("no client has a row")
            replies = reply_of(
                protocol.session,
                words,
                sums,
                protocol.survivors,
                server,
                self.buffers,
                self.statistics,
            )
        except (RoundFailed, Refused) as reason:
            self._fail(reason)
            return None
        self.sums = sums
        return replies

    def reasons(self) -> str:
        """Return why the round has no sum, then who was refused and why."""
        return "; ".join(filter(None, (self.failed, super().reasons())))

    def notes(self, parameters: int) -> dict[str, float]:
        """Return what the round's record says of it.

        Args:
            parameters: of the model.
        """
        if self.sums is None:
            return {"secure_failed": 1.0}
        session = self.protocol.session
        sums = self.sums
        noted = {
            "secure_rounding": rounding(session.clip, sums, session),
            "secure_clipped": sums.clipped / max(sums.replies * parameters, 1),
            "secure_over_rows": float(sums.over),
        }
        if session.statistics:
            entries = max(sums.replies * self.statistics.size, 1)
            noted["secure_clipped_statistics"] = sums.clipped_statistics / entries
        return noted

    def _agree_on_keys(self) -> None:
        """Ask the cohort for keys, and others while too few have answered."""
        began = time.monotonic()
        to_ask = dict(self.asked)
        while True:
            empty = {client: ConfigRecord() for client in to_ask}
            self._exchange(KEYS, to_ask, empty, self.protocol.take_keys)
            missing = self.protocol.session.threshold - len(self.protocol.with_keys)
            if missing <= 0:
                break
            waited = time.monotonic() - began
            nobody = self.hopeless(self.protocol.with_keys)
            if nobody or waited > self.patience:
                sent = f"{len(self.protocol.with_keys)} clients sent keys"
                usable = f"{sent}, {self.protocol.session.threshold} are needed"
                raise self.too_few(usable, None if nobody else waited)
            to_ask = self._others(missing)
            self.asked |= to_ask
            if not to_ask:
                time.sleep(1)
        self.protocol.close_keys()

    def _others(self, missing: int) -> dict[int, int]:
        """Return clients to ask in place of those that sent no keys."""
        online = self.clients.online()
        done = self._silent.union(self._failed, self.protocol.with_keys)
        room = self.protocol.session.clients - len(self.protocol.with_keys)
        free = [c for c in online if c not in done]
        chosen = sorted(free, key=lambda client: (client not in self.asked, client))
        return {client: online[client] for client in chosen[: min(missing, room)]}

    def _deal_shares(self) -> None:
        nodes = {client: self.asked[client] for client in self.protocol.with_keys}
        mails = {client: self.protocol.keys_for(client) for client in nodes}
        self._exchange(SHARES, nodes, mails, self.protocol.take_shares)
        self.protocol.close_shares()

    def _unmask(self) -> None:
        nodes = {client: self.asked[client] for client in self.protocol.survivors}
        mails = {client: self.protocol.lists_for(client) for client in nodes}
        self._exchange(UNMASK, nodes, mails, self.protocol.take_unmask)

    def _exchange(
        self,
        stage: str,
        nodes: Mapping[int, int],
        mails: Mapping[int, ConfigRecord],
        take: Callable[[int, ConfigRecord], None],
    ) -> None:
        """Put a question of the protocol to clients and take their answers."""
        whose = {node: client for client, node in nodes.items()}
        session = self.protocol.session.record()
        messages = []
        for client, node in nodes.items():
            config = ConfigRecord({ASK: stage})
            content = RecordDict({"config": config, SECURE: session, MAIL: mails[client]})
            self.bytes_down += content_bytes(content)
            messages.append(Message(content, node, MessageType.QUERY, ttl=self.timeout))
        _log.info("round %d: %s: asking %d clients", self.round, stage, len(messages))
        sent = self.clients.send(messages)
        for reply in self.clients.replies(sent, self.timeout):
            if isinstance(reply, GaveUp):
                self._silent.add(whose[reply.node])
                self._gave_up(reply.node, reply.reason)
                continue
            node = sent[reply.metadata.reply_to_message_id]
            client = whose[node]
            if from_flower(reply):
                self._silent.add(client)
                self._gave_up(node, fault(reply))
                continue
            try:
                if reply.has_error():
                    raise Refused(fault(reply))
                most = MOST_NUMBERS + _MOST_FOR_ONE * len(nodes)
                self.collector.bytes_up += check_size(reply.content, most)
                take(client, the_record(reply.content, ConfigRecord))
            except Refused as reason:
                self.refuse(client, node, f"{stage}: {reason}")

    def _fail(self, reason: Exception) -> None:
        self.failed = str(reason)
        _log.warning(
            "round %d: secure aggregation failed, nothing is unmasked and the server keeps its "
            "model: %s",
            self.round,
            reason,
        )
