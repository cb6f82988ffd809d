"""How clients train: their optimiser, their plan and its schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fedbasin.core.expressions import Choice, parse
from fedbasin.core.method import Plan
from fedbasin.experiment.config import ConfigError, Experiment, LocalConfig
from fedbasin.local import SGD, Optimiser


def optimiser_of(local: LocalConfig) -> Optimiser:
    """Return the clients' optimiser; `local.momentum` and `local.weight_decay` are those of SGD."""
    optimiser: Optimiser = parse(local.optimiser, "optimiser")
    if type(optimiser) is not SGD:
        return optimiser
    return replace(
        optimiser,
        momentum=optimiser.momentum or local.momentum,
        weight_decay=optimiser.weight_decay or local.weight_decay,
    )


def plan_of(local: LocalConfig) -> Plan:
    """Return a client's work in a round, before the schedule: `local.steps` or `local.epochs`."""
    if local.steps:
        return Plan(local.lr, None, local.steps)
    return Plan(local.lr, local.epochs)


def schedule_of(experiment: Experiment) -> Callable[[int], Plan]:
    """Return the plan of each round; a schedule that cannot run is refused."""
    local = experiment.local
    plan = plan_of(local)
    choice: Choice = parse(local.schedule, "schedule")
    try:
        choice(plan, 0, experiment.rounds)  # a schedule that cannot run says so before the run
    except ValueError as error:
        raise ConfigError(f"local.schedule, {choice}: {error}") from error
    return lambda round: choice(plan, round, experiment.rounds)
