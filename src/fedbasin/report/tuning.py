"""How much tuning a method needs, and which of its arguments matter, from the settings tried."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedbasin.core.figure_data import Analysis, Line, Lines, Panel, Table
from fedbasin.core.record import Headline


@dataclass(frozen=True)
class Tried:
    """One setting of a method: the value of each argument, and its validation score."""

    number: int
    values: Mapping[str, Any]
    score: float | None  # None where a run diverged
    rounds: int
    chosen: bool = False


def expected_best(scores: Sequence[float | None], *, higher_is_better: bool) -> list[float]:
    """Return the expected best score of 1, 2, ... settings drawn from those that were tried.

    Draws are without replacement, so the last number is the best score of all. With the scores
    in ascending order v_1 <= ... <= v_n,

        E[max of b] = sum_i v_i C(i - 1, b - 1) / C(n, b)

    (Dodge et al., EMNLP 2019, draw with replacement). A setting that diverged counts as the worst
    score that is known. Empty where no setting has a score.

    >>> [round(best, 2) for best in expected_best([1.0, 2.0, 4.0], higher_is_better=True)]
    [2.33, 3.33, 4.0]
    """
    known = [score for score in scores if score is not None]
    if not known:
        return []
    sign = 1.0 if higher_is_better else -1.0
    worst = min(sign * score for score in known)
    ordered = sorted(worst if score is None else sign * score for score in scores)
    count = len(ordered)
    best = []
    for drawn in range(1, count + 1):
        ways = math.comb(count, drawn)
        mean = sum(v * math.comb(i, drawn - 1) / ways for i, v in enumerate(ordered))
        best.append(sign * mean)
    return best


def influence(tried: Sequence[Tried], argument: str) -> float | None:
    """Return Spearman's rank correlation of an argument with the score, in [-1, 1].

    None for texts, and where fewer than three settings have a score or all are alike.
    """
    pairs = [(one.values[argument], one.score) for one in tried if one.score is not None]
    numbers = [(v, s) for v, s in pairs if isinstance(v, int | float)]
    if len(numbers) < 3 or len(numbers) < len(pairs):
        return None
    if len({v for v, _ in numbers}) < 2 or len({s for _, s in numbers}) < 2:
        return None
    from scipy import stats  # slow to import, and needed only here

    values, scores = zip(*numbers, strict=True)
    return float(stats.spearmanr(values, scores).statistic)


def tuning_analysis(
    tried: Mapping[str, Sequence[Tried]], headline: Headline, logarithmic: Mapping[str, bool]
) -> Analysis:
    """Return what a page shows about tuning.

    Args:
        tried: the settings that each method tried.
        headline: the metric that settings are chosen by.
        logarithmic: for each argument, whether its range is on a log scale.
    """
    label = f"validation {headline.title}"
    panels: list[Panel] = [_chosen_table(tried, headline)]
    curves = []
    for method, own in tried.items():
        best = expected_best([one.score for one in own], higher_is_better=headline.higher_is_better)
        if best:
            y = tuple(headline.scale * value for value in best)
            curves.append(Line(method, tuple(float(n + 1) for n in range(len(y))), y))
    if curves:
        title = "Expected best validation score against budget"
        panels.append(Lines(title, "settings tried", label, tuple(curves)))
    for method, own in tried.items():
        panels += _sensitivity(method, own, headline, logarithmic)
    return Analysis(
        name="tuning",
        title="How settings were chosen",
        source="",
        runs=tuple(tried),
        panels=tuple(panels),
        notes=(
            "Scores are means over tuning seeds on rows held out from the clients' training data.",
            "Settings that were stopped early count with the score they had then.",
            "A setting that diverged counts as the worst known score of its method.",
        ),
    )


def _chosen_table(tried: Mapping[str, Sequence[Tried]], headline: Headline) -> Table:
    rows: list[tuple[str | float | None, ...]] = []
    for method, own in tried.items():
        best = next((one for one in own if one.chosen), None)
        failed = sum(one.score is None for one in own)
        if best is None:
            rows.append((method, "diverged for every setting", None, len(own), failed))
            continue
        said = ", ".join(f"{name} = {value}" for name, value in best.values.items())
        score = None if best.score is None else headline.scale * best.score
        rows.append((method, said or "nothing to tune", score, len(own), failed))
    columns = ("method", "chosen", f"validation {headline.title}", "settings", "diverged")
    return Table("Chosen settings", columns, tuple(rows))


def _sensitivity(
    method: str, tried: Sequence[Tried], headline: Headline, logarithmic: Mapping[str, bool]
) -> list[Lines]:
    """Return one panel for each argument that is a number: the score over its value."""
    panels = []
    scored = [one for one in tried if one.score is not None]
    for argument in scored[0].values if scored else ():
        log = logarithmic.get(argument, False)
        points = []
        for one in scored:
            value = one.values[argument]
            if isinstance(value, bool) or not isinstance(value, int | float):
                break
            if log and value <= 0:  # a default outside the range
                continue
            score = headline.scale * (one.score or 0.0)
            points.append((math.log10(value) if log else float(value), score))
        else:
            points.sort()
            line = Line(method, tuple(x for x, _ in points), tuple(y for _, y in points))
            x_label = f"log10 of {argument}" if log else argument
            title = f"{method}: {argument}"
            panels.append(Lines(title, x_label, f"validation {headline.title}", (line,)))
    return panels
