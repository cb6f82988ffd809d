"""A task of a user's own: counts, by the Poisson loss."""

from dataclasses import dataclass
from typing import ClassVar

from fedbasin.core.catalogue import entry
from fedbasin.core.task import RowTask


@entry("task")
@dataclass(frozen=True)
class Poisson(RowTask):
    """Counts: exp of the output is the expected one.

    Args:
        offset: added to the output.
    """

    offset: float = 0.0

    usual_metrics: ClassVar[tuple[str, ...]] = ("loss",)

    def outputs(self, targets):
        """One output."""
        if not targets.whole or targets.columns != 1:
            raise ValueError("poisson needs one whole number a row")
        return 1

    def check_values(self, targets):
        """Counts are not negative."""
        if (targets < 0).any():
            raise ValueError(f"poisson needs counts of at least 0, got {int(targets.min())}")

    def each(self, outputs, targets):
        """Return the negative log-likelihood of every row, without its constant."""
        rate = outputs[:, 0] + self.offset
        return rate.exp() - targets * rate
