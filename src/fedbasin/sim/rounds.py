"""The round loop of a simulation: draw a cohort, answer the round's requests, store snapshots."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fedbasin.core.archive import Archive
from fedbasin.core.evaluator import Evaluator
from fedbasin.core.expressions import Choice
from fedbasin.core.holdings import Holdings
from fedbasin.core.method import Context, Method, Plan, Probe, Replies, ReplyError
from fedbasin.core.needs import check_task
from fedbasin.core.net import Net
from fedbasin.core.protocols import check_private
from fedbasin.core.record import Headline, RoundRecord
from fedbasin.core.rng import Key
from fedbasin.core.round import (
    Attempt,
    BufferPolicy,
    Gathered,
    Merged,
    Probed,
    ProbeRequest,
    Request,
    Returned,
    RoundSetup,
    Scoring,
    Sent,
    Server,
    Statistics,
    Traffic,
    TrainRequest,
    answered,
    one_round,
)
from fedbasin.core.served import ClientTable
from fedbasin.core.snapshot import Snapshot, Snapshots
from fedbasin.core.tree import count_bytes
from fedbasin.local.train import Trainer
from fedbasin.sim.attacks import Hostility
from fedbasin.sim.clients import ClientStates
from fedbasin.sim.clock import Clock
from fedbasin.sim.home import ClientScores
from fedbasin.sim.loop import Executor
from fedbasin.sim.participation import draw_cohort, drop_out
from fedbasin.sim.population import Population

Work: TypeAlias = Generator[Request, Any, tuple[Server, RoundRecord]]  # sent Probe or Gathered
_REPLY_NUMBERS = 3 * 8  # samples, steps and loss travel beside a model


class Diverged(RuntimeError):
    """A run that cannot continue; the message names the round and the client."""


class Strict:
    """The policy of a simulation: a reply that is not finite ends the run."""

    def merge(self, server: Server, replies: Replies, attempt: Attempt) -> Merged:
        """Check the replies, then merge them."""
        try:
            replies.check(server.send)
        except ReplyError as error:
            raise Diverged(f"round {server.round + 1}: {error}") from error
        return attempt()


@dataclass(frozen=True)
class Federation:
    """Everything a run needs that does not change.

    Args:
        method: how the server merges.
        net: the network.
        trainer: how one client trains.
        population: the clients' data.
        evaluator: rows that models are scored on.
        executor: how a cohort is trained.
        context: what the method may know.
        schedule: the configured plan of each round.
        participation: how a cohort is drawn.
        eligible: ids of the clients that hold data.
        key: the run's randomness.
        rounds: how many rounds there are, R.
        dropout: chance that a drawn client does not answer.
        buffers: what happens to float statistics (BatchNorm).
        recalibrate: renews statistics for a model, for the policy of that name.
        evaluate_every: score every k rounds.
        evaluate_last: and in each of the last rounds.
        train: rows of clients that models are scored on as well, where that is wanted.
        home: scores models on the rows that clients hold out, where that is wanted.
        client_memory: most bytes of main memory for what all clients keep between rounds.
        client_archive: files for it beyond that.
        snapshots: which models are stored for analyses, and where.
        holdings: who holds what, for the record.
        data: what identifies the data (`provenance.identity`).
        interface: what the network takes and gives, as JSON, for the record.
        encoding: how the columns of a table became numbers, as JSON; empty for other data.
        hostility: hostile clients, and what they do.
        triggered: test rows with a backdoor's pattern, labelled as the attack wants them.
        clock: tells the seconds that the run takes.
    """

    method: Method
    net: Net
    trainer: Trainer
    population: Population
    evaluator: Evaluator
    executor: Executor
    context: Context
    schedule: Callable[[int], Plan]
    participation: Choice
    eligible: np.ndarray
    key: Key
    rounds: int
    dropout: float = 0.0
    buffers: BufferPolicy = "mean"
    recalibrate: Callable[[Tensor, Tensor], Tensor] | None = None
    evaluate_every: int = 1
    evaluate_last: int = 10
    train: Evaluator | None = None
    home: ClientScores | None = None
    client_memory: float = math.inf
    client_archive: Archive | None = None
    snapshots: Snapshots | None = None
    holdings: Holdings | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    interface: str = ""
    encoding: str = ""
    hostility: Hostility | None = None
    triggered: Evaluator | None = None
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        check_task(self.method, self.trainer.task)
        check_private(self.method, self.net.has_statistics and self.buffers != "keep")

    def begin(self) -> tuple[Server, ClientStates]:
        """Return the server and the clients before the first round."""
        vector, buffers = self.net.initial()
        state = self.method.init(vector, self.context)
        states = ClientStates(
            self.trainer.zero_state(vector),
            vector,
            clients=self.context.clients,
            limit=self.client_memory,
            archive=self.client_archive,
        )
        return Server(0, vector, vector, buffers, state), states

    def facts(self) -> dict[str, Any]:
        """Return what a run's summary says about how it was computed."""
        if self.hostility is None:
            return self.executor.facts()
        return {**self.executor.facts(), "hostile": sorted(self.hostility.clients)}

    @property
    def headline(self) -> Headline:
        """The metric that the run is judged by."""
        return self.evaluator.headline

    def sweep(self) -> None:
        """Delete the files that the method's state no longer needs."""
        if self.context.archive is not None:
            self.context.archive.sweep()

    def close(self) -> None:
        """Free what the executors hold, such as processes."""
        self.executor.close()
        if self.home is not None:
            self.home.close()

    def cohort(self, round: int) -> tuple[np.ndarray, np.ndarray]:
        """Return who is drawn in a round, counted from 0, and who of them answers."""
        drawn = draw_cohort(self.participation, self.eligible, self.key, round)
        return drawn, drop_out(drawn, self.dropout, self.key.fold("dropout", round))

    def client_table(self, records: list[RoundRecord]) -> ClientTable | None:
        """Return what each client gets; None where clients were not scored."""
        if self.home is None:
            return None
        return self.home.table(records, lambda round: self.cohort(round)[1])

    def snapshot_bytes(self) -> int:
        """Return how many bytes the snapshots of a run take up, at most."""
        if self.snapshots is None:
            return 0
        net = self.net
        rounds = self.snapshots.rounds
        vectors = 2 * len(rounds)  # score and send
        if self.snapshots.clients:
            vectors += sum(1 + len(self.cohort(round - 1)[1]) for round in rounds)
        numbers = vectors * net.layout.size + len(rounds) * net.buffer_layout.size
        return numbers * torch.empty((), dtype=net.dtype).element_size()

    def rounds_from(
        self, server: Server, states: ClientStates
    ) -> Iterator[tuple[Server, RoundRecord]]:
        """Yield the server after each round with the round's record."""
        holders = self.holders(server)
        while server.round < self.rounds:
            server, record = answered(self.round(server, states, holders), self.answer)
            yield server, record

    def holders(self, server: Server) -> set[int]:
        """Return the clients that have been sent the frozen parts of the network."""
        found: set[int] = set()
        if self.net.frozen_bytes:  # after a checkpoint some have
            found.update(*(self.cohort(round)[0].tolist() for round in range(server.round)))
        return found

    def answer(self, request: Request) -> Probe | Gathered:
        """Return what the executor makes of a request."""
        if isinstance(request, ProbeRequest):
            return self.executor.probe([request])[0]
        return self.executor.train([request])[0]

    def setup(self) -> RoundSetup:
        """Return what all rounds have in common."""
        return RoundSetup(
            method=self.method,
            context=self.context,
            schedule=self.schedule,
            key=self.key,
            policy=Strict(),
            scoring=Scoring(
                rounds=self.rounds,
                test=self.evaluator,
                train=self.train,
                every=self.evaluate_every,
                last=self.evaluate_last,
            ),
            statistics=Statistics(self.buffers, self.recalibrate),
            clock=self.clock,
        )

    def round(self, server: Server, states: ClientStates, holders: set[int]) -> Work:
        """Yield what an executor is asked for in the next round; return the server after it.

        Args:
            server: the server before the round.
            states: what clients keep.
            holders: who has been sent the frozen parts; who is sent them now is added.
        """
        began = self.clock()
        drawn, cohort = self.cohort(server.round)
        new = set(drawn.tolist()) - holders
        holders |= new
        exchange = _Exchange(len(drawn), len(new) * self.net.frozen_bytes, self._forged)
        steps = one_round(self.setup(), server, cohort, states)
        request = next(steps)
        while True:
            response = yield from exchange.answer(request)
            try:
                request = steps.send(response)
            except StopIteration as end:
                after, record = end.value
                break
        replies = None
        if exchange.gathered is not None:
            replies = exchange.gathered.replies
            states.put(cohort.tolist(), exchange.gathered.own, server.round)
        self._store_snapshot(server, after, replies)
        if self.home is not None:
            record = self.home.entered(record, after)
        record = self._attack_noted(record, after, cohort)
        return after, replace(record, seconds=self.clock() - began)

    def _forged(self, gathered: Gathered, sent: Sent) -> Gathered:
        """Return what the cohort sends: what it trained, or what its hostile members forge."""
        if self.hostility is None:
            return gathered
        return self.hostility.forged(gathered, sent, self.key)

    def _attack_noted(self, record: RoundRecord, server: Server, cohort: np.ndarray) -> RoundRecord:
        """Enter how many of the cohort were hostile, and how well a backdoor works."""
        if self.hostility is None:
            return record
        notes = dict(record.notes)
        notes["hostile"] = float(len(self.hostility.clients.intersection(cohort.tolist())))
        if self.triggered is not None and self.setup().scoring.due(record.round):
            success = self.triggered.score(server.score, server.buffers).get("accuracy")
            if isinstance(success, float):  # the task has classes
                notes["attack_success"] = success
        return replace(record, notes=notes)

    def _store_snapshot(self, before: Server, after: Server, replies: Replies | None) -> None:
        """Store the models of a round, if snapshots of it are wanted."""
        if self.snapshots is None or after.round not in self.snapshots.rounds:
            return
        send = None if after.send is after.score else after.send
        snapshot = Snapshot(after.round, after.score, send, after.buffers)
        if self.snapshots.clients and replies is not None:
            snapshot = replace(
                snapshot,
                start=before.send,
                models=replies.models,
                weights=replies.weights,
                clients=replies.clients,
            )
        self.snapshots.put(snapshot)


@dataclass
class _Exchange:
    """Passes on the requests of one round to an executor, and counts what would travel.

    Args:
        drawn: how many clients were drawn; all of them are sent the model, not all answer.
        frozen: bytes of frozen parts that are sent, to clients that are drawn for the first time.
        forged: what becomes of the replies on their way.
    """

    drawn: int
    frozen: int = 0
    forged: Callable[[Gathered, Sent], Gathered] = lambda gathered, sent: gathered
    gathered: Gathered | None = None  # what the cohort sent back
    _probe_bytes: int = 0

    def answer(self, request: Request) -> Generator[Request, Any, Probed | Returned]:
        """Yield what an executor must answer; return what the round is sent."""
        if isinstance(request, ProbeRequest):
            probe: Probe = yield request
            self._probe_bytes = count_bytes(probe)
            return Probed(request.cohort, probe)
        if len(request.cohort):
            trained: Gathered = yield request
            self.gathered = self.forged(trained, request.sent)
        return Returned(self.gathered, self._traffic(request))

    def _traffic(self, request: TrainRequest) -> Traffic:
        count = len(request.cohort)
        sent = request.sent
        down = count_bytes((sent.vector, sent.buffers, sent.shared))
        up = self._probe_bytes + count * _REPLY_NUMBERS
        if self.gathered is not None:
            replies = self.gathered.replies
            up += count_bytes((replies.models, self.gathered.buffers, replies.reports))
        return Traffic(
            replies=count,
            dropped=self.drawn - count,
            bytes_down=self.drawn * down + self.frozen,
            bytes_up=up,
        )
