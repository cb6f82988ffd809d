"""Which settings are tried: the defaults, then points that fill the space evenly.

Points are a scrambled Sobol sequence, keyed by a seed. The common settings take the first columns
and a method's own arguments the next ones, so the common settings are the same points for all
methods, a method's points do not depend on the other methods, and a larger budget adds points
without changing those before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.stats import qmc

from fedbasin.core.rng import root
from fedbasin.tuning.arguments import Argument, TuneError

_COLUMNS = 64  # a fixed number: scrambling draws for all columns at once


def sobol(count: int, seed: int) -> np.ndarray:
    """Return the first points of a scrambled Sobol sequence, float64 [count, 64] in [0, 1)."""
    if count == 0:
        return np.empty((0, _COLUMNS))
    sequence = qmc.Sobol(_COLUMNS, scramble=True, seed=root(seed).fold("tune").numpy())
    power = int(np.ceil(np.log2(count)))  # SciPy warns of other numbers than powers of two
    points: np.ndarray = sequence.random_base2(power)[:count]
    return points


def settings(arguments: Sequence[Argument], count: int, seed: int) -> list[tuple[Any, ...]]:
    """Return up to `count` settings, the defaults first: one value for each argument."""
    if len(arguments) > _COLUMNS:
        raise TuneError(f"{len(arguments)} arguments are tuned at once; at most {_COLUMNS} can be")
    chosen = [tuple(argument.default for argument in arguments)]
    for point in sobol(count - 1, seed):
        shares = point[: len(arguments)].tolist()
        chosen.append(tuple(a.space.at(share) for a, share in zip(arguments, shares, strict=True)))
    # A method with a few choices alone has fewer settings than the budget.
    return list(dict.fromkeys(chosen))
