"""One sentence about a comparison: which method is best, and whether the seeds can tell."""

from __future__ import annotations

from collections.abc import Sequence

from fedbasin.core.record import Headline
from fedbasin.report.runs import Run, headline_of_runs
from fedbasin.report.table import differences, summarise


def verdict(runs: Sequence[Run]) -> str:
    """Say which method has the best mean, by how much, and if that is more than chance.

    The second best is compared with it seed by seed (paired t-test).
    """
    headline = headline_of_runs(runs)
    rows = [row for row in summarise(runs, None) if row.score is not None]
    if not rows:
        return "No run was scored."
    sign = -1 if headline.higher_is_better else 1
    ordered = sorted(rows, key=lambda row: sign * (row.score or 0.0))
    best = ordered[0]
    mean = f"{headline.shown(best.score)}{_unit(headline)}"
    word = "Highest" if headline.higher_is_better else "Lowest"
    if len(ordered) == 1:
        return f"{best.method}: mean {headline.name} {mean}{_over(best.seeds)}."
    second = ordered[1]
    start = f"{word} mean {headline.name}: {best.method}, {mean}"
    method_of_best = next(run.method for run in runs if run.label == best.method)
    gap = differences(runs, method_of_best).get(second.method)
    if gap is None or gap.p is None:
        return (
            f"{start}; next is {second.method}, {headline.shown(second.score)}{_unit(headline)}. "
            f"{_cannot_tell(best.seeds)}"
        )
    ahead = headline.shown(abs(gap.mean))
    if gap.p < 0.05:
        return (
            f"{start}, which is {ahead}{_unit(headline)} ahead of {second.method} "
            f"(p = {gap.p:.2g}, {gap.pairs} seeds)."
        )
    return (
        f"{start}. {gap.pairs} seeds cannot tell it from {second.method}, {ahead}"
        f"{_unit(headline)} behind (p = {gap.p:.2g})."
    )


def _unit(headline: Headline) -> str:
    return f" {headline.unit}" if headline.unit else ""


def _over(seeds: int) -> str:
    return f" over {seeds} seeds" if seeds > 1 else ""


def _cannot_tell(seeds: int) -> str:
    if seeds == 1:
        return "One seed cannot tell luck from merit: give it 5."
    return f"{seeds} seeds give no test here."
