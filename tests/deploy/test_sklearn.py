"""Flower's scikit-learn quickstart: coefficients in Fortran's order, float64, no `train_loss`."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss

pytest.importorskip("flwr", reason="needs the extra fedbasin[flower]")

from deploy.grids import LocalGrid
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from fedbasin.deploy import FedbasinStrategy, Handling, Records

CLASSES = 3
FEATURES = 4
CLIENTS = 3


def rows(client: int) -> tuple[np.ndarray, np.ndarray]:
    draws = np.random.default_rng(client)
    y = np.arange(20 + 7 * client) % CLASSES
    return draws.normal(size=(len(y), FEATURES)) + y[:, None] * [1.0, -1.0, 0.5, 0.0], y


def logistic_app(name: str = "train_logloss") -> ClientApp:
    """The quickstart's ClientApp on rows of its own.

    Args:
        name: what it calls its loss; its template says ``train_logloss``.
    """
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = LogisticRegression(max_iter=2, warm_start=True)
        model.classes_ = np.arange(CLASSES)
        model.coef_, model.intercept_ = message.content["arrays"].to_numpy_ndarrays()
        x, y = rows(int(context.node_config["partition-id"]))
        with pytest.warns(ConvergenceWarning):
            model.fit(x, y)
        assert model.coef_.flags.f_contiguous and not model.coef_.flags.c_contiguous
        metrics = MetricRecord({"num-examples": len(y), name: log_loss(y, model.predict_proba(x))})
        arrays = ArrayRecord([model.coef_, model.intercept_])
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return app


def first() -> ArrayRecord:
    return ArrayRecord([np.zeros((CLASSES, FEATURES)), np.zeros(CLASSES)])


def started(strategy, name="train_logloss"):
    grid = LocalGrid(logistic_app(name), CLIENTS)
    return strategy.start(grid, first(), num_rounds=3, timeout=5).arrays.to_torch_state_dict()


@pytest.mark.parametrize("stream", [False, True])
def test_the_merge_is_flowers_in_full_precision(stream, tmp_path):
    """Also on disk: a float64 model stays one in the checkpoint and in what is shipped."""
    theirs = started(FedAvg(fraction_evaluate=0))
    strategy = FedbasinStrategy(
        "fedavg",
        fraction_evaluate=0,
        handling=Handling(stream=stream),
        records=Records(tmp_path),
    )
    ours = started(strategy)
    shipped = load_file(tmp_path / "model.safetensors")
    assert strategy._server.send.dtype == torch.float64
    for name, tensor in theirs.items():
        assert ours[name].dtype == shipped[name].dtype == tensor.dtype == torch.float64
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-12)
        assert torch.equal(shipped[name], ours[name])
    assert not torch.equal(ours["0"], torch.zeros(CLASSES, FEATURES, dtype=torch.float64))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["refused"] == {} and summary["status"] == "finished"
    last = json.loads((tmp_path / "rounds.jsonl").read_text().splitlines()[-1])
    norm = float(torch.cat([tensor.flatten() for tensor in theirs.values()]).norm())
    assert last["model_norm"] == pytest.approx(norm, rel=1e-12)
