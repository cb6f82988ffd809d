"""Bad input of tasks: a clear error before training, or a value that is defined and recorded."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from experiment.real_tasks import CASES, experiment
from torch import nn

from fedbasin import run
from fedbasin.analyze import AnalysisError, find
from fedbasin.core.record import Headline, RoundRecord, mean_of_last, scores_of
from fedbasin.data import Dataset, Rows, load
from fedbasin.experiment import ConfigError, Experiment, build
from fedbasin.experiment.config import DataConfig, PartitionConfig, SnapshotConfig
from fedbasin.experiment.subjects import open_subject
from fedbasin.report.page import render
from fedbasin.report.runs import read_runs
from fedbasin.report.table import cells, summarise
from fedbasin.sim.rounds import Diverged

RNG = np.random.default_rng(3)
INPUTS = RNG.normal(size=(90, 4)).astype(np.float32)
YES = (INPUTS[:, 0] > 0).astype(np.int64)


def table(targets, classes=()):
    rows = Rows(INPUTS, targets)
    return Dataset("mine", "table", rows.take(slice(0, 60)), rows.take(slice(60, 90)), classes)


def settings(task, method="fedavg", **changes):
    base = replace(experiment("regression", method, 3), task=task)
    return replace(base, partition=PartitionConfig(how="iid", clients=4), **changes)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_none_are_refused_with_their_row(value):
    inputs = INPUTS.copy()
    inputs[7, 2] = value
    with pytest.raises(ValueError, match=r"inputs.*row 7"):
        Rows(inputs, YES)
    targets = INPUTS[:, 0].copy()
    targets[5] = value
    with pytest.raises(ValueError, match=r"labels.*row 5"):
        Rows(INPUTS, targets)


NUMBERS = INPUTS[:, 0]
PAIRS = np.abs(INPUTS[:, :2])


@pytest.mark.parametrize(
    ("task", "targets", "classes", "words"),
    [
        ("classification", NUMBERS, (), r"whole number.*numbers; write task = 'regression'"),
        ("binary", NUMBERS, (), r"targets 0 and 1.*write task = 'regression'"),
        ("binary", YES + YES, ("a", "b", "c"), r"0 and 1.*3 classes; write task = 'classific"),
        ("survival", NUMBERS, (), "two columns, time and event.*write task = 'regression'"),
        ("multilabel", NUMBERS, (), "several columns of 0 and 1.*write task = 'regression'"),
        ("tokens(vocabulary=9)", PAIRS, (), "whole numbers at several positions"),
        ("survival", -PAIRS, (), r"times of at least 0 in the first column, got -\d"),
        ("survival", PAIRS, (), r"events in the second column that are 0 or 1, got \d"),
        ("multilabel", PAIRS, (), r"labels that are 0 or 1, got \d"),
        ("multilabel", np.stack([YES, 2 * YES], 1), (), r"labels that are 0 or 1, got 2"),
        ("tokens(vocabulary=2)", np.stack([YES, 4 * YES], 1), (), "set vocabulary to at least 5"),
    ],
)
def test_targets_of_another_kind_are_refused(task, targets, classes, words):
    with pytest.raises(ConfigError, match=f"task: .*{words}"):
        build(settings(task), data=table(targets, classes))


def test_a_class_that_never_occurs_in_training_is_scored_and_does_no_harm(tmp_path):
    labels = YES.copy()
    labels[60:70] = 2  # in the test rows alone
    summary = run(
        settings("classification"), tmp_path / "r", data=table(labels, ("no", "yes", "rare"))
    )
    assert summary["status"] == "finished"
    assert 0 <= summary["accuracy_per_class"][2] < 0.5
    absent = run(
        settings("classification"), tmp_path / "a", data=table(YES, ("no", "yes", "never"))
    )
    assert absent["accuracy_per_class"][2] is None or math.isnan(absent["accuracy_per_class"][2])
    assert json.loads((tmp_path / "a/summary.json").read_text())["accuracy_per_class"][2] is None


def test_auroc_of_one_class_is_null_and_a_dash(tmp_path):
    labels = YES.copy()
    labels[60:] = 1
    out = tmp_path / "r"
    summary = run(settings("binary"), out, data=table(labels, ("no", "yes")))
    lines = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    assert [line["auroc"] for line in lines] == [None] * 3
    assert all(line["accuracy"] is not None for line in lines)
    assert summary["auroc_last"] is None and summary["auroc_mean_last10"] is None
    assert summary["status"] == "finished"
    assert json.loads((out / "summary.json").read_text())["auroc_mean_last10"] is None
    runs = read_runs([out])
    (row,) = summarise(runs, None)
    assert cells(row, Headline("auroc", unit=""))[1] == "-"
    page = render(runs, target=None, baseline="")
    assert '<td class="n">-</td>' in page and ">nan<" not in page.lower()


def test_what_is_undefined_is_left_out_of_means_before_and_after_it_is_written():
    records = [
        RoundRecord(round=i + 1, metrics={"auroc": value, "loss": 1.0})
        for i, value in enumerate([0.5, math.nan, 0.7, math.nan])
    ]
    read = [RoundRecord.read(record.line()) for record in records]
    for rounds in (records, read):
        assert mean_of_last(rounds, metric="auroc") == pytest.approx(0.6)
        assert scores_of(rounds, Headline("auroc"))["auroc_last"] == 0.7
    assert Headline("auroc").shown(records[1].metric("auroc")) == "-"


def test_a_client_of_one_class_is_scored_apart_as_undefined():
    labels = YES.copy()
    made = build(settings("binary"), data=table(labels, ("no", "yes")))
    test = made.evaluator
    found = test.scores_by(made.net.initial()[0], test.labels, 3)  # by class; group 2 is empty
    assert found["auroc"].isnan().all()
    assert found["accuracy"][:2].isfinite().all() and found["accuracy"][2].isnan()


def test_clients_without_an_event_do_no_harm(tmp_path):
    """Their loss is 0 and has no slope; without any event nothing moves and C is undefined."""
    event = np.zeros(90, np.float32)
    none = table(np.stack([np.exp(NUMBERS), event], 1))
    summary = run(settings("survival"), tmp_path / "none", data=none)
    assert summary["status"] == "finished" and summary["c_index_last"] is None
    lines = (tmp_path / "none/rounds.jsonl").read_text().splitlines()
    assert all(json.loads(line)["update_norm"] == 0 for line in lines)
    event[:5] = 1
    event[60:80] = 1
    few = table(np.stack([np.exp(NUMBERS), event], 1))
    summary = run(settings("survival"), tmp_path / "few", data=few)
    assert summary["status"] == "finished" and 0 <= summary["c_index_last"] <= 1


def wide(shape, outputs):
    """A network that pays no heed to what it is told."""
    return nn.Linear(shape[0], 5)


def flat(shape, outputs):
    return nn.Sequential(nn.Linear(shape[0], 1), nn.Flatten(0))


@pytest.mark.parametrize("task", ["binary", "regression", "classification"])
def test_a_head_of_the_wrong_size_is_refused_before_training(task):
    model = "custom(path='experiment.test_bad_input:wide')"
    data = table(NUMBERS) if task == "regression" else table(YES, ("no", "yes"))
    needed = 2 if task == "classification" else 1
    words = rf"model: {model.replace('(', '.').replace(')', '.')} gives 5 outputs a row, and the "
    with pytest.raises(ConfigError, match=rf"{words}task {task} needs {needed} on this data"):
        build(settings(task, model=model), data=data)


def test_a_network_without_an_axis_of_outputs_is_refused():
    model = "custom(path='experiment.test_bad_input:flat')"
    with pytest.raises(ConfigError, match="gives one number without an axis a row"):
        build(settings("regression", model=model), data=table(NUMBERS))


@pytest.mark.parametrize("method", ["fedfa", "creff", "fedgen", "balancefl"])
def test_methods_on_features_refuse_a_network_that_shows_none(method):
    model = "custom(path='experiment.test_bad_input:plain')"
    data = table(YES, ("no", "yes"))
    with pytest.raises(ConfigError, match=rf"model: {method}.* works on features, and custom.*mlp"):
        build(settings("classification", method, model=model), data=data)
    build(settings("classification", "balancefl(noise=False)", model=model), data=data)
    build(settings("classification", method), data=data)


def plain(shape, outputs):
    return nn.Linear(shape[0], outputs)


@pytest.mark.parametrize("name", [name for name in CASES if name != "classification"])
def test_a_model_that_puts_out_no_numbers_has_undefined_scores(name):
    """Its weights are finite, its outputs overflow: the run goes on, and the record says null."""
    made = build(experiment(name), data=CASES[name].data())
    found = made.evaluator.score(made.net.initial()[0] * 1e300)
    headline = made.evaluator.headline.name
    assert headline in found and set(found) == {m.name for m in made.evaluator.metrics}
    assert RoundRecord(round=1, metrics=found).metric(headline) is None


def test_a_run_that_diverges_keeps_its_records(tmp_path):
    wild = settings("regression", model="custom(path='experiment.test_bad_input:plain')")
    wild = replace(wild, local=replace(wild.local, lr=1e40), rounds=20)
    out = tmp_path / "r"
    with pytest.raises(Diverged, match=r"round \d: .*client.*the records up to there are in"):
        run(wild, out, data=table(NUMBERS))
    summary = json.loads((out / "summary.json").read_text())
    assert summary["status"] == "diverged" and "client" in summary["reason"]
    lines = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    assert 2 <= len(lines) == summary["rounds"] < 20
    assert lines[0]["rmse"] > 1e30 and lines[0]["r2"] < 0
    assert cells(*summarise(read_runs([out]), None), Headline("rmse", False, ""))[1]


CLASSY = ["decomposition", "averaging", "cka", "pearson", "neurons", "classes", "collapse"]


def test_analyses_of_classes_refuse_other_tasks(tmp_path):
    kept = replace(
        experiment("regression", "fedlaw", 2), snapshots=SnapshotConfig(every=1, clients=True)
    )
    assert isinstance(kept, Experiment) and isinstance(kept.data, DataConfig)
    run(kept, tmp_path / "r")
    subject = open_subject(tmp_path / "r")
    for name in CLASSY:
        with pytest.raises(
            AnalysisError, match=rf"{name} needs .*task regression; analyses for it: "
        ):
            find(name)([subject])
    for name in ("line", "locality", "curves", "hessian", "rescaling", "shrinking"):
        find(name)([subject])
    assert load("diabetes").classes == () and CASES["regression"]
