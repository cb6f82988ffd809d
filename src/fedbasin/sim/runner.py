"""A run on disk: records flushed every round, checkpoints that resume to the same bits."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from multiprocessing import parent_process
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from fedbasin.core.journal import Journal
from fedbasin.core.protocols import shared_prefix, state_from_prefix
from fedbasin.core.record import Headline, RoundRecord, RunFolder, write_atomically
from fedbasin.core.round import Gathered, Launch, Server
from fedbasin.core.sink import Log, Sink
from fedbasin.core.state import load, save
from fedbasin.core.system import peak_memory
from fedbasin.sim.allocator import hand_back_gaps
from fedbasin.sim.clients import ClientStates, SavedStates
from fedbasin.sim.provenance import record_data, refuse_other
from fedbasin.sim.rounds import Diverged, Federation, Simulation

_log = logging.getLogger(__name__)
OnRound = Callable[[RoundRecord], bool | None]
Stopping = Callable[[], bool]
Summary = dict[str, Any]


class Interrupted(RuntimeError):
    """A run stopped by the user; its folder resumes."""


@dataclass(frozen=True)
class Checkpoint:
    """Everything that a run needs to resume."""

    server: Server
    clients: SavedStates
    seconds: float  # spent so far


@dataclass(frozen=True)
class RunOptions:
    """How a run is carried out. Its settings say what is run.

    Args:
        facts: what the summary says beside the measured numbers.
        settings: every setting by its full name, for sinks.
        checkpoint_every: save after every k rounds, and at the end.
        branching: rounds after which a checkpoint is saved for other runs to start from.
        until: the round to pause after, with a checkpoint; a run that is there already is not
            changed. None runs to the end.
        on_round: called with each round's record; the run ends early where it returns True.
        sinks: where else records and summary go. If one fails, a checkpoint is saved before the
            error is raised.
        root: the folder of the comparison that the run belongs to; by default the run's own.
    """

    facts: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    checkpoint_every: int = 10
    branching: Collection[int] = ()
    until: int | None = None
    on_round: OnRound | None = None
    sinks: Sequence[Sink] = ()
    root: Path | None = None


@dataclass(eq=False)
class RunJournal(Journal):
    """The journal of a simulated run. Its checkpoints hold the clients' states."""

    federation: Federation
    states: ClientStates

    @property
    def headline(self) -> Headline:
        """The metric that the run is judged by."""
        return self.federation.headline

    def content(self, server: Server) -> Checkpoint:
        """Return what a checkpoint holds."""
        return Checkpoint(server, self.states.kept(), self.seconds())

    def restore(self, content: Checkpoint) -> None:
        """Take back the clients' states."""
        self.states.restore(content.clients)

    def facts_at_end(self) -> dict[str, Any]:
        """Return what the run took, and how it was computed."""
        return {**_peaks(), **self.federation.facts(), "client_states": self.states.where}

    def save(self, server: Server) -> None:
        """Save a checkpoint, and delete what only the one before needed."""
        table = self.federation.client_table(self.records)
        if table is not None:
            self.keep_clients(table)
        super().save(server)
        self.states.mark_saved()
        self.federation.sweep()
        hand_back_gaps()


class Run:
    """A run on disk, new or resumed. Whoever drives it trains between the halves of a round.

        run = Run.open(federation, folder)
        while run.goes_on():
            run.merge(federation.train_cohort(run.launch()))
        summary = run.finish()

    `close` must be called at the end, however it comes; `drive` does all of this.
    """

    def __init__(
        self, federation: Federation, folder: RunFolder, options: RunOptions, resources: ExitStack
    ) -> None:
        self.federation = federation
        self.folder = folder
        self._options = options
        root = options.root or folder.path
        log = Log(options.sinks, folder.path, root, options.settings)
        resources.callback(log.close)
        record_data(folder, federation.data)
        if federation.holdings is not None:
            write_atomically(folder.partition, federation.holdings.to_csv())
        fresh, states = federation.begin()
        self._journal = RunJournal(
            folder,
            log,
            options.facts,
            options.checkpoint_every,
            federation.clock,
            federation,
            states,
        )
        self._simulation = Simulation(federation, self._journal.open(fresh), states)
        self._status = "running"
        self._reason: str | None = None
        until = options.until
        self._end = federation.rounds if until is None else min(until, federation.rounds)
        self._resources = resources.pop_all()  # last: until here whoever opens the run closes them

    @classmethod
    def open(
        cls,
        federation: Federation,
        folder: RunFolder,
        options: RunOptions | None = None,
        resources: ExitStack | None = None,
    ) -> Run:
        """Start the run of a folder, or resume it if there is a checkpoint.

        Args:
            federation: what to run.
            folder: where its records go.
            options: how it is carried out.
            resources: what is closed with the run, such as the folder's lock.
        """
        with resources or ExitStack() as held:
            return cls(federation, folder, options or RunOptions(), held)

    @property
    def _server(self) -> Server:
        return self._simulation.server

    def goes_on(self) -> bool:
        """Whether there is another round to come."""
        return self._status == "running" and self._server.round < self._end

    def launch(self) -> Launch:
        """Begin the next round: return what its cohort is to train."""
        return self._simulation.launch()

    def merge(self, gathered: Gathered | None) -> None:
        """End the round with what its cohort trained, and write it to disk.

        A run that diverges is over; its summary says so.
        """
        try:
            record = self._simulation.merge(gathered)
        except Diverged as error:
            self._status = "diverged"
            self._reason = str(error)
            return
        self._journal.append(record)
        on_round = self._options.on_round
        if on_round is not None and on_round(record) is True:
            self._status = "finished"
            self._reason = f"ended early by on_round after round {record.round}"
        if record.round in self._options.branching:
            self.folder.sync_rounds()
            _save_branching(self.folder, self._journal.content(self._server))
        self._journal.checkpoint(self._server, last=not self.goes_on())

    def stop(self) -> None:
        """End after the round that is over, at the user's wish; a run that is over stays so."""
        if not self.goes_on():
            return
        self._journal.checkpoint(self._server, last=True)
        self._status = "stopped"
        self._reason = f"stopped by the user after round {self._server.round}"

    def finish(self) -> Summary:
        """Write the summary, and the model of a finished run; return the summary.

        A run that was stopped then raises `Interrupted`.
        """
        if self._status == "running":
            paused = self._end < self.federation.rounds
            self._status = "paused" if paused else "finished"
            self._reason = f"paused after round {self._end}" if paused else None
        model = self.federation.net.state_dict(self._server.score, self._server.buffers)
        summary = self._journal.finish(model, self._status, self._reason)
        if self._status == "stopped":
            raise Interrupted(f"{self._reason}; resume it with: fedbasin resume {self.folder.path}")
        return summary

    def close(self) -> None:
        """Close the log, let go of the lock and free the executors."""
        self._resources.close()


Opened = Run | Summary  # a summary is of a run that is over already


def drive(run: Opened, stopping: Stopping | None = None) -> Summary:
    """Run to the end with the run's own executor, close it, and return its summary.

    Args:
        run: what is run.
        stopping: whether to stop after the round; by default at Ctrl-C and SIGTERM.
    """
    if not isinstance(run, Run):
        return run
    watch = stop_after_round() if stopping is None else nullcontext(stopping)
    with closing(run), watch as asked_to_stop:
        while run.goes_on():
            run.merge(run.federation.train_cohort(run.launch()))
            if asked_to_stop():
                run.stop()
        return run.finish()


def start_from_prefix(
    federation: Federation, folder: RunFolder, prefix: RunFolder, round: int
) -> None:
    """Begin a run with the rounds that it shares with another one.

    Args:
        federation: what is to run.
        folder: where; it holds nothing yet.
        prefix: the run of the method's `shared_prefix`, which saved a checkpoint for it.
        round: how many rounds are taken over.
    """
    plain, common = shared_prefix(federation.method, federation.rounds)
    if round > common:
        raise ValueError(f"{federation.method} parts from {plain} after round {common}")
    refuse_other(prefix, federation.data)
    record_data(folder, federation.data)
    server, states = replace(federation, method=plain).begin()
    empty = Checkpoint(server, states.kept(), 0.0)
    branch: Checkpoint = load(prefix.branching(round), empty)
    server = branch.server
    context = federation.context.at(round, 0.0)
    state = state_from_prefix(federation.method, server.state, server.send, context)
    records = [record for record in prefix.read_rounds() if record.round <= round]
    write_atomically(folder.rounds, "".join(record.line() + "\n" for record in records))
    save(folder.checkpoint, replace(branch, server=replace(server, state=state)))


def _save_branching(folder: RunFolder, checkpoint: Checkpoint) -> None:
    """Save a checkpoint for other runs, unless it needs files that will be deleted."""
    if folder.archive.exists() or folder.clients.exists():
        return
    path = folder.branching(checkpoint.server.round)
    path.parent.mkdir(exist_ok=True)
    save(path, checkpoint)


def _peaks() -> dict[str, int | None]:
    """Return how much memory the process has taken at most, here and on the device."""
    on_cuda = torch.cuda.is_available()
    return {
        "peak_memory_bytes": peak_memory(),
        "peak_device_memory_bytes": torch.cuda.max_memory_allocated() if on_cuda else None,
    }


@contextmanager
def stop_after_round() -> Iterator[Callable[[], bool]]:
    """Stop after the round at the first Ctrl-C or SIGTERM, and at once at a second one.

    One of each counts as one stop: a scheduler's SIGTERM also ends the parent process, and a run of
    a comparison interrupts itself when its parent ends.
    """
    asked = threading.Event()
    numbers = set[int]()

    def ask(number: int, frame: FrameType | None) -> None:
        if number in numbers:
            raise KeyboardInterrupt
        if not numbers and parent_process() is None:  # of several runs their parent tells
            _log.warning("finishing the round, then saving; Ctrl-C again stops at once")
        numbers.add(number)
        asked.set()

    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    before = {each: signal.signal(each, ask) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
