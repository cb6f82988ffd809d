"""The fields of the protocol's messages, read with their bounds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from flwr.app import ConfigRecord

from fedbasin.deploy.wire import Refused

_MOST_CLIENTS = 1 << 16


def read_bytes(record: ConfigRecord, key: str, size: int) -> bytes:
    """Return bytes of a known length."""
    value = record.get(key)
    if not isinstance(value, bytes) or len(value) != size:
        raise Refused(f"{key} is {_shown(value)}, expected {size} bytes")
    return value


def read_all_bytes(record: ConfigRecord, key: str, size: int, count: int) -> list[bytes]:
    """Return a list of bytes of a known length each."""
    values = record.get(key)
    if not isinstance(values, list) or len(values) != count:
        raise Refused(f"{key} is {_shown(values)}, expected {count} times {size} bytes")
    for value in values:
        if not isinstance(value, bytes) or len(value) != size:
            raise Refused(f"{key} has {_shown(value)}, expected {size} bytes")
    return [value for value in values if isinstance(value, bytes)]


def read_clients(record: ConfigRecord, key: str) -> list[int]:
    """Return client ids, rising and without repetition."""
    values = record.get(key)
    if not isinstance(values, list) or len(values) > _MOST_CLIENTS:
        raise Refused(f"{key} is {_shown(values)}, expected client ids")
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 31:
            raise Refused(f"{key} has {_shown(value)}, expected a client id")
    ids = [value for value in values if isinstance(value, int)]
    if any(a >= b for a, b in pairwise(ids)):
        raise Refused(f"{key} is not rising, or names a client twice")
    return ids


def by_client(clients: Sequence[int], values: Sequence[Any]) -> dict[int, Any]:
    """Return values by the client they belong to."""
    return dict(zip(clients, values, strict=True))


def _shown(value: Any) -> str:
    if isinstance(value, bytes | list):
        return f"{type(value).__name__} of length {len(value)}"
    return f"{type(value).__name__} {str(value)[:64]}"
