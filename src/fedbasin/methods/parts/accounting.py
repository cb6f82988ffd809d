"""What noise costs: epsilon of the rounds so far, and the noise for a wanted epsilon.

All numbers come from Google's `dp-accounting` (the extra `dp`), by Renyi divergences. This module
chooses the event that describes how cohorts were drawn:

    poisson   each client joins on its own with probability q: sampled Gaussian, add or remove one
    fixed     m of N without replacement: the sampled Gaussian of replacing one client. Replacing
              moves the sum by 2 S, and the accountant does not double: it is given z / 2
    other     no amplification: a Gaussian in every round
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from fedbasin.core.method import Sampling

# Orders of Renyi's divergence. Fractions matter for large epsilon alone. Where little noise makes
# one of them diverge, the accountant leaves it out: epsilon is then no smaller than it should be.
_ORDERS = (1.6, 1.65, 1.7, 1.75, 2.5, 3.5, *range(2, 65), 80, 96, 128, 192, 256, 512, 1024)
_LEAST_NOISE = 0.05  # less costs an epsilon of hundreds in one round
_WHOLE_ORDERS = tuple(order for order in _ORDERS if order == int(order))


class NoAccountant(RuntimeError):
    """The package `dp-accounting` is not installed."""


def installed() -> bool:
    """Whether epsilon can be computed."""
    return importlib.util.find_spec("dp_accounting") is not None


@cache
def epsilon(noise: float, rounds: int, delta: float, sampling: Sampling) -> float:
    """Return the epsilon of so many rounds at a delta.

    Args:
        noise: z, the standard deviation of the noise on the sum over the clip.
        rounds: how many noisy sums were released.
        delta: the chance that the guarantee fails.
        sampling: how cohorts were drawn.
    """
    make, event = _parts(sampling)
    accountant = make()
    with _quiet():
        accountant.compose(event(noise), rounds)
        return float(accountant.get_epsilon(delta))


def noise_for(wanted: float, rounds: int, delta: float, sampling: Sampling) -> float:
    """Return the smallest noise z at which all rounds cost no more than the wanted epsilon."""
    make, event = _parts(sampling)
    dp = _package()
    with _quiet():
        found = dp.calibrate_dp_mechanism(
            make,
            lambda z: dp.SelfComposedDpEvent(event(z), rounds),
            wanted,
            delta,
            dp.LowerEndpointAndGuess(_LEAST_NOISE, 1.0),
        )
    return float(found)


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


def _parts(sampling: Sampling) -> tuple[Any, Any]:
    """Return a function that makes an accountant, and one from the noise to a round's event."""
    dp = _package()
    from dp_accounting import rdp

    relation = dp.NeighboringRelation
    if sampling.kind == "fixed" and sampling.expected < sampling.clients:
        cohort = round(sampling.expected)

        def replaced(z: float) -> Any:
            inside = dp.GaussianDpEvent(z / 2)
            return dp.SampledWithoutReplacementDpEvent(sampling.clients, cohort, inside)

        return (lambda: rdp.RdpAccountant(_WHOLE_ORDERS, relation.REPLACE_ONE)), replaced

    def accountant() -> Any:
        return rdp.RdpAccountant(_ORDERS)

    if sampling.kind == "poisson":
        rate = sampling.expected / sampling.clients
        return accountant, lambda z: dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(z))
    return accountant, dp.GaussianDpEvent
