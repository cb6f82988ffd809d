"""Many runs as one matrix: runs that train alike advance together.

In each turn all runs begin a round, those with the same network, rules, optimiser and batch size
train as one cohort whose rows are the clients of all of them, and all end their round. Each run has
its own folder, records and checkpoints, and gets what it would get alone. A run that joins no
others is run to its end before the next one begins.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from fedbasin.core.net import Net
from fedbasin.core.round import Gathered, Launch
from fedbasin.core.tree import count_bytes
from fedbasin.local.train import Trainer
from fedbasin.sim.cohort import CohortExecutor
from fedbasin.sim.memory import SHARE, client_bytes, free_bytes
from fedbasin.sim.population import Population
from fedbasin.sim.rounds import Federation
from fedbasin.sim.runner import (
    Interrupted,
    Opened,
    Run,
    Stopping,
    Summary,
    drive,
    stop_after_round,
)

MOST = 32  # runs at once: with more of them a step of a client gets no cheaper
_SERVER_MODELS = 8  # vectors that a server and its state take, about

Name = TypeVar("Name")
Outcome = Summary | Exception
Open = Callable[[], Opened]


@dataclass
class _Member(Generic[Name]):
    """A run that advances with others, and the round that it is in."""

    name: Name
    run: Run
    team: _Team  # runs that train alike, this one among them
    launch: Launch | None = None
    answer: Gathered | Exception | None = None  # what comes of the launch
    seconds: float = 0.0  # that the training took, of the run's own

    @property
    def asks(self) -> bool:
        """Whether there is somebody to train."""
        return self.launch is not None and len(self.launch.cohort) > 0

    def begin(self) -> None:
        """Begin a round."""
        self.seconds = 0.0
        try:
            with self._going():
                self.launch = self.run.launch()
        except Exception as error:
            self.answer = error

    def train_alone(self) -> None:
        """Train with the run's own executor."""
        assert self.launch is not None
        began = time.perf_counter()
        try:
            self.answer = self.run.federation.train_cohort(self.launch)
        except Exception as error:
            self.answer = error  # the other runs continue
        self.seconds = time.perf_counter() - began

    def end(self, stopping: Stopping) -> Outcome | None:
        """End the round; return the outcome of a run that is over, and close it."""
        answer = self.answer
        self.answer = None  # it holds a model of every client
        self.launch = None  # and this may hold a gradient of each
        outcome: Outcome
        try:
            with self._going():
                if isinstance(answer, Exception):
                    raise answer
                self.run.merge(answer)
                if stopping():
                    self.run.stop()
                if self.run.goes_on():
                    return None
                outcome = self.run.finish()
        except Exception as error:
            outcome = error
        self.run.close()
        return outcome

    @contextmanager
    def _going(self) -> Iterator[None]:
        """Let the run's clock go on; it is paused while other runs work."""
        clock = self.run.federation.clock
        clock.go_on(self.seconds)
        try:
            yield
        finally:
            clock.pause()


def run_batch(
    following: Callable[[], tuple[Name, Open] | None], most: int = 0
) -> Iterator[tuple[Name, Outcome]]:
    """Run to the end, runs that train alike together; yield each with its summary or its error.

    Ctrl-C and SIGTERM stop all of them after the round that each is in.

    Args:
        following: returns the next run to open; None where there is none for now.
        most: runs at once; 0 is as many as pay and fit in memory.
    """
    live: list[_Member[Name]] = []
    room = most or MOST
    stopped: Interrupted | None = None
    with stop_after_round() as stopping:
        try:
            while True:
                ended: list[tuple[Name, Outcome]] = []
                if len(live) < room and not stopping() and (found := following()) is not None:
                    name, opening = found
                    outcome = _begin(name, opening, live, stopping)
                    if outcome is None:
                        room = min(room, _room(live[-1].run.federation))
                    else:
                        ended = [(name, outcome)]
                elif live:
                    ended = _turn(live, stopping)
                else:
                    break
                for name, outcome in ended:
                    if isinstance(outcome, Interrupted):
                        stopped = outcome
                    else:
                        yield name, outcome
        finally:
            for member in live:  # somebody stops in between: locks are let go of, runs resume
                member.run.close()
        if stopped is not None:
            raise stopped
        if stopping() and following() is not None:
            raise Interrupted("stopped by the user")


def _begin(
    name: Name, opening: Open, live: list[_Member[Name]], stopping: Stopping
) -> Outcome | None:
    """Open a run and let it join the others; return the outcome of one that joins none."""
    try:
        run = opening()
        if not isinstance(run, Run) or not run.goes_on() or not joins(run.federation):
            return drive(run, stopping)
    except Exception as error:
        return error
    run.federation.clock.pause()
    team = _team_of(run.federation, [member.team for member in live])
    live.append(_Member(name, run, team))
    return None


def _turn(live: list[_Member[Name]], stopping: Stopping) -> list[tuple[Name, Outcome]]:
    """Play one round of every run; return the runs that are over, which are no longer live."""
    ended: list[tuple[Name, Outcome]] = []
    teams = {id(member.team): member.team for member in live}
    for team in teams.values():
        members = [member for member in live if member.team is team]
        for member in members:
            member.begin()
        team.train([member for member in members if member.asks])
        for member in members:
            outcome = member.end(stopping)
            if outcome is not None:
                live.remove(member)
                ended.append((member.name, outcome))
    return ended


def _team_of(federation: Federation, teams: Iterable[_Team]) -> _Team:
    """Return the team that a run joins, or a new one."""
    for team in teams:
        if train_alike(team.first, federation):
            return team
    return _Team(federation)


class _Team:
    """Runs that train alike, and the executor of all their clients."""

    def __init__(self, first: Federation) -> None:
        self.first = first
        self._members: list[Federation] = []
        self._begins: list[int] = []
        self._executor: CohortExecutor

    def train(self, members: Sequence[_Member[Any]]) -> None:
        """Train the launches of runs together; where that fails, each alone."""
        if len(members) > 1 and self._train_together(members):
            return
        for member in members:
            member.train_alone()

    def _train_together(self, members: Sequence[_Member[Any]]) -> bool:
        """Train all launches in one go; return whether that has worked."""
        self._join([member.run.federation for member in members])
        launches = [
            member.launch._replace(first=first)
            for member, first in zip(members, self._begins, strict=True)
            if member.launch is not None
        ]
        began = time.perf_counter()
        try:
            gathered = self._executor.train(launches)
        except Exception as error:
            first_line = str(error).strip().split("\n", 1)[0]
            warnings.warn(
                f"{len(members)} runs continue one by one in this round: {first_line}", stacklevel=2
            )
            return False
        spent = time.perf_counter() - began
        steps = [float(each.replies.steps.sum()) for each in gathered]
        for member, answer, taken in zip(members, gathered, steps, strict=True):
            member.answer = answer
            member.seconds = spent * taken / max(sum(steps), 1.0)
            executor = member.run.federation.executor
            assert isinstance(executor, CohortExecutor)
            executor.counters.useful += int(taken)
            executor.counters.total += int(taken)
        return True

    def _join(self, members: list[Federation]) -> None:
        """Make the executor of these runs, unless it is there."""
        same = len(members) == len(self._members)
        if same and all(a is b for a, b in zip(members, self._members, strict=True)):
            return
        first = members[0].executor
        assert isinstance(first, CohortExecutor)
        people = [each.population for each in members]
        self._begins = [sum(len(p) for p in people[:i]) for i in range(len(people))]
        self._executor = replace(first, population=Population.joined(people))
        self._members = members


def joins(federation: Federation) -> bool:
    """Whether a run can advance with others: its cohorts are uncompiled matrices on a CPU."""
    executor = federation.executor
    return (
        isinstance(executor, CohortExecutor)
        and executor.exact
        and federation.population.places is not None
        and _says_all(federation.net)
    )


def train_alike(one: Federation, other: Federation) -> bool:
    """Whether clients of two runs may be rows of one matrix, of runs that both `joins`."""
    a = one.executor
    b = other.executor
    assert isinstance(a, CohortExecutor) and isinstance(b, CohortExecutor)
    if one.population.inputs is not other.population.inputs:
        return False
    if (a.chunk, a.memory) != (b.chunk, b.memory):
        return False
    try:
        how = bool(_how(one.trainer) == _how(other.trainer))
    except (RuntimeError, ValueError):  # a rule of the user's own that holds tensors
        return False
    return how and _same_network(one.net, other.net)


def _how(trainer: Trainer) -> tuple[Any, ...]:
    inner = getattr(trainer.transform, "func", trainer.transform)
    given = getattr(trainer.transform, "keywords", {})
    return (
        [(type(rule), rule) for rule in trainer.rules],
        (type(trainer.optimiser), trainer.optimiser),
        (trainer.batch, trainer.clip, trainer.classes, trainer.keep_optimiser),
        (type(trainer.task), trainer.task),
        (type(inner), inner, given),
    )


def _says_all(net: Net) -> bool:
    """Whether all that a network computes with is in its vector and in its layers' settings."""
    ours = ("torch.nn.modules.", "fedbasin.models.")
    known = all(type(part).__module__.startswith(ours) for part in net.module.modules())
    return known and net.plain and not net.frozen_size and not net.has_statistics


def _same_network(one: Net, other: Net) -> bool:
    """Whether two networks differ by their weights alone."""
    if (one.layout, one.dtype, one.mixed) != (other.layout, other.dtype, other.mixed):
        return False
    pairs = zip(one.module.modules(), other.module.modules(), strict=False)
    said = all(_settings(a) == _settings(b) for a, b in pairs)
    return said and str(one.module) == str(other.module) and _same_buffers(one.module, other.module)


def _settings(part: nn.Module) -> dict[str, Any]:
    """Return the plain attributes of a layer."""
    plain = (bool, int, float, str, tuple, type(None))
    return {name: value for name, value in vars(part).items() if isinstance(value, plain)}


def _same_buffers(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.buffers(), other.buffers(), strict=True)
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)


def _room(federation: Federation) -> int:
    """Return how many runs like this one fit in memory; at least one."""
    executor = federation.executor
    assert isinstance(executor, CohortExecutor)
    vector, _ = federation.net.initial()
    cohort = len(federation.cohort(0)[1])
    own = len(federation.population) * count_bytes(federation.trainer.zero_state(vector))
    need = cohort * client_bytes(federation.trainer, federation.population, vector)
    need += own + _SERVER_MODELS * count_bytes(vector)
    budget = executor.memory or int(SHARE * free_bytes(vector.device))
    return max(1, budget // max(need, 1))
