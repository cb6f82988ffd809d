"""Run records to a table: one row a method, mean and spread over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from fedbasin.core.record import Headline, mean_of_last, rounds_to_target
from fedbasin.report.paired import Difference, corrected, paired_difference
from fedbasin.report.runs import Run, headline_of_runs


@dataclass(frozen=True)
class Row:
    """One method over its seeds."""

    method: str  # its label
    seeds: int
    score: float | None  # mean over seeds of the headline's mean over the last 10 rounds
    spread: float | None  # standard deviation over seeds; None for a single seed
    rounds: float | None  # mean rounds to the target, of the seeds that reached it
    reached: int  # how many seeds reached it
    seconds: float  # mean over seeds
    bytes_moved: float = 0.0  # down and up, mean over seeds
    diverged: int = 0  # seeds whose run diverged; they count with the rounds they have
    stopped: int = 0  # seeds whose run can be resumed; they count too


def by_label(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Gather runs by label, in the order the labels first appear; seeds in ascending order."""
    labels = dict.fromkeys(run.label for run in runs)
    return {
        label: sorted((run for run in runs if run.label == label), key=lambda run: run.seed)
        for label in labels
    }


def summarise(found: Sequence[Run], target: float | None) -> list[Row]:
    """Write one row a method; without a target nobody reaches it."""
    headline = headline_of_runs(found)
    rows = []
    for method, runs in by_label(found).items():
        scores = [s for s in (_score(run, headline) for run in runs) if s is not None]
        reached = []
        if target is not None:
            first = [rounds_to_target(run.records, target, headline=headline) for run in runs]
            reached = [round for round in first if round is not None]
        rows.append(
            Row(
                method=method,
                seeds=len(runs),
                score=fmean(scores) if scores else None,
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
    """Compare every method with the baseline, seed by seed, without runs that can be resumed.

    Where the baseline ran with several settings, a method is compared with the one that
    shares its own; None where there is no such run, or no common seed. P-values are also given
    corrected for the number of methods.
    """
    groups = by_label(runs)
    headline = headline_of_runs(runs)
    found: dict[str, Difference | None] = {}
    for label, members in groups.items():
        partners = {name: others for name, others in groups.items() if others[0].method == baseline}
        if len(partners) > 1:
            own = label.removeprefix(members[0].method)
            partners = {n: o for n, o in partners.items() if n.removeprefix(baseline) == own}
        if len(partners) == 1 and label not in partners:
            (theirs,) = partners.values()
            found[label] = paired_difference(
                _scores(members, headline),
                _scores(theirs, headline),
                higher_is_better=headline.higher_is_better,
            )
        else:
            found[label] = None
    return corrected(found)


def mean_ranks(runs: Sequence[Run]) -> dict[str, float]:
    """Return each method's mean rank over the seeds that all methods ran with; 1 is best.

    Methods of equal score share the mean of their ranks. Empty without a common seed.
    """
    from scipy import stats  # slow to import, and needed only here

    headline = headline_of_runs(runs)
    scores = {label: _scores(members, headline) for label, members in by_label(runs).items()}
    common = sorted(set.intersection(*(set(own) for own in scores.values()))) if scores else []
    if not common:
        return {}
    sign = -1 if headline.higher_is_better else 1
    table = [[sign * own[seed] for seed in common] for own in scores.values()]
    ranks = stats.rankdata(table, axis=0).mean(1)
    return dict(zip(scores, ranks.tolist(), strict=True))


def _score(run: Run, headline: Headline) -> float | None:
    return mean_of_last(run.records, metric=headline.name)


def _scores(runs: Sequence[Run], headline: Headline) -> dict[int, float]:
    scores = {run.seed: _score(run, headline) for run in runs if run.ended}
    return {seed: score for seed, score in scores.items() if score is not None}


def cells(row: Row, headline: Headline | None = None) -> tuple[str, str, str, str, str]:
    """Write a row for people: method, score in its unit, rounds to target, seconds, seeds."""
    headline = headline or Headline()
    score = headline.shown(row.score)
    if row.spread is not None:
        score += f" ± {headline.shown(row.spread)}"
    if row.diverged:
        score += f" ({row.diverged} diverged)"
    if row.stopped:
        score += f" ({row.stopped} stopped)"
    rounds = "not reached" if row.rounds is None else f"{row.rounds:.0f}"
    if 0 < row.reached < row.seeds:
        rounds += f" ({row.reached} of {row.seeds} seeds)"
    return row.method, score, rounds, f"{row.seconds:.1f}", str(row.seeds)
