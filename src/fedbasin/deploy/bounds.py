"""How large what a client sends may be, from what the server already knows.

The server knows the plan of the round, the model, and how many rows the client stated when it was
asked who it is. Steps, sum of step sizes and length follow from these; a client that says
otherwise is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import RecordDict

from fedbasin.core.method import EffectiveSteps, Plan
from fedbasin.deploy.wire import Refused, content_bytes, number
from fedbasin.local.batches import count_steps

MOST_ROWS = 10**8  # that a client may state, unless the app says otherwise
MOST_CLIENTS = 10**6  # that nodes may count, where the app does not say how many there are
MOST_NUMBERS = 1 << 16  # bytes of numbers and text beside arrays
_CLOSE = 1e-6  # relative; clients compute the same numbers in another order
_SPARE = 1 << 20  # bytes for headers, and for reports that are small beside any model
_REPORTED = 4  # how many times the model's bytes the report of one client rule may take


@dataclass(frozen=True)
class Bounds:
    """What a reply to one round may say.

    Args:
        plan: how the cohort was told to train.
        batch: the clients' batch size; 0 where the server does not know it.
        length: how many gradients K steps add up to; None where the server does not know.
        most_rows: how many rows a client may state.
        most_bytes: how many bytes a reply may take.
    """

    plan: Plan
    batch: int = 0
    length: EffectiveSteps | None = None
    most_rows: int = MOST_ROWS
    most_bytes: int = 1 << 62

    def rows(self, metrics: Mapping[str, Any], key: str, known: int | None) -> float:
        """Return a client's number of samples: what it said when it was asked, or 0."""
        stated = number(metrics, key, least=0)
        if known is not None and stated not in (0, known):
            raise Refused(f"{key} is {stated:g}, it said {known} when asked who it is")
        if stated > self.most_rows:
            raise Refused(f"{key} is {stated:g}, expected at most {self.most_rows:g}")
        return stated

    def steps(self, metrics: Mapping[str, Any], rows: float) -> float:
        """Return a client's local steps, which follow from the plan and its rows."""
        steps = number(metrics, "steps", least=0)
        least, most = self._least_and_most_steps(math.ceil(rows))
        if not least <= steps <= most or steps != int(steps):
            expected = f"{least}" if least == most else f"{least} to {most}"
            raise Refused(f"steps is {steps:g}, expected {expected} of {rows:g} rows")
        return steps

    def _least_and_most_steps(self, rows: int) -> tuple[int, int]:
        if self.batch or self.plan.steps is not None or rows == 0:
            exact = count_steps(self.plan, rows, self.batch or 1)
            return exact, exact
        return count_steps(self.plan, rows, rows), count_steps(self.plan, rows, 1)

    def lr_sum(self, metrics: Mapping[str, Any], steps: float) -> float:
        """Return the sum of a client's step sizes: the plan's learning rate times its steps."""
        return _equal(metrics, "lr-sum", self.plan.lr * steps)

    def effective_steps(self, metrics: Mapping[str, Any], steps: float) -> float:
        """Return how many gradients a client's steps add up to."""
        if self.length is not None:
            counted = self.length(int(steps), 0.0)
            return _equal(metrics, "length", steps if counted is None else counted)
        value = number(metrics, "length", least=0)
        most = steps * (steps + 1) / 2  # SGD whose momentum forgets nothing
        if not steps * (1 - _CLOSE) <= value <= most * (1 + _CLOSE):
            raise Refused(f"length is {value:g}, expected {steps:g} to {most:g} of {steps:g} steps")
        return value

    def size(self, content: RecordDict) -> int:
        """Return how many bytes a reply takes; too many are refused before any is read."""
        return check_size(content, self.most_bytes)


def reply_bytes(model: int, rules: int) -> int:
    """Return how many bytes a reply may take at most: a model, and what client rules report."""
    return model * (2 + _REPORTED * rules) + _SPARE


def check_size(content: RecordDict, most: int) -> int:
    """Count the bytes of a message, or refuse it."""
    found = content_bytes(content)
    if found > most:
        raise Refused(f"the message has {found:,} bytes, expected at most {most:,}")
    return found


def _equal(metrics: Mapping[str, Any], key: str, expected: float) -> float:
    value = number(metrics, key, least=0)
    if not math.isclose(value, expected, rel_tol=_CLOSE):
        raise Refused(f"{key} is {value:g}, expected {expected:g}")
    return value
