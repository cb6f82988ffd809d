"""The noise of `dp` for a wanted epsilon, before a run begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedbasin.core.expressions import parse
from fedbasin.core.method import Method, Sampling, Wrapper
from fedbasin.core.rng import root
from fedbasin.experiment.config import ConfigError, Experiment
from fedbasin.methods.dp import DP
from fedbasin.methods.parts.accounting import noise_for
from fedbasin.sim.participation import sampling_of


def calibrated(experiment: Experiment, epsilon: float | None, delta: float | None) -> Experiment:
    """Return the run with the smallest noise whose rounds together cost no more than epsilon.

    Args:
        experiment: a run of `dp`, inside averagers and server optimisers too.
        epsilon: what all rounds may cost; None keeps the noise.
        delta: the chance that the guarantee fails; None keeps that of `dp`.
    """
    method: Method = parse(experiment.method, "method")
    private = _private(method)
    if private is None:
        raise ConfigError(
            f"epsilon and delta: method = {method} adds no noise; write method = "
            "\"dp(fedavg(weighting='uniform'), clip=1.0)\""
        )
    if delta is not None:
        private = replace(private, delta=delta)
    if epsilon is not None:
        if not epsilon > 0:
            raise ConfigError(f"epsilon must be above 0, got {epsilon:g}")
        drawn = private.seen(_drawn(experiment))
        rounds = experiment.rounds
        found = noise_for(epsilon, rounds, private.delta, drawn, private.accountant)
        private = replace(private, noise=float(np.ceil(1e4 * found) / 1e4))
    return replace(experiment, method=str(_with(method, private)))


def calibrated_methods(
    experiment: Experiment, methods: Sequence[str], epsilon: float | None, delta: float | None
) -> list[str]:
    """Return the methods of a comparison, each `dp` with its noise for the wanted epsilon.

    Args:
        experiment: what the methods have in common.
        methods: expressions; those without `dp` stay as they are, but one must have it.
        epsilon: what all rounds of a run may cost; None keeps the noise.
        delta: the chance that the guarantee fails; None keeps that of `dp`.
    """
    if epsilon is None and delta is None:
        return list(methods)
    private = [_private(parse(method, "method")) is not None for method in methods]
    if not any(private):
        raise ConfigError(
            "epsilon and delta: none of the methods adds noise; one must be, such as "
            "\"dp(fedavg(weighting='uniform'), clip=1.0)\""
        )
    return [
        calibrated(replace(experiment, method=method), epsilon, delta).method if has_dp else method
        for method, has_dp in zip(methods, private, strict=True)
    ]


def guarantee_text(methods: Sequence[str]) -> str:
    """Say by which accountant, and at which delta, the epsilon of each private method holds."""
    found = [_private(parse(method, "method")) for method in methods]
    said = [f"{p.accountant} at delta {p.delta:g}" for p in found if p is not None]
    return f"epsilon by the accountant {', '.join(dict.fromkeys(said))}"


def _drawn(experiment: Experiment) -> Sampling:
    where = experiment.partition
    if not where.clients:
        raise ConfigError(
            "epsilon: the noise follows from the number of clients; set partition.clients, or give "
            "dp(noise=...) and read epsilon in the record"
        )
    clients = where.clients - int(where.unseen * where.clients)
    participation = parse(experiment.sim.participation, "participation")
    return sampling_of(participation, np.arange(clients), root(experiment.seed))


def _private(method: Method) -> DP | None:
    if isinstance(method, DP):
        return method
    return _private(method.inner) if isinstance(method, Wrapper) else None


def _with(method: Method, private: DP) -> Method:
    """Return the method with another `dp` inside."""
    if isinstance(method, DP):
        return private
    assert isinstance(method, Wrapper)
    return replace(method, inner=_with(method.inner, private))  # type: ignore[type-var]
