"""What noise costs: epsilon of the rounds so far, and the noise for a wanted epsilon.

All numbers come from Google's `dp-accounting` (the extra `dp`), by Renyi divergences ("rdp") or by
privacy loss distributions ("pld"). Both are upper bounds, and the second is tighter. This module
chooses the event that describes how cohorts were drawn:

    poisson   each client joins on its own with probability q: sampled Gaussian, add or remove one
    fixed     m of N without replacement: the sampled Gaussian of replacing one client. Replacing
              moves the sum by 2 S, and the accountant does not double: it is given z / 2
    other     no amplification: a Gaussian in every round

"pld" refuses `fixed`: no pair of cohorts is known to be the worst one of every round.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

from fedbasin.core.method import Sampling

Accountant = Literal["rdp", "pld"]
# Orders of Renyi's divergence. Fractions matter for large epsilon alone. Where little noise makes
# one of them diverge, the accountant leaves it out: epsilon is then no smaller than it should be.
_ORDERS = (1.6, 1.65, 1.7, 1.75, 2.5, 3.5, *range(2, 65), 80, 96, 128, 192, 256, 512, 1024)
_LEAST_NOISE = 0.05  # less costs an epsilon of hundreds in one round
_WHOLE_ORDERS = tuple(order for order in _ORDERS if order == int(order))
# Width of the steps in which "pld" counts the loss at z = 1, rounding up. Losses grow as z^-2, and
# so do the steps: memory and time then do not depend on z.
_LOSS_STEP = 1e-3


class NoAccountant(RuntimeError):
    """The package `dp-accounting` is not installed."""


def installed() -> bool:
    """Whether epsilon can be computed."""
    return importlib.util.find_spec("dp_accounting") is not None


@cache
def epsilon(
    noise: float,
    rounds: int,
    delta: float,
    sampling: Sampling,
    accountant: Accountant = "rdp",
) -> float:
    """Return the epsilon of so many rounds at a delta.

    Args:
        noise: z, the standard deviation of the noise on the sum over the clip.
        rounds: how many noisy sums were released.
        delta: the chance that the guarantee fails.
        sampling: how cohorts were drawn.
        accountant: what computes it.
    """
    counting = _new(accountant, sampling, noise)
    with _quiet():
        counting.compose(_event(noise, sampling), rounds)
        return float(counting.get_epsilon(delta))


def noise_for(
    wanted: float,
    rounds: int,
    delta: float,
    sampling: Sampling,
    accountant: Accountant = "rdp",
) -> float:
    """Return the smallest noise z at which all rounds cost no more than the wanted epsilon."""
    dp = _package()
    about, least = 1.0, _LEAST_NOISE
    if accountant == "pld":  # which takes long where the noise is far too small
        check_accountant(accountant, sampling)
        about = noise_for(wanted, rounds, delta, sampling)
        least = about / 4
    with _quiet():
        found = dp.calibrate_dp_mechanism(
            lambda: _new(accountant, sampling, about),
            lambda z: dp.SelfComposedDpEvent(_event(z, sampling), rounds),
            wanted,
            delta,
            dp.LowerEndpointAndGuess(least, about),
        )
    return float(found)


def check_accountant(accountant: Accountant, sampling: Sampling) -> None:
    """Refuse an accountant that does not know how cohorts are drawn."""
    if accountant == "pld" and _replaces(sampling):
        raise ValueError(
            "dp(accountant='pld') does not know cohorts of fixed size: draw them by "
            "sim.participation = \"poisson(rate=...)\", or write accountant='rdp'"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the accountant from warning of every order that it leaves out."""
    log = logging.getLogger("absl")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _package() -> Any:
    if not installed():
        raise NoAccountant(
            "epsilon is computed by the package dp-accounting: pip install 'fedbasin[dp]'"
        )
    import dp_accounting

    return dp_accounting


def _replaces(sampling: Sampling) -> bool:
    """Whether epsilon is for replacing a client, as the number of the others is fixed."""
    return sampling.kind == "fixed" and sampling.expected < sampling.clients


def _new(accountant: Accountant, sampling: Sampling, noise: float) -> Any:
    """Return an accountant that has counted nothing, for a noise of about this size."""
    relation = _package().NeighboringRelation
    check_accountant(accountant, sampling)
    if accountant == "pld":
        from dp_accounting.pld import PLDAccountant

        step = _LOSS_STEP * max(1.0, noise**-2)
        return PLDAccountant(relation.ADD_OR_REMOVE_ONE, value_discretization_interval=step)
    from dp_accounting.rdp import RdpAccountant

    if _replaces(sampling):
        return RdpAccountant(_WHOLE_ORDERS, relation.REPLACE_ONE)
    return RdpAccountant(_ORDERS, relation.ADD_OR_REMOVE_ONE)


def _event(noise: float, sampling: Sampling) -> Any:
    """Return what happens in one round, in the accountants' terms."""
    dp = _package()
    if _replaces(sampling):
        cohort = round(sampling.expected)
        halved = dp.GaussianDpEvent(noise / 2)
        return dp.SampledWithoutReplacementDpEvent(sampling.clients, cohort, halved)
    gaussian = dp.GaussianDpEvent(noise)
    if sampling.kind == "poisson":
        return dp.PoissonSampledDpEvent(sampling.expected / sampling.clients, gaussian)
    return gaussian
