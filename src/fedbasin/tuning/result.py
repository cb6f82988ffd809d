"""What a tuned comparison shows: the table with tests, the verdict, how settings were chosen."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedbasin.core.figure_data import Analysis
from fedbasin.core.record import RunFolder, write_atomically
from fedbasin.core.space import Range
from fedbasin.report.page import write_page
from fedbasin.report.paired import Difference
from fedbasin.report.runs import Run, read_runs
from fedbasin.report.table import Row, differences, mean_ranks, summarise
from fedbasin.report.tuning import Tried, expected_best, influence, tuning_analysis
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
    tried = {
        method: [
            Tried(t.number, t.values, t.score, t.rounds, t == outcome.chosen.get(method))
            for t in outcome.of(method)
        ]
        for method in outcome.request.methods
    }
    logarithmic = {
        argument.name: isinstance(argument.space, Range) and argument.space.scale == "log"
        for method in outcome.request.methods
        for argument in outcome.request.arguments(method)
    }
    return tuning_analysis(tried, outcome.headline, logarithmic)


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
        scores = [trial.score for trial in outcome.of(method)]
        best = expected_best(scores, higher_is_better=outcome.headline.higher_is_better)
        for place, value in enumerate(best, start=1):
            lines.append({"method": method, "settings": place, "expected_best": value})
    return lines


def sensitivity_lines(outcome: Outcome) -> list[dict[str, Any]]:
    """Return each value of each argument with its score, and the argument's rank correlation."""
    lines = []
    for method in outcome.request.methods:
        own = outcome.of(method)
        tried = [Tried(t.number, t.values, t.score, t.rounds) for t in own]
        for name in own[0].values:
            rho = influence(tried, name)
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
