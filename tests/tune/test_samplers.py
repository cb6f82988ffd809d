"""Optuna as the sampler: the same budget, the same rules, and what it says without Optuna."""

import sys

import pytest
from tune.asking import request

from fedbasin.core.record import Headline
from fedbasin.core.space import Options, Range
from fedbasin.tuning import TuneError, tune
from fedbasin.tuning.arguments import Argument
from fedbasin.tuning.result import trial_lines, tuned_rows
from fedbasin.tuning.search import Trial

ACCURACY = Headline()


def test_without_optuna_nothing_is_trained_and_the_line_names_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(TuneError, match=r"pip install 'fedbasin\[optuna\]'"):
        tune(request(sampler="tpe"), tmp_path)
    assert not list(tmp_path.glob("tuning/*"))


def test_tpe_keeps_the_budget_and_proposes_the_same_settings_again(tmp_path):
    pytest.importorskip("optuna", reason="needs the extra optuna: pip install 'fedbasin[optuna]'")
    asked = request(sampler="tpe", budget=5, final_seeds=1)
    found = tune(asked, tmp_path / "one")
    rates = [[t.values["local.lr"] for t in found.of(m)] for m in asked.methods]
    assert [len(set(own)) for own in rates] == [5, 5]
    assert rates[0][:2] == rates[1][:2] and rates[0][0] == 0.05  # the drawn half is shared
    assert all(0.001 <= rate <= 1 for own in rates for rate in own)
    assert {row.client_rounds for row in tuned_rows(found)} == {5 * 1 * 6 * 2}
    assert trial_lines(tune(asked, tmp_path / "one")) == trial_lines(found)
    assert trial_lines(tune(asked, tmp_path / "two")) == trial_lines(found)


def test_tpe_looks_near_what_was_good_and_takes_every_kind_of_space():
    pytest.importorskip("optuna", reason="needs the extra optuna: pip install 'fedbasin[optuna]'")
    from fedbasin.tuning.tpe import propose

    arguments = [
        Argument("local.lr", ("lr",), Range(1e-4, 1.0, "log"), 0.05),
        Argument("ima.window", ("window",), Range(2, 9, "linear", whole=True), 5),
        Argument("fedlaw.learn", ("learn",), Options("both", "gamma"), "both"),
    ]
    tried = []
    for number in range(40):
        rate = 10 ** (-4 * number / 39)
        values = {"local.lr": rate, "ima.window": 2 + number % 8, "fedlaw.learn": "both"}
        score = None if rate > 0.5 else 1 - abs(rate - 0.01)  # large rates diverge
        tried.append(Trial("fedavg", number, values, 6, (score,)))
    drawn = [propose(arguments, tried, ACCURACY, seed) for seed in range(12)]
    near = sum(0.001 < values["local.lr"] < 0.1 for values in drawn)
    assert near >= 9  # by chance it would be half of 12
    assert all(isinstance(v["ima.window"], int) and 2 <= v["ima.window"] <= 9 for v in drawn)
    assert {values["fedlaw.learn"] for values in drawn} <= {"both", "gamma"}
    assert drawn[0] == propose(arguments, tried, ACCURACY, 0)
    # Where less is better, the good settings are others.
    error = Headline("rmse", False, "")
    far = [propose(arguments, tried, error, seed)["local.lr"] for seed in range(12)]
    assert sum(0.001 < rate < 0.1 for rate in far) < near
