"""The sentences about all methods: which has the best mean, and which cannot be told apart.

`verdict` asks whether the seeds can tell. `coinciding` names curves that lie on each other, and
says from which round on they differ.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedbasin.core.record import Headline
from fedbasin.report.paired import Difference
from fedbasin.report.runs import Run, headline_of_runs
from fedbasin.report.table import Row, by_label, differences, summarise

_MOST_NAMED = 4  # methods that a sentence lists; others are counted
_ENOUGH_SEEDS = 10  # what is advised where a few seeds cannot tell


def verdict(runs: Sequence[Run], baseline: str | None = None) -> str:
    """Say which method has the best mean, by how much, and which cannot be told apart from it.

    Every other method is compared with it seed by seed (paired t-test), and the p-values are
    corrected for the number of methods (Holm).

    Args:
        runs: the runs.
        baseline: the method that the lead is given over; by default fedavg, else the first one.
    """
    headline = headline_of_runs(runs)
    rows = [row for row in summarise(runs, None) if row.score is not None]
    if not rows:
        return "No run was scored."
    sign = -1 if headline.higher_is_better else 1
    ordered = sorted(rows, key=lambda row: sign * (row.score or 0.0))
    best = ordered[0]
    mean = f"{headline.shown(best.score)}{_unit(headline)}"
    name = headline.name.replace("_", " ")
    if len(ordered) == 1:
        return f"{best.method}: mean {name} {mean}{_over(best.seeds)}."
    method_of_best = next(run.method for run in runs if run.label == best.method)
    gaps = differences(runs, method_of_best)
    start = f"{'Highest' if headline.higher_is_better else 'Lowest'} mean {name}: {best.method}"
    reference = _reference(runs, ordered, baseline)
    gap = gaps.get(reference.method)
    if reference is best or gap is None:
        lead = f", {mean}{_over(best.seeds)}"
    else:
        lead = f", {_lead(gap, headline)} against {reference.method}{_over(gap.pairs)}"
    if best.seeds == 1:
        return f"{start}{lead}. One seed cannot tell luck from merit: run {_ENOUGH_SEEDS}."
    return f"{start}{lead}. {_told_apart([row.method for row in ordered[1:]], gaps, best.seeds)}."


def _reference(runs: Sequence[Run], ordered: Sequence[Row], baseline: str | None) -> Row:
    """Return the method that the lead is given over."""
    labels = [run.label for run in runs if run.method == (baseline or "fedavg")]
    wanted = labels[0] if labels else runs[0].label
    return next((row for row in ordered if row.method == wanted), ordered[0])


def _lead(gap: Difference, headline: Headline) -> str:
    """Write how far the best is ahead; `gap` is of the other method against the best."""
    digits = headline.digits
    scale = headline.scale
    said = f"{-scale * gap.mean:+.{digits}f}"
    unit = " points" if headline.unit == "%" else _unit(headline)
    if gap.low is None or gap.high is None:
        return f"{said}{unit}"
    return f"{said}{unit} [{-scale * gap.high:+.{digits}f}, {-scale * gap.low:+.{digits}f}]"


def _told_apart(others: Sequence[str], gaps: dict[str, Difference | None], seeds: int) -> str:
    """Say which of the other methods the seeds cannot tell from the best."""
    close = []
    for method in others:
        gap = gaps.get(method)
        if gap is None or gap.holm is None or gap.holm >= 0.05:
            close.append(method)
    if not close:
        which = "The other method is" if len(others) == 1 else "All others are"
        return f"{which} worse (p < 0.05{', corrected by Holm' if len(others) > 1 else ''})"
    named = close[:_MOST_NAMED]
    if len(close) == len(others) > _MOST_NAMED:
        named = ["any other method"]
    elif len(close) > _MOST_NAMED:
        left = len(close) - _MOST_NAMED
        named.append(f"{left} {'other' if left == 1 else 'others'}")
    listed = " and ".join([", ".join(named[:-1]), named[-1]] if len(named) > 1 else named)
    more = f": run {_ENOUGH_SEEDS}" if seeds < _ENOUGH_SEEDS else ""
    return f"Not distinguishable from {listed} with {seeds} seeds{more}"


def _unit(headline: Headline) -> str:
    return f" {headline.unit}" if headline.unit else ""


def _over(seeds: int) -> str:
    return f" over {seeds} seeds" if seeds > 1 else ""


def coinciding(runs: Sequence[Run]) -> list[str]:
    """Return a sentence for each method whose first scored rounds equal another method's.

    Equal means that training loss and all metrics are the same in all common seeds.
    """
    groups = list(by_label(runs).items())
    said = []
    for number, (label, members) in enumerate(groups):
        longest = 0
        sentence = ""
        for other, theirs in groups[:number]:
            until, always = _equal_until(members, theirs)
            if until > longest:
                longest = until
                when = "in every round" if always else f"until round {until}"
                sentence = f"{label} equals {other} {when}."
        if sentence:
            said.append(sentence)
    return said


def _equal_until(ours: Sequence[Run], theirs: Sequence[Run]) -> tuple[int, bool]:
    """Return the last scored round before the first difference; whether there is none."""
    partners = {run.seed: run for run in theirs}
    pairs = [(run, partners[run.seed]) for run in ours if run.seed in partners]
    lengths = {len(run.records) for pair in pairs for run in pair}
    if not pairs:
        return 0, False
    until = 0
    for number in range(min(lengths)):
        for a, b in pairs:
            mine = a.records[number]
            yours = b.records[number]
            if mine.metrics != yours.metrics or mine.train_loss != yours.train_loss:
                return until, False
        if any(value is not None for value in pairs[0][0].records[number].metrics.values()):
            until = number + 1
    return until, len(lengths) == 1
