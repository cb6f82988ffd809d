"""A loss, a metric, an optimiser, a schedule and a partition of your own, in one module.

Name them by the module, in Python, in configurations and on the command line:

    cd examples
    fedbasin run --preset demo --set local.schedule=own_pieces.harmonic --out runs/own
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from fedbasin.core.catalogue import entry
from fedbasin.core.task import RowTask
from fedbasin.local import Optimiser
from fedbasin.partition.pool import cut, even


@entry("task")
@dataclass(frozen=True)
class Quartic(RowTask):
    """Numbers with the loss error^4."""

    kind: ClassVar[str] = "numbers"
    usual_metrics: ClassVar[tuple[str, ...]] = ("rmse", "loss")

    def outputs(self, targets):
        """One output a column."""
        return targets.columns

    def each(self, outputs, targets):
        """Return the loss of every row."""
        return ((targets.reshape(outputs.shape) - outputs) ** 4).mean(1)


@entry("metric")
def within(outputs, targets):
    """The share of rows that are predicted within 0.5."""
    return (outputs[:, 0] - targets.reshape(-1)).abs() < 0.5


@entry("optimiser")
@dataclass(frozen=True)
class Signed(Optimiser):
    """Step by the sign of the gradient."""

    def init(self, vector):
        """Keep nothing."""
        return ()

    def update(self, direction, state, vector, lr, paces=()):
        """Return the vector after a step."""
        return vector - lr * direction.sign(), state


@entry("schedule")
def harmonic(plan, round, rounds):
    """Shrink like 1 / t."""
    return replace(plan, lr=plan.lr / (1 + round))


@entry("partition")
def in_order(pool, clients, rng):
    """Cut the rows in the order they have."""
    return cut(np.arange(pool.rows), even(pool.rows, clients), pool.rows)
