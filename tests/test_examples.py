"""The examples run as written, and the one by hand agrees with the library."""

import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedbasin.core.catalogue import CATALOGUE
from fedbasin.core.evaluator import Evaluator
from fedbasin.core.expressions import parse
from fedbasin.core.method import Context, Plan
from fedbasin.core.net import Net
from fedbasin.core.rng import root
from fedbasin.core.task import Classification
from fedbasin.local import SGD, Trainer
from fedbasin.methods import FedAvg
from fedbasin.sim import Federation, LoopExecutor, Population

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_fedavg_by_hand_agrees_with_the_library(capsys):
    """Same data, split, network and settings: both learn, and end within three points."""
    hand = load("fedavg_by_hand")
    accuracy = hand.main()
    assert "round  60" in capsys.readouterr().out
    images, labels, test_images, test_labels = hand.load()
    people = Population.of(
        (images * 16).round().to(torch.uint8).numpy(),
        labels.numpy(),
        [part.numpy() for part in hand.deal(labels)],
    )

    def transform(raw, key=None):
        return raw.float() / 16

    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Net(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
    key = root(0)
    scored = Evaluator(
        net, (test_images * 16).round().to(torch.uint8), test_labels, transform, Classification()
    )
    trainer = Trainer(net, (), SGD(), hand.BATCH, transform, 10)
    federation = Federation(
        method=FedAvg(),
        net=net,
        trainer=trainer,
        population=people,
        evaluator=scored,
        executor=LoopExecutor(trainer, people, key),
        context=Context(net.layout, hand.CLIENTS, hand.ROUNDS, key),
        schedule=lambda t: Plan(hand.LR, hand.EPOCHS),
        participation=parse(f"count(clients={hand.COHORT})"),
        eligible=np.arange(hand.CLIENTS),
        key=key,
        rounds=hand.ROUNDS,
    )
    server, states = federation.begin()
    *_, (_, record) = federation.rounds_from(server, states)
    assert accuracy > 0.75 and abs(record.metric("accuracy") - accuracy) < 0.06


def test_quickstart_is_whole():
    quick = load("quickstart")
    for method in quick.methods:
        assert parse(str(parse(method, "method"))) == parse(method)


def test_data_and_networks_of_your_own_are_learnt(tmp_path):
    for result in load("own_data").main(tmp_path, rounds=4):
        assert result.frame["accuracy_last"].min() > 0.5


@pytest.fixture(params=["real", "made"])
def source(request, monkeypatch):
    """The data folder where there is one, and none: an example then makes its rows."""
    if request.param == "made":
        monkeypatch.delenv("FEDBASIN_DATA", raising=False)
        monkeypatch.chdir(request.getfixturevalue("tmp_path"))
    elif not Path(os.environ.get("FEDBASIN_DATA", "/nowhere")).joinpath("local").is_dir():
        pytest.skip("FEDBASIN_DATA holds no local tables")


def test_a_table_with_text_and_missing_values_is_learnt_and_asked(source, tmp_path, capsys):
    result = load("own_table").main(tmp_path / "r", rounds=3, seeds=[0], rows=3000, jobs=1)
    assert result.best["auroc_last"] > 0.7
    assert capsys.readouterr().out.count("chance of >50K") == 5


def test_numbers_are_learnt_and_tested_on_the_future(source, tmp_path):
    mine = load("own_regression")
    for result in mine.main(tmp_path / "r", rounds=3, jobs=1):
        assert result.best["headline"] == "rmse" and result.best["r2_last"] > 0.3


def test_persons_held_out_are_never_trained_on(source, tmp_path, capsys):
    results = load("own_sensors").main(tmp_path / "r", rounds=4, seeds=[0], jobs=1)
    assert results["clients"].best["clients"] < results["rows"].best["clients"]
    assert min(result.best["accuracy_last"] for result in results.values()) > 0.3
    assert "for unseen ones" in capsys.readouterr().out


def test_several_labels_a_row_are_learnt(source, tmp_path, capsys):
    result = load("own_multilabel").main(tmp_path / "r", rounds=3, seeds=[0], jobs=1)
    assert result.best["task"] == "multilabel" and result.best["average_precision_last"] > 0.3
    assert "labels a gene" in capsys.readouterr().out


def test_texts_of_one_s_own_are_learnt(tmp_path, monkeypatch):
    """On made texts: the real ones take minutes."""
    monkeypatch.delenv("FEDBASIN_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    result = load("own_texts").main(tmp_path / "r", rounds=2, jobs=1)
    assert result.best["clients"] > 1 and len(result) == 3 and result.best["accuracy_last"] > 0.1


def test_images_in_arrays_are_learnt(source, tmp_path, capsys):
    result = load("own_images").main(tmp_path / "r", rounds=3, rows=400, jobs=1)
    assert result.best["clients"] == 10 and len(result) == 3
    assert "chance of pneumonia" in capsys.readouterr().out


def test_a_task_and_a_metric_of_your_own_are_learnt(tmp_path):
    """The loss is NumPy's log cosh, and the headline is the own metric."""
    mine = load("own_task")
    try:
        gap = np.array([[-3.0], [0.25], [40.0]])
        each = mine.LogCosh().each(torch.from_numpy(gap), torch.zeros(3, dtype=torch.float64))
        np.testing.assert_allclose(each, np.log(np.cosh(gap[:, 0])), rtol=1e-12)
        summary = mine.main(tmp_path / "r", rounds=15)
    finally:
        for name in ("log_cosh", "close"):
            CATALOGUE.pop(name, None)
    assert (summary["headline"], summary["headline_unit"]) == ("close", "%")
    assert summary["higher_is_better"] and summary["close_last"] > 0.35
    assert summary["rmse_last"] < 0.9 and 0 < summary["mae_last"] < summary["rmse_last"]


def test_a_method_of_your_own_passes_the_laws_and_runs(tmp_path):
    mine = load("new_method")
    try:
        assert mine.main(tmp_path / "r", rounds=3)["method"] == "my_median"
    finally:
        del CATALOGUE["my_median"]
