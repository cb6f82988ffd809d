"""Frozen parts of a model: a node is sent them once, and from then on their hash.

A client of fedbasin makes its network from weights of its own, and compares frozen parts with the
server's. With its reply it sends their hash. A node that has sent the right hash is not sent these
parts again, but the hash, which it compares with that of its own. A client that sends no hash, such
as one written for another strategy, gets the whole model every time. The server remembers nodes as
long as it runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fedbasin.core.net import Net
from fedbasin.deploy.wire import Codec, Refused, read_array

FROZEN = "frozen"  # the record that names frozen parts by their hash
_HASH = "sha256"


def hash_of(arrays: Mapping[str, np.ndarray]) -> str:
    """Return the hash of named arrays: of names, types, shapes and values; empty for none."""
    if not arrays:
        return ""
    total = hashlib.sha256()
    for name in sorted(arrays):
        values = np.ascontiguousarray(arrays[name])
        total.update(f"{name} {values.dtype} {list(values.shape)}\n".encode())
        total.update(values.data if values.size else b"")
    return total.hexdigest()


@dataclass
class FrozenParts:
    """The server's side: which parts of the model are frozen, and which nodes hold them.

    Args:
        names: of the frozen parts.
        hash: of their values; empty where there are none.
        holders: nodes that have sent this hash.
    """

    names: frozenset[str] = frozenset()
    hash: str = ""
    holders: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, codec: Codec) -> FrozenParts:
        """Find the frozen parts of a model."""
        arrays = {name: read_array(array) for name, array in codec.fixed.items()}
        frozen = {name: values for name, values in arrays.items() if values.dtype.kind == "f"}
        return cls(frozenset(frozen), hash_of(frozen))

    def content_for(self, node: int, content: RecordDict) -> RecordDict:
        """Return a message's content as it is for a node: with the frozen parts or their hash."""
        if node not in self.holders:
            return content
        lean = RecordDict({**content, FROZEN: ConfigRecord({_HASH: self.hash})})
        for key, record in content.items():
            if isinstance(record, ArrayRecord) and not self.names.isdisjoint(record):
                kept = {name: array for name, array in record.items() if name not in self.names}
                lean[key] = ArrayRecord(kept)
        return lean

    def heard(self, node: int, content: RecordDict | None) -> None:
        """Note what a node answered; None for an error, after which it is sent the whole model."""
        record = None if content is None else content.get(FROZEN)
        known = isinstance(record, ConfigRecord) and record.get(_HASH) == self.hash
        if self.hash and known:
            self.holders.add(node)
        elif content is None:
            self.holders.discard(node)


def check_frozen(net: Net, codec: Codec, content: RecordDict) -> str:
    """Compare the client's frozen parts with the server's; return their hash, the client's side.

    The hash is empty where nothing is frozen, or where the server did not send all of it.
    """
    moving = (*net.layout.names, *net.buffer_layout.names)
    named = net.state_dict(*net.initial()).items() if net.frozen_size or codec.fixed else ()
    own = {n: t.cpu() for n, t in named if n not in moving and t.is_floating_point()}
    for name in codec.fixed.keys() & own.keys():
        theirs = torch.from_numpy(read_array(codec.fixed[name]).copy())
        if theirs.is_floating_point() and not torch.equal(theirs, own[name]):
            raise Refused(
                f"{name} is frozen, and the client's is not the server's: make both models with "
                "the same weights, from one file or one seed"
            )
    found = hash_of({name: tensor.numpy() for name, tensor in own.items()})
    record = content.get(FROZEN)
    if isinstance(record, ConfigRecord):
        if record.get(_HASH) != found:
            raise Refused(
                "the hash of the frozen parts is not the server's: make both models with the same "
                "weights, from one file or one seed"
            )
        return found
    return found if own.keys() <= codec.fixed.keys() else ""


def hash_record(found: str) -> ConfigRecord:
    """Return the record with which a client says that it holds frozen parts."""
    return ConfigRecord({_HASH: found})
