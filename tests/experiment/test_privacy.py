"""The noise for a wanted epsilon: what a run is given, and what its record then says."""

import json
from dataclasses import replace

import pytest

import fedbasin as fb
from fedbasin.core.method import Sampling
from fedbasin.experiment import from_mapping, run
from fedbasin.experiment.privacy import calibrated, calibrated_methods, guarantee_text
from fedbasin.methods.parts import accounting

needs_accountant = pytest.mark.skipif(
    not accounting.installed(), reason="needs the extra fedbasin[dp]"
)
UNIFORM = "fedavg(weighting='uniform')"


def experiment(method=f"dp({UNIFORM})", who="poisson(rate=0.2)", clients=30, rounds=3):
    return from_mapping(
        {
            "method": method,
            "rounds": rounds,
            "data": {"name": "digits"},
            "partition": {"how": "iid", "clients": clients},
            "local": {"steps": 1},
            "sim": {"participation": who, "device": "cpu"},
        }
    )


@needs_accountant
@pytest.mark.parametrize("source", ["dp({})", "wima(dp(fedavgm({})))"])
def test_a_run_costs_what_was_asked_for_and_no_more(source, tmp_path):
    made = calibrated(experiment(source.format(UNIFORM)), 2.0, 1e-3)
    assert "delta=0.001" in made.method
    run(made, tmp_path / "run")
    rows = [json.loads(row) for row in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    spent = [row["note_epsilon"] for row in rows]
    assert spent == sorted(spent) and spent[0] < spent[-1]
    assert spent[-1] == pytest.approx(2.0, rel=2e-3) and spent[-1] <= 2.0


@needs_accountant
def test_the_noise_follows_the_draw():
    def noise(**settings):
        text = calibrated(experiment(**settings), 8.0, 1e-3).method
        return float(text.split("noise=")[1].split(",")[0].rstrip(")"))

    hidden = noise()
    assert noise(who="count(clients=6)") > hidden  # replaced, not left out
    assert noise(who="fraction(rate=1.0)") > hidden  # not hidden at all
    ours = accounting.noise_for(8.0, 3, 1e-3, Sampling("other", 30.0, 30))
    assert noise(who="fraction(rate=1.0)") == pytest.approx(ours, abs=1e-3)
    by_clients = noise(method=f"dp({UNIFORM}, noise_by='clients')")
    assert by_clients == pytest.approx(ours, abs=1e-3)


def test_what_makes_no_sense_is_refused_with_the_setting():
    with pytest.raises(ValueError, match="adds no noise; write method"):
        calibrated(experiment("fedavg"), 8.0, None)
    with pytest.raises(ValueError, match="epsilon must be above 0"):
        calibrated(experiment(), 0.0, None)
    natural = experiment()
    natural = replace(natural, partition=replace(natural.partition, how="natural", clients=0))
    with pytest.raises(ValueError, match=r"set partition\.clients"):
        calibrated(natural, 8.0, None)


def test_delta_alone_keeps_the_noise():
    made = calibrated(experiment(f"dp({UNIFORM}, noise=0.7)"), None, 1e-4)
    assert "noise=0.7" in made.method and "delta=0.0001" in made.method


@needs_accountant
def test_every_private_method_of_a_comparison_gets_its_noise(tmp_path):
    base = experiment("fedavg")
    plain = f"dp({UNIFORM}, clip=0.5)"
    secret = f"ima(dp({UNIFORM}, noise_by='clients'))"
    found = fb.compare(base, ["fedavg", plain, secret], (0,), tmp_path, epsilon=2.0, delta=1e-3)
    for result, source in zip(found, ("fedavg", plain, secret), strict=True):
        alone = source
        if "dp" in source:
            alone = calibrated(replace(base, method=source), 2.0, 1e-3).method
        assert result.summary["method"] == fb.text(fb.parse(alone, "method"))
    assert found[1].records[-1].notes["epsilon"] == pytest.approx(2.0, rel=2e-3)


@needs_accountant
def test_one_run_from_python_costs_what_was_asked_for(tmp_path):
    found = fb.run(experiment(), tmp_path / "run", epsilon=2.0, delta=1e-3)
    assert found.records[-1].notes["epsilon"] == pytest.approx(2.0, rel=2e-3)


@needs_accountant
@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_the_summary_and_the_command_line_say_which_accountant_spoke(accountant, tmp_path):
    source = f"wima(dp({UNIFORM}, accountant='{accountant}'))"
    found = fb.run(experiment(source), tmp_path / "run", epsilon=2.0, delta=1e-3)
    assert (found.summary["accountant"], found.summary["delta"]) == (accountant, 1e-3)
    drawn = Sampling("poisson", 6.0, 30)
    noise = found.summary["method"].split("noise=")[1].split(",")[0].rstrip(")")
    said = accounting.epsilon(float(noise), 3, 1e-3, drawn, accountant)
    assert found.records[-1].notes["epsilon"] == said == pytest.approx(2.0, rel=2e-3)
    assert (
        guarantee_text([source, "fedavg"])
        == f"epsilon by the accountant {accountant} at delta 1e-05"
    )


def test_without_a_guarantee_the_summary_names_no_accountant(tmp_path):
    for method in ("fedavg", f"dp({UNIFORM}, noise=0.0)"):
        found = fb.run(experiment(method, rounds=1), tmp_path / fb.text(fb.parse(method))[:4])
        assert "accountant" not in found.summary


def test_a_comparison_without_private_methods_has_no_epsilon():
    with pytest.raises(ValueError, match="none of the methods adds noise"):
        calibrated_methods(experiment(), ["fedavg", "median"], 8.0, None)
    assert calibrated_methods(experiment(), ["fedavg"], None, None) == ["fedavg"]
