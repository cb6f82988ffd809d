"""What each client gets: models are scored on the rows that clients hold out.

The federated model is scored by client in one pass. At the end, where that is wanted, so are

    home    a copy of it that each client has fine-tuned on its own rows,
    alone   a model that each client trains by itself, from the same start, for as many epochs or
            steps as the federated model has behind it in R rounds,
    pooled  one model that is trained on all clients' rows in one place, for as many rows as all
            cohorts together have gone through.

Alone and pooled train with the mean learning rate of the schedule and without the method's rules.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbasin.core.evaluator import Evaluator
from fedbasin.core.method import Plan
from fedbasin.core.metric import GroupMetric
from fedbasin.core.record import Headline, RoundRecord
from fedbasin.core.rng import Key
from fedbasin.core.round import Launch, Sent, Server
from fedbasin.core.served import Cell, ClientTable, columns_of, share_worse, took_part
from fedbasin.local.batches import count_steps
from fedbasin.local.train import Shard, Trainer
from fedbasin.sim.loop import Executor, LoopExecutor
from fedbasin.sim.population import Population

_BLOCK_BYTES = 1 << 28  # of clients' own models that are in memory at once
_log = logging.getLogger(__package__)


@dataclass(frozen=True)
class _Fresh:
    """Clients that keep nothing."""

    zero: tuple[Any, ...]

    def get(self, client: int) -> tuple[Any, ...]:
        """Return the state before the first round."""
        return self.zero


@dataclass(frozen=True)
class HomeTraining:
    """Trains a model of every client's own, as cohorts.

    Args:
        name: what it is, for the log and the randomness.
        trainer: how a client trains.
        executor: how cohorts are trained, on the rows that clients have at home.
        plan: how long.
        key: the run's randomness.
    """

    name: str
    trainer: Trainer
    executor: Executor
    plan: Plan
    key: Key

    def models(
        self, clients: np.ndarray, vector: Tensor, buffers: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield blocks of clients [C], their models [C, P] and statistics [C, Q]."""
        shared = tuple(() for _ in self.trainer.rules)
        sent = Sent(vector, buffers, shared, 0)
        states = _Fresh(self.trainer.zero_state(vector))
        key = self.key.fold(self.name)
        size = max(1, _BLOCK_BYTES // max(vector.numel() * vector.element_size(), 1))
        for first in range(0, len(clients), size):
            block = clients[first : first + size]
            launch = Launch(block, sent, self.plan, states, key)
            gathered = self.executor.train([launch])[0]
            _log.info("%s: %d of %d clients", self.name, first + len(block), len(clients))
            ids = torch.from_numpy(block).to(vector.device)
            yield ids, gathered.replies.models, gathered.replies.buffers


@dataclass(frozen=True)
class Baselines:
    """What federation is held against.

    Args:
        alone: trains every client by itself.
        pooled: all clients' rows as those of one client.
        pooled_steps: how many steps are trained on these.
    """

    alone: HomeTraining
    pooled: Population
    pooled_steps: int

    def pooled_model(self, vector: Tensor, buffers: Tensor) -> tuple[Tensor, Tensor]:
        """Return a model trained on all rows, and its statistics."""
        trainer = self.alone.trainer
        executor = LoopExecutor(trainer, self.pooled, self.alone.key)
        plan = Plan(self.alone.plan.lr, None, self.pooled_steps)
        one = HomeTraining("pooled", trainer, executor, plan, self.alone.key)
        _, models, statistics = next(one.models(np.zeros(1, np.int64), vector, buffers))
        return models[0], statistics[0]


@dataclass(eq=False)
class ClientScores:
    """Scores models by client, and keeps the latest scores for the table of clients.

    Args:
        evaluator: the rows that clients hold out, in the clients' order; `groups` are those of the
            data, such as hospitals.
        offsets: where each client's rows begin, int64 [N + 1].
        unseen: clients that never take part.
        facts: columns that say what clients are.
        every: score every k rounds, and after the last.
        rounds: how many rounds there are.
        start: the first model and its statistics.
        home: fine-tunes the final model, where that is wanted.
        baselines: what federation is held against, where that is wanted.
    """

    evaluator: Evaluator
    offsets: np.ndarray
    unseen: np.ndarray
    facts: Mapping[str, list[Cell]]
    every: int
    rounds: int
    start: tuple[Tensor, Tensor]
    home: HomeTraining | None = None
    baselines: Baselines | None = None
    latest: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def sizes(self) -> np.ndarray:
        """How many rows each client is scored on, [N]."""
        return np.diff(self.offsets)

    @property
    def headlines(self) -> list[Headline]:
        """The metrics that clients are scored by."""
        own = self.evaluator.metrics
        return [metric.headline for metric in own if not isinstance(metric, GroupMetric)]

    def shard(self, client: int) -> Shard | None:
        """Return the rows that a client holds out; None where it has none."""
        rows = slice(int(self.offsets[client]), int(self.offsets[client + 1]))
        if rows.start == rows.stop:
            return None
        return Shard(self.evaluator.inputs[rows], self.evaluator.labels[rows])

    def entered(self, record: RoundRecord, server: Server) -> RoundRecord:
        """Enter how the scored model serves clients into a round's record, if it is time to."""
        last = record.round == self.rounds
        if not last and record.round % self.every:
            return record
        began = time.perf_counter()
        federated = self._by_client(server.score, server.buffers)
        self.latest = dict(federated)
        columns = self._columns(federated, "")
        columns |= self._over_groups(server.score, server.buffers)
        if last:
            columns |= self._at_the_end(server)
        spent = record.seconds_evaluate + time.perf_counter() - began
        return replace(record, metrics={**record.metrics, **columns}, seconds_evaluate=spent)

    def table(
        self, records: list[RoundRecord], cohort: Callable[[int], np.ndarray]
    ) -> ClientTable | None:
        """Return one line a client with the latest scores; None before clients were scored.

        Args:
            records: all rounds.
            cohort: returns who answered in a round, counted from 0.
        """
        if not self.latest:
            return None
        scores = {name: list(values.tolist()) for name, values in self.latest.items()}
        part = took_part(records, cohort, len(self.sizes))
        return ClientTable({**self.facts, **part, **scores})

    def _by_client(self, vector: Tensor, buffers: Tensor) -> dict[str, np.ndarray]:
        owner = torch.from_numpy(np.repeat(np.arange(len(self.sizes)), self.sizes))
        found = self.evaluator.scores_by(vector, owner, len(self.sizes), buffers)
        return {name: values.numpy() for name, values in found.items()}

    def _columns(self, scores: Mapping[str, np.ndarray], way: str) -> dict[str, float]:
        """Return the columns of clients that take part, and of those that never do."""
        never = np.zeros(len(self.sizes), dtype=bool)
        never[self.unseen] = True
        columns: dict[str, float] = {}
        for headline in self.headlines:
            named = headline._replace(name=headline.name + way)
            values = scores[headline.name]
            columns |= columns_of("clients_", named, values[~never], self.sizes[~never])
            if never.any():
                columns |= columns_of("unseen_", named, values[never], self.sizes[never])
        return columns

    def _over_groups(self, vector: Tensor, buffers: Tensor) -> dict[str, float]:
        """Return the mean over groups of each metric, where the data has groups."""
        group = self.evaluator.groups
        if group is None or not len(group):
            return {}
        found = self.evaluator.scores_by(vector, group, int(group.max()) + 1, buffers)
        return {f"clients_{name}_group_mean": float(v.nanmean()) for name, v in found.items()}

    def _at_the_end(self, server: Server) -> dict[str, float]:
        """Return the columns of models that are not the federated one, and keep their scores."""
        columns: dict[str, float] = {}
        able = np.flatnonzero((self.sizes > 0) & (np.array(self.facts["home_rows"]) > 0))
        ways: dict[str, dict[str, np.ndarray]] = {}
        if self.home is not None:
            models = self.home.models(able, server.score, server.buffers)
            ways["_home"] = self._own(models)
        if self.baselines is not None:
            ways["_alone"] = self._own(self.baselines.alone.models(able, *self.start))
            ways["_pooled"] = self._by_client(*self.baselines.pooled_model(*self.start))
        for way, scores in ways.items():
            columns |= self._columns(scores, way)
            self.latest |= {f"{name}{way}": values for name, values in scores.items()}
        for headline in self.headlines if "_alone" in ways else []:
            worse = share_worse(headline, self.latest[headline.name], ways["_alone"][headline.name])
            if worse is not None:
                columns[f"clients_{headline.name}_worse_than_alone"] = worse
        return columns

    def _own(self, models: Iterator[tuple[Tensor, Tensor, Tensor]]) -> dict[str, np.ndarray]:
        found = self.evaluator.scores_at_home(models, self.offsets.tolist())
        return {name: values.numpy() for name, values in found.items()}

    def close(self) -> None:
        """Free what the executors hold."""
        if self.home is not None:
            self.home.executor.close()
        if self.baselines is not None:
            self.baselines.alone.executor.close()


def alone_plan(schedule: Callable[[int], Plan], rounds: int) -> Plan:
    """Return all rounds' work of one client as one plan, at the mean learning rate."""
    plans = [schedule(round) for round in range(rounds)]
    lr = math.fsum(plan.lr for plan in plans) / rounds
    first = plans[0]
    if first.steps is not None:
        return Plan(lr, None, sum(plan.steps or 0 for plan in plans))
    return Plan(lr, sum(plan.epochs or 0 for plan in plans))


def pooled_steps(
    schedule: Callable[[int], Plan],
    cohort: Callable[[int], np.ndarray],
    sizes: np.ndarray,
    rounds: int,
    batch: int,
) -> int:
    """Return how many steps on all rows go through as many rows as all cohorts have."""
    rows = 0
    for round in range(rounds):
        plan = schedule(round)
        for size in sizes[cohort(round)].tolist():
            rows += plan.epochs * size if plan.epochs else count_steps(plan, size, batch) * batch
    return max(1, -(-rows // batch))
