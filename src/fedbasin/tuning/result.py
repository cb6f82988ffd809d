"""What a tuned comparison shows: the table with tests, the verdict, how settings were chosen.

And how much tuning a method needs, and which of its arguments matter, from the settings tried.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedbasin.core.figure_data import Analysis, Line, Lines, Panel, Table
from fedbasin.core.record import Headline, RunFolder, write_atomically
from fedbasin.core.space import Range
from fedbasin.report.page import write_page
from fedbasin.report.paired import Difference
from fedbasin.report.runs import Run, read_runs
from fedbasin.report.table import Row, differences, mean_ranks, summarise
from fedbasin.report.verdict import verdict
from fedbasin.tuning.search import Outcome, Trial


@dataclass(frozen=True)
class TunedRow:
    """One tuned method.

    Args:
        method: the method, as it was asked for.
        row: its final runs: mean and spread over seeds on test rows; None where all its settings
            diverged.
        trial: its chosen setting.
        difference: to the baseline, seed by seed; None for the baseline itself.
        rank: mean rank over the final seeds; 1 is best.
        settings: settings tried.
        failed: settings with a run that diverged.
        client_rounds: trainings of a client that tuning cost.
    """

    method: str
    row: Row | None
    trial: Trial | None
    difference: Difference | None
    rank: float | None
    settings: int
    failed: int
    client_rounds: int


def final_runs(outcome: Outcome) -> list[Run]:
    """Read the final runs; each goes by the name of the method that was asked for."""
    runs = []
    for method, paths in outcome.final.items():
        runs += [replace(run, label=method, method=method) for run in read_runs(paths)]
    return runs


def tuned_rows(outcome: Outcome) -> list[TunedRow]:
    """Return one row a method, in the order they were asked for."""
    runs = final_runs(outcome)
    by_method = {row.method: row for row in summarise(runs, None)} if runs else {}
    gaps = differences(runs, outcome.request.baseline) if runs else {}
    ranks = mean_ranks(runs) if runs else {}
    rows = []
    for method in outcome.request.methods:
        tried = outcome.of(method)
        rows.append(
            TunedRow(
                method=method,
                row=by_method.get(method),
                trial=outcome.chosen.get(method),
                difference=gaps.get(method),
                rank=ranks.get(method),
                settings=len(tried),
                failed=sum(trial.score is None for trial in tried),
                client_rounds=_client_rounds(outcome, method),
            )
        )
    return rows


def _client_rounds(outcome: Outcome, method: str) -> int:
    """Count the replies of clients in a method's tuning runs."""
    total = 0
    for trial in outcome.of(method):
        for path in tuning_paths(outcome, trial):
            total += sum(record.replies for record in RunFolder(path).read_rounds())
    return total


def tuning_paths(outcome: Outcome, trial: Trial) -> list[Path]:
    """Return the folders of a setting's tuning runs."""
    request = outcome.request
    values = tuple(trial.values.values())
    return [
        request.tuning_cell(outcome.out, trial.method, trial.number, values, seed).path
        for seed in range(request.tuning_seeds)
    ]


def verdict_of(outcome: Outcome) -> str:
    """Say which tuned method is best, and which methods have no setting that works."""
    runs = final_runs(outcome)
    said = (
        verdict(runs, outcome.request.baseline) if runs else "No method has a setting that works."
    )
    if outcome.diverged and runs:
        said += f" Diverged for every setting: {', '.join(outcome.diverged)}."
    return said


def analysis_of(outcome: Outcome) -> Analysis:
    """Return how settings were chosen, for the page."""
    headline = outcome.headline
    logarithmic = {
        argument.name: isinstance(argument.space, Range) and argument.space.scale == "log"
        for method in outcome.request.methods
        for argument in outcome.request.arguments(method)
    }
    panels: list[Panel] = [_chosen_table(outcome)]
    curves = []
    for method in outcome.request.methods:
        best = _best_by_budget(outcome, method)
        if best:
            y = tuple(headline.scale * value for value in best)
            curves.append(Line(method, tuple(float(n + 1) for n in range(len(y))), y))
    if curves:
        title = "Expected best validation score against budget"
        label = f"validation {headline.title}"
        panels.append(Lines(title, "settings tried", label, tuple(curves)))
    for method in outcome.request.methods:
        panels += _sensitivity(method, outcome.of(method), headline, logarithmic)
    return Analysis(
        name="tuning",
        title="How settings were chosen",
        source="",
        runs=outcome.request.methods,
        panels=tuple(panels),
        notes=(
            "Scores are means over tuning seeds on rows held out from the clients' training data.",
            "Settings that were stopped early count with the score they had then.",
            "A setting that diverged counts as the worst known score of its method.",
        ),
    )


def _best_by_budget(outcome: Outcome, method: str) -> list[float]:
    """Return the expected best score of 1, 2, ... settings of a method."""
    scores = [trial.score for trial in outcome.of(method)]
    return expected_best(scores, higher_is_better=outcome.headline.higher_is_better)


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


def influence(tried: Sequence[Trial], argument: str) -> float | None:
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


def _chosen_table(outcome: Outcome) -> Table:
    headline = outcome.headline
    rows: list[tuple[str | float | None, ...]] = []
    for method in outcome.request.methods:
        own = outcome.of(method)
        best = outcome.chosen.get(method)
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
    method: str, tried: Sequence[Trial], headline: Headline, logarithmic: Mapping[str, bool]
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


def write_report(outcome: Outcome, path: Path) -> Path:
    """Write the page of the final runs, with a section about tuning."""
    runs = final_runs(outcome)
    if not runs:
        raise ValueError(
            f"{outcome.out} has no final run: every method diverged for every setting; try smaller "
            "values of local.lr"
        )
    return write_page(runs, path, baseline=outcome.request.baseline, tuning=analysis_of(outcome))


def trial_lines(outcome: Outcome) -> list[dict[str, Any]]:
    """Return one line for each setting that was tried."""
    return [
        {
            "method": trial.method,
            "setting": trial.number,
            "rounds": trial.rounds,
            "score": trial.score,
            "scores": list(trial.scores),
            "chosen": trial == outcome.chosen.get(trial.method),
            **trial.values,
        }
        for trial in outcome.trials
    ]


def table_lines(outcome: Outcome) -> list[dict[str, Any]]:
    """Return one line for each method: scores, interval, p-values, rank, chosen setting."""
    lines = []
    for tuned in tuned_rows(outcome):
        row, gap, trial = tuned.row, tuned.difference, tuned.trial
        lines.append(
            {
                "method": tuned.method,
                "score": None if row is None else row.score,
                "spread": None if row is None else row.spread,
                "seeds": 0 if row is None else row.seeds,
                "difference": None if gap is None else gap.mean,
                "low": None if gap is None else gap.low,
                "high": None if gap is None else gap.high,
                "p": None if gap is None else gap.p,
                "p_holm": None if gap is None else gap.holm,
                "rank": tuned.rank,
                "validation": None if trial is None else trial.score,
                "settings": tuned.settings,
                "diverged": tuned.failed,
                "client_rounds": tuned.client_rounds,
                "chosen": None if trial is None else dict(trial.values),
            }
        )
    return lines


def budget_lines(outcome: Outcome) -> list[dict[str, Any]]:
    """Return the expected best validation score of each method by the number of settings."""
    lines = []
    for method in outcome.request.methods:
        for place, value in enumerate(_best_by_budget(outcome, method), start=1):
            lines.append({"method": method, "settings": place, "expected_best": value})
    return lines


def sensitivity_lines(outcome: Outcome) -> list[dict[str, Any]]:
    """Return each value of each argument with its score, and the argument's rank correlation."""
    lines = []
    for method in outcome.request.methods:
        own = outcome.of(method)
        for name in own[0].values:
            rho = influence(own, name)
            for trial in own:
                lines.append(
                    {
                        "method": method,
                        "argument": name,
                        "value": trial.values[name],
                        "score": trial.score,
                        "spearman": rho,
                    }
                )
    return lines


def write_files(outcome: Outcome) -> None:
    """Write the settings tried and the table as lines of JSON, and the analysis."""
    for name, lines in (("trials", trial_lines(outcome)), ("table", table_lines(outcome))):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        write_atomically(outcome.out / f"{name}.jsonl", text)
    write_atomically(outcome.out / "tuning.json", analysis_of(outcome).to_json())
