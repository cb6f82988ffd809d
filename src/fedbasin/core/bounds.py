"""Bounds of fields: what a number may be is declared with the field, and checked in one place.

>>> from dataclasses import dataclass
>>> @dataclass(frozen=True)
... class Pull(Bounded):
...     mu: float = at_least(0, default=0.01)
>>> Pull(mu=-1)
Traceback (most recent call last):
ValueError: mu must be at least 0, got -1
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Bound:
    """What a field must be, in words and as a test."""

    words: str
    holds: Callable[[Any], bool]
    optional: bool  # None, the default, is let through

    def check(self, name: str, value: Any, error: type[ValueError] = ValueError) -> None:
        """Refuse a value out of bounds; NaN lies in none."""
        if not (self.optional and value is None) and not self.holds(value):
            raise error(f"{name} {self.words}, got {value}")


class Bounded:
    """A dataclass whose fields may declare bounds. Subclasses that check more call this first."""

    def __post_init__(self) -> None:
        """Refuse values out of bounds."""
        for name, bound in bounds_of(type(self)).items():
            bound.check(name, getattr(self, name))


def bounds_of(kind: type[Any]) -> dict[str, Bound]:
    """Return the bounds of a class's fields.

    A field that a subclass declares anew, with another default, keeps its bound.
    """
    bounds: dict[str, Bound] = {}
    for base in reversed(kind.__mro__):
        for one in fields(base) if is_dataclass(base) else ():
            if "bound" in one.metadata:
                bounds[one.name] = one.metadata["bound"]
    return bounds


def at_least(least: float, *, default: T) -> T:
    """Declare a field whose least value is named."""
    return _declared(f"must be at least {least}", lambda value: value >= least, default)


def above(limit: float, *, default: T) -> T:
    """Declare a field whose values lie above a limit."""
    return _declared(f"must be above {limit}", lambda value: value > limit, default)


def within(interval: str, *, default: T, words: str = "") -> T:
    """Declare a field whose values lie in an interval.

    Args:
        interval: its ends; a square bracket means that the end belongs to it: ``"[0, 1)"``.
        default: the field's default.
        words: what a refusal says, if not "must be in [0, 1)".
    """
    low, high = map(float, interval[1:-1].split(","))
    over = {"[": operator.ge, "(": operator.gt}[interval[0]]
    under = {"]": operator.le, ")": operator.lt}[interval[-1]]
    return _declared(
        words or f"must be in {interval}",
        lambda value: over(value, low) and under(value, high),
        default,
    )


def _declared(words: str, holds: Callable[[Any], bool], default: T) -> T:
    return field(default=default, metadata={"bound": Bound(words, holds, default is None)})
