"""Runs as analyses see them, and the catalogue of analyses.

An analysis turns subjects (runs) and options into panels. It is entered here under the name that
``fedbasin analyze`` knows it by, with the options it uses.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedbasin.core.evaluator import Evaluator, Tick, no_tick
from fedbasin.core.figure_data import Analysis, Numbers, Panel
from fedbasin.core.metric import MetricError, task_name
from fedbasin.core.record import Headline, RoundRecord
from fedbasin.core.rng import root
from fedbasin.core.snapshot import Snapshot, Snapshots
from fedbasin.core.task import Provided
from fedbasin.core.vectors import shares, weighted_mean

Watch = Callable[[str, int], Tick]  # (what, how many) -> where progress goes
_REFERENCE = re.compile(
    r"(?:(\d+)/)?(score|send|start|mean|client(\d+)):(\d+|last)|(?:(\d+)/)?final"
)


class AnalysisError(ValueError):
    """An analysis that cannot be made of these runs: what is missing and how to get it."""


@dataclass(frozen=True)
class Data:
    """What the models of a run are measured on."""

    test: Evaluator
    train: Evaluator
    owner: Tensor  # [n] client of each training row
    counts: Tensor  # [N, classes] training rows
    class_names: tuple[str, ...]
    cohort: Callable[[int], np.ndarray]  # round, counted from 1 -> ids of clients that answered
    final: Callable[[], tuple[Tensor, Tensor]]  # the shipped model [P] and its statistics [Q]


class Model(NamedTuple):
    """A model of a run."""

    name: str
    vector: Tensor  # [P]
    buffers: Tensor  # [Q]
    round: int


@dataclass(frozen=True)
class Subject:
    """One run.

    Args:
        name: its folder, as it was given.
        method: the expression it ran.
        seed: of the run.
        records: its rounds.
        snapshots: the models it kept.
        headline: the metric that it is judged by.
        load: builds what models are measured on; called only where that is needed.
    """

    name: str
    method: str
    seed: int
    records: tuple[RoundRecord, ...]
    snapshots: Snapshots
    load: Callable[[], Data] = field(repr=False)
    headline: Headline = field(default_factory=Headline)

    @cached_property
    def data(self) -> Data:
        """What its models are measured on."""
        return self.load()

    def kept(self) -> Iterator[Snapshot]:
        """Yield the snapshots that hold clients' models, one after another."""
        found = False
        for round in self.snapshots.stored():
            snapshot = self.snapshots.get(round)
            if snapshot.models is not None:
                found = True
                yield snapshot
        if not found:
            raise AnalysisError(
                f"{self.name} keeps no clients' models; run it again with, say, "
                "--set snapshots.every=10 --set snapshots.clients=true"
            )

    def last_cohort(self) -> Snapshot:
        """Return the last snapshot that holds clients' models."""
        for round in reversed(self.snapshots.stored()):
            snapshot = self.snapshots.get(round)
            if snapshot.models is not None:
                return snapshot
        return next(self.kept())  # says that there is none

    def models(self) -> Iterator[Model]:
        """Yield the scored model of every snapshot, or the final one where there are none."""
        stored = self.snapshots.stored()
        yield from (self._scored(round) for round in stored)
        if not stored:
            yield self.final()

    def last_model(self) -> Model:
        """Return the scored model of the last snapshot, or the final one."""
        stored = self.snapshots.stored()
        return self._scored(stored[-1]) if stored else self.final()

    def _scored(self, round: int) -> Model:
        snapshot = self.snapshots.get(round)
        return Model(f"score:{round}", snapshot.score, snapshot.buffers, round)

    def final(self) -> Model:
        """Return the model the run shipped."""
        return Model("final", *self.data.final(), len(self.records))

    def noted(self, *names: str) -> list[RoundRecord]:
        """Return the rounds whose method recorded these numbers; none is an error."""
        found = [r for r in self.records if all(name in r.notes for name in names)]
        if not found:
            raise AnalysisError(
                f"{self.name} ran {self.method}, which records no {' and '.join(names)}"
            )
        return found

    def notes(self, *names: str) -> tuple[Numbers, list[Numbers]]:
        """Return the rounds in which a method recorded these numbers, and a column for each."""
        found = self.noted(*names)
        columns: list[list[Any]] = [[r.notes[name] for r in found] for name in names]
        return numbers([r.round for r in found]), [numbers(column) for column in columns]


@dataclass(frozen=True)
class Options:
    """What can be chosen; each analysis uses some of these.

    Args:
        models: names such as score:40, send:last, mean:40, client7:40, final, 2/score:40.
        points: grid points along an axis.
        margin: how far a line or plane goes beyond its models, as a share of their spread.
        rows: how many rows to measure on; 0 is all, None the analysis's own choice.
        count: eigenvalues (hessian), or subsets of each size (averaging).
        draws: late rounds that stand for draws of a client's model, with one run.
        target: accuracy for rounds to target.
        groups: groups of client ids.
    """

    models: tuple[str, ...] = ()
    points: int = 25
    margin: float = 0.3
    rows: int | None = None
    count: int = 5
    draws: int = 1
    target: float = 0.8
    groups: tuple[frozenset[int], ...] = ()

    def __post_init__(self) -> None:
        low = [("points", self.points, 2), ("margin", self.margin, 0), ("count", self.count, 1)]
        for name, value, least in [*low, ("rows", self.rows or 0, 0), ("draws", self.draws, 1)]:
            if not value >= least:
                raise AnalysisError(f"--{name} must be at least {least}, got {value}")


class Found(NamedTuple):
    """What an analysis finds."""

    panels: Sequence[Panel]
    notes: Sequence[str] = ()


Make = Callable[[Sequence[Subject], Options, Watch], Found]


@dataclass(frozen=True)
class Entry:
    """An analysis of the catalogue."""

    name: str
    title: str
    source: str
    uses: tuple[str, ...]
    make: Make
    needs: Provided | None = None  # of the task

    def __call__(
        self,
        subjects: Sequence[Subject],
        options: Options | None = None,
        watch: Watch = lambda what, total: no_tick,
    ) -> Analysis:
        """Make the analysis of some runs."""
        if self.needs is not None:
            self._check(subjects, self.needs)
        try:
            panels, notes = self.make(subjects, options or Options(), watch)
        except MetricError as error:
            raise AnalysisError(f"{self.name}: {error}; take curves or locality") from error
        runs = tuple(subject.name for subject in subjects)
        return Analysis(self.name, self.title, self.source, runs, tuple(panels), tuple(notes))

    def _check(self, subjects: Sequence[Subject], needs: Provided) -> None:
        """Refuse runs of a task without classes, where these are looked at."""
        for subject in subjects:
            task = subject.data.test.task
            if needs not in task.provides:
                what = "class probabilities" if needs == "classes" else "numbers of rows by class"
                raise AnalysisError(
                    f"{self.name} works on {what}, and {subject.name} is a run of the task "
                    f"{task_name(task)}; take curves or locality"
                )


CATALOGUE: dict[str, Entry] = {}


def analysis(
    name: str,
    title: str,
    source: str,
    uses: Sequence[str] = (),
    needs: Provided | None = None,
) -> Callable[[Make], Make]:
    """Enter a function in the catalogue."""

    def enter(make: Make) -> Make:
        CATALOGUE[name] = Entry(name, title, source, tuple(uses), make, needs)
        return make

    return enter


def find(name: str) -> Entry:
    """Return an analysis by name; an unknown one is an error that names the nearest."""
    if name not in CATALOGUE:
        close = difflib.get_close_matches(name, CATALOGUE, n=3, cutoff=0.5) or sorted(CATALOGUE)
        raise AnalysisError(f"no analysis is called {name!r}; there is {', '.join(close)}")
    return CATALOGUE[name]


def resolve(subjects: Sequence[Subject], reference: str) -> Model:
    """Return the model that a name such as ``2/client7:40`` stands for."""
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        raise AnalysisError(
            f"cannot read the model {reference!r}; write score:40, send:last, start:40, mean:40, "
            "client7:40 or final, with 2/ before it for the second run"
        )
    number = int(match[1] or match[5] or 1)
    if not 1 <= number <= len(subjects):
        raise AnalysisError(f"{reference!r}: there are {len(subjects)} runs, counted from 1")
    subject = subjects[number - 1]
    if match[2] is None:
        return subject.final()._replace(name=reference)
    stored = subject.snapshots.stored()
    if not stored:
        raise AnalysisError(f"{subject.name} keeps no models; set snapshots.rounds, or name final")
    round = stored[-1] if match[4] == "last" else int(match[4])
    if round not in stored:
        there = ", ".join(map(str, stored))
        raise AnalysisError(f"{reference!r}: {subject.name} keeps rounds {there}")
    snapshot = subject.snapshots.get(round)
    vector = {"score": snapshot.score, "send": snapshot.sent}.get(match[2])
    if vector is None:
        vector = _of_cohort(snapshot, match[2], match[3], reference)
    return Model(reference, vector, snapshot.buffers, round)


def _of_cohort(snapshot: Snapshot, kind: str, client: str | None, reference: str) -> Tensor:
    if snapshot.models is None or snapshot.clients is None or snapshot.start is None:
        raise AnalysisError(f"{reference!r}: clients' models were not kept (snapshots.clients)")
    assert snapshot.weights is not None
    if kind == "start":
        return snapshot.start
    if kind == "mean":
        return weighted_mean(snapshot.models, shares(snapshot.weights))
    ids = snapshot.clients.tolist()
    if int(client or -1) not in ids:
        raise AnalysisError(f"{reference!r}: the clients of that round are {ids}")
    return snapshot.models[ids.index(int(client or -1))]


def sampled(
    evaluator: Evaluator, subject: Subject, options: Options, buffers: Tensor, default: int
) -> tuple[Evaluator, Tensor]:
    """Return as many rows as asked for, with a model's statistics, and which rows they are."""
    count = default if options.rows is None else options.rows
    few, rows = evaluator.sample(count, root(subject.seed).fold("analysis"))
    statistics = buffers.to(evaluator.net.device, evaluator.net.dtype) if buffers.numel() else None
    return replace(few, buffers=statistics), rows


def ground_for(
    evaluator: Evaluator, subject: Subject, options: Options, buffers: Tensor, default: int
) -> Evaluator:
    """Return as many rows as asked for, with the statistics that go with a model."""
    return sampled(evaluator, subject, options, buffers, default)[0]


def rows_note(used: Evaluator, whole: Evaluator, what: str = "test") -> str:
    """Say on which rows models were measured."""
    return f"measured on {len(used):,} of {len(whole):,} {what} rows"


def numbers(values: Tensor | np.ndarray | Sequence[float | None]) -> Numbers:
    """Return numbers as figure data holds them."""
    listed = values.tolist() if isinstance(values, Tensor | np.ndarray) else values
    return tuple(float("nan") if v is None else float(v) for v in listed)


def table(values: Tensor) -> tuple[Numbers, ...]:
    """Return a matrix as figure data holds it."""
    return tuple(numbers(row) for row in values)


def label(subject: Subject, subjects: Sequence[Subject]) -> str:
    """Name a run in a legend: its method, with the seed or the folder where that is not enough."""
    same = [s for s in subjects if s.method == subject.method]
    if len(same) == 1:
        return subject.method
    seeds = [s.seed for s in same]
    apart = f"seed {subject.seed}" if len(set(seeds)) == len(seeds) else subject.name
    return f"{subject.method}, {apart}"


def on_device(vector: Tensor, evaluator: Evaluator) -> Tensor:
    """Return a stored model as the network wants it."""
    return torch.as_tensor(vector).to(evaluator.net.device, evaluator.net.dtype)
