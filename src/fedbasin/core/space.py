"""Where an argument may lie when it is tuned: a range on a scale, or a list of choices.

A method's card names its tunable arguments with such a space (`Card.tunable`), and tuning maps
points of the unit cube into it. Defaults lie inside.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

Scale = Literal["log", "linear"]


class SpaceError(ValueError):
    """A range or a list of choices that nothing can be drawn from."""


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, spread evenly on a scale.

    Args:
        low: the least value.
        high: the largest value.
        scale: ``"log"`` spreads orders of magnitude evenly and needs a `low` above 0.
        whole: whether values are rounded to whole numbers.

    >>> Range(0.01, 1.0, "log").at(0.5)
    0.1
    >>> Range(1, 8, "log", whole=True).at(0.99)
    8
    """

    low: float
    high: float
    scale: Scale = "linear"
    whole: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high)):
            raise SpaceError(f"the range {self} is not finite")
        if self.low == self.high:
            raise SpaceError(f"the range {self} is empty: write two different numbers")
        if self.low > self.high:
            raise SpaceError(f"the range {self} is reversed: write the smaller number first")
        if self.scale == "log" and self.low <= 0:
            raise SpaceError(
                f"the range {self} is on a log scale: begin above 0, or write {self.low:g}.."
                f"{self.high:g}:linear"
            )

    def at(self, share: float) -> int | float:
        """Return the value at a share in [0, 1] of the range, with four digits."""
        if self.scale == "log":
            value = float(self.low * (self.high / self.low) ** share)
        else:
            value = self.low + share * (self.high - self.low)
        if self.whole:
            return min(max(round(value), math.ceil(self.low)), math.floor(self.high))
        # Four digits are enough to tell settings apart, and texts stay short.
        return min(max(float(f"{value:.4g}"), self.low), self.high)

    def holds(self, value: Any) -> bool:
        """Whether a value lies in the range."""
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and self.low <= value <= self.high

    def __str__(self) -> str:
        return f"{self.low:g}..{self.high:g} {self.scale}{', whole' if self.whole else ''}"


@dataclass(frozen=True, init=False)
class Options:
    """A list of values to choose from.

    >>> Options("a", "b").at(0.7)
    'b'
    """

    values: tuple[Any, ...]

    def __init__(self, *values: Any) -> None:
        object.__setattr__(self, "values", values)
        if not values:
            raise SpaceError("there is nothing to choose from: give values with commas between")
        if len(set(map(repr, values))) < len(values):
            raise SpaceError(f"the choices {self} name a value twice")

    def at(self, share: float) -> Any:
        """Return the value at a share in [0, 1] of the list."""
        return self.values[min(int(share * len(self.values)), len(self.values) - 1)]

    def holds(self, value: Any) -> bool:
        """Whether a value is one of the choices."""
        return any(type(value) is type(one) and value == one for one in self.values)

    def __str__(self) -> str:
        return ", ".join(map(repr, self.values))


Space = Range | Options
