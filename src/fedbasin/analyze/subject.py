"""Runs as analyses see them, and the catalogue of analyses.

An analysis turns subjects (runs) and options into panels. It is entered here under the name that
``fedbasin analyze`` knows it by, with the options it uses.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedbasin.core.catalogue import cards
from fedbasin.core.evaluator import Evaluator, Tick, no_tick
from fedbasin.core.figure_data import Analysis, Line, Lines, Mark, Numbers, Panel
from fedbasin.core.record import Headline, RoundRecord
from fedbasin.core.rng import root
from fedbasin.core.snapshot import Snapshot, Snapshots
from fedbasin.core.suggest import nearest
from fedbasin.core.task import CLASSIFICATION, Provided, Task
from fedbasin.core.vectors import shares, weighted_mean

# What an analysis may need of a task, in words.
_NEEDS: dict[Provided, str] = {
    "classes": "class probabilities",
    "class_labels": "rows that belong to classes",
    "row_losses": "a loss that adds up over rows",
}
Watch = Callable[[str, int], Tick]  # (what, how many) -> where progress goes
Values = Tensor | np.ndarray | Sequence[float | None]
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
        task: what its models predict.
        setting: all it ran but for its seed: runs of one setting are draws of one another.
    """

    name: str
    method: str
    seed: int
    records: tuple[RoundRecord, ...]
    snapshots: Snapshots
    load: Callable[[], Data] = field(repr=False)
    headline: Headline = field(default_factory=Headline)
    task: Task = CLASSIFICATION
    setting: str = ""

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

    def stages(self, count: int = 3) -> list[Snapshot]:
        """Return early, middle and late snapshots that hold clients' models."""
        rounds = [snapshot.round for snapshot in self.kept()]
        places = sorted({round((len(rounds) - 1) * i / max(count - 1, 1)) for i in range(count)})
        return [self.snapshots.get(rounds[place]) for place in places]

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
        points: grid points along an axis; None is the analysis's own choice.
        margin: how far a line or plane goes beyond its models, as a share of their spread.
        rows: how many rows to measure on; 0 is all, None the analysis's own choice.
        count: eigenvalues (hessian), or subsets of each size (averaging).
        draws: late rounds that stand for draws of a client's model, with one run.
        target: value of the headline for rounds to target; None is 0.8 for accuracy.
        groups: groups of client ids.
    """

    models: tuple[str, ...] = ()
    points: int | None = None
    margin: float = 0.3
    rows: int | None = None
    count: int = 5
    draws: int = 1
    target: float | None = None
    groups: tuple[frozenset[int], ...] = ()

    def __post_init__(self) -> None:
        low = [
            ("points", self.points or 2, 2),
            ("margin", self.margin, 0),
            ("count", self.count, 1),
        ]
        for name, value, least in [*low, ("rows", self.rows or 0, 0), ("draws", self.draws, 1)]:
            if not value >= least:
                raise AnalysisError(f"--{name} must be at least {least}, got {value}")

    def grid(self, default: int = 25) -> int:
        """Return how many points an axis has."""
        return default if self.points is None else self.points


@dataclass
class Curves:
    """A panel of lines that an analysis draws point by point, or line by line."""

    title: str
    y_label: str
    x_label: str = "round"
    log_y: bool = False
    lines: list[Line] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)

    def point(self, name: str, x: float, y: float | Tensor) -> None:
        """Go on with the last line of a name.

        A point that is not further right begins another line: a run may be given twice.
        """
        places = [place for place, line in enumerate(self.lines) if line.name == name]
        if not places or self.lines[places[-1]].x[-1] >= x:
            self.line(name, [x], [float(y)])
            return
        before = self.lines[places[-1]]
        self.lines[places[-1]] = Line(name, (*before.x, float(x)), (*before.y, float(y)))

    def line(self, name: str, x: Values, y: Values, low: Values = (), high: Values = ()) -> None:
        """Add a whole line, with a band around it or without."""
        self.lines.append(Line(name, *map(numbers, (x, y, low, high))))

    def panel(self) -> Lines:
        """Return what was drawn."""
        lines = tuple(self.lines)
        return Lines(self.title, self.x_label, self.y_label, lines, tuple(self.marks), self.log_y)


class Found(NamedTuple):
    """What an analysis finds."""

    panels: Sequence[Panel | Curves]
    notes: Sequence[str] = ()


Make = Callable[[Sequence[Subject], Options, Watch], Found]


@dataclass(frozen=True)
class Entry:
    """An analysis of the catalogue.

    Args:
        name: the word that ``fedbasin analyze`` knows it by.
        title: what it shows.
        source: the paper and figure that it is from.
        uses: the options that it takes.
        make: the function.
        needs: what the task of a run must provide.
    """

    name: str
    title: str
    source: str
    uses: tuple[str, ...]
    make: Make
    needs: frozenset[Provided] = frozenset()

    def __call__(
        self,
        subjects: Sequence[Subject],
        options: Options | None = None,
        watch: Watch = lambda what, total: no_tick,
    ) -> Analysis:
        """Make the analysis of some runs; a run of a task that it is not for is an error."""
        for subject in subjects:
            self._check_task(subject)
        found, notes = self.make(subjects, options or Options(), watch)
        panels = [one.panel() if isinstance(one, Curves) else one for one in found]
        runs = tuple(subject.name for subject in subjects)
        return Analysis(self.name, self.title, self.source, runs, tuple(panels), tuple(notes))

    def fits(self, task: Task | type[Task]) -> bool:
        """Whether it can be made of runs of a task."""
        return self.needs <= task.provides

    def _check_task(self, subject: Subject) -> None:
        if self.fits(subject.task):
            return
        missing = [words for need, words in _NEEDS.items() if need in self.needs]
        task = type(subject.task).__name__.lower()
        others = ", ".join(entry.name for entry in CATALOGUE.values() if entry.fits(subject.task))
        raise AnalysisError(
            f"{self.name} needs {' and '.join(missing)}, and {subject.name} is a run of the task "
            f"{task}; analyses for it: {others}"
        )


CATALOGUE: dict[str, Entry] = {}


def analysis(
    name: str,
    title: str,
    source: str,
    uses: Sequence[str] = (),
    needs: Sequence[Provided] = (),
) -> Callable[[Make], Make]:
    """Enter a function in the catalogue."""

    def enter(make: Make) -> Make:
        CATALOGUE[name] = Entry(name, title, source, tuple(uses), make, frozenset(needs))
        return make

    return enter


def tasks_for(entry: Entry) -> str:
    """Name the tasks whose runs an analysis can be made of."""
    fitting = [card.name for card in cards("task") if entry.fits(card.make)]  # type: ignore[arg-type]
    others = [card.name for card in cards("task") if card.name not in fitting]
    if not others:
        return "all"
    if len(others) < len(fitting):
        return f"all but {', '.join(others)}"
    return ", ".join(fitting)


def find(name: str) -> Entry:
    """Return an analysis by name; an unknown one is an error that names the nearest."""
    if name not in CATALOGUE:
        raise AnalysisError(f"no analysis is called {name!r}; {nearest(name, sorted(CATALOGUE))}")
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


def numbers(values: Values) -> Numbers:
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
    if len(set(seeds)) == len(seeds) and len({s.setting for s in same}) == 1:
        return f"{subject.method}, seed {subject.seed}"
    folders = [Path(s.name).name for s in same]
    apart = Path(subject.name).name if len(set(folders)) == len(folders) else subject.name
    return f"{subject.method}, {apart}"


def on_device(vector: Tensor, evaluator: Evaluator) -> Tensor:
    """Return a stored model as the network wants it."""
    return torch.as_tensor(vector).to(evaluator.net.device, evaluator.net.dtype)
