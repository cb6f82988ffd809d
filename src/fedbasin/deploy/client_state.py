"""The state that a client keeps between rounds, stored on the client.

By default it is in Flower's client state, which lives as long as the SuperNode and the run. A
node that is started with ``--node-config "state-dir='/var/lib/fedbasin'"`` stores it in a file,
which outlives both. The state before the last round is stored too. The client returns to it if
that round was not merged: its reply was lost or refused, or the server was stopped in it.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context

from fedbasin.core.state import load, save
from fedbasin.core.tree import Leaf, flatten, restore, tensors
from fedbasin.deploy.wire import Refused, read_array

_ARRAYS = "fedbasin-own"
_ROUND = "fedbasin-own-round"
_log = logging.getLogger("flwr")


@dataclass(frozen=True)
class StoredState:
    """A client's own state before and after its last round."""

    round: int  # finished rounds when it trained
    before: Any
    after: Any


class StatesOnClients:
    """What the server of a federation has in place of the clients' states: nothing."""

    def get(self, client: int) -> tuple[Any, ...]:
        """Raise an error: the state is on the client."""
        raise LookupError(f"client {client} keeps its state itself")


class ClientStateStore:
    """Reads and writes one client's state in one federation.

    Args:
        context: Flower's context of the client.
        name: of the federation, as the server says.
        client: the client's id.
        zero: the state before the first round.
    """

    def __init__(self, context: Context, name: str, client: int, zero: tuple[Any, ...]) -> None:
        if not re.fullmatch(r"[0-9a-f]{1,64}", name):
            raise Refused(f"the federation is called {name[:64]!r}, expected hexadecimal digits")
        self._context = context
        self._name = name
        self._zero = zero
        folder = context.node_config.get("state-dir")
        self._file = None
        if folder is not None:
            self._file = Path(str(folder)) / name / f"client{client:06d}.safetensors"

    def at(self, round: int, merged: int) -> tuple[Any, ...]:
        """Return the state with which a round begins.

        Args:
            round: finished rounds.
            merged: the last round of this client that the server merged, from 1; 0 before.
        """
        stored = self._read() if tensors(self._zero) else None
        if stored is None:
            return self._zero
        if stored.round > round:
            _log.warning(
                "the server asks for round %d, this client has trained in round %d: its own "
                "state is ahead",
                round + 1,
                stored.round + 1,
            )
        state: tuple[Any, ...] = stored.after if stored.round < merged else stored.before
        return state

    def write(self, round: int, before: tuple[Any, ...], after: tuple[Any, ...]) -> None:
        """Store the state after a round, and the one before it."""
        if not tensors(self._zero):
            return
        stored = StoredState(round, before, after)
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            save(self._file, stored)
            return
        arrays = {p: Array(leaf.detach().cpu().numpy()) for p, leaf in _tensors(stored)}
        self._context.state[_ARRAYS] = ArrayRecord(arrays)
        self._context.state[_ROUND] = ConfigRecord({"round": round, "name": self._name})

    def _read(self) -> StoredState | None:
        template = StoredState(0, self._zero, self._zero)
        if self._file is not None:
            if not self._file.exists():
                return None
            from_file: StoredState = load(self._file, template)
            return from_file
        if _ARRAYS not in self._context.state:
            return None
        arrays = self._context.state[_ARRAYS]
        when = self._context.state[_ROUND]
        if when["name"] != self._name:
            return None  # an app may run several federations, one after another
        leaves: dict[str, Leaf] = dict(flatten(template))
        leaves |= {p: torch.from_numpy(read_array(a).copy()) for p, a in arrays.items()}
        leaves["round"] = int(when["round"])
        stored: StoredState = restore(template, leaves)
        return stored


def _tensors(tree: Any) -> list[tuple[str, torch.Tensor]]:
    return [(path, leaf) for path, leaf in flatten(tree) if isinstance(leaf, torch.Tensor)]
