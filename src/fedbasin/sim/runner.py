"""A run on disk: records flushed every round, checkpoints that resume to the same bits."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from multiprocessing import parent_process
from types import FrameType
from typing import Any, TypeAlias

import torch

from fedbasin.core.protocols import shared_prefix, state_from_prefix
from fedbasin.core.record import RoundRecord, RunFolder, write_atomically
from fedbasin.core.round import Request, Server, answered, summary_of
from fedbasin.core.sink import Log
from fedbasin.core.state import load, save, write
from fedbasin.core.system import peak_memory
from fedbasin.sim.allocator import hand_back_gaps
from fedbasin.sim.clients import ClientStates, SavedStates
from fedbasin.sim.provenance import record_data, refuse_other
from fedbasin.sim.rounds import Diverged, Federation, Work

_log = logging.getLogger(__name__)
OnRound = Callable[[RoundRecord], bool | None]
Stopping = Callable[[], bool]


class Interrupted(RuntimeError):
    """A run stopped by the user; its folder resumes."""


@dataclass(frozen=True)
class Checkpoint:
    """Everything that a run needs to resume."""

    server: Server
    clients: SavedStates
    seconds: float  # spent so far


@dataclass(frozen=True)
class Asked:
    """What a run asks an executor for; it is sent the answer, a `Probe` or `Gathered`."""

    federation: Federation
    request: Request


Course: TypeAlias = Generator[Asked, Any, dict[str, Any]]  # of a run; ends with its summary


def alone(course: Course) -> dict[str, Any]:
    """Run to the end with the run's own executor; return the summary."""
    return answered(course, lambda asked: asked.federation.answer(asked.request))


def run(
    federation: Federation, folder: RunFolder, facts: dict[str, Any], **options: Any
) -> dict[str, Any]:
    """Start or resume the run of a folder, as `course` does. Return and write its summary."""
    return alone(course(federation, folder, facts, **options))


def course(
    federation: Federation,
    folder: RunFolder,
    facts: dict[str, Any],
    *,
    checkpoint_every: int = 10,
    branching: Collection[int] = (),
    until: int | None = None,
    on_round: OnRound | None = None,
    log: Log | None = None,
    stopping: Stopping | None = None,
) -> Course:
    """Start or resume the run of a folder: yield its requests, return and write its summary.

    Args:
        federation: what to run.
        folder: where its records go. A checkpoint in it is resumed.
        facts: what the summary says beside the measured numbers.
        checkpoint_every: save after every k rounds, and at the end.
        branching: rounds after which a checkpoint is saved for other runs to start from.
        until: the round to pause after, with a checkpoint; a run that is there already is not
            changed. None runs to the end.
        on_round: called with each round's record; the run ends early where it returns True.
        log: where else records and summary go. If it fails, a checkpoint is saved before the error
            is raised.
        stopping: whether the run is to stop after the round; by default at Ctrl-C and SIGTERM.
    """
    log = log or Log((), folder.path, folder.path, {})
    record_data(folder, federation.data)
    server, states, spent = _restored(federation, folder)
    records = folder.keep_rounds(server.round)
    if federation.holdings is not None:
        write_atomically(folder.partition, federation.holdings.to_csv())
    log.open(records)
    began = federation.clock()
    status = "finished"
    reason = None
    end = federation.rounds if until is None else min(until, federation.rounds)

    def seconds() -> float:
        return spent + federation.clock() - began

    watched = stop_after_round() if stopping is None else nullcontext(stopping)
    with watched as stopping:
        try:
            holders = federation.holders(server)
            while server.round < end:
                after, record = yield from _asked(
                    federation, federation.round(server, states, holders)
                )
                server = after
                folder.append(record)
                records.append(record)
                ends = on_round is not None and on_round(record) is True
                failed = log.record(record)
                if record.round in branching:
                    folder.sync_rounds()
                    _save_branching(folder, Checkpoint(server, states.kept(), seconds()))
                last = ends or record.round == end
                if last or stopping() or failed or record.round % checkpoint_every == 0:
                    _write_clients(federation, records, folder)
                    folder.sync_rounds()
                    save(folder.checkpoint, Checkpoint(server, states.kept(), seconds()))
                    states.mark_saved()
                    federation.sweep()
                    hand_back_gaps()
                if failed is not None:
                    raise failed
                if stopping() and not last:
                    status = "stopped"
                    reason = f"stopped by the user after round {record.round}"
                    break
                if ends:
                    reason = f"ended early by on_round after round {record.round}"
                    break
        except Diverged as error:
            status = "diverged"
            reason = str(error)
        if status == "finished" and reason is None and end < federation.rounds:
            status = "paused"
            reason = f"paused after round {end}"
        summary = (
            facts | summary_of(records, seconds(), federation.headline, status, reason) | _peaks()
        )
        summary |= federation.facts() | {"client_states": states.where}
        folder.sync_rounds()
        folder.write_summary(summary)
    if status == "finished":
        _ship(federation, server, folder)
    log.finish(summary)
    _raise_unfinished(status, reason, folder)
    return summary


def _write_clients(federation: Federation, records: list[RoundRecord], folder: RunFolder) -> None:
    """Write what each client gets, where clients were scored."""
    table = federation.client_table(records)
    if table is not None:
        write_atomically(folder.client_table, table.to_csv())


def _asked(federation: Federation, work: Work) -> Generator[Asked, Any, tuple[Server, RoundRecord]]:
    """Yield the requests of a round with the run that makes them."""
    response = None
    while True:
        try:
            request = work.send(response)
        except StopIteration as end:  # at once where nobody answers
            result: tuple[Server, RoundRecord] = end.value
            return result
        response = yield Asked(federation, request)


def _raise_unfinished(status: str, reason: str | None, folder: RunFolder) -> None:
    if status == "diverged":
        raise Diverged(f"{reason}; the records up to there are in {folder.path}")
    if status == "stopped":
        raise Interrupted(f"{reason}; resume it with: fedbasin resume {folder.path}")


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


def _restored(federation: Federation, folder: RunFolder) -> tuple[Server, ClientStates, float]:
    server, states = federation.begin()
    if not folder.checkpoint.exists():
        return server, states, 0.0
    empty = Checkpoint(server, states.kept(), 0.0)
    checkpoint: Checkpoint = load(folder.checkpoint, empty)
    states.restore(checkpoint.clients)
    server = checkpoint.server
    if torch.equal(server.send, server.score):
        server = replace(server, score=server.send)  # one model, as it was before saving
    return server, states, checkpoint.seconds


def _ship(federation: Federation, server: Server, folder: RunFolder) -> None:
    """Write the scored model under the network's own parameter names."""
    named = federation.net.state_dict(server.score, server.buffers)
    write(folder.model, {name: tensor.cpu().contiguous() for name, tensor in named.items()})


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
