"""Which methods the seeds tell apart, after Holm's correction, and mean ranks."""

import numpy as np
import pytest
from scipy import stats

from fedbasin.core.record import Headline, RoundRecord
from fedbasin.report.runs import Run
from fedbasin.report.table import differences, mean_ranks
from fedbasin.report.verdict import verdict


def runs_of(scores, name="accuracy"):
    """One run a score; scores by method, a seed each."""
    return [
        Run(
            method, seed, (RoundRecord(round=1, metrics={name: score}),),
            seconds=1.0, status="finished", method=method,
        )
        for method, own in scores.items()
        for seed, score in enumerate(own)
    ]  # fmt: skip


CLOSE = {
    "fedavg": [0.60, 0.61, 0.62, 0.60, 0.62],
    "scaffold": [0.80, 0.80, 0.83, 0.81, 0.82],
    "fedacg": [0.81, 0.79, 0.82, 0.82, 0.81],
    "fedprox": [0.605, 0.605, 0.615, 0.61, 0.62],
}


def test_it_names_the_best_its_lead_and_who_cannot_be_told_apart():
    gap = np.array(CLOSE["scaffold"]) - np.array(CLOSE["fedavg"])
    low, high = stats.ttest_1samp(100 * gap, 0).confidence_interval()
    said = verdict(runs_of(CLOSE))
    assert said == (
        f"Highest mean accuracy: scaffold, {100 * gap.mean():+.2f} points [{low:+.2f}, {high:+.2f}]"
        " against fedavg over 5 seeds. Not distinguishable from fedacg with 5 seeds: run 10."
    )
    assert "against fedprox" in verdict(runs_of(CLOSE), "fedprox")


def test_who_is_told_apart_is_decided_after_holms_correction():
    rng = np.random.default_rng(3)
    noise = rng.normal(size=(12, 6))
    scores = {f"m{i:02d}": list(0.5 + 0.01 * i + 0.02 * noise[i]) for i in range(12)}
    said = verdict(runs_of(scores), "m00")
    best = max(scores, key=lambda name: np.mean(scores[name]))
    others = [name for name in scores if name != best]
    raw = {n: stats.ttest_rel(scores[n], scores[best]).pvalue for n in others}
    ordered = sorted(others, key=raw.get)
    holm = np.maximum.accumulate([(11 - k) * raw[n] for k, n in enumerate(ordered)])
    close = {n for n, p in zip(ordered, holm, strict=True) if p >= 0.05}
    assert {n for n in others if raw[n] >= 0.05} < close  # the correction decides some of them
    gaps = differences(runs_of(scores), best)
    assert {n for n in others if gaps[n].holm >= 0.05} == close
    named = {name for name in others if name in said.partition("Not distinguishable")[2]}
    assert named <= close and f"{len(close) - len(named)} other" in said


def test_less_is_better_where_the_headline_says_so(monkeypatch):
    errors = {"fedavg": [2.0, 2.1, 2.2], "ima": [1.0, 1.2, 1.1]}
    headline = Headline("rmse", False, "")
    for room in ("verdict", "table"):
        monkeypatch.setattr(f"fedbasin.report.{room}.headline_of_runs", lambda _: headline)
    said = verdict(runs_of(errors, "rmse"))
    assert said.startswith("Lowest mean rmse: ima, -1.0000 [-")
    assert mean_ranks(runs_of(errors, "rmse")) == {"fedavg": 2.0, "ima": 1.0}


def test_ranks_are_means_over_common_seeds_and_ties_share():
    scores = {"a": [0.9, 0.5, 0.7], "b": [0.8, 0.5, 0.9], "c": [0.1, 0.2]}
    assert mean_ranks(runs_of(scores)) == pytest.approx({"a": 1.25, "b": 1.75, "c": 3.0})
