"""What few methods do beyond merging, each as a small class that such a method implements.

A wrapper does not implement them for the method inside it. The functions below look through
wrappers, so that ``wima(mime)`` gets the gradients that ``mime`` needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from fedbasin.core.method import Averaging, Context, Method, Replies, Wrapped, Wrapper
from fedbasin.core.vectors import shares, weighted_mean


class NeedsGradients:
    """A method whose cohort sends its full gradients (`Context.probe`) before it trains."""


class ScoresCounts(ABC):
    """A method that can use one number of each client in place of its class counts."""

    @abstractmethod
    def score_counts(self, counts: Tensor, total: Tensor) -> float:
        """Return the number that a client tells, from its counts and all clients' [classes]."""


class MergesStatistics(ABC):
    """A method that merges the clients' BatchNorm statistics by a rule of its own."""

    @abstractmethod
    def merge_statistics(self, before: Tensor, replies: Replies, context: Context) -> Tensor:
        """Return the statistics [Q] after the round.

        Args:
            before: the statistics that were sent [Q].
            replies: the replies, of which `buffers` are the clients' statistics [C, Q]; their
                models are empty [C, 0], and they have no reports.
            context: what surrounds the round.
        """


class Private:
    """A wrapper after which the cohort's update is private, also where the cohort is empty.

    What is around it must not look at the replies: `check_private` refuses such wrappers.
    """

    def guarantee(self) -> dict[str, Any]:
        """Return what a run's summary says of the guarantee; its size is in every record."""
        return {}


class StartsLate(ABC):
    """A method that equals a plainer one in its first rounds."""

    @abstractmethod
    def shared_prefix(self, rounds: int) -> tuple[Method, int]:
        """Return the plainer method, and how many first rounds of a run the two have in common."""

    @abstractmethod
    def state_from_prefix(self, state: Any, server: Tensor, context: Context) -> Any:
        """Convert the plainer method's state into this one's, at the round where they diverge."""


def needs_gradients(method: Method) -> bool:
    """Whether the method, or one inside its wrappers, needs the cohort's gradients."""
    return any(isinstance(layer, NeedsGradients) for layer in _layers(method))


def merge_statistics(method: Method, before: Tensor, replies: Replies, context: Context) -> Tensor:
    """Merge the clients' statistics, `replies.buffers`, as the method says; by default their mean.

    The outermost wrapper that has a rule goes first; it calls this for what is inside it.
    """
    for layer in _layers(method):
        if isinstance(layer, MergesStatistics):
            return layer.merge_statistics(before, replies, context)
    return weighted_mean(replies.buffers, shares(replies.weights))


def is_private(method: Method) -> bool:
    """Whether the method, or one inside its wrappers, makes the cohort's update private."""
    return any(isinstance(layer, Private) for layer in _layers(method))


def guarantee_of(method: Method) -> dict[str, Any]:
    """Return what a run's summary says of what a private method guarantees."""
    for layer in _layers(method):
        if isinstance(layer, Private):
            return layer.guarantee()
    return {}


def check_private(method: Method, statistics: bool) -> None:
    """Refuse what would show single clients' data in spite of a private method.

    Args:
        method: what is to run.
        statistics: whether the clients' BatchNorm statistics are merged.
    """
    if not is_private(method):
        return
    if statistics:
        raise ValueError(
            f"{method} does not protect BatchNorm statistics: take a network with norm='group', or "
            "sim.buffers = 'keep'"
        )
    for layer in _layers(method):
        if isinstance(layer, Private):
            return
        plain = replace(layer, inner=_UniformMean())  # type: ignore[type-var]
        if plain.streams() is None:
            raise ValueError(
                f"{method}: {type(layer).__name__} looks at the clients' replies, which are "
                "private only inside dp; leave it out, or put dp around a method of the mean alone"
            )


class _UniformMean(Averaging):
    """Stands for a method of the uniform mean, to ask wrappers whether they look at replies."""

    weighting = "uniform"


def asks_for_scores(method: Method) -> bool:
    """Whether clients tell the method a number in place of their class counts."""
    return any(isinstance(layer, ScoresCounts) for layer in _layers(method))


def score_counts(method: Method, counts: Tensor, total: Tensor) -> float:
    """Return the number that a client tells in place of its class counts [classes]."""
    for layer in _layers(method):
        if isinstance(layer, ScoresCounts):
            return layer.score_counts(counts, total)
    raise NotImplementedError(
        f"{method} needs the clients' class counts themselves: do not keep them private, "
        "or take a method that works with scores, such as fedwcm(momentum='scores')"
    )


def shared_prefix(method: Method, rounds: int) -> tuple[Method, int]:
    """Return a plainer method, and how many first rounds of a run the two have in common.

    For a method that does not start late this is the method itself, and all rounds.
    """
    if isinstance(method, StartsLate):
        return method.shared_prefix(rounds)
    if isinstance(method, Wrapper):
        inner, common = shared_prefix(method.inner, rounds)
        return replace(method, inner=inner), common  # type: ignore[type-var]
    return method, rounds


def state_from_prefix(method: Method, state: Any, server: Tensor, context: Context) -> Any:
    """Convert the state of a method's `shared_prefix` into its own where the two diverge."""
    if isinstance(method, StartsLate):
        return method.state_from_prefix(state, server, context)
    if isinstance(method, Wrapper):
        inner = state_from_prefix(method.inner, state.inner, server, context)
        return Wrapped(state.own, inner)
    return state


def _layers(method: Method) -> Iterator[Method]:
    """Yield the method, then those inside its wrappers."""
    yield method
    if isinstance(method, Wrapper):
        yield from _layers(method.inner)
