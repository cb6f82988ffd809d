"""The reference executor: one client after another, plain autograd."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fedbasin.core.method import Plan, Probe, Replies
from fedbasin.core.rng import Key
from fedbasin.core.tree import stack
from fedbasin.local.train import Received, Trained, Trainer
from fedbasin.sim.clients import ClientStates
from fedbasin.sim.population import Population


class Sent(NamedTuple):
    """What the server sends to a cohort."""

    vector: Tensor  # [P]
    buffers: Tensor  # [Q]
    shared: tuple[Any, ...]  # one entry for each client rule
    round: int  # finished rounds


class Gathered(NamedTuple):
    """What comes back, beside the replies proper."""

    replies: Replies
    buffers: Tensor  # [C, Q]
    own: list[tuple[Any, ...]]  # the clients' new states, in the order of the cohort
    train_loss: Tensor  # mean loss of the cohort's local training


class Executor(Protocol):
    """Trains a cohort. Every executor gives the result of the loop."""

    def train(self, cohort: np.ndarray, sent: Sent, plan: Plan, states: ClientStates) -> Gathered:
        """Train the clients of a cohort from what the server sent."""
        ...

    def probe(self, cohort: np.ndarray, sent: Sent) -> Probe:
        """Return the cohort's full gradients at the model it was sent."""
        ...

    def zero_state(self, vector: Tensor) -> tuple[Any, ...]:
        """Return what a client keeps before its first round."""
        ...

    def facts(self) -> dict[str, Any]:
        """Return what a run's summary says about the executor."""
        ...

    def close(self) -> None:
        """Let go of processes and clusters; a closed executor trains no more."""
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
        key: the run's randomness.
    """

    trainer: Trainer
    population: Population
    key: Key

    def train(self, cohort: np.ndarray, sent: Sent, plan: Plan, states: ClientStates) -> Gathered:
        """Train the clients of a cohort from what the server sent."""
        trained = [self.one(int(i), sent, plan, states.get(int(i))) for i in cohort]
        return gather(cohort, trained, sent.vector)

    def probe(self, cohort: np.ndarray, sent: Sent) -> Probe:
        """Return the cohort's full gradients at the model it was sent."""
        shards = [self.population.shard(int(client)) for client in cohort]
        gradients = [self.trainer.full_gradient(s, sent.vector, sent.buffers) for s in shards]
        return Probe(torch.stack(gradients), self.population.weights(cohort))

    def zero_state(self, vector: Tensor) -> tuple[Any, ...]:
        """Return what a client keeps before its first round."""
        return self.trainer.zero_state(vector)

    def facts(self) -> dict[str, Any]:
        """Name the executor."""
        return {"executor": "loop"}

    def one(self, client: int, sent: Sent, plan: Plan, own: tuple[Any, ...]) -> Trained:
        """Train one client, given what it kept."""
        key = client_key(self.key, sent.round, client).tensor(sent.vector.device)
        received = Received(sent.vector, sent.buffers, sent.shared, own, sent.round, key)
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

    replies = Replies(
        models=torch.stack([t.vector for t in trained]),
        weights=numbers([t.examples for t in trained]),
        clients=torch.from_numpy(cohort.astype(np.int64)).to(like.device),
        steps=numbers([t.steps for t in trained]),
        lr_sum=numbers([t.lr_sum for t in trained]),
        effective_steps=numbers([t.length for t in trained]),
        last_loss=torch.stack([t.last_loss for t in trained]),
        reports=stack([t.reports for t in trained]),
    )
    weights = replies.weights / replies.weights.sum()
    losses = torch.stack([t.mean_loss for t in trained])
    return Gathered(
        replies,
        torch.stack([t.buffers for t in trained]),
        [t.own for t in trained],
        (losses * weights).sum(),
    )
