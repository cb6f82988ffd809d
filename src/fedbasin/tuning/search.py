"""Run a tuned comparison: settings on held-out rows, then the chosen ones on test rows.

All runs are cells in folders of their own, so the same request in the same folder resumes a
stopped tuning: an ended run is read, and an interrupted one resumes from its checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from fedbasin.core.record import Headline, RunFolder, headline_of, mean_of_last, write_atomically
from fedbasin.core.settings import write_toml
from fedbasin.experiment.comparison import Cell, run_cells, slug
from fedbasin.tuning import points
from fedbasin.tuning.request import Request

RunAll = Callable[[list[Cell]], Any]  # runs or resumes cells; their folders hold the results


@dataclass(frozen=True)
class Trial:
    """One setting of one method.

    Args:
        method: the method, as it was asked for.
        number: its place among the settings tried; 0 is the defaults.
        values: the value of each tuned argument, by name.
        rounds: how many rounds it ran.
        scores: the validation score of each tuning seed at that round; None where a run diverged.
    """

    method: str
    number: int
    values: Mapping[str, Any]
    rounds: int = 0
    scores: tuple[float | None, ...] = ()

    @property
    def score(self) -> float | None:
        """The mean over tuning seeds; None where a run diverged."""
        known = [score for score in self.scores if score is not None]
        return fmean(known) if known and len(known) == len(self.scores) else None


@dataclass(frozen=True)
class Outcome:
    """What a tuned comparison found.

    Args:
        request: what was asked for.
        out: its folder.
        headline: the metric that decides.
        trials: every setting that was tried.
        chosen: the best setting of each method that has one.
        final: folders of the final runs, by method.
    """

    request: Request
    out: Path
    headline: Headline
    trials: tuple[Trial, ...]
    chosen: Mapping[str, Trial]
    final: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)

    @property
    def diverged(self) -> list[str]:
        """Methods that have no setting with a score."""
        return [method for method in self.request.methods if method not in self.chosen]

    def of(self, method: str) -> list[Trial]:
        """Return the settings that a method tried."""
        return [trial for trial in self.trials if trial.method == method]


def tune(request: Request, out: Path, run_all: RunAll = run_cells) -> Outcome:
    """Choose settings by validation scores, run the chosen ones with fresh seeds.

    Args:
        request: what to tune.
        out: the folder of all runs; one that holds part of the request is completed.
        run_all: runs the cells it is given, in any order and on any machine that sees the folder.
    """
    _write_request(request, out)
    if request.sampler == "tpe":
        from fedbasin.tuning.tpe import search  # needs the extra optuna

        trials = search(request, out, run_all)
    else:
        trials = _halved(request, out, run_all)
    headline = headline_of_trials(request, out, trials)
    chosen = {}
    for method in request.methods:
        best = _ordered([trial for trial in trials if trial.method == method], headline)
        if best and best[0].score is not None:
            chosen[method] = best[0]
    final = _final(request, out, chosen, run_all)
    _write_chosen(request, out, chosen)
    return Outcome(request, out, headline, tuple(trials), chosen, final)


def _halved(request: Request, out: Path, run_all: RunAll) -> list[Trial]:
    """Run all settings to the first rung, the best of each method to the next, and so on."""
    trials = [
        trial for method in request.methods for trial in numbered(request, method, request.budget)
    ]
    ended: list[Trial] = []
    alive = trials
    for count, rounds in request.rungs():
        kept = [
            trial
            for method in request.methods
            for trial in _best(request, out, alive, method, count)
        ]
        ended += [trial for trial in alive if trial not in kept]
        alive = scored(request, out, kept, rounds, run_all)
    forget_checkpoints(request, out, alive)
    return sorted(ended + alive, key=lambda t: (request.methods.index(t.method), t.number))


def numbered(request: Request, method: str, count: int) -> list[Trial]:
    """Return the first settings of a method, not yet run."""
    names = [argument.name for argument in request.arguments(method)]
    drawn = points.settings(request.arguments(method), count, request.seed)
    return [
        Trial(method, number, dict(zip(names, values, strict=True)))
        for number, values in enumerate(drawn)
    ]


def scored(
    request: Request, out: Path, trials: Sequence[Trial], rounds: int, run_all: RunAll
) -> list[Trial]:
    """Run settings up to a round; return them with their validation scores there."""
    cells = {
        (trial.method, trial.number): [
            replace(cell, until=rounds if rounds < request.base.rounds else None)
            for cell in _cells(request, out, trial)
        ]
        for trial in trials
    }
    # Seed by seed and setting by setting: what is stopped leaves all methods equally far.
    flat = [cell for own in cells.values() for cell in own]
    run_all(sorted(flat, key=lambda cell: (cell.experiment.seed, cell.path.parent.name)))
    found = []
    for trial in trials:
        scores = [_score(cell.path, rounds) for cell in cells[trial.method, trial.number]]
        found.append(replace(trial, rounds=rounds, scores=tuple(scores)))
    return found


def _cells(request: Request, out: Path, trial: Trial) -> list[Cell]:
    values = tuple(trial.values.values())
    return [
        request.tuning_cell(out, trial.method, trial.number, values, seed)
        for seed in range(request.tuning_seeds)
    ]


def _score(path: Path, rounds: int) -> float | None:
    """Return the validation score of a run at a round: the mean of the last 10, or the last one.

    A run that diverged before the round has none. Later rounds do not count, so a repeated
    tuning, whose best settings have already run further, decides as before.
    """
    folder = RunFolder(path)
    headline = headline_of(folder.read_summary())
    records = [record for record in folder.read_rounds() if record.round <= rounds]
    if len(records) < rounds:
        return None
    mean = mean_of_last(records, metric=headline.name)
    known = [value for record in records if (value := record.metric(headline.name)) is not None]
    return known[-1] if mean is None and known else mean


def _best(
    request: Request, out: Path, alive: Sequence[Trial], method: str, count: int
) -> list[Trial]:
    """Return the best settings of a method, in the order they were drawn."""
    own = [trial for trial in alive if trial.method == method]
    if all(trial.rounds == 0 for trial in own):
        return own[:count]
    ordered = _ordered(own, headline_of_trials(request, out, own))
    good = [trial for trial in ordered[:count] if trial.score is not None]
    return sorted(good, key=lambda trial: trial.number)


def _ordered(trials: Sequence[Trial], headline: Headline) -> list[Trial]:
    """Order settings: those that ran longest first, then by score, then as drawn."""
    sign = -1 if headline.higher_is_better else 1

    def place(trial: Trial) -> tuple[Any, ...]:
        known = trial.score is not None
        return (not known, -trial.rounds, sign * (trial.score or 0.0), trial.number)

    return sorted(trials, key=place)


def headline_of_trials(request: Request, out: Path, trials: Sequence[Trial]) -> Headline:
    """Return the metric that settings are judged by, from a run's summary."""
    first = _cells(request, out, trials[0])[0]
    return headline_of(RunFolder(first.path).read_summary())


def _final(
    request: Request, out: Path, chosen: Mapping[str, Trial], run_all: RunAll
) -> dict[str, tuple[Path, ...]]:
    """Run the chosen settings with fresh seeds; return the folders of the runs."""
    cells: dict[str, list[Cell]] = {}
    for method, trial in chosen.items():
        values = tuple(trial.values.values())
        cells[method] = [
            request.final_cell(out, method, trial.number, values, seed)
            for seed in range(request.final_seeds)
        ]
    flat = [cell for own in cells.values() for cell in own]
    if flat:
        run_all(sorted(flat, key=lambda cell: cell.experiment.seed))
    return {method: tuple(cell.path for cell in own) for method, own in cells.items()}


def forget_checkpoints(request: Request, out: Path, trials: Sequence[Trial]) -> None:
    """Delete checkpoints of finished runs, which may be large; records and models stay."""
    for trial in trials:
        for cell in _cells(request, out, trial):
            folder = RunFolder(cell.path)
            if folder.model.exists():
                folder.checkpoint.unlink(missing_ok=True)


def _write_request(request: Request, out: Path) -> None:
    """Write what was asked for, so that a reader of the folder knows."""
    out.mkdir(parents=True, exist_ok=True)
    asked: dict[str, Any] = {
        "methods": list(request.methods),
        "baseline": request.baseline,
        "budget": request.budget,
        "tuning_seeds": request.tuning_seeds,
        "final_seeds": request.final_seeds,
        "halving": request.halving,
        "validation": request.share,
        "sampler": request.sampler,
        "seed": request.seed,
        "over": {name: str(space) for name, space in request.over.items()},
    }
    write_atomically(out / "tune.toml", write_toml(asked))


def _write_chosen(request: Request, out: Path, chosen: Mapping[str, Trial]) -> None:
    """Write each method's chosen setting as a file that `fedbasin run` takes."""
    folder = out / "chosen"
    folder.mkdir(exist_ok=True)
    for method, trial in chosen.items():
        experiment = request.chosen(method, tuple(trial.values.values()))
        write_atomically(folder / f"{slug(method)}.toml", experiment.to_toml())
