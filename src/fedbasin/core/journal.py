"""The journal of a run: its records and checkpoints, simulated or on Flower, new or resumed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedbasin.core.record import Headline, RoundRecord, RunFolder, write_atomically
from fedbasin.core.round import Server, summary_of
from fedbasin.core.served import ClientTable
from fedbasin.core.sink import Log, SinkError
from fedbasin.core.state import load, save, write


@dataclass(eq=False)
class Journal(ABC):
    """Writes a run to its folder. Without a folder, records are in memory alone.

    Each round calls `append`, then `checkpoint`. A run that dies at any moment resumes from the
    last checkpoint; the records of its rounds are on the disk before it.

    Args:
        folder: the run's folder.
        log: the sinks of the run.
        facts: what the summary says before the measured numbers.
        checkpoint_every: save after every k rounds, and at the end.
        clock: tells the seconds that the run takes.
    """

    folder: RunFolder | None
    log: Log
    facts: Mapping[str, Any]
    checkpoint_every: int
    clock: Callable[[], float]

    # Set up by `open`.
    records: list[RoundRecord] = field(init=False)
    _began: float = field(init=False)
    _spent: float = field(init=False)  # seconds of earlier starts
    _saved: int = field(init=False)  # the round of the last checkpoint
    _failed: SinkError | None = field(init=False)

    @property
    @abstractmethod
    def headline(self) -> Headline:
        """The metric that the run is judged by."""

    @abstractmethod
    def content(self, server: Server) -> Any:
        """Return what a checkpoint holds: a tree with `server`, `seconds` and all to resume."""

    @abstractmethod
    def restore(self, content: Any) -> None:
        """Take back what a checkpoint holds beside the server and the seconds."""

    @abstractmethod
    def facts_at_end(self) -> dict[str, Any]:
        """Return what the summary says after the measured numbers."""

    def open(self, fresh: Server) -> Server:
        """Return the server of the last checkpoint, or the fresh one; later records are dropped."""
        self.records = []
        self._began = self.clock()
        self._spent = 0.0
        self._failed = None
        server = fresh
        if self.folder is not None:
            if self.folder.checkpoint.exists():
                content = load(self.folder.checkpoint, self.content(fresh))
                self.restore(content)
                self._spent = content.seconds
                server = content.server
                if torch.equal(server.send, server.score):
                    server = replace(server, score=server.send)  # one model, as before saving
            self.records = self.folder.keep_rounds(server.round)
        self._saved = server.round
        self.log.open(self.records)
        return server

    def seconds(self) -> float:
        """Return how long the run has taken, over all its starts."""
        return self._spent + self.clock() - self._began

    def append(self, record: RoundRecord) -> None:
        """Add a round's record. The error of a sink is raised by `checkpoint`."""
        self.records.append(record)
        if self.folder is not None:
            self.folder.append(record)
        self._failed = self.log.record(record)

    def checkpoint(self, server: Server, *, last: bool) -> None:
        """Save a checkpoint if it is time to or a sink has failed; then raise the sink's error.

        Args:
            server: the server after the round.
            last: whether the run ends here. A round is saved once.
        """
        due = last or server.round % self.checkpoint_every == 0 or self._failed is not None
        if due and self._saved != server.round:
            self.save(server)
        if self._failed is not None:
            raise self._failed

    def save(self, server: Server) -> None:
        """Save a checkpoint. The records that it knows of are on the disk before it."""
        if self.folder is not None:
            self.folder.sync_rounds()
            save(self.folder.checkpoint, self.content(server))
        self._saved = server.round

    def keep_clients(self, table: ClientTable) -> None:
        """Write what each client gets."""
        if self.folder is not None:
            write_atomically(self.folder.client_table, table.to_csv())

    def finish(
        self, model: Mapping[str, Tensor], status: str = "finished", reason: str | None = None
    ) -> dict[str, Any]:
        """Write the summary, and the model of a finished run; return the summary.

        Args:
            model: the scored model under the network's own parameter names.
            status: how the run ended, as `summary_of` has it.
            reason: why it did not finish.
        """
        measured = summary_of(self.records, self.seconds(), self.headline, status, reason)
        summary = {**self.facts, **measured, **self.facts_at_end()}
        if self.folder is not None:
            self.folder.sync_rounds()
            self.folder.write_summary(summary)
            if status == "finished":
                whole = {name: part.cpu().contiguous() for name, part in model.items()}
                write(self.folder.model, whole)
        self.log.finish(summary)
        return summary
