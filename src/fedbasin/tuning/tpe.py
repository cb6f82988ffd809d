"""Settings proposed by Optuna's TPE sampler, under the same budget (extra ``optuna``).

The first half of the budget is what Sobol draws, the defaults first. Each further setting is
proposed from the scores before it, so the common settings are no longer the same points for all
methods. Proposals depend on the seed and the scores alone: a tuning that was stopped proposes the
same settings again, and reads their finished runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedbasin.core.record import Headline
from fedbasin.core.rng import root
from fedbasin.core.space import Options, Space
from fedbasin.tuning.arguments import Argument, TuneError
from fedbasin.tuning.request import Request
from fedbasin.tuning.search import (
    RunAll,
    Trial,
    forget_checkpoints,
    headline_of_trials,
    numbered,
    scored,
)


def search(request: Request, out: Path, run_all: RunAll) -> list[Trial]:
    """Run the budget of every method; all methods propose their next setting together."""
    _optuna()  # before any work: the package may be missing
    rounds = request.base.rounds
    first = max(1, request.budget // 2)
    drawn = [trial for method in request.methods for trial in numbered(request, method, first)]
    trials = scored(request, out, drawn, rounds, run_all)
    headline = headline_of_trials(request, out, trials)
    for number in range(first, request.budget):
        new = []
        for method in request.methods:
            arguments = request.arguments(method)
            own = [trial for trial in trials if trial.method == method]
            if arguments and len(own) == number:
                values = propose(arguments, own, headline, request.seed)
                new.append(Trial(method, number, values))
        trials += scored(request, out, new, rounds, run_all) if new else []
        forget_checkpoints(request, out, trials)
    return sorted(trials, key=lambda t: (request.methods.index(t.method), t.number))


def propose(
    arguments: Sequence[Argument], tried: Sequence[Trial], headline: Headline, seed: int
) -> dict[str, Any]:
    """Return the next setting of a method, from the scores of those before it.

    Args:
        arguments: what is tuned.
        tried: the settings before, in their order.
        headline: the metric, which says what is better.
        seed: keys the sampler, together with the number of settings tried.
    """
    optuna = _optuna()
    key = root(seed).fold("tpe", len(tried)).numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna calls parts of its interface experimental
        sampler = optuna.samplers.TPESampler(
            seed=int(key.integers(2**31)), n_startup_trials=1, multivariate=True
        )
        direction = "maximize" if headline.higher_is_better else "minimize"
        study = optuna.create_study(sampler=sampler, direction=direction)
        spaces = {argument.name: _distribution(optuna, argument.space) for argument in arguments}
        for trial in tried:
            study.add_trial(_told(optuna, trial, arguments, spaces))
        asked = study.ask(spaces)
    values = {}
    for argument in arguments:
        value = asked.params[argument.name]
        space = argument.space
        if isinstance(space, Options):
            values[argument.name] = space.values[value]
        else:
            # Four digits, as other settings have.
            values[argument.name] = value if space.whole else float(f"{value:.4g}")
    return values


def _told(optuna: Any, trial: Trial, arguments: Sequence[Argument], spaces: dict[str, Any]) -> Any:
    """Return a setting as Optuna keeps it; values outside the ranges are left out of the model."""
    inside = [a for a in arguments if a.space.holds(trial.values[a.name])]
    params = {}
    for argument in inside:
        value = trial.values[argument.name]
        space = argument.space
        params[argument.name] = space.values.index(value) if isinstance(space, Options) else value
    state = optuna.trial.TrialState.COMPLETE if trial.score is not None else None
    return optuna.trial.create_trial(
        params=params,
        distributions={argument.name: spaces[argument.name] for argument in inside},
        value=trial.score,
        state=state or optuna.trial.TrialState.FAIL,
    )


def _distribution(optuna: Any, space: Space) -> Any:
    """Return a space as Optuna writes it."""
    if isinstance(space, Options):  # by place: Optuna takes few types of choices
        return optuna.distributions.CategoricalDistribution(list(range(len(space.values))))
    log = space.scale == "log"
    if space.whole:
        return optuna.distributions.IntDistribution(int(space.low), int(space.high), log=log)
    return optuna.distributions.FloatDistribution(space.low, space.high, log=log)


def _optuna() -> Any:
    try:
        import optuna
    except ModuleNotFoundError as error:
        raise TuneError(
            "the sampler tpe needs Optuna: pip install 'fedbasin[optuna]', or take sampler sobol"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
