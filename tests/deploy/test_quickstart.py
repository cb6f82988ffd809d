"""An ordinary Flower app, its own clients, and one line changed on its server."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra fedbasin[flower]")

from deploy.grids import LocalGrid
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp.strategy import FedAvg

from fedbasin.deploy import FedbasinStrategy, Handling
from fedbasin.deploy.federation import LocalFederation

APP = Path(__file__).parents[2] / "examples" / "flower_quickstart"
SETTINGS = {"local-epochs": 1, "batch-size": 32}


@pytest.fixture
def quickstart(monkeypatch):
    monkeypatch.syspath_prepend(str(APP))
    from quickstart import client_app, task

    yield client_app.app, task.Net


def started(strategy, quickstart, rounds=3, timeout=9):
    app, network = quickstart
    grid = LocalGrid(app, 4)
    for context in grid.contexts.values():
        context.run_config = SETTINGS
    with torch.random.fork_rng():
        torch.manual_seed(0)
        arrays = ArrayRecord(network().state_dict())
    result = strategy.start(
        grid=grid,
        initial_arrays=arrays,
        train_config=ConfigRecord({"lr": 0.5}),
        num_rounds=rounds,
        timeout=timeout,
    )
    return grid, result


def test_fedavg_is_flowers_fedavg(quickstart):
    _, theirs = started(FedAvg(), quickstart)
    _, ours = started(FedbasinStrategy("fedavg"), quickstart)
    assert list(ours.arrays) == list(theirs.arrays)
    for name, tensor in theirs.arrays.to_torch_state_dict().items():
        found = ours.arrays.to_torch_state_dict()[name]
        torch.testing.assert_close(found, tensor, rtol=1e-5, atol=1e-6)
    for when, record in theirs.train_metrics_clientapp.items():
        assert ours.train_metrics_clientapp[when]["train_loss"] == pytest.approx(
            record["train_loss"]
        )
    for when, record in theirs.evaluate_metrics_clientapp.items():
        assert dict(ours.evaluate_metrics_clientapp[when]) == pytest.approx(dict(record), rel=1e-4)


@pytest.mark.parametrize(
    "method", ["ima(fedavg, window=2, start=0.3)", "wima(window=2)", "ima(fedadam)", "fedcda"]
)
def test_other_methods_need_no_other_client(method, quickstart, caplog):
    with caplog.at_level(logging.WARNING, "flwr"):
        grid, result = started(FedbasinStrategy(method), quickstart)
    _, plain = started(FedbasinStrategy("fedavg"), quickstart)
    assert any("numbered as they come" in r.getMessage() for r in caplog.records)
    assert result.evaluate_metrics_clientapp[3]["eval_acc"] > 0.3
    ours = result.arrays.to_torch_state_dict()
    theirs = plain.arrays.to_torch_state_dict()
    if method != "fedcda":  # its first quarter is FedAvg
        assert any(not torch.allclose(ours[name], theirs[name]) for name in ours)
    if method.startswith("ima(fedavg"):  # clients are told the smaller steps
        sent = [m for m in grid.sent if m.metadata.message_type == "train"]
        rates = [m.content["config"]["lr"] for m in sent]
        assert rates[0] == 0.5 and rates[-1] < 0.5


def test_a_method_with_client_rules_says_what_it_needs(quickstart):
    strategy = FedbasinStrategy("scaffold", min_train_nodes=1, handling=Handling(patience=0.5))
    with pytest.raises(RuntimeError, match="0 of 1 replies"):
        started(strategy, quickstart, rounds=1, timeout=0.5)
    assert all("only fedbasin's ClientApp" in reason for reason in strategy.journal.refused)


def test_flwr_run_simulates_it(tmp_path):
    """The whole way: Flower's command line, its simulation engine, four clients."""
    with LocalFederation(tmp_path / "f", 4, simulate=True) as federation:
        process = federation.run(APP, {"num-server-rounds": 2, "method": "wima(window=2)"})
        assert process.wait() == 0
        log = federation.log("run")
    assert "[ROUND 2/2]" in log and "Received 4 results and 0 failures" in log, log[-3000:]
    assert "eval_acc" in log and "Strategy execution finished" in log
