"""What a federation leaves on disk, and how a stopped ServerApp goes on from there.

The files are those of a simulated run. Flower knows no resuming: a run that was stopped is
started anew with the same folder, and begins after the last round that was saved.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedbasin.core.archive import Archive
from fedbasin.core.lock import alone_in
from fedbasin.core.record import RecordError, RoundRecord, RunFolder, mean_of_last
from fedbasin.core.state import load, read, save, write
from fedbasin.sim.rounds import Server

_log = logging.getLogger("flwr")


@dataclass(frozen=True)
class Saved:
    """Everything a ServerApp needs to go on."""

    server: Server
    name: str  # of the federation, by which clients know their own state again
    method: str
    seconds: float  # spent so far
    seed: int


class Journal:
    """The records of a federation; without a folder they are kept in memory only.

    Args:
        folder: where they go.
        every: save after every k rounds, and at the end.
        facts: what the summary says beside the measured numbers.
        seed: of the run; a checkpoint of another one is not gone on from.
    """

    def __init__(
        self, folder: Path | str | None, every: int, facts: Mapping[str, Any], seed: int
    ) -> None:
        if every < 1:
            raise ValueError(f"checkpoint_every must be at least 1, got {every}")
        self.folder = None if folder is None else RunFolder(Path(folder))
        self.every, self.facts, self.seed = every, dict(facts), seed
        self.name = secrets.token_hex(8)
        self.records: list[RoundRecord] = []
        self._began, self._spent = time.monotonic(), 0.0

    def alone(self) -> AbstractContextManager[None]:
        """Keep the folder from other processes: two would mix their records."""
        if self.folder is None:
            return nullcontext()
        self.folder.path.mkdir(parents=True, exist_ok=True)
        return alone_in(self.folder.path)

    def archive(self) -> Archive | None:
        """Return where methods may keep models of clients."""
        return None if self.folder is None else Archive(self.folder.archive)

    def restored(self, fresh: Server, method: str) -> Server:
        """Return the server of the last checkpoint, or the fresh one."""
        self._began, self._spent, self.records = time.monotonic(), 0.0, []
        self.name = secrets.token_hex(8)  # a start is a federation of its own, unless it goes on
        if self.folder is None:
            return fresh
        if not self.folder.checkpoint.exists():
            self.folder.keep_rounds(0)
            return fresh
        held = read(self.folder.checkpoint)
        for what, own in (("method", method), ("seed", self.seed)):
            if held.get(what) != own:
                raise RecordError(
                    f"{self.folder.path} holds a run of {what} {held.get(what)}, this is {own}; "
                    f"give the same {what} or choose another folder"
                )
        found: Saved = load(self.folder.checkpoint, Saved(fresh, "", "", 0.0, 0))
        self.name, self._spent, server = found.name, found.seconds, found.server
        if server.send.shape != fresh.send.shape:
            raise RecordError(
                f"{self.folder.path} holds a model of {server.send.numel()} parameters, the "
                f"network has {fresh.send.numel()}; choose another folder"
            )
        self.records = self.folder.keep_rounds(server.round)
        _log.info("Going on after round %d from %s", server.round, self.folder.checkpoint)
        if torch.equal(server.send, server.score):
            server = replace(server, score=server.send)  # one model, as it was before saving
        return server

    def append(self, record: RoundRecord, server: Server, method: str, *, last: bool) -> bool:
        """Add a round; return whether a checkpoint was written."""
        self.records.append(record)
        if self.folder is None:
            return False
        self.folder.append(record)
        if not (last or record.round % self.every == 0):
            return False
        save(self.folder.checkpoint, Saved(server, self.name, method, self.seconds(), self.seed))
        return True

    def seconds(self) -> float:
        """Return how long the federation has run, over all its starts."""
        return self._spent + time.monotonic() - self._began

    def finish(self, method: str, refused: Mapping[str, int]) -> dict[str, Any]:
        """Write and return the headline numbers."""
        scored = [r for r in self.records if r.accuracy is not None]
        last = scored[-1] if scored else None
        summary = self.facts | {
            "method": method,
            "seed": self.seed,
            "executor": "flower",
            "status": "finished",
            "reason": None,
            "rounds": len(self.records),
            "accuracy_mean_last10": mean_of_last(self.records, 10),
            "accuracy_last": last.accuracy if last else None,
            "loss_last": last.loss if last else None,
            "accuracy_per_class": last.accuracy_per_class if last else None,
            "bytes_down": sum(r.bytes_down for r in self.records),
            "bytes_up": sum(r.bytes_up for r in self.records),
            "dropped": sum(r.dropped for r in self.records),
            "refused": dict(refused),
            "seconds": self.seconds(),
        }
        if self.folder is not None:
            self.folder.write_summary(summary)
        return summary

    def ship(self, named: Mapping[str, Tensor]) -> None:
        """Write the scored model under the network's own names."""
        if self.folder is None:
            return
        write(self.folder.model, {n: t.cpu().contiguous().clone() for n, t in named.items()})
