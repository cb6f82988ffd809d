"""A simulation in memory: what does not change in it, and its rounds, one after another."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbasin.core.archive import Archive
from fedbasin.core.evaluator import Evaluator
from fedbasin.core.expressions import Choice
from fedbasin.core.holdings import Holdings
from fedbasin.core.method import Context, Method, Plan, Replies, ReplyError
from fedbasin.core.needs import check_task
from fedbasin.core.net import Net
from fedbasin.core.protocols import check_private
from fedbasin.core.record import Headline, RoundRecord
from fedbasin.core.rng import Key
from fedbasin.core.round import (
    Attempt,
    BufferPolicy,
    Gathered,
    Launch,
    Merged,
    Returned,
    RoundSetup,
    Scoring,
    Server,
    Statistics,
    Traffic,
    begin_round,
    end_round,
    probe_of,
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
        simulation = Simulation(self, server, states)
        while simulation.server.round < self.rounds:
            record = simulation.merge(self.train_cohort(simulation.launch()))
            yield simulation.server, record

    def train_cohort(self, launch: Launch) -> Gathered | None:
        """Return what the run's own executor makes of a launch; None if it asks nobody."""
        if not len(launch.cohort):
            return None
        return self.executor.train([launch])[0]

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
        )


class Simulation:
    """A simulated run in memory. Whoever drives it trains between the two halves of a round.

    Args:
        federation: what does not change.
        server: the server before the next round.
        states: what clients keep.
    """

    def __init__(self, federation: Federation, server: Server, states: ClientStates) -> None:
        self.federation = federation
        self.server = server
        self.states = states
        self._setup = federation.setup()
        self._holders = self._holders_before()
        self._launch: Launch | None = None  # of the round under way
        self._drawn = 0  # clients that are sent the model; not all of them answer
        self._new = 0  # of these, the ones that are sent the frozen parts, too
        self._began = 0.0

    def launch(self) -> Launch:
        """Begin a round: draw its cohort, ask for gradients if the method wants them."""
        federation = self.federation
        self._began = federation.clock()
        drawn, cohort = federation.cohort(self.server.round)
        new = set(drawn.tolist()) - self._holders
        self._holders |= new
        self._drawn = len(drawn)
        self._new = len(new)
        request = probe_of(self._setup, self.server, cohort)
        probe = None if request is None else federation.executor.probe([request])[0]
        self._launch = begin_round(self._setup, self.server, cohort, self.states, probe)
        return self._launch

    def merge(self, gathered: Gathered | None) -> RoundRecord:
        """End the round with what its cohort trained; None if nobody was asked."""
        launch = self._launch
        if launch is None:
            raise RuntimeError("no round is under way: call launch() before merge()")
        self._launch = None  # it may hold a gradient of every client
        federation = self.federation
        if gathered is not None and federation.hostility is not None:
            forged = federation.hostility.forged(gathered.replies, launch.sent, federation.key)
            gathered = gathered._replace(replies=forged)
        before = self.server
        seconds = federation.clock() - self._began
        returned = Returned(gathered, self._traffic(launch, gathered), seconds)
        self.server, record = end_round(self._setup, before, launch, returned)
        if gathered is not None:
            self.states.put(launch.cohort.tolist(), gathered.own, before.round)
        self._store_snapshot(before, None if gathered is None else gathered.replies)
        if federation.home is not None:
            record = federation.home.entered(record, self.server)
        record = self._attack_noted(record, launch.cohort)
        return replace(record, seconds=federation.clock() - self._began)

    def _holders_before(self) -> set[int]:
        """Return the clients that have been sent the frozen parts of the network."""
        holders: set[int] = set()
        if self.federation.net.frozen_bytes:  # after a checkpoint some have
            for round in range(self.server.round):
                holders.update(self.federation.cohort(round)[0].tolist())
        return holders

    def _traffic(self, launch: Launch, gathered: Gathered | None) -> Traffic:
        """Count what would travel in a federation."""
        count = len(launch.cohort)
        sent = launch.sent
        down = count_bytes((sent.vector, sent.buffers, sent.shared))
        up = count_bytes(launch.probe) + count * _REPLY_NUMBERS
        if gathered is not None:
            replies = gathered.replies
            up += count_bytes((replies.models, replies.buffers, replies.reports))
        return Traffic(
            replies=count,
            dropped=self._drawn - count,
            bytes_down=self._drawn * down + self._new * self.federation.net.frozen_bytes,
            bytes_up=up,
        )

    def _attack_noted(self, record: RoundRecord, cohort: np.ndarray) -> RoundRecord:
        """Enter how many of the cohort were hostile, and how well a backdoor works."""
        federation = self.federation
        if federation.hostility is None:
            return record
        notes = dict(record.notes)
        hostile = federation.hostility.clients.intersection(cohort.tolist())
        notes["hostile"] = float(len(hostile))
        if federation.triggered is not None and self._setup.scoring.due(record.round):
            scores = federation.triggered.score(self.server.score, self.server.buffers)
            success = scores.get("accuracy")
            if isinstance(success, float):  # the task has classes
                notes["attack_success"] = success
        return replace(record, notes=notes)

    def _store_snapshot(self, before: Server, replies: Replies | None) -> None:
        """Store the models of a round, if snapshots of it are wanted."""
        snapshots = self.federation.snapshots
        after = self.server
        if snapshots is None or after.round not in snapshots.rounds:
            return
        send = None if after.send is after.score else after.send
        snapshot = Snapshot(after.round, after.score, send, after.buffers)
        if snapshots.clients and replies is not None:
            snapshot = replace(
                snapshot,
                start=before.send,
                models=replies.models,
                weights=replies.weights,
                clients=replies.clients,
            )
        snapshots.put(snapshot)
