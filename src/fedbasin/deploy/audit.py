"""Who was merged in which round, and who was refused and why: lines chained by hashes.

``merged.jsonl`` in the run folder has one line for each round and one for each resumed start.
Lines are only added. Each holds the SHA-256 of the line before it, so a changed, removed or added
line no longer fits the next one. The last line's hash is in the log of every round and in
``summary.json``. Whoever keeps it can detect a changed last line or a rewritten file.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fedbasin.core.files import replacing

FIRST = "0" * 64  # what stands for the line before the first
FILE = "merged.jsonl"


class MergedReply(NamedTuple):
    """A reply that was merged.

    Args:
        client: whose.
        key: fingerprint of its node's key; empty where Flower does not tell it.
        weight: how many samples it counted for; None where the server does not see it.
        norm: length of its update as it was merged; None where the server keeps no single reply.
    """

    client: int
    key: str
    weight: float | None = None
    norm: float | None = None


class Refusal(NamedTuple):
    """A message that was not used, or not as it came.

    Args:
        client: whose; None where the node does not say.
        node: which node sent it.
        key: fingerprint of its key.
        reason: why.
    """

    client: int | None
    node: int
    key: str
    reason: str


@dataclass(frozen=True)
class AuditedRound:
    """What the audit trail says of one round.

    Args:
        round: the round's number, from 1.
        asked: the clients that were asked to train.
        merged: whose replies the model is made of.
        bounded: replies that were merged, but shortened or counted for less.
        refused: messages that were not used.
    """

    round: int
    asked: Sequence[int]
    merged: Sequence[MergedReply]
    bounded: Sequence[Refusal] = ()
    refused: Sequence[Refusal] = ()

    def plain(self) -> dict[str, Any]:
        """Return the round as plain values for JSON; a length beyond float32 is null."""
        finite = [
            each if math.isfinite(each.norm or 0.0) else each._replace(norm=None)
            for each in self.merged
        ]
        return {
            "round": self.round,
            "asked": list(self.asked),
            "merged": [each._asdict() for each in finite],
            "bounded": [each._asdict() for each in self.bounded],
            "refused": [each._asdict() for each in self.refused],
        }


@dataclass(frozen=True)
class Checked:
    """The result of checking an audit trail.

    Args:
        lines: how many lines it has.
        head: the hash of the last line.
        broken: where the chain breaks and how; empty if it holds.
    """

    lines: int
    head: str
    broken: str = ""


@dataclass
class AuditTrail:
    """Writes the audit trail of a federation.

    Args:
        file: its path; with None nothing is kept.
    """

    file: Path | None
    head: str = field(default=FIRST, init=False)

    def begin(self, finished: int) -> Checked:
        """Continue an existing file and note the start; return the state of the file.

        Args:
            finished: rounds that the run has finished; later rounds are repeated.
        """
        if self.file is not None and self.file.is_symlink():
            _own_copy(self.file)
        if self.file is None or not self.file.exists():
            return Checked(0, FIRST)
        found = check(self.file)
        self.head = found.head
        data = self.file.read_bytes()
        if data and not data.endswith(b"\n"):  # a power cut in the last line
            with self.file.open("ab") as stream:
                stream.write(b"\n")
        self._add({"started_after_round": finished, "broken": found.broken})
        return found

    def add(self, made: AuditedRound) -> None:
        """Add what happened in a round."""
        self._add(made.plain())

    def _add(self, values: dict[str, Any]) -> None:
        if self.file is None:
            return
        values["previous"] = self.head
        line = json.dumps(values, allow_nan=False).encode()
        with self.file.open("ab") as stream:
            stream.write(line + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
        self.head = _hash(line)


def _own_copy(link: Path) -> None:
    """Put a file in the place of a link: what it leads to is not the run's to write to."""
    data = link.read_bytes() if link.exists() else b""
    with replacing(link) as temporary:
        temporary.write_bytes(data)


def check(file: Path) -> Checked:
    """Follow the chain of an audit trail to its end, or to where it breaks."""
    head = FIRST
    broken = ""
    number = 0
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        if not broken:
            said = _previous(line)
            if said is None:
                broken = f"line {number} is damaged"
            elif said != head:
                broken = f"line {number} does not follow from the line before it"
        head = _hash(line)
    return Checked(number, head, broken)


def refusals_of(file: Path) -> Counter[str]:
    """Count the refusals of an audit trail, by client and reason; damaged lines count for none."""
    found: Counter[str] = Counter()
    for line in file.read_bytes().splitlines():
        values = _values(line)
        refused = values.get("refused", []) if values else []
        for each in refused if isinstance(refused, list) else []:
            if isinstance(each, dict):
                client = each.get("client")
                who = f"node {each.get('node')}" if client is None else f"client {client}"
                found[f"{who}: {each.get('reason')}"] += 1
    return found


def _values(line: bytes) -> dict[str, Any] | None:
    """Return what a line says; None if it is no line of an audit trail."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def _previous(line: bytes) -> str | None:
    """Return the hash that a line holds; None if it is no line of an audit trail."""
    values = _values(line)
    said = values.get("previous") if values else None
    return said if isinstance(said, str) else None


def _hash(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()
