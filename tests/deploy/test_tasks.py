"""Every task on Flower's in-process grid: the model of the simulator, and what is refused."""

from __future__ import annotations

import json
import logging
import math

import pytest
import torch
from torch import nn

pytest.importorskip("flwr", reason="needs the extra fedbasin[flower]")

from deploy.grids import LocalGrid, app_for, strategy_for
from experiment.real_tasks import CASES, METHODS, federation, models
from flwr.app import ArrayRecord, ConfigRecord

from fedbasin.core.expressions import parse
from fedbasin.core.needs import NeedError
from fedbasin.core.net import Net
from fedbasin.deploy import FedbasinStrategy, Handling, ServerSide, client_app
from fedbasin.deploy.clients import TooFewNodes
from fedbasin.local import Shard

ROUNDS = 4


def on_the_grid(made, **settings):
    grid = LocalGrid(app_for(made), len(made.population))
    strategy = strategy_for(made, made.method, **settings)
    arrays = ArrayRecord(made.net.state_dict(*made.net.initial()))
    result = strategy.start(grid, arrays, num_rounds=ROUNDS, timeout=5)
    return strategy, result


@pytest.mark.parametrize("task", CASES)
@pytest.mark.parametrize("method", METHODS)
def test_the_grid_gives_the_model_of_the_simulator(task, method, tmp_path):
    made = federation(task, method, ROUNDS)
    server, record = models(made)[-1]
    strategy, _ = on_the_grid(made, folder=tmp_path / "r")
    found = strategy._server
    torch.testing.assert_close(found.send, server.send, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(found.score, server.score, rtol=1e-8, atol=1e-10)
    last = json.loads((tmp_path / "r/rounds.jsonl").read_text().splitlines()[-1])
    headline = made.evaluator.headline
    assert last[headline.name] == pytest.approx(record.metric(headline.name), abs=1e-6)
    summary = json.loads((tmp_path / "r/summary.json").read_text())
    assert summary["headline"] == headline.name
    assert summary["higher_is_better"] == headline.higher_is_better


def test_clients_leave_out_what_is_not_defined_on_their_rows():
    """Sorted by label, most clients hold one class: their AUROC is undefined, the mean is not."""
    made = federation("binary", "fedavg", ROUNDS)
    order = made.population.labels.argsort(stable=True)
    people = made.population
    people.inputs.copy_(people.inputs[order])
    people.labels.copy_(people.labels[order])
    _, result = on_the_grid(made, fraction_evaluate=1.0)
    found = dict(result.evaluate_metrics_clientapp[ROUNDS])
    assert all(math.isfinite(value) for value in found.values())
    assert 0 <= found["accuracy"] <= 1 and found["loss"] > 0


def trained(method, network, task="binary", labels=None, **server):
    """Train three clients of an app of one's own for a round."""
    labels = torch.arange(12) % 2 if labels is None else labels
    rows = Shard(torch.arange(48.0).reshape(12, 4) / 48, labels)
    app = client_app(network, lambda client, clients: rows, method, classes=2, task=task)
    strategy = FedbasinStrategy(
        method,
        fraction_evaluate=0,
        server=ServerSide(task=parse(task, "task"), **server),
        handling=Handling(patience=0.5),
    )
    config = ConfigRecord({"lr": 0.05})
    arrays = ArrayRecord(network().state_dict())
    strategy.start(LocalGrid(app, 3), arrays, num_rounds=1, timeout=0.5, train_config=config)
    return strategy._server


def one_output():
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def two_outputs():
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def test_a_clients_network_with_too_many_outputs_is_not_trained(caplog):
    first = one_output().weight.detach().flatten()
    assert not torch.equal(trained("fedavg", one_output).send[:4], first)
    with pytest.raises(TooFewNodes), caplog.at_level(logging.WARNING, "flwr"):
        trained("fedavg", two_outputs)
    assert "binary needs one output a row" in caplog.text


def test_a_method_on_features_is_refused_by_server_and_clients(caplog):
    with pytest.raises(NeedError, match="fedfa works on features, and the network of Server"):
        trained("fedfa", two_outputs, "classification", net=Net(two_outputs()))
    with pytest.raises(ValueError, match="features"), caplog.at_level(logging.WARNING, "flwr"):
        trained("fedfa", two_outputs, "classification")
    assert "works on features, and the client's network has no `features`" in caplog.text


@pytest.mark.parametrize(("method", "task"), [("feddf", "binary"), ("mime", "survival")])
def test_a_server_refuses_a_method_that_the_task_does_not_suit(method, task):
    with pytest.raises(NeedError, match=f"{method}.*{task}.*; take "):
        trained(method, one_output, task)
