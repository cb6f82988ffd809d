"""The request for a tuned comparison, checked before anything is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from fedbasin.core.bounds import at_least, within
from fedbasin.core.expressions import ExpressionError, parse, text
from fedbasin.core.reading import PYTHON, Reader
from fedbasin.core.space import Space
from fedbasin.experiment.checks import check_needs
from fedbasin.experiment.comparison import Cell, slug
from fedbasin.experiment.config import Experiment
from fedbasin.tuning.arguments import (
    STEP_SETTINGS,
    Argument,
    TuneError,
    arguments_of,
    check_over,
    with_values,
)

Sampler = Literal["sobol", "tpe"]
_VALIDATION = (
    "is the share of each client's rows that settings are chosen on: it must be above 0 and below 1"
)
_SEEDS_APART = 1000  # tuning seeds begin here, so that final seeds are fresh


@dataclass(frozen=True)
class Request:
    """A tuned comparison: every method gets the same number of settings and of client-steps.

    Args:
        base: the run without tuning; final runs are this run with the chosen settings.
        methods: expressions. Arguments that are written in one keep their value.
        over: spaces of common settings (``local.lr``) and of methods' arguments (``fedprox.mu``).
        budget: settings that each method may try, the defaults among them.
        tuning_seeds: runs of each setting; their mean validation score decides.
        final_seeds: runs of each chosen setting, with other seeds, scored on test rows.
        halving: keep one in so many settings at each rung; 0 runs every setting to the end.
        validation: share of each client's rows that tuning runs score and do not train on, where
            `partition.hold_out` does not set one.
        sampler: how settings are drawn.
        seed: keys the drawn settings and the tuning seeds.
        baseline: the method that others are compared with; fedavg, else the first one.
    """

    base: Experiment = field(metadata={"in_memory": True})
    methods: tuple[str, ...]
    over: Mapping[str, Space]
    budget: int = at_least(1, default=16)
    tuning_seeds: int = at_least(1, default=2)
    final_seeds: int = at_least(1, default=10)
    halving: int = at_least(0, default=0)
    validation: float = within("(0, 1)", default=0.2, words=_VALIDATION)
    sampler: Sampler = "sobol"
    seed: int = at_least(0, default=0)
    baseline: str = ""

    def __post_init__(self) -> None:
        reader = Reader(TuneError, noun="argument", form=PYTHON)
        for name, value in reader.values(Request, self).items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "methods", _named_once(self.methods))
        object.__setattr__(self, "baseline", self._baseline())
        _check_numbers(self)
        check_over(self.methods, self.base, self.over)
        _check_equal_steps(self)
        for method in self.methods:
            check_needs(replace(self.base, method=method).resolved())
            arguments_of(method, self.base, self.over)

    def _baseline(self) -> str:
        if not self.baseline:
            return "fedavg" if "fedavg" in self.methods else self.methods[0]
        named = text(parse(self.baseline, "method"))
        if named not in self.methods:
            raise TuneError(f"the baseline {named} is not among the methods; add it to them")
        return named

    def arguments(self, method: str) -> list[Argument]:
        """Return what is tuned for a method."""
        return arguments_of(method, self.base, self.over)

    @property
    def share(self) -> float:
        """The share of each client's rows that tuning runs are scored on."""
        return self.base.partition.hold_out or self.validation

    def rungs(self) -> list[tuple[int, int]]:
        """Return for each rung the settings of a method that take part, and its last round.

        Rounds are multiples of `sim.evaluate_every`, so that every rung ends with a score.
        """
        rounds = self.base.rounds
        if not self.halving:
            return [(self.budget, rounds)]
        counts = [self.budget]
        while counts[-1] >= self.halving:
            counts.append(counts[-1] // self.halving)
        every = self.base.sim.evaluate_every
        rungs: list[tuple[int, int]] = []
        for place, count in enumerate(counts):
            part = rounds / self.halving ** (len(counts) - 1 - place)
            end = min(rounds, max(1, round(part / every)) * every)
            if not rungs or end > rungs[-1][1]:
                rungs.append((count, end))
        rungs[-1] = (rungs[-1][0], rounds)
        return rungs

    def tuning_cell(self, out: Path, method: str, number: int, values: Any, seed: int) -> Cell:
        """Return the run of one setting with one tuning seed, scored on held-out rows."""
        experiment = with_values(self.base, method, self.arguments(method), values)
        experiment = replace(
            experiment,
            seed=_SEEDS_APART * (self.seed + 1) + seed,
            partition=replace(experiment.partition, seed=self.base.partition.seed),
        )
        experiment = replace(
            experiment,
            partition=replace(experiment.partition, hold_out=self.share),
            sim=replace(experiment.sim, score_on="held_out"),
        ).resolved()
        path = out / "tuning" / slug(method) / f"setting{number:03d}" / f"seed{experiment.seed}"
        return Cell(experiment, path, root=out)

    def final_cell(self, out: Path, method: str, number: int, values: Any, seed: int) -> Cell:
        """Return the run of a chosen setting with one fresh seed, scored on test rows."""
        experiment = self.chosen(method, values)
        experiment = replace(experiment, seed=seed).resolved()
        path = out / "final" / slug(method) / f"setting{number:03d}" / f"seed{seed}"
        return Cell(experiment, path, root=out)

    def chosen(self, method: str, values: Any) -> Experiment:
        """Return the run of a chosen setting; its partition follows the seed as the base's does."""
        experiment = with_values(self.base, method, self.arguments(method), values)
        partition = replace(experiment.partition, seed=self.base.partition.seed)
        return replace(experiment, partition=partition)


def _named_once(methods: Sequence[str]) -> tuple[str, ...]:
    """Return methods by their canonical names; refuse one that is listed twice."""
    if not methods:
        raise TuneError("name at least one method, such as fedavg")
    named: list[str] = []
    for method in methods:
        try:
            name = text(parse(method, "method"))
        except ExpressionError as error:
            raise TuneError(f"methods: {error}") from error
        if name in named:
            raise TuneError(f"the method {name} is listed twice; leave one of them out")
        named.append(name)
    return tuple(named)


def _check_numbers(request: Request) -> None:
    if request.halving == 1:
        raise TuneError("halving 1 would keep every setting; write 2 or more, or 0 for no halving")
    if request.final_seeds > _SEEDS_APART or request.tuning_seeds > _SEEDS_APART:
        raise TuneError(f"at most {_SEEDS_APART} seeds can be told apart; ask for fewer")


def _check_equal_steps(request: Request) -> None:
    """Refuse what would give methods unequal numbers of client-steps."""
    changing = [name for name in STEP_SETTINGS if name in request.over]
    if changing and (request.halving or request.sampler == "tpe"):
        why = "halving" if request.halving else "the sampler tpe"
        raise TuneError(
            f"over {changing[0]} changes how many steps a client takes, and with {why} methods "
            "would then get different numbers of client-steps: leave one of the two out"
        )
    if request.halving and request.sampler == "tpe":
        raise TuneError("halving and the sampler tpe cannot be combined: leave one of them out")
