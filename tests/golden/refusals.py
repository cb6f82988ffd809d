"""What entries of the catalogue say of arguments that are out of bounds.

    python tests/golden/refusals.py > tests/golden/refusals.txt

A change of shape leaves every line as it is. A line that is new needs no writing down.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fedbasin.experiment  # noqa: F401  fills the catalogue
from fedbasin.core.catalogue import CATALOGUE, Card

STORED = Path(__file__).with_suffix(".txt")
TRIED = (-1, 0, 0.5, 1, 1.5, 2, math.nan, math.inf, None, (-1, 0.5), (0.5, 1))


def refusals() -> Iterator[str]:
    """A line for every argument of every dataclass that is refused, beside usual ones."""
    for card in CATALOGUE.values():
        if not card.is_function and card.make.__module__.startswith("fedbasin."):
            yield from refusals_of(card)


def refusals_of(card: Card) -> Iterator[str]:
    """The lines of one entry."""
    usual: dict[str, Any] = {p.name: 1 for p in card.parameters if p.required}
    for parameter in card.parameters:
        for value in TRIED:
            try:
                card.make(**usual | {parameter.name: value})
            except ValueError as error:
                yield f"{card.name}({parameter.name}={value!r}): {error}"
            except (AttributeError, TypeError) as error:
                if value is not None:
                    continue  # of another kind than the argument
                yield f"{card.name}({parameter.name}=None): {type(error).__name__}"


if __name__ == "__main__":
    print(*refusals(), sep="\n")
