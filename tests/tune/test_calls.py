"""Tuning from Python and on the command line: frames, files, and one line for what is wrong."""

import json

import numpy as np
import pandas
import pytest
from tune.asking import planted
from typer.testing import CliRunner

import fedbasin as fb
from fedbasin.cli import app
from fedbasin.experiment.config import ConfigError, read_experiment

SETTINGS = {
    "model": "logistic",
    "rounds": 3,
    "partition": {"how": "iid", "clients": 4},
    "local": {"lr": 0.05, "batch": 8},
    "sim": {"participation": "count(clients=2)", "executor": "loop"},
}


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    return fb.tune(
        planted(),
        ["fedavg", fb.fedprox(), "fedprox(mu=0.5)"],
        over={"local.lr": (0.001, 1.0)},
        out=tmp_path_factory.mktemp("tuned"),
        budget=3,
        tuning_seeds=2,
        final_seeds=3,
        jobs=1,
        progress=False,
        **SETTINGS,
    )


def test_frames_hold_the_table_the_settings_the_budget_and_the_sensitivity(tuned):
    table = tuned.frame.set_index("method")
    assert list(table.index) == ["fedavg", "fedprox", "fedprox(mu=0.5)"]
    assert (table.settings == 3).all() and (table.seeds == 3).all()
    assert np.isnan(table.difference["fedavg"])
    for method in ("fedprox", "fedprox(mu=0.5)"):
        lead = table.score[method] - table.score["fedavg"]
        assert table.difference[method] == pytest.approx(lead)
    trials = tuned.trials
    assert len(trials) == 9 and trials.groupby("method").chosen.sum().eq(1).all()
    means = trials.scores.map(np.mean)
    assert np.allclose(trials.score, means)
    assert trials.groupby("method").score.max().to_dict() == pytest.approx(
        table.validation.to_dict()
    )
    budget = tuned.budget
    last = budget[budget.settings == 3].set_index("method").expected_best
    assert last.to_dict() == pytest.approx(table.validation.to_dict())
    assert budget.groupby("method").expected_best.apply(lambda v: v.is_monotonic_increasing).all()
    panels = tuned.sensitivity.groupby(["method", "argument"]).size()
    assert panels.to_dict() == {
        ("fedavg", "local.lr"): 3,
        ("fedprox", "local.lr"): 3,
        ("fedprox", "fedprox.mu"): 3,
        ("fedprox(mu=0.5)", "local.lr"): 3,  # an argument that is written keeps its value
    }
    own = trials[trials.method == "fedprox"]
    rho = own["fedprox.mu"].corr(own.score, method="spearman")
    found = tuned.sensitivity.set_index(["method", "argument"]).spearman
    assert found["fedprox", "fedprox.mu"].iloc[0] == pytest.approx(rho)


def test_files_hold_the_same_and_chosen_settings_are_runs(tuned):
    lines = (tuned.path / "table.jsonl").read_text().splitlines()
    assert [json.loads(line)["score"] for line in lines] == list(tuned.frame.score)
    assert len((tuned.path / "trials.jsonl").read_text().splitlines()) == 9
    for method, experiment in tuned.chosen.items():
        assert experiment.sim.score_on == "test"
        rate = tuned.frame.set_index("method").chosen[method]["local.lr"]
        assert experiment.local.lr == rate
    files = sorted(tuned.path.glob("chosen/*.toml"))
    assert sorted(read_experiment(f).method for f in files) == sorted(
        e.method for e in tuned.chosen.values()
    )
    assert tuned.verdict in repr(tuned) and "over fedavg" in repr(tuned)
    assert isinstance(tuned.frame, pandas.DataFrame)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"methods": "fedavg"}, r"methods=\['fedavg', 'scaffold'\]"),
        ({"methods": fb.fedprox()}, r"methods is FedProx\(.*give a list, such as methods=\["),
        ({"budget": 2.5}, r"^budget is 2\.5, it must be a whole number"),
        ({"tuning_seeds": "2"}, r"^tuning_seeds is '2', it must be a whole number"),
        ({"final_seeds": True}, r"^final_seeds is True, it must be a whole number"),
        ({"validation": "0.2"}, r"^validation is '0\.2', it must be a number"),
        ({"sampler": "random"}, r"^sampler is 'random', it must be 'sobol' or 'tpe'"),
        ({"seed": 1.5}, r"^seed is 1\.5, it must be a whole number"),
        ({"jobs": "2"}, r"^jobs is '2', it must be a whole number"),
        ({"rounds": 2.5}, r"^rounds is 2\.5, it must be a whole number"),
        ({"over": "local.lr"}, r"over is 'local\.lr': give a mapping, as \{'local\.lr': \("),
        ({"out": 3}, r"^out is 3, it must be a path"),
        ({"method": "fedavg"}, r"takes methods=\[...\]"),
        ({"over": {"local.lr": 0.1}}, r"give \(low, high\)"),
        ({"over": {"local.lr": (1.0, 0.1)}}, "reversed"),
        ({"over": {"local.lr": []}}, "nothing to choose from"),
        ({"over": {"fedprox.nu": (0.1, 1.0)}, "methods": ["fedprox"]}, "no argument 'nu'"),
        ({"budget": 0}, "budget must be at least 1"),
        ({"jobs": 0}, "jobs must be at least 1"),
        ({"on": "moon"}, "on is 'moon', it must be 'here' or 'ray'"),
        ({"methods": ["fedprox", fb.fedprox(mu=0.01)]}, "listed twice"),
    ],
)
def test_bad_input_from_python_is_one_line(options, says, tmp_path):
    with pytest.raises(ConfigError, match=says) as error:
        fb.tune(planted(), **({"out": tmp_path / "t", "progress": False} | SETTINGS | options))
    assert "\n" not in str(error.value)
    assert not list(tmp_path.glob("t/tuning/*"))


def test_the_command_prints_table_verdict_and_places(tmp_path):
    command = ["tune", "fedavg", "fedprox", "--preset", "demo", "--rounds", "1", "--budget", "2"]
    command += ["--tuning-seeds", "1", "--final-seeds", "2", "--over", "local.lr=0.01..1"]
    command += ["--set", "partition.clients=10", "--jobs", "1", "--out", str(tmp_path / "t")]
    done = CliRunner().invoke(app, command, env={"COLUMNS": "200"}, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "2 methods, settings of each: 2 to round 1; 1 tuning seeds, 2 final seeds" in done.output
    for part in ("over fedavg", "mean accuracy", "chosen settings:", "page:", "records:"):
        assert part in done.output
    page = (tmp_path / "t" / "report.html").read_text()
    assert "How settings were chosen" in page


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--over", "local.lr=1..0.1"], "reversed"),
        (["--over", "local.lr=0.1..0.1"], "empty"),
        (["--over", "fedavg.mu=0.1..1"], "no argument 'mu'"),
        (["--budget", "0"], "budget must be at least 1, got 0"),
        (["fedavg"], "the method fedavg is listed twice"),
    ],
)
def test_bad_input_on_the_command_line_is_one_line(words, says, tmp_path):
    command = ["tune", "fedavg", *words, "--preset", "demo", "--out", str(tmp_path / "t")]
    done = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert done.exit_code != 0 and says in f"{done.output}{done.exception}"
    assert not (tmp_path / "t").exists()
