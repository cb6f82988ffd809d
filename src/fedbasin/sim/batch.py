"""Many runs as one matrix: runs that train alike advance together.

Every run is a course of requests with folders, records and checkpoints of its own. In each turn the
requests to train of runs with the same network, rules, optimiser and batch size are answered by one
cohort whose rows are the clients of all of them. What a run is sent is what it would be sent alone.
A run that joins no others is run to its end before the next one begins.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from fedbasin.core.net import Net
from fedbasin.core.round import Gathered, TrainRequest
from fedbasin.core.tree import count_bytes
from fedbasin.local.train import Trainer
from fedbasin.sim.cohort import CohortExecutor
from fedbasin.sim.memory import SHARE, client_bytes, free_bytes
from fedbasin.sim.population import Population
from fedbasin.sim.rounds import Federation
from fedbasin.sim.runner import Asked, Course, Interrupted, Stopping, stop_after_round

MOST = 32  # runs at once: with more of them a step of a client gets no cheaper
_SERVER_MODELS = 8  # vectors that a server and its state take, about

Name = TypeVar("Name")
Outcome = dict[str, Any] | Exception
Begin = Callable[[Stopping], Course]


@dataclass
class _Run(Generic[Name]):
    """A run that waits for an answer."""

    name: Name
    course: Course
    asked: Asked
    team: _Team | None = None  # runs that train alike, this one among them

    @property
    def federation(self) -> Federation:
        return self.asked.federation


def side_by_side(
    following: Callable[[], tuple[Name, Begin] | None], most: int = 0
) -> Iterator[tuple[Name, Outcome]]:
    """Run courses, those that train alike together; yield each with its summary or its error.

    Ctrl-C and SIGTERM stop all of them after the round that each is in.

    Args:
        following: returns the next run to begin; None where there is none for now.
        most: runs at once; 0 is as many as pay and fit in memory.
    """
    live: list[_Run[Name]] = []
    room = most or MOST
    stopped: Interrupted | None = None
    with stop_after_round() as stopping:
        try:
            while True:
                while len(live) < room and not stopping() and (found := following()) is not None:
                    name, begin = found
                    run, outcome = _begun(name, begin, stopping)
                    if run is not None:
                        run.team = _team_of(run.federation, [each.team for each in live])
                        live.append(run)
                        room = min(room, _room(run.federation))
                    if isinstance(outcome, Interrupted):
                        stopped = outcome
                    elif outcome is not None:
                        yield name, outcome
                if not live:
                    break
                for run, outcome in _turn(live):
                    live.remove(run)
                    if isinstance(outcome, Interrupted):
                        stopped = outcome
                    else:
                        yield run.name, outcome
        finally:
            for run in live:  # somebody stops in between: locks are let go of, runs resume
                run.course.close()
        if stopped is not None:
            raise stopped
        if stopping() and following() is not None:
            raise Interrupted("stopped by the user")


def _begun(
    name: Name, begin: Begin, stopping: Stopping
) -> tuple[_Run[Name] | None, Outcome | None]:
    """Begin a run; return it at its first request, or its result if it joins no others."""
    try:
        course = begin(stopping)
        asked = next(course)
    except StopIteration as end:
        return None, end.value
    except Exception as error:
        return None, error
    asked.federation.clock.pause()
    run = _Run(name, course, asked)
    return (run, None) if joins(run.federation) else (None, _to_its_end(run))


def _to_its_end(run: _Run[Any]) -> Outcome:
    """Run to the end with the run's own executor."""
    while True:
        try:
            answer = _own_answer(run)
        except Exception as error:
            outcome = _sent(run, error)
        else:
            outcome = _sent(run, answer)
        if outcome is not None:
            return outcome


def _own_answer(run: _Run[Any]) -> Any:
    clock = run.federation.clock
    clock.go_on(0.0)
    try:
        return run.federation.answer(run.asked.request)
    finally:
        clock.pause()


def _sent(run: _Run[Any], answer: Any, seconds: float = 0.0) -> Outcome | None:
    """Hand an answer or an error to a run; return the run's result, if it is over."""
    clock = run.federation.clock
    clock.go_on(seconds)
    try:
        if isinstance(answer, Exception):
            run.asked = run.course.throw(answer)
        else:
            run.asked = run.course.send(answer)
    except StopIteration as end:
        summary: dict[str, Any] = end.value
        return summary
    except Exception as error:
        return error
    finally:
        clock.pause()
    return None


def _turn(live: list[_Run[Name]]) -> list[tuple[_Run[Name], Outcome]]:
    """Answer the request of every run; return the runs that are over."""
    over = []
    teams = {id(run.team): run.team for run in live}
    for team in teams.values():
        assert team is not None
        for run, answer, seconds in team.answers([run for run in live if run.team is team]):
            outcome = _sent(run, answer, seconds)
            if outcome is not None:
                over.append((run, outcome))
    return over


def _team_of(federation: Federation, teams: Iterable[_Team | None]) -> _Team:
    """Return the team that a run joins, or a new one."""
    for team in teams:
        if team is not None and train_alike(team.first, federation):
            return team
    return _Team(federation)


class _Team:
    """Runs that train alike, and the executor of all their clients."""

    def __init__(self, first: Federation) -> None:
        self.first = first
        self._members: list[Federation] = []
        self._begins: list[int] = []
        self._executor: CohortExecutor

    def answers(self, runs: Sequence[_Run[Name]]) -> list[tuple[_Run[Name], Any, float]]:
        """Return what each run is sent: an answer or an error; and its seconds of the work."""
        training = [run for run in runs if isinstance(run.asked.request, TrainRequest)]
        together = self._together(training) if len(training) > 1 else None
        found: list[tuple[_Run[Name], Any, float]] = []
        for run in runs:
            if together is not None and run in training:
                place = training.index(run)
                found.append((run, together[0][place], together[1][place]))
                continue
            began = time.perf_counter()
            answer: Any
            try:
                answer = run.federation.answer(run.asked.request)
            except Exception as error:
                answer = error  # this run's own: the others continue
            found.append((run, answer, time.perf_counter() - began))
        return found

    def _together(self, runs: Sequence[_Run[Name]]) -> tuple[list[Gathered], list[float]] | None:
        """Answer requests to train in one go; None where that fails, and each is answered alone."""
        self._join([run.federation for run in runs])
        requests = [
            run.asked.request._replace(first=first)
            for run, first in zip(runs, self._begins, strict=True)
        ]
        began = time.perf_counter()
        try:
            gathered = self._executor.train(requests)  # type: ignore[arg-type]
        except Exception as error:
            first = str(error).strip().split("\n", 1)[0]
            warnings.warn(
                f"{len(runs)} runs continue one by one in this round: {first}", stacklevel=2
            )
            return None
        spent = time.perf_counter() - began
        steps = [float(each.replies.steps.sum()) for each in gathered]
        for run, mine in zip(runs, steps, strict=True):
            executor = run.federation.executor
            assert isinstance(executor, CohortExecutor)
            executor.counters.useful += int(mine)
            executor.counters.total += int(mine)
        return gathered, [spent * mine / max(sum(steps), 1.0) for mine in steps]

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
