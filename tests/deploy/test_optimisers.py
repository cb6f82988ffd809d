"""Clients of a federation step as those of a simulation, and keep an optimiser's state at home."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("flwr", reason="needs the extra fedbasin[flower]")

from deploy.grids import LocalGrid, app_for, strategy_for
from flwr.app import ArrayRecord, ConfigRecord

from fedbasin.core.expressions import parse
from fedbasin.deploy import FedbasinStrategy, Handling, ServerSide, client_app
from fedbasin.deploy.clients import TooFewNodes
from fedbasin.local import SGD, AdamW, Shard
from fedbasin.testing import toy_federation


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "ima(fedavg, window=2, start=0.3)"])
@pytest.mark.parametrize("where", ["context", "file"])
@pytest.mark.parametrize(
    ("optimiser", "kept"),
    [(AdamW(), False), (AdamW(), True), (SGD(0.9, nesterov=True), True)],
    ids=["fresh adamw", "kept adamw", "kept nesterov"],
)
def test_three_rounds_equal_the_simulators(method, optimiser, kept, where, tmp_path):
    given = {"optimiser": optimiser, "keep_optimiser": kept, "clip": 1.0, "rounds": 3}
    federation = toy_federation(parse(method, "method"), participation="count(clients=4)", **given)
    *_, (server, _) = federation.rounds_from(*federation.begin())
    node = {"state-dir": str(tmp_path)} if where == "file" else {}
    grid = LocalGrid(app_for(federation), 6, node_config=node)
    strategy = strategy_for(federation, federation.method)
    arrays = ArrayRecord(federation.net.state_dict(*federation.net.initial()))
    strategy.start(grid, arrays, num_rounds=3, timeout=5)
    torch.testing.assert_close(strategy._server.send, server.send, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(strategy._server.score, server.score, rtol=1e-9, atol=1e-11)


def trained(method, rounds=1, **settings):
    """Return the model of three clients of an app of one's own after some rounds."""

    def model():
        torch.manual_seed(0)
        return nn.Linear(4, 3)

    rows = Shard(torch.arange(48.0).reshape(12, 4) / 48, torch.arange(12) % 3)
    app = client_app(model, lambda client, clients: rows, method, classes=3, **settings)
    strategy = FedbasinStrategy(
        method,
        fraction_evaluate=0,
        server=ServerSide(counts="plain"),
        handling=Handling(patience=0.5),
    )
    arrays = ArrayRecord(model().state_dict())
    config = ConfigRecord({"lr": 0.05})
    grid = LocalGrid(app, 3)
    result = strategy.start(grid, arrays, num_rounds=rounds, timeout=0.5, train_config=config)
    return np.concatenate([a.numpy().reshape(-1) for a in result.arrays.values()])


def test_an_app_takes_an_optimiser_as_an_object_or_by_its_name():
    named = trained("fedavg", optimiser="adamw(weight_decay=0.5)", clip=1.0)
    made = trained("fedavg", optimiser=AdamW(weight_decay=0.5), clip=1.0)
    np.testing.assert_array_equal(named, made)
    plain = trained("fedavg")
    np.testing.assert_array_equal(plain, trained("fedavg", optimiser=SGD()))
    assert not np.allclose(named, plain)


def test_an_app_keeps_the_state_where_it_is_told_to():
    for rounds, alike in ((1, True), (2, False)):
        kept = trained("fedavg", rounds, optimiser="adam", keep_optimiser=True)
        fresh = trained("fedavg", rounds, optimiser="adam")
        assert np.array_equal(kept, fresh) == alike


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"optimiser": "adam"}, "take the optimiser sgd"),
        ({"optimiser": SGD(0.9), "keep_optimiser": True}, "set keep_optimiser to false"),
    ],
)
def test_clients_refuse_a_method_that_counts_plain_steps(settings, word, caplog):
    with pytest.raises(TooFewNodes), caplog.at_level(logging.WARNING, "flwr"):
        trained("fedcm", **settings)
    assert word in caplog.text
    trained("fedcm", optimiser=SGD(0.9))
