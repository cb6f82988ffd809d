"""The round loop: draw a cohort, train it, merge, score."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedbasin.core.archive import Archive
from fedbasin.core.evaluator import Evaluator
from fedbasin.core.expressions import Choice
from fedbasin.core.holdings import Holdings
from fedbasin.core.method import Context, Method, Plan, Replies, ReplyError, Served
from fedbasin.core.protocols import needs_gradients
from fedbasin.core.record import RoundRecord
from fedbasin.core.rng import Key
from fedbasin.core.snapshot import Snapshot, Snapshots
from fedbasin.core.tree import count_bytes, flatten
from fedbasin.core.vectors import shares, weighted_mean
from fedbasin.sim.clients import ClientStates
from fedbasin.sim.loop import Executor, Gathered, Sent
from fedbasin.sim.participation import draw_cohort, drop_out

BufferPolicy = Literal["mean", "keep", "recalibrate"]
_REPLY_NUMBERS = 3 * 8  # samples, steps and loss travel beside a model


class Diverged(RuntimeError):
    """A run that cannot go on, with the round and the client named."""


@dataclass(frozen=True)
class Server:
    """All that the server carries from round to round."""

    round: int  # finished rounds
    send: Tensor  # [P] where clients start next
    score: Tensor  # [P] the model that counts
    buffers: Tensor  # [Q] statistics
    state: Any  # the method's own


@dataclass(frozen=True)
class Federation:
    """Everything a run needs that does not change.

    Args:
        method: how the server merges.
        executor: how a cohort is trained.
        context: what the method may know.
        schedule: the configured plan of each round.
        participation: how a cohort is drawn.
        eligible: ids of the clients that hold data.
        key: the run's randomness.
        test: rows that models are scored on.
        rounds: how many rounds there are, R.
        dropout: chance that a drawn client does not answer.
        buffers: what happens to float statistics (BatchNorm).
        recalibrate: renews statistics for a model, for the policy of that name.
        evaluate_every: score every k rounds.
        evaluate_last: and in each of the last rounds.
        train: rows of clients that models are scored on beside `test`, where that is wanted.
        client_memory: most bytes of main memory for what all clients keep between rounds.
        client_archive: files for it beyond that.
        snapshots: which models are kept for analyses, and where.
        holdings: who holds what, for the record.
        data: what tells this data from other (`provenance.identity`).
    """

    method: Method
    executor: Executor
    context: Context
    schedule: Callable[[int], Plan]
    participation: Choice
    eligible: np.ndarray
    key: Key
    test: Evaluator
    rounds: int
    dropout: float = 0.0
    buffers: BufferPolicy = "mean"
    recalibrate: Callable[[Tensor, Tensor], Tensor] | None = None
    evaluate_every: int = 1
    evaluate_last: int = 10
    train: Evaluator | None = None
    client_memory: float = math.inf
    client_archive: Archive | None = None
    snapshots: Snapshots | None = None
    holdings: Holdings | None = None
    data: Mapping[str, Any] = field(default_factory=dict)

    def begin(self) -> tuple[Server, ClientStates]:
        """Return the server and the clients before the first round."""
        vector, buffers = self.test.net.initial()
        state = self.method.init(vector, self.context)
        states = ClientStates(
            self.executor.zero_state(vector),
            vector,
            clients=self.context.clients,
            limit=self.client_memory,
            archive=self.client_archive,
        )
        return Server(0, vector, vector, buffers, state), states

    def close(self) -> None:
        """Let go of what the executor holds, such as processes."""
        self.executor.close()

    def cohort(self, round: int) -> tuple[np.ndarray, np.ndarray]:
        """Return who is drawn in a round, counted from 0, and who of them answers."""
        drawn = draw_cohort(self.participation, self.eligible, self.key, round)
        return drawn, drop_out(drawn, self.dropout, self.key.fold("dropout", round))

    def snapshot_bytes(self) -> int:
        """Return how many bytes the snapshots of a run take up, at most."""
        if self.snapshots is None:
            return 0
        net, rounds = self.test.net, self.snapshots.rounds
        vectors = 2 * len(rounds)  # score and send
        if self.snapshots.clients:
            vectors += sum(1 + len(self.cohort(round - 1)[1]) for round in rounds)
        numbers = vectors * net.layout.size + len(rounds) * net.buffer_layout.size
        return numbers * torch.empty((), dtype=net.dtype).element_size()

    def rounds_from(
        self, server: Server, states: ClientStates
    ) -> Iterator[tuple[Server, RoundRecord]]:
        """Yield the server after each round with the round's record."""
        while server.round < self.rounds:
            server, record = self._round(server, states)
            yield server, record

    def _round(self, server: Server, states: ClientStates) -> tuple[Server, RoundRecord]:
        began = time.perf_counter()
        now, method = server.round, self.method
        plan = method.plan(self.schedule, self.context.at(now, 0.0))
        context = self.context.at(now, plan.lr, plan)
        drawn, cohort = self.cohort(now)
        context = self._probed(cohort, server, context)
        shared = method.broadcast(server.state, server.send, context)
        sent = Sent(server.send, server.buffers, shared, now)
        record = RoundRecord(
            round=now + 1,
            lr=plan.lr,
            replies=len(cohort),
            dropped=len(drawn) - len(cohort),
            bytes_down=len(drawn) * count_bytes((sent.vector, sent.buffers, shared)),
            bytes_up=count_bytes(context.probe) if context.probe is not None else 0,
        )
        after, replies = replace(server, round=now + 1), None
        if len(cohort):
            gathered = self.executor.train(cohort, sent, plan, states)
            replies = gathered.replies
            trained = time.perf_counter()
            after, served = self._merge(server, gathered, context)
            record = self._merged(record, server, after, served, gathered)
            states.put(cohort.tolist(), gathered.own, now)
            merged = time.perf_counter()
            record = replace(record, seconds_train=trained - began, seconds_merge=merged - trained)
        self._keep(server, after, replies)
        record = self._scored(record, after)
        return after, replace(record, seconds=time.perf_counter() - began)

    def _probed(self, cohort: np.ndarray, server: Server, context: Context) -> Context:
        """Return the context with the cohort's gradients, where the method asks for them."""
        if not (needs_gradients(self.method) and len(cohort)):
            return context
        sent = Sent(server.send, server.buffers, (), server.round)
        return replace(context, probe=self.executor.probe(cohort, sent))

    def _merge(self, server: Server, gathered: Gathered, context: Context) -> tuple[Server, Served]:
        replies = gathered.replies
        try:
            replies.check(server.send)
        except ReplyError as error:
            raise Diverged(f"round {server.round + 1}: {error}") from error
        buffers = self._statistics(server, gathered.buffers, replies)
        if isinstance(context.proxy, Evaluator):
            context = replace(context, proxy=replace(context.proxy, buffers=buffers))
        served, state = self.method.aggregate(server.state, server.send, replies, context)
        if self.buffers == "recalibrate" and self.test.net.has_statistics:
            assert self.recalibrate is not None
            buffers = self.recalibrate(served.score, buffers)
        return Server(server.round + 1, served.send, served.score, buffers, state), served

    def _keep(self, before: Server, after: Server, replies: Replies | None) -> None:
        """Store the models of a round that was asked for."""
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

    def _statistics(self, server: Server, sent_back: Tensor, replies: Replies) -> Tensor:
        """Return the statistics that go with the merged model, before any recalibration."""
        if self.buffers == "keep" or not self.test.net.has_statistics:
            return server.buffers
        return weighted_mean(sent_back, shares(replies.weights))

    def _merged(
        self,
        record: RoundRecord,
        before: Server,
        after: Server,
        served: Served,
        gathered: Gathered,
    ) -> RoundRecord:
        up = count_bytes((gathered.replies.models, gathered.buffers, gathered.replies.reports))
        host = torch.stack(
            [
                gathered.train_loss.double(),
                (after.send - before.send).norm().double(),
                after.score.norm().double(),
            ]
        ).tolist()
        return replace(
            record,
            train_loss=host[0],
            update_norm=host[1],
            model_norm=host[2],
            bytes_up=record.bytes_up + up + record.replies * _REPLY_NUMBERS,
            notes=notes_of(served),
        )

    def _scored(self, record: RoundRecord, server: Server) -> RoundRecord:
        last = record.round == self.rounds
        late = record.round > self.rounds - self.evaluate_last
        if not (last or late or record.round % self.evaluate_every == 0):
            return replace(record, metrics=self.test.unscored())
        began = time.perf_counter()
        metrics = self.test.of_round(
            server.score, server.send, server.buffers, last=last, train=self.train
        )
        return replace(record, metrics=metrics, seconds_evaluate=time.perf_counter() - began)


def notes_of(served: Served) -> dict[str, float | list[float]]:
    """Return what the method wants recorded as plain numbers by name.

    Notes of nested methods are a tuple; a note's place in it is not part of its name.
    """
    plain: dict[str, float | list[float]] = {}
    for path, leaf in flatten(served.notes):
        name = path.lstrip(".0123456789")
        if isinstance(leaf, Tensor):
            plain[name] = leaf.tolist()
        elif isinstance(leaf, int | float):
            plain[name] = float(leaf)
    return plain
