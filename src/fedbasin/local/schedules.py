"""Learning-rate schedules of the papers: how a round's plan follows from the configured one.

Each takes the base plan, the number of finished rounds t and the number of rounds R. `warmup` takes
another schedule for the rounds after it, and these may nest.
"""

from __future__ import annotations

import math
from dataclasses import replace

from fedbasin.core.catalogue import CATALOGUE, entry
from fedbasin.core.expressions import Choice
from fedbasin.core.method import Plan


@entry("schedule")
def constant(plan: Plan, round: int, rounds: int) -> Plan:
    """Keep the learning rate: eta_t = eta."""
    return plan


@entry("schedule")
def exponential(plan: Plan, round: int, rounds: int, *, decay: float = 0.99) -> Plan:
    """Shrink every round: eta_t = eta * decay^t."""
    _require(decay > 0, "decay", decay, "above 0")
    return replace(plan, lr=plan.lr * decay**round)


@entry("schedule")
def stepwise(plan: Plan, round: int, rounds: int, *, every: int = 20, factor: float = 0.5) -> Plan:
    """Shrink every few rounds: eta_t = eta * factor^floor(t / every)."""
    _require(every >= 1, "every", every, "at least 1")
    _require(factor > 0, "factor", factor, "above 0")
    return replace(plan, lr=plan.lr * factor ** (round // every))


@entry("schedule")
def cosine(plan: Plan, round: int, rounds: int, *, floor: float = 0.0) -> Plan:
    """Fall along half a cosine from eta to floor * eta at the last round."""
    _require(0 <= floor <= 1, "floor", floor, "in [0, 1]")
    share = 0.5 * (1 + math.cos(math.pi * round / max(rounds - 1, 1)))
    return replace(plan, lr=plan.lr * (floor + (1 - floor) * share))


@entry("schedule")
def cyclic(plan: Plan, round: int, rounds: int, *, period: int = 20, ratio: float = 0.01) -> Plan:
    """Fall linearly from eta to ratio * eta in every cycle, as in the SWA baseline.

    With c = period and s = ((t mod c) + 1) / c: eta_t = (1 - s) eta + s ratio eta. A period of
    1 leaves the learning rate alone.
    """
    _require(period >= 1, "period", period, "at least 1")
    if period == 1:
        return plan
    share = ((round % period) + 1) / period
    return replace(plan, lr=plan.lr * (1 - share + share * ratio))


@entry("schedule")
def epoch_decay(plan: Plan, round: int, rounds: int, *, every: int = 20, least: int = 1) -> Plan:
    """Drop one local epoch every few rounds: E_t = max(least, E - floor(t / every))."""
    _require(every >= 1, "every", every, "at least 1")
    _require(least >= 1, "least", least, "at least 1")
    if plan.epochs is None:
        raise ValueError("epoch_decay needs local.epochs; the plan is given in steps")
    return replace(plan, epochs=max(min(least, plan.epochs), plan.epochs - round // every))


_CONSTANT = Choice("constant")


@entry("schedule")
def warmup(
    plan: Plan, round: int, total: int, *, rounds: int = 10, then: Choice = _CONSTANT
) -> Plan:
    """Rise linearly for some rounds, then follow another schedule as if the run began there.

    With w = rounds and the other schedule's rates s_0, s_1, ... over R - w rounds:
    eta_t = s_0 (t + 1) / w for t < w, then eta_t = s_(t - w). So `cosine` begins at its full rate
    after the warm-up and still ends in the last round.
    """
    _require(rounds >= 1, "rounds", rounds, "at least 1")
    if CATALOGUE[then.name].kind != "schedule":
        raise ValueError(f"then must be a schedule, got {then}")
    after: Plan = then(plan, max(round - rounds, 0), max(total - rounds, 1))
    if round >= rounds:
        return after
    return replace(after, lr=after.lr * (round + 1) / rounds)


def _require(holds: bool, name: str, value: float, rule: str) -> None:
    if not holds:
        raise ValueError(f"{name} must be {rule}, got {value}")
