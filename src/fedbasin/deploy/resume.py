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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedbasin.core.archive import Archive
from fedbasin.core.lock import alone_in
from fedbasin.core.record import (
    Headline,
    RecordError,
    RoundRecord,
    RunFolder,
    write_atomically,
)
from fedbasin.core.round import Server, merge_refused, summary_of
from fedbasin.core.served import ClientTable
from fedbasin.core.sink import Log, SinkError
from fedbasin.core.state import load, read, save, write
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


class Journal:
    """The records of a federation. Without a folder they are in memory alone.

    Args:
        settings: where they go, and how often a checkpoint is written.
        method: the run's method. A checkpoint of another method is refused.
        seed: the run's seed. A checkpoint of another seed is refused.
        headline: the metric that runs are compared by.
    """

    # Set up by `restored`; as `Saved` has them.
    name: str
    records: list[RoundRecord]
    merged: Tensor
    refused: Counter[str]

    def __init__(
        self, settings: Records, method: str, seed: int, headline: Headline | None = None
    ) -> None:
        self.settings = settings
        self.folder = None if settings.folder is None else RunFolder(Path(settings.folder))
        self.method = method
        self.seed = seed
        self.headline = headline or Headline()
        path = Path() if self.folder is None else self.folder.path
        said = {**settings.facts, "method": method, "seed": seed}
        self.log = Log(sinks_of(settings.log), path, path, said)
        self._archive: Archive | None = None
        self.audit = AuditTrail(None if self.folder is None else path / FILE)

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

    def sweep(self) -> None:
        """Delete the files that the method's state no longer needs."""
        if self._archive is not None:
            self._archive.sweep()

    def mark_merged(self, clients: Iterable[int], round: int) -> None:
        """Note that the replies of some clients were merged in a round, counted from 1."""
        self.merged[sorted(clients)] = round

    def clients(self) -> int:
        """Return how many clients the run in the folder has; 0 where there is none."""
        known = self._held().get("clients")
        return known if isinstance(known, int) else 0

    def restored(self, fresh: Server, clients: int) -> Server:
        """Return the server of the last checkpoint, or the fresh one."""
        self._began = time.monotonic()
        self._spent = 0.0
        self.records = []
        self.name = secrets.token_hex(8)  # a new federation, unless a checkpoint names one
        self.merged = torch.zeros(clients, dtype=torch.int64)
        self.refused = Counter()
        if self.folder is None:
            return fresh
        if not (held := self._held()):
            self.folder.keep_rounds(0)
            self.log.open([])
            self._begin_audit(0)
            return fresh
        self._compare("method", held.get("method"), self.method)
        self._compare("seed", held.get("seed"), self.seed)
        self._compare("number of clients", held.get("clients"), clients)
        saved: Saved = load(self.folder.checkpoint, self._saved(fresh))
        self.name = saved.name
        self._spent = saved.seconds
        server = saved.server
        self.merged = saved.merged
        self.refused = Counter(json.loads(saved.refused))
        self._compare("number of parameters", server.send.numel(), fresh.send.numel())
        self.records = self.folder.keep_rounds(server.round)
        self.log.open(self.records)
        self._begin_audit(server.round)
        _log.info("Resuming after round %d from %s", server.round, self.folder.checkpoint)
        if torch.equal(server.send, server.score):
            server = replace(server, score=server.send)  # one model, as it was before saving
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

    def add(self, record: RoundRecord, audited: AuditedRound) -> SinkError | None:
        """Add a round without a checkpoint; return the error of a sink that failed."""
        self.records.append(record)
        if self.folder is None:
            return None
        self.audit.add(audited)  # first: what a checkpoint holds has its line
        _log.info("\t├──> Audit trail after round %d: %s", record.round, self.audit.head)
        self.folder.append(record)
        return self.log.record(record)

    def append(
        self, record: RoundRecord, server: Server, audited: AuditedRound, *, last: bool
    ) -> bool:
        """Add a round; return whether a checkpoint was written."""
        failed = self.add(record, audited)
        if self.folder is None:
            return False
        due = last or record.round % self.settings.checkpoint_every == 0
        if not due and failed is None:
            return False
        self.folder.sync_rounds()
        save(self.folder.checkpoint, self._saved(server))
        if failed is not None:
            raise failed
        return True

    def keep_clients(self, table: ClientTable) -> None:
        """Write what each client measured last."""
        if self.folder is not None:
            write_atomically(self.folder.client_table, table.to_csv())

    def _judged_by(self) -> Headline:
        """Return the headline; that of clients where they alone have scored the models."""
        of_clients = f"clients_{self.headline.name}_mean_by_rows"
        scored = [set(_known(record)) for record in self.records]
        alone = not any(self.headline.name in names for names in scored)
        if alone and any(of_clients in names for names in scored):
            return self.headline._replace(name=of_clients)
        return self.headline

    def _saved(self, server: Server) -> Saved:
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

    def _held(self) -> dict[str, Leaf]:
        """Return what the checkpoint holds, by path; nothing where there is none."""
        if self.folder is None or not self.folder.checkpoint.exists():
            return {}
        return read(self.folder.checkpoint)

    def seconds(self) -> float:
        """Return how long the federation has run, over all its starts."""
        return self._spent + time.monotonic() - self._began

    def finish(self, named: Mapping[str, Tensor], failed: str | None = None) -> dict[str, Any]:
        """Write the scored model and the summary; return the summary.

        Args:
            named: the model under the network's own names.
            failed: why the run failed. Its model is not written.
        """
        summary = {
            **self.settings.facts,
            "method": self.method,
            "seed": self.seed,
            "executor": "flower",
        }
        status = "finished" if failed is None else "failed"
        summary |= summary_of(self.records, self.seconds(), self._judged_by(), status, failed)
        summary |= {
            "dropped": sum(record.dropped for record in self.records),
            "refused": dict(self.refused),
            "merge_refused": sum(map(merge_refused, self.records)),
        }
        if self.folder is not None:
            summary["audit"] = self.audit.head
            self.folder.write_summary(summary)
        if self.folder is not None and failed is None:
            write(self.folder.model, {n: t.cpu().contiguous().clone() for n, t in named.items()})
        self.log.finish(summary)
        return summary


def _known(record: RoundRecord) -> list[str]:
    """Return the metrics of a record that are numbers."""
    return [name for name in record.metrics if record.metric(name) is not None]
