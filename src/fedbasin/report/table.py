"""Run records to a table: one row a method, mean and spread over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from fedbasin.core.record import RoundRecord, RunFolder, mean_of_last, rounds_to_target


@dataclass(frozen=True)
class Curve:
    """One run: what it was and how it went."""

    method: str
    seed: int
    records: tuple[RoundRecord, ...]
    seconds: float
    status: str = "finished"


@dataclass(frozen=True)
class Row:
    """One method over its seeds."""

    method: str
    seeds: int
    accuracy: float | None  # mean over seeds of the mean accuracy of the last 10 rounds
    spread: float | None  # standard deviation over seeds; None for a single seed
    rounds: float | None  # mean rounds to the target, of the seeds that reached it
    reached: int  # how many seeds reached it
    seconds: float  # mean over seeds
    diverged: int = 0  # seeds whose run broke off; they count with the rounds they have


def read_curves(paths: Sequence[Path]) -> list[Curve]:
    """Read run folders."""
    curves = []
    for path in paths:
        folder = RunFolder(path)
        summary = folder.read_summary()
        curves.append(
            Curve(
                str(summary.get("method", path.name)),
                int(summary.get("seed", 0)),
                tuple(folder.read_rounds()),
                float(summary.get("seconds", 0.0)),
                str(summary.get("status", "finished")),
            )
        )
    return curves


def summarise(curves: Sequence[Curve], target: float) -> list[Row]:
    """Gather runs by method, in the order the methods first appear."""
    rows = []
    for method in dict.fromkeys(curve.method for curve in curves):
        runs = [curve for curve in curves if curve.method == method]
        scores = [s for s in (mean_of_last(run.records) for run in runs) if s is not None]
        reached = [
            r for r in (rounds_to_target(run.records, target) for run in runs) if r is not None
        ]
        rows.append(
            Row(
                method=method,
                seeds=len(runs),
                accuracy=fmean(scores) if scores else None,
                spread=stdev(scores) if len(scores) > 1 else None,
                rounds=fmean(reached) if reached else None,
                reached=len(reached),
                seconds=fmean(run.seconds for run in runs),
                diverged=sum(run.status == "diverged" for run in runs),
            )
        )
    return rows


def cells(row: Row) -> tuple[str, str, str, str, str]:
    """Write a row for people: method, accuracy in percent, rounds to target, seconds, seeds."""
    accuracy = "-" if row.accuracy is None else f"{100 * row.accuracy:.2f}"
    if row.spread is not None:
        accuracy += f" ± {100 * row.spread:.2f}"
    if row.diverged:
        accuracy += f" ({row.diverged} diverged)"
    rounds = "not reached" if row.rounds is None else f"{row.rounds:.0f}"
    if 0 < row.reached < row.seeds:
        rounds += f" ({row.reached} of {row.seeds} seeds)"
    return row.method, accuracy, rounds, f"{row.seconds:.1f}", str(row.seeds)
