"""The states that clients keep between rounds, in one store keyed by client id.

States are on the device if all of them take a small part of its memory. Otherwise they are in main
memory, or in files if they do not fit there either, and are copied to the device while their client
trains. On real clients (`deploy.client_state`) each client stores its own state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fedbasin.core.archive import Archive
from fedbasin.core.tree import count_bytes, flatten, mapped, rebuild, row, stack, tensors

_DEVICE_SHARE = 1 / 16  # of a GPU's memory that states may take
_ALIGNED = 8  # every leaf of a stored state begins at a multiple of this many bytes


@dataclass(frozen=True)
class SavedStates:
    """The states of clients that have taken part, as a checkpoint stores them."""

    ids: Tensor  # int64 [k]
    rounds: Tensor  # int64 [k] when each of them last took part
    rows: Any  # own states, stacked [k, ...]; () where they lie in files


class ClientStates:
    """Own states of all clients; a client that never took part has the zero state.

    Args:
        zero: the state before a client's first round (`Trainer.zero_state`).
        vector: a model, for the device of states.
        clients: how many clients there are, N.
        limit: most bytes of main memory that the states of N clients may take.
        archive: files for them beyond that; without it they stay in main memory.
    """

    def __init__(
        self,
        zero: tuple[Any, ...],
        vector: Tensor,
        *,
        clients: int = 0,
        limit: float = math.inf,
        archive: Archive | None = None,
    ) -> None:
        self._zero = zero
        self._device = vector.device
        self._rounds: dict[int, int] = {}  # when each client last took part
        self._held: dict[int, tuple[Any, ...]] = {}  # their states, unless these lie in files
        need = clients * count_bytes(self._zero)
        self._home = home(self._device, need)
        spills = self._home.type == "cpu" and need > limit
        self._archive = archive if spills else None
        self._saved: dict[int, int] = {}  # the rounds in the last checkpoint

    @property
    def where(self) -> Literal["none", "device", "memory", "disk"]:
        """Where states are stored; none if clients have no state."""
        if not tensors(self._zero):
            return "none"
        if self._archive is not None:
            return "disk"
        return "memory" if self._home.type == "cpu" else "device"

    def get(self, client: int) -> tuple[Any, ...]:
        """Return a client's own state on the device."""
        if client not in self._rounds:
            return self._zero
        if self._archive is None:
            state = self._held[client]
        else:
            state = _unpacked(self._archive.get(client, self._rounds[client]), self._zero)
        moved: tuple[Any, ...] = _moved(state, self._device)
        return moved

    def put(self, clients: Iterable[int], states: Iterable[tuple[Any, ...]], round: int) -> None:
        """Replace the states of the clients that took part in a round."""
        if self.where == "none":
            return
        for client, state in zip(clients, states, strict=True):
            if self._archive is None:
                self._held[client] = _apart(state, self._home)
            else:
                self._archive.put(client, round, _packed(state))
            self._rounds[client] = round
        self._sweep()

    def kept(self) -> SavedStates:
        """Return the states as a checkpoint stores them."""
        ids = sorted(self._rounds)
        rows: Any = ()
        if self._archive is None:
            rows = stack([self._held[i] for i in ids]) if ids else _moved(self._zero, self._home)
        rounds = torch.tensor([self._rounds[i] for i in ids], dtype=torch.int64)
        return SavedStates(torch.tensor(ids, dtype=torch.int64), rounds, rows)

    def restore(self, saved: SavedStates) -> None:
        """Replace all states by those of a checkpoint."""
        ids = [int(i) for i in saved.ids]
        self._rounds = dict(zip(ids, saved.rounds.tolist(), strict=True))
        self._saved = dict(self._rounds)
        if self._archive is None:
            self._held = {i: row(saved.rows, n) for n, i in enumerate(ids)}

    def mark_saved(self) -> None:
        """Note that a checkpoint has the present states. Older files are no longer needed."""
        self._saved = dict(self._rounds)
        self._sweep()

    def _sweep(self) -> None:
        """Delete files other than those of now and of the last checkpoint."""
        if self._archive is not None:
            self._archive.keep([*self._rounds.items(), *self._saved.items()])
            self._archive.sweep()


def home(device: torch.device, need: int) -> torch.device:
    """Return the device of states that take `need` bytes and are not on disk."""
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        if need <= memory * _DEVICE_SHARE:
            return device
    return torch.device("cpu")


def _moved(state: Any, device: torch.device) -> Any:
    return mapped(lambda leaf: leaf.to(device), state)


def _apart(state: Any, device: torch.device) -> Any:
    """Return a state on a device, its rows copied: a view would hold on to its whole cohort."""

    def apart(leaf: Tensor) -> Tensor:
        view = leaf.untyped_storage().nbytes() > leaf.numel() * leaf.element_size()
        return leaf.detach().to(device, copy=view)

    return mapped(apart, state)


def _packed(state: Any) -> Tensor:
    """Return the tensors of a state as bytes, one after another."""
    parts = []
    for leaf in tensors(state):
        raw = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        parts += [raw, raw.new_zeros(-len(raw) % _ALIGNED)]
    return torch.cat(parts)


def _unpacked(packed: Tensor, template: Any) -> Any:
    """Return bytes as a state of the template's shape, without a copy."""
    places = {}
    end = 0
    for path, leaf in flatten(template):
        if isinstance(leaf, Tensor):
            size = leaf.numel() * leaf.element_size()
            places[path] = packed[end : end + size].view(leaf.dtype).reshape(leaf.shape)
            end += size + -size % _ALIGNED
    return rebuild(template, lambda path, leaf: places.get(path, leaf))
