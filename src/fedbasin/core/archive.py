"""Models of clients on disk, for methods that remember more than main memory holds.

One file for each (client, round), written whole or not at all, never changed and mapped into
memory when read, so only what is looked at takes up memory. A file that the method no longer
needs is removed by `sweep`, which a run calls once a checkpoint without it is on disk:
whenever the process dies, every file that the last checkpoint names is there.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedbasin.core.files import replacing


class ArchiveError(ValueError):
    """A stored model that cannot be used, with the file and what to do."""


class Archive:
    """A folder of stored models; it is made when the first one is put in.

    Args:
        folder: where the files lie.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._needed: frozenset[str] | None = None

    def put(self, client: int, round: int, vector: Tensor) -> None:
        """Store the model a client sent in a round, in place of one stored under that name."""
        path = self.folder / _name(client, round)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.save(file, vector.detach().cpu().numpy(), allow_pickle=False)

    def get(self, client: int, round: int) -> Tensor:
        """Return a stored model [P], mapped from its file; writing to it changes no file."""
        path = self.folder / _name(client, round)
        try:
            return torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))
        except (OSError, ValueError, EOFError) as error:
            raise ArchiveError(
                f"{path} is missing or damaged, and the run cannot continue without the model that "
                f"client {client} sent in round {round + 1}; start the run again in a new folder"
            ) from error

    def keep(self, models: Iterable[tuple[int, int]]) -> None:
        """Say which (client, round) are needed from now on; `sweep` removes the others."""
        self._needed = frozenset(_name(client, round) for client, round in models)

    def sweep(self) -> None:
        """Remove what is not needed; before the first `keep` that is nothing."""
        if self._needed is None or not self.folder.is_dir():
            return
        if self.folder.is_symlink():  # it would delete files of another folder
            raise ArchiveError(f"{self.folder} is a link; put the folder itself there")
        for path in self.folder.iterdir():
            if path.name not in self._needed:
                path.unlink()


def _name(client: int, round: int) -> str:
    return f"client{client:06d}-round{round:06d}.npy"
