"""One round of the server, the same for every engine.

A round is two calls. `begin_round` returns what a cohort is asked to do. `end_round` takes what
came of it, and returns the server after the round and the round's record. Between the two a
simulation trains with an executor, and a federation sends messages. Methods that want the cohort's
gradients first say so by `probe_of`. All state between rounds lies in `Server` and in what clients
keep.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from fedbasin.core.evaluator import Evaluator
from fedbasin.core.method import Context, Method, Plan, Probe, Proxy, Replies, Served
from fedbasin.core.protocols import is_private, merge_statistics, needs_gradients
from fedbasin.core.record import Headline, RoundRecord, scores_of
from fedbasin.core.rng import Key
from fedbasin.core.tree import flatten

BufferPolicy = Literal["mean", "keep", "recalibrate"]
_REFUSED = "merge_refused"  # the note of a round whose replies made no model
_PIECE = 1 << 20  # elements whose difference is in memory at once


@dataclass(frozen=True)
class Server:
    """All that the server carries from round to round."""

    round: int  # finished rounds
    send: Tensor  # [P] where clients start next
    score: Tensor  # [P] the model that counts
    buffers: Tensor  # [Q] statistics
    state: Any  # the method's own


class Sent(NamedTuple):
    """What the server sends to a cohort."""

    vector: Tensor  # [P]
    buffers: Tensor  # [Q]
    shared: tuple[Any, ...]  # one entry for each client rule
    round: int  # finished rounds


class OwnStates(Protocol):
    """What clients keep between rounds, as an executor reads it."""

    def get(self, client: int) -> tuple[Any, ...]:
        """Return a client's own state, one entry for each rule."""
        ...


class ProbeRequest(NamedTuple):
    """Asks for the full gradients of a cohort at the model it is sent."""

    cohort: np.ndarray  # client ids, rising
    sent: Sent
    first: int = 0  # where the run's clients begin, for an executor of several runs


class Launch(NamedTuple):
    """A round that has begun: asks a cohort to train from what it is sent, by the round's plan."""

    cohort: np.ndarray  # client ids, rising; nobody is asked where there are none
    sent: Sent
    plan: Plan
    states: OwnStates
    key: Key | None = None  # the run's randomness; None takes the executor's
    first: int = 0  # where the run's clients begin, for an executor of several runs
    probe: Probe | None = None  # the cohort's gradients, where the method asked for them


class Gathered(NamedTuple):
    """What a cohort sends back, beside the replies proper."""

    replies: Replies
    own: list[tuple[Any, ...]]  # the clients' new states, where the server's side keeps them
    train_loss: Tensor  # mean loss of the cohort's local training
    trusted: Tensor | None = None  # bool [C] whose statistics count; None trusts all

    def take(self, rows: Tensor) -> Gathered:
        """Return what some of the clients sent; the loss stays that of all."""
        trusted = None if self.trusted is None else self.trusted[rows]
        return self._replace(replies=self.replies.take(rows), own=[], trusted=trusted)


class Traffic(NamedTuple):
    """Who answered, and what travelled."""

    replies: int = 0
    dropped: int = 0
    refused: int = 0
    bytes_down: int = 0
    bytes_up: int = 0


class Returned(NamedTuple):
    """What came of a cohort's training; `gathered` is None where there is nothing to merge."""

    gathered: Gathered | None
    traffic: Traffic
    seconds: float = 0.0  # from the draw of the cohort to its last reply


class Merged(NamedTuple):
    """What the method made of the replies, and the statistics that go with it."""

    served: Served
    state: Any
    buffers: Tensor  # [Q] before any recalibration


class Attempt(Protocol):
    """Merges what a cohort sent."""

    def __call__(self, rows: Tensor | None = None) -> Merged:
        """Merge all replies, or the chosen rows of them."""
        ...


class Policy(Protocol):
    """What happens to replies that make no model: engines differ in this alone."""

    def merge(self, server: Server, replies: Replies, attempt: Attempt) -> Merged | None:
        """Return what `attempt` gives, or None to keep the model of `server`."""
        ...


@dataclass(frozen=True)
class Statistics:
    """What happens to BatchNorm statistics.

    Args:
        policy: average the clients', keep the first ones, or renew the average.
        recalibrate: renews statistics for a model, for the policy of that name.
    """

    policy: BufferPolicy = "mean"
    recalibrate: Callable[[Tensor, Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        if self.policy == "recalibrate" and self.recalibrate is None:
            raise ValueError("buffers='recalibrate' needs recalibrate=, a function of a model")

    def merged(
        self, before: Tensor, gathered: Gathered, method: Method, context: Context
    ) -> Tensor:
        """Return the statistics that go with the merged model, before any recalibration."""
        if self.policy == "keep" or not before.numel():
            return before
        replies = gathered.replies
        replies = replace(replies, models=replies.models[:, :0], reports=())
        if gathered.trusted is not None:
            replies = replies.take(gathered.trusted)
        return merge_statistics(method, before, replies, context)

    def renewed(self, model: Tensor, buffers: Tensor) -> Tensor:
        """Return the statistics of the scored model."""
        if self.policy != "recalibrate" or self.recalibrate is None or not buffers.numel():
            return buffers
        return self.recalibrate(model, buffers)


@dataclass(frozen=True)
class Scoring:
    """On what rows models are scored, and when.

    Args:
        rounds: how many rounds there are, R.
        test: rows for the scored model; None scores nothing.
        train: rows of clients beside them, where that is wanted.
        every: score every k rounds.
        last: and in each of the last rounds.
    """

    rounds: int
    test: Evaluator | None
    train: Evaluator | None = None
    every: int = 1
    last: int = 10

    def due(self, round: int) -> bool:
        """Whether models are scored after a round, counted from 1."""
        late = round == self.rounds or round > self.rounds - self.last
        return late or round % self.every == 0


@runtime_checkable
class WithStatistics(Protocol):
    """Server data that runs models with the statistics it is given."""

    def with_buffers(self, buffers: Tensor) -> Proxy:
        """Return the same rows, for models with other statistics."""
        ...


@dataclass(frozen=True)
class RoundSetup:
    """What all rounds of a run have in common.

    Args:
        method: how the server merges.
        context: what the method may know.
        schedule: the configured plan of each round.
        key: the run's randomness.
        policy: what happens to replies that make no model.
        scoring: on what rows models are scored, and when.
        statistics: what happens to BatchNorm statistics.
    """

    method: Method
    context: Context
    schedule: Callable[[int], Plan]
    key: Key
    policy: Policy
    scoring: Scoring
    statistics: Statistics = field(default_factory=Statistics)


def probe_of(setup: RoundSetup, server: Server, cohort: np.ndarray) -> ProbeRequest | None:
    """Return what a cohort is asked before the next round begins; None for most methods."""
    if not needs_gradients(setup.method) or not len(cohort):
        return None
    return ProbeRequest(cohort, Sent(server.send, server.buffers, (), server.round))


def begin_round(
    setup: RoundSetup,
    server: Server,
    cohort: np.ndarray,
    states: OwnStates,
    probe: Probe | None = None,
) -> Launch:
    """Begin the next round: plan it, and say what the cohort is sent.

    Args:
        setup: what all rounds have in common.
        server: the server before the round.
        cohort: ids of the clients that take part.
        states: what clients keep, passed on to whoever trains them.
        probe: the cohort's gradients, where `probe_of` asks for them. A client that sent none is
            left out of the cohort.
    """
    if probe is None and probe_of(setup, server, cohort) is not None:
        raise ValueError(
            f"{setup.method} needs the cohort's gradients before a round: ask for them by "
            "probe_of, and give begin_round(..., probe=...)"
        )
    plan = setup.method.plan(setup.schedule, setup.context.at(server.round, 0.0))
    context = replace(setup.context.at(server.round, plan.lr, plan), probe=probe)
    shared = setup.method.broadcast(server.state, server.send, context)
    sent = Sent(server.send, server.buffers, shared, server.round)
    return Launch(cohort, sent, plan, states, setup.key, probe=probe)


def end_round(
    setup: RoundSetup, server: Server, launch: Launch, returned: Returned
) -> tuple[Server, RoundRecord]:
    """Merge what came of a launch; return the server after the round, and the round's record.

    Args:
        setup: what all rounds have in common.
        server: the server as it is now.
        launch: what `begin_round` returned.
        returned: what the cohort sent back.
    """
    record = RoundRecord(
        round=server.round + 1,
        lr=launch.plan.lr,
        seconds_train=returned.seconds,
        **returned.traffic._asdict(),
    )
    context = setup.context.at(server.round, launch.plan.lr, launch.plan)
    context = replace(context, probe=launch.probe, answered=returned.traffic.replies)
    server, record = _merge(setup, server, returned.gathered, context, record)
    return server, scored(record, server, setup.scoring)


def _merge(
    setup: RoundSetup,
    server: Server,
    gathered: Gathered | None,
    context: Context,
    record: RoundRecord,
) -> tuple[Server, RoundRecord]:
    """Return the server after the round, and the record with what the merge says."""
    after = replace(server, round=server.round + 1)
    if gathered is None:
        if not is_private(setup.method):
            return after, record
        gathered = _nothing(server)
    began = time.perf_counter()

    def attempt(rows: Tensor | None = None) -> Merged:
        chosen = gathered if rows is None else gathered.take(rows)
        buffers = setup.statistics.merged(server.buffers, chosen, setup.method, context)
        known = context
        if isinstance(context.proxy, WithStatistics):
            known = replace(context, proxy=context.proxy.with_buffers(buffers))
        served, state = setup.method.aggregate(server.state, server.send, chosen.replies, known)
        return Merged(served, state, buffers)

    nobody = not len(gathered.replies.clients)  # a private method adds its noise all the same
    merged = attempt() if nobody else setup.policy.merge(server, gathered.replies, attempt)
    if merged is None:
        record = replace(record, train_loss=float(gathered.train_loss), notes={_REFUSED: 1.0})
        return after, replace(record, seconds_merge=time.perf_counter() - began)
    served = merged.served
    buffers = setup.statistics.renewed(served.score, merged.buffers)
    after = Server(after.round, served.send, served.score, buffers, merged.state)
    numbers = [gathered.train_loss, _distance(after.send, server.send), after.score.norm()]
    host = torch.stack([number.double() for number in numbers]).tolist()  # one transfer
    record = replace(
        record,
        train_loss=host[0],
        update_norm=host[1],
        model_norm=host[2],
        notes=notes_of(served),
        seconds_merge=time.perf_counter() - began,
    )
    return after, record


def _nothing(server: Server) -> Gathered:
    """Return what a cohort without clients sends."""
    none = server.send.new_zeros(0, dtype=torch.float64)
    replies = Replies(
        models=server.send.new_zeros(0, server.send.numel()),
        weights=none,
        clients=none.long(),
        steps=none,
        lr_sum=none,
        effective_steps=none,
        last_loss=none,
        train_loss=none,
        buffers=server.buffers.new_zeros(0, server.buffers.numel()),
    )
    return Gathered(replies, [], none.sum())


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """Return |a - b| without a third model in memory."""
    pieces = zip(a.split(_PIECE), b.split(_PIECE), strict=True)
    norms: list[Tensor] = [(x - y).norm().double() for x, y in pieces]
    whole: Tensor = torch.stack(norms).norm()
    return whole


def merge_refused(record: RoundRecord) -> bool:
    """Whether the replies of a round made no model, so that the server kept its own."""
    return _REFUSED in record.notes


def scored(record: RoundRecord, server: Server, scoring: Scoring) -> RoundRecord:
    """Enter how good the server's models are into the round's record, where it is time to."""
    if scoring.test is None:
        return record
    if not scoring.due(record.round):
        return replace(record, metrics=scoring.test.unscored())
    began = time.perf_counter()
    last = record.round == scoring.rounds
    metrics = scoring.test.of_round(
        server.score, server.send, server.buffers, last=last, train=scoring.train
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


def summary_of(
    records: Sequence[RoundRecord],
    seconds: float,
    headline: Headline,
    status: str = "finished",
    reason: str | None = None,
) -> dict[str, Any]:
    """Return the headline numbers of a run.

    Args:
        records: all its rounds.
        seconds: how long it took, over all its starts.
        headline: the metric that it is judged by.
        status: ``"finished"``, ``"paused"``, ``"stopped"``, ``"diverged"``, or, of a federation,
            ``"failed"``.
        reason: why it did not finish.
    """
    return {
        "status": status,
        "reason": reason,
        "rounds": len(records),
        **scores_of(records, headline),
        "bytes_down": sum(record.bytes_down for record in records),
        "bytes_up": sum(record.bytes_up for record in records),
        "seconds": seconds,
    }
