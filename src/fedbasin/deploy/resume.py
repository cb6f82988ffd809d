"""What a federation writes to disk, and how a stopped ServerApp resumes from it.

The files are those of a simulated run. Flower cannot resume runs. A stopped run is started again
with the same folder, and begins after the last round that was saved.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedbasin.core.archive import Archive
from fedbasin.core.journal import Journal
from fedbasin.core.lock import alone_in
from fedbasin.core.record import Headline, RecordError, RoundRecord, RunFolder
from fedbasin.core.round import Server, merge_refused
from fedbasin.core.sink import Log
from fedbasin.core.state import read
from fedbasin.core.tree import Leaf
from fedbasin.deploy.audit import FILE, AuditedRound, AuditTrail
from fedbasin.deploy.seats import Seats
from fedbasin.deploy.settings import Records
from fedbasin.sinks import sinks_of

_log = logging.getLogger("flwr")


@dataclass(frozen=True)
class Saved:
    """Everything that a ServerApp needs to resume."""

    server: Server
    name: str  # of the federation, under which clients store their states
    method: str
    seconds: float  # spent so far
    seed: int
    clients: int  # N
    merged: Tensor  # [N] the last round of each client that was merged, from 1; 0 before
    refused: str  # JSON: how often replies were refused, by client and reason


class ServerJournal(Journal):
    """The journal of a federation. It keeps its name, who was merged, refusals and the audit trail.

    Args:
        settings: where records go, and how often a checkpoint is written.
        method: the run's method. A checkpoint of another method is refused.
        seed: the run's seed. A checkpoint of another seed is refused.
        headline: the metric that runs are compared by.
    """

    # Set up by `restored`; as `Saved` has them.
    name: str
    merged: Tensor
    refused: Counter[str]

    def __init__(
        self, settings: Records, method: str, seed: int, headline: Headline | None = None
    ) -> None:
        folder = None if settings.folder is None else RunFolder(Path(settings.folder))
        path = Path() if folder is None else folder.path
        known = {**settings.facts, "method": method, "seed": seed}
        super().__init__(
            folder,
            Log(sinks_of(settings.log), path, path, known),
            {**known, "executor": "flower"},
            settings.checkpoint_every,
            time.monotonic,
        )
        self.method = method
        self.seed = seed
        self._headline = headline or Headline()
        self._archive: Archive | None = None
        self.audit = AuditTrail(None if folder is None else path / FILE)

    @property
    def headline(self) -> Headline:
        """The metric that the run is judged by; that of clients where they alone have scored."""
        of_clients = f"clients_{self._headline.name}_mean_by_rows"
        scored = [set(_known(record)) for record in self.records]
        alone = not any(self._headline.name in names for names in scored)
        if alone and any(of_clients in names for names in scored):
            return self._headline._replace(name=of_clients)
        return self._headline

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lock the folder: two processes would mix their records."""
        if self.folder is None:
            yield
            return
        self.folder.path.mkdir(parents=True, exist_ok=True)
        with alone_in(self.folder.path), closing(self.log):
            yield

    def open_archive(self) -> Archive | None:
        """Return where methods may store models of clients; None without a folder."""
        self._archive = None if self.folder is None else Archive(self.folder.archive)
        return self._archive

    def seats(self) -> Seats:
        """Return which node key holds which client's number."""
        return Seats(None if self.folder is None else self.folder.path / "seats.toml")

    def mark_merged(self, clients: Iterable[int], round: int) -> None:
        """Note that the replies of some clients were merged in a round, counted from 1."""
        self.merged[sorted(clients)] = round

    def clients(self) -> int:
        """Return how many clients the run in the folder has; 0 where there is none."""
        known = self._held().get("clients")
        return known if isinstance(known, int) else 0

    def restored(self, fresh: Server, clients: int) -> Server:
        """Return the server of the last checkpoint, or the fresh one."""
        self.name = secrets.token_hex(8)  # a new federation, unless a checkpoint names one
        self.merged = torch.zeros(clients, dtype=torch.int64)
        self.refused = Counter()
        held = self._held()
        if held:
            self._compare("method", held.get("method"), self.method)
            self._compare("seed", held.get("seed"), self.seed)
            self._compare("number of clients", held.get("clients"), clients)
            send = held.get("server.send")
            size = send.numel() if isinstance(send, Tensor) else None
            self._compare("number of parameters", size, fresh.send.numel())
        server = self.open(fresh)
        self._begin_audit(server.round)
        if self.folder is not None and held:
            _log.info("Resuming after round %d from %s", server.round, self.folder.checkpoint)
        return server

    def _compare(self, what: str, held: Leaf, own: Leaf) -> None:
        assert self.folder is not None
        if held != own:
            raise RecordError(
                f"{self.folder.path} holds a run whose {what} is {held}, here it is {own}; "
                f"give the same {what} or choose another folder"
            )

    def _begin_audit(self, finished: int) -> None:
        found = self.audit.begin(finished)
        if found.broken:
            _log.warning(
                "%s was changed: %s; new lines are added at its end", self.audit.file, found.broken
            )

    def append_audited(self, record: RoundRecord, audited: AuditedRound) -> None:
        """Add a round's record, and its line of the audit trail."""
        if self.folder is not None:
            self.audit.add(audited)  # first: what a checkpoint holds has its line
            _log.info("\t├──> Audit trail after round %d: %s", record.round, self.audit.head)
        self.append(record)

    def save(self, server: Server) -> None:
        """Save a checkpoint, and delete the files that the method's state no longer needs."""
        super().save(server)
        # After a refused merge the old state needs its models.
        if self._archive is not None and not merge_refused(self.records[-1]):
            self._archive.sweep()

    def content(self, server: Server) -> Saved:
        """Return what a checkpoint holds."""
        return Saved(
            server=server,
            name=self.name,
            method=self.method,
            seconds=self.seconds(),
            seed=self.seed,
            clients=len(self.merged),
            merged=self.merged,
            refused=json.dumps(self.refused),
        )

    def restore(self, content: Saved) -> None:
        """Take back the federation's name, who was merged, and refusals."""
        self.name = content.name
        self.merged = content.merged
        self.refused = Counter(json.loads(content.refused))

    def facts_at_end(self) -> dict[str, Any]:
        """Return what was dropped and refused, and the head of the audit trail."""
        facts = {
            "dropped": sum(record.dropped for record in self.records),
            "refused": dict(self.refused),
            "merge_refused": sum(map(merge_refused, self.records)),
        }
        return facts if self.folder is None else {**facts, "audit": self.audit.head}

    def _held(self) -> dict[str, Leaf]:
        """Return what the checkpoint holds, by path; nothing where there is none."""
        if self.folder is None or not self.folder.checkpoint.exists():
            return {}
        return read(self.folder.checkpoint)


def _known(record: RoundRecord) -> list[str]:
    """Return the metrics of a record that are numbers."""
    return [name for name in record.metrics if record.metric(name) is not None]
