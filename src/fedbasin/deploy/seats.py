"""Which node key holds which client's number, in a file beside the run's records.

The first key that claims a number keeps it, also when the run is started again. To give a number
to another key, delete its line from ``seats.toml`` while the run is stopped.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

from fedbasin.core.files import read_toml
from fedbasin.core.record import RecordError, write_atomically

_HEAD = "# The SHA-256 of a node's public key, and the client that this key speaks for.\n"


def fingerprint(key: bytes) -> str:
    """Return a short name of a public key."""
    return hashlib.sha256(key).hexdigest()[:32]


@dataclass
class Seats:
    """Who holds which number.

    Args:
        file: where they are remembered; None keeps them in memory alone.
    """

    file: Path | None = None
    _clients: dict[str, int] = field(default_factory=dict)  # by fingerprint

    def __post_init__(self) -> None:
        if self.file is None or not self.file.exists():
            return
        try:
            read = read_toml(self.file)
        except ValueError as error:
            raise RecordError(f"{self.file} is not TOML: {error}") from error
        whole = {k: v for k, v in read.items() if type(v) is int and v >= 0}
        if whole != read or len(set(whole.values())) != len(whole):
            raise RecordError(f"{self.file} must give each key one client of its own")
        self._clients = whole

    def refusal(self, key: str, client: int) -> str | None:
        """Return why a key may not speak for a client; None if it may."""
        own = self._clients.get(key)
        if own is not None:
            return None if own == client else f"its key {key} is bound to client {own}"
        if client in self._clients.values():
            return f"client {client} is bound to another key than its {key}"
        return None

    def bind(self, key: str, client: int) -> None:
        """Remember that a key speaks for a client."""
        if self._clients.get(key) == client:
            return
        self._clients[key] = client
        if self.file is not None:
            lines = [f"{json.dumps(k)} = {v}\n" for k, v in self._clients.items()]
            write_atomically(self.file, _HEAD + "".join(lines))
