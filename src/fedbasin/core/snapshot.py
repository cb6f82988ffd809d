"""Models of chosen rounds, kept for analyses.

One safetensors file a round, ``snapshots/round000040.safetensors``, written whole or not at
all. A resumed run writes the rounds after its checkpoint again, with the same bits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fedbasin.core.state import StateError, read, save

_NAME = re.compile(r"round(\d{6,})\.safetensors")


@dataclass(frozen=True)
class Snapshot:
    """The models of one round; the last four are None where clients were not kept."""

    round: int  # rounds finished, counted from 1
    score: Tensor  # [P] the model that counts, averaged where the method averages
    send: Tensor | None  # [P] the model sent to the next cohort; None where it is the scored one
    buffers: Tensor  # [Q] BatchNorm statistics
    start: Tensor | None = None  # [P] what the cohort started from
    models: Tensor | None = None  # [C, P] what the clients sent back
    weights: Tensor | None = None  # [C] their samples, n_i
    clients: Tensor | None = None  # [C] their ids

    @property
    def sent(self) -> Tensor:
        """The model sent to the next cohort, [P]."""
        return self.score if self.send is None else self.send


@dataclass(frozen=True)
class Snapshots:
    """A folder of snapshots, and which rounds go into it.

    Args:
        folder: where the files lie.
        rounds: the rounds to keep.
        clients: whether the clients' models are kept too.
    """

    folder: Path
    rounds: frozenset[int] = frozenset()
    clients: bool = False

    def put(self, snapshot: Snapshot) -> None:
        """Store a snapshot, in place of one of the same round."""
        self.folder.mkdir(parents=True, exist_ok=True)
        save(self._path(snapshot.round), snapshot)

    def stored(self) -> list[int]:
        """Return the rounds whose snapshots are there, in order."""
        matches = [_NAME.fullmatch(path.name) for path in self.folder.glob("*.safetensors")]
        return sorted(int(match[1]) for match in matches if match)

    def get(self, round: int) -> Snapshot:
        """Read a snapshot; a file that is not one is an error that names it."""
        path = self._path(round)
        leaves = read(path)
        try:
            snapshot = Snapshot(**leaves)  # type: ignore[arg-type]
            _check(snapshot, round)
        except (TypeError, ValueError, AttributeError) as error:
            raise StateError(f"{path} is not a snapshot of round {round} ({error})") from error
        return snapshot

    def _path(self, round: int) -> Path:
        return self.folder / f"round{round:06d}.safetensors"


def _check(snapshot: Snapshot, round: int) -> None:
    """Refuse a snapshot whose parts do not fit each other."""
    if snapshot.round != round or snapshot.score.dim() != 1 or snapshot.buffers.dim() != 1:
        raise ValueError("its round or shapes are wrong")
    size = snapshot.score.shape
    for vector in (snapshot.send, snapshot.start):
        if vector is not None and vector.shape != size:
            raise ValueError("its vectors are of unlike lengths")
    if snapshot.models is None:
        return
    rows = snapshot.models.shape[:1]
    beside = (snapshot.weights, snapshot.clients)
    if snapshot.start is None or snapshot.models.shape[1:] != size:
        raise ValueError("the clients' models do not fit the server's")
    if any(part is None or part.shape != rows for part in beside):
        raise ValueError("clients, weights and models are of unlike lengths")
