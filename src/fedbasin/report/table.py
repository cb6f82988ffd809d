"""Run records to a table: one row a method, mean and spread over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from fedbasin.core.record import mean_of_last, rounds_to_target
from fedbasin.report.paired import Difference, paired_difference
from fedbasin.report.runs import Run


@dataclass(frozen=True)
class Row:
    """One method over its seeds."""

    method: str  # its label
    seeds: int
    accuracy: float | None  # mean over seeds of the mean accuracy of the last 10 rounds
    spread: float | None  # standard deviation over seeds; None for a single seed
    rounds: float | None  # mean rounds to the target, of the seeds that reached it
    reached: int  # how many seeds reached it
    seconds: float  # mean over seeds
    bytes_moved: float = 0.0  # down and up, mean over seeds
    diverged: int = 0  # seeds whose run broke off; they count with the rounds they have
    stopped: int = 0  # seeds whose run can go on; they too


def by_label(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Gather runs by label, in the order the labels first appear; seeds in ascending order."""
    labels = dict.fromkeys(run.label for run in runs)
    return {
        label: sorted((run for run in runs if run.label == label), key=lambda run: run.seed)
        for label in labels
    }


def summarise(found: Sequence[Run], target: float) -> list[Row]:
    """Write one row a method."""
    rows = []
    for method, runs in by_label(found).items():
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
                bytes_moved=fmean(
                    sum(r.bytes_down + r.bytes_up for r in run.records) for run in runs
                ),
                diverged=sum(run.status == "diverged" for run in runs),
                stopped=sum(not run.ended for run in runs),
            )
        )
    return rows


def differences(runs: Sequence[Run], baseline: str) -> dict[str, Difference | None]:
    """Compare every method with the baseline, seed by seed, without runs that can go on.

    Where the baseline ran with several settings, a method is compared with the one that
    shares its own; None where there is no such run, or no common seed.
    """
    groups = by_label(runs)
    found = {}
    for label, members in groups.items():
        partners = {name: others for name, others in groups.items() if others[0].method == baseline}
        if len(partners) > 1:
            own = label.removeprefix(members[0].method)
            partners = {n: o for n, o in partners.items() if n.removeprefix(baseline) == own}
        if len(partners) == 1 and label not in partners:
            (theirs,) = partners.values()
            found[label] = paired_difference(_scores(members), _scores(theirs))
        else:
            found[label] = None
    return found


def _scores(runs: Sequence[Run]) -> dict[int, float]:
    scores = {run.seed: mean_of_last(run.records) for run in runs if run.ended}
    return {seed: score for seed, score in scores.items() if score is not None}


def cells(row: Row) -> tuple[str, str, str, str, str]:
    """Write a row for people: method, accuracy in percent, rounds to target, seconds, seeds."""
    accuracy = "-" if row.accuracy is None else f"{100 * row.accuracy:.2f}"
    if row.spread is not None:
        accuracy += f" ± {100 * row.spread:.2f}"
    if row.diverged:
        accuracy += f" ({row.diverged} diverged)"
    if row.stopped:
        accuracy += f" ({row.stopped} stopped)"
    rounds = "not reached" if row.rounds is None else f"{row.rounds:.0f}"
    if 0 < row.reached < row.seeds:
        rounds += f" ({row.reached} of {row.seeds} seeds)"
    return row.method, accuracy, rounds, f"{row.seconds:.1f}", str(row.seeds)
