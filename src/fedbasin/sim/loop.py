"""The reference executor: one client after another, plain autograd."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fedbasin.core.method import Plan, Probe, Replies
from fedbasin.core.rng import Key
from fedbasin.core.round import Gathered, Launch, ProbeRequest, Sent
from fedbasin.core.tree import stack
from fedbasin.local.train import Received, Trained, Trainer
from fedbasin.sim.population import Population


class Executor(Protocol):
    """Trains cohorts. Every executor gives the same result as the loop."""

    def train(self, launches: Sequence[Launch]) -> list[Gathered]:
        """Train the cohort of each launch from what its server sent."""
        ...

    def probe(self, requests: Sequence[ProbeRequest]) -> list[Probe]:
        """Return the full gradients of each request's cohort at the model it was sent."""
        ...

    def facts(self) -> dict[str, Any]:
        """Return what a run's summary says about the executor."""
        ...

    def close(self) -> None:
        """Free processes and clusters. A closed executor cannot train."""
        return


def client_key(key: Key, round: int, client: int) -> Key:
    """Return the randomness of one client in one round."""
    return key.fold("client", round, client)


@dataclass(frozen=True)
class LoopExecutor(Executor):
    """Train clients one by one.

    Args:
        trainer: how a client trains.
        population: the clients' data.
        key: the randomness of launches that bring none.
    """

    trainer: Trainer
    population: Population
    key: Key

    def train(self, launches: Sequence[Launch]) -> list[Gathered]:
        """Train the cohort of each launch, one client after another."""
        return [self._train(launch) for launch in launches]

    def probe(self, requests: Sequence[ProbeRequest]) -> list[Probe]:
        """Return the full gradients of each request's cohort at the model it was sent."""
        return [self._probe(request) for request in requests]

    def _train(self, launch: Launch) -> Gathered:
        key = launch.key or self.key
        trained = [
            self.one(client, launch.sent, launch.plan, launch.states.get(client), key)
            for client in launch.cohort.tolist()
        ]
        return gather(launch.cohort, trained, launch.sent.vector)

    def _probe(self, request: ProbeRequest) -> Probe:
        cohort, sent = request.cohort, request.sent
        shards = [self.population.shard(client) for client in cohort.tolist()]
        gradients = [self.trainer.full_gradient(s, sent.vector, sent.buffers) for s in shards]
        return Probe(torch.stack(gradients), self.population.weights(cohort))

    def facts(self) -> dict[str, Any]:
        """Name the executor."""
        return {"executor": "loop"}

    def one(self, client: int, sent: Sent, plan: Plan, own: tuple[Any, ...], key: Key) -> Trained:
        """Train one client, given what it kept and the run's randomness."""
        draws = client_key(key, sent.round, client).tensor(sent.vector.device)
        received = Received(sent.vector, sent.buffers, sent.shared, own, sent.round, draws)
        try:
            return self.trainer.train(self.population.shard(client), received, plan)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise ValueError(
                f"client {client}: BatchNorm cannot train on a batch of one row; use norm='group', "
                "another local.batch, or a partition with a larger minimum"
            ) from error


def gather(cohort: np.ndarray, trained: list[Trained], like: Tensor) -> Gathered:
    """Turn the results of single clients into one matrix of replies."""

    def numbers(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=like.device)

    losses = torch.stack([t.mean_loss for t in trained])
    replies = Replies(
        models=torch.stack([t.vector for t in trained]),
        weights=numbers([t.examples for t in trained]),
        clients=torch.from_numpy(cohort.astype(np.int64)).to(like.device),
        steps=numbers([t.steps for t in trained]),
        lr_sum=numbers([t.lr_sum for t in trained]),
        effective_steps=numbers([t.length for t in trained]),
        last_loss=torch.stack([t.last_loss for t in trained]),
        train_loss=losses,
        buffers=torch.stack([t.buffers for t in trained]),
        reports=stack([t.reports for t in trained]),
    )
    weights = replies.weights / replies.weights.sum()
    return Gathered(replies, [t.own for t in trained], (losses * weights).sum())
