"""Who takes part in a round. All methods with the same seed see the same cohorts."""

from __future__ import annotations

import numpy as np

from fedbasin.core.catalogue import entry
from fedbasin.core.expressions import Choice
from fedbasin.core.method import Sampling
from fedbasin.core.rng import Key


@entry("participation")
def fraction(
    eligible: np.ndarray, rng: np.random.Generator, round: int, *, rate: float = 0.1
) -> np.ndarray:
    """A fixed share: max(floor(rate * N), 1) clients, drawn without replacement."""
    return eligible[rng.choice(len(eligible), size=_share(eligible, rate), replace=False)]


@entry("participation")
def reseeded(
    eligible: np.ndarray, rng: np.random.Generator, round: int, *, seed: int, rate: float = 0.1
) -> np.ndarray:
    """The same fraction, drawn with NumPy seeded by `seed` + round (from 0) as in FedIMA's code.

    FedIMA's seed is 2023. The run's own seed is not used.
    """
    if not 0 <= seed < 1 << 31:
        raise ValueError(f"participation: seed must be from 0 to {(1 << 31) - 1}, got {seed}")
    draws = np.random.RandomState(seed + round)
    return eligible[draws.choice(len(eligible), size=_share(eligible, rate), replace=False)]


@entry("participation")
def count(
    eligible: np.ndarray, rng: np.random.Generator, round: int, *, clients: int
) -> np.ndarray:
    """A fixed number of clients, drawn without replacement."""
    if clients < 1:
        raise ValueError(f"participation: clients must be at least 1, got {clients}")
    if clients > len(eligible):
        raise ValueError(
            f"participation: {clients} clients asked for, only {len(eligible)} hold data; "
            f"write count(clients={len(eligible)}) or fewer"
        )
    return eligible[rng.choice(len(eligible), size=clients, replace=False)]


@entry("participation")
def at_most(
    eligible: np.ndarray, rng: np.random.Generator, round: int, *, clients: int = 20
) -> np.ndarray:
    """All clients where there are no more than `clients`; else that many, drawn at random."""
    if clients < 1:
        raise ValueError(f"participation: clients must be at least 1, got {clients}")
    if len(eligible) <= clients:
        return eligible
    return eligible[rng.choice(len(eligible), size=clients, replace=False)]


@entry("participation")
def bernoulli(
    eligible: np.ndarray, rng: np.random.Generator, round: int, *, rate: float = 0.1
) -> np.ndarray:
    """Every client joins independently with probability `rate`; an empty cohort is drawn again."""
    _check_rate(rate)
    return eligible[rng.random(len(eligible)) < rate]


@entry("participation")
def poisson(
    eligible: np.ndarray, rng: np.random.Generator, round: int, *, rate: float = 0.1
) -> np.ndarray:
    """Every client joins independently with probability `rate`; a cohort may be empty.

    Differential privacy (`dp`) counts on it: a draw that is repeated is another distribution.
    """
    _check_rate(rate)
    return eligible[rng.random(len(eligible)) < rate]


@entry("participation")
def only(
    eligible: np.ndarray, rng: np.random.Generator, round: int, *, clients: tuple[int, ...]
) -> np.ndarray:
    """The same clients in every round, by number: one of them is a client that trains alone."""
    absent = sorted(set(clients) - set(eligible.tolist()))
    if absent or not clients:
        raise ValueError(
            f"participation: clients is {clients}, and the clients that hold data are numbered "
            f"{eligible.min()} to {eligible.max()}; name some of these, such as "
            f"only(clients=({eligible[0]},))"
        )
    return np.unique(np.array(clients, dtype=eligible.dtype))


def draw_cohort(choice: Choice, eligible: np.ndarray, key: Key, round: int) -> np.ndarray:
    """Draw a round's cohort; an empty draw is repeated with the next key, except poisson's."""
    key = key.fold("cohort", round)
    for attempt in range(10_000):
        cohort: np.ndarray = choice(eligible, key.fold(attempt).numpy(), round)
        if len(cohort) or choice.name == poisson.__name__:
            return np.sort(cohort)
    raise ValueError(f"participation: {choice} gave 10,000 empty cohorts in a row; raise its rate")


def sampling_of(choice: Choice, eligible: np.ndarray, key: Key) -> Sampling:
    """Return how cohorts are drawn, as the accounting of privacy sees it."""
    clients = len(eligible)
    if choice.name == poisson.__name__:
        rate = dict(choice.arguments).get("rate", 0.1)
        return Sampling("poisson", rate * clients, clients)
    size = len(draw_cohort(choice, eligible, key, 0))
    if choice.name in (fraction.__name__, count.__name__, at_most.__name__):
        return Sampling("fixed", float(size), clients)
    if choice.name == bernoulli.__name__:
        size = dict(choice.arguments).get("rate", 0.1) * clients
    return Sampling("other", float(size), clients)


def drop_out(cohort: np.ndarray, rate: float, key: Key) -> np.ndarray:
    """Return the members of a cohort that answer when each fails with probability `rate`."""
    if rate == 0:
        return cohort
    return cohort[key.numpy().random(len(cohort)) >= rate]


def _share(eligible: np.ndarray, rate: float) -> int:
    _check_rate(rate)
    return max(int(rate * len(eligible) + 1e-9), 1)


def _check_rate(rate: float) -> None:
    if not 0 < rate <= 1:
        raise ValueError(f"participation: rate must be in (0, 1], got {rate}")
