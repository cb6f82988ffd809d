"""A table or arrays of its own at every node: the simulator's model, and what is refused."""

from __future__ import annotations

import numpy as np
import pandas
import pytest
import torch
from torch import nn

pytest.importorskip("flwr", reason="needs the extra fedbasin[flower]")

from deploy.grids import LocalGrid, strategy_for
from flwr.app import ArrayRecord, Context, RecordDict

from fedbasin import Experiment
from fedbasin.data import DataError, from_clients
from fedbasin.deploy import client_app, node_table
from fedbasin.deploy.client import _check_classes
from fedbasin.deploy.own_rows import Held, held_by
from fedbasin.deploy.wire import Refused
from fedbasin.experiment import build

SITES = {"north": 24, "south": 32, "west": 40}
TARGETS = {"binary": "died", "regression": "days"}


def dropout():
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))


def batchnorm():
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


def encoder():
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    parts = nn.Unflatten(1, (5, 1)), nn.Linear(1, 4), layer, nn.Flatten(), nn.Linear(20, 1)
    return nn.Sequential(*parts)


def frame(rows, seed):
    """Three numbers and a text column of two values: five inputs."""
    rng = np.random.default_rng(seed)
    numbers = rng.normal(50, 9, (rows, 3))
    table = pandas.DataFrame(numbers, columns=["age", "weight", "pulse"])
    table["sex"] = rng.choice(["f", "m"], rows)
    table["died"] = (numbers[:, 0] + rng.normal(0, 3, rows) > 50).astype(int)
    table["days"] = (numbers[:, 1] - 50) / 9 + rng.normal(0, 0.1, rows)
    return table


@pytest.fixture
def sites(tmp_path):
    """A file of training rows and one of test rows for every site."""
    for number, (name, rows) in enumerate(SITES.items()):
        frame(rows, number).to_csv(tmp_path / f"{name}.csv", index=False)
        frame(16, 10 + number).to_csv(tmp_path / f"{name}-test.csv", index=False)
    return tmp_path


def simulated(folder, task, module):
    """The simulation of all sites in one process."""
    other = TARGETS["regression" if task == "binary" else "binary"]
    data = from_clients(
        {name: folder / f"{name}.csv" for name in SITES},
        TARGETS[task],
        drop=[other],
        test={name: folder / f"{name}-test.csv" for name in SITES},
    )
    experiment = Experiment(
        method="scaffold",
        model=module,
        task=task,
        rounds=3,
        partition={"how": "natural", "clients": 0},
        local={"lr": 0.02, "batch": 8, "epochs": 2},
        sim={"participation": "fraction(rate=1.0)", "executor": "loop", "device": "cpu"},
    )
    return data, build(experiment, data=data)


def nodes(app, folder):
    grid = LocalGrid(app, len(SITES))
    for context in grid.contexts.values():
        name = list(SITES)[context.node_config["partition-id"]]
        context.node_config["data"] = str(folder / f"{name}.csv")
    return grid


@pytest.mark.parametrize("network", [dropout, batchnorm, encoder])
@pytest.mark.parametrize("task", TARGETS)
def test_nodes_with_files_of_their_own_give_the_model_of_the_simulator(task, network, sites):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = network()
    data, made = simulated(sites, task, module)
    server, states = made.begin()
    server, _ = list(made.rounds_from(server, states))[-1]
    (sites / "encoding.json").write_text(data.encoding.to_json())

    def rows(context):
        test = context.node_config["data"].replace(".csv", "-test.csv")
        return node_table(context, sites / "encoding.json", test=test)

    app = client_app(module, rows, "scaffold", task=task, batch=8)
    strategy = strategy_for(made, made.method, fraction_evaluate=1.0)
    arrays = ArrayRecord(made.net.state_dict(*made.net.initial()))
    result = strategy.start(nodes(app, sites), arrays, num_rounds=3, timeout=5)
    assert not torch.allclose(server.send, made.net.initial()[0])
    torch.testing.assert_close(strategy._server.send, server.send, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(strategy._server.buffers, server.buffers, rtol=1e-5, atol=1e-6)
    # Every client scores its 16 test rows, so their mean is the loss of all test rows.
    expected = made.evaluator.score(server.score, server.buffers)["loss"]
    assert result.evaluate_metrics_clientapp[3]["loss"] == pytest.approx(expected, rel=1e-4)


@pytest.fixture
def encoding(sites):
    return simulated(sites, "binary", dropout())[0].encoding


def context_of(**config):
    where = {"partition-id": 1, "num-partitions": 3, **config}
    return Context(1, 1, where, RecordDict(), {})


def refused(table, encoding, folder):
    """What a node says about a table of its own."""
    table.to_csv(folder / "mine.csv", index=False)
    with pytest.raises(DataError) as error:
        context = context_of(data=str(folder / "mine.csv"))
        held_by(lambda context: node_table(context, encoding), context, 1, 3)
    return str(error.value)


def test_a_table_that_does_not_fit_is_refused_with_client_file_column_and_row(sites, encoding):
    good = frame(20, 5).drop(columns="days")
    for table, words in (
        (good.drop(columns="pulse"), ["'pulse' is no column"]),
        (good.assign(height=1.0), ["column 'height' is not known to the encoding"]),
        (good.assign(age="old"), ["column 'age'", "holds text"]),
        (good.assign(died=[0] * 7 + [3] + [0] * 12), ["'died', row 7", "'3'"]),
        (good.assign(died=[0.0] * 4 + [None] + [1.0] * 15), ["'died', row 4", "missing"]),
        (good.assign(age=[1.0] * 9 + [np.inf] + [1.0] * 10), ["column 'age', row 9"]),
        (good[:0], ["has no rows"]),
    ):
        said = refused(table, encoding, sites)
        for word in ("client 1: ", "mine.csv", *words):
            assert word in said, said


def test_a_node_without_a_file_or_an_encoding_says_what_to_do(sites, encoding):
    for context, given, words in (
        (context_of(), encoding, "client 1: the node does not say where its table is"),
        (context_of(data="/nowhere.csv"), encoding, "there is no file /nowhere.csv"),
        (context_of(data="/x.csv"), sites / "none.json", "none.json cannot be read"),
    ):
        with pytest.raises(DataError, match=words):
            held_by(lambda context, given=given: node_table(context, given), context, 1, 3)


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.float16, np.int64, np.uint8, np.bool_])
def test_arrays_of_any_type_are_taken_as_they_are(kind):
    x = (np.arange(24).reshape(6, 4) % 7).astype(kind)
    held = Held.of((x, [0, 1, 0, 1, 0, 1]), 0)
    inputs = held.transform(held.rows.inputs)
    assert inputs.dtype == torch.float32
    torch.testing.assert_close(inputs, torch.from_numpy(x.astype(np.float32)))
    assert held.rows.labels.dtype == torch.int64 and held.held_out is None
    assert Held.of((torch.from_numpy(x), torch.ones(6)), 0).rows.labels.dtype == torch.float32


def test_bytes_of_images_are_scaled():
    held = Held.of((np.full((2, 1, 3, 3), 255, np.uint8), [0, 1]), 0)
    assert held.transform(held.rows.inputs).unique().tolist() == [1.0]


def test_arrays_that_do_not_fit_name_the_client_and_the_row():
    x = np.zeros((4, 2))
    x[3, 1] = np.nan
    for given, words in (
        ((x, np.zeros(4)), "client 2: inputs holds nan in row 3"),
        ((np.zeros((0, 2)), np.zeros(0)), "client 2: it holds no rows"),
        ((np.zeros((4, 2)), np.zeros(3)), "client 2: inputs has 4 rows and labels has 3"),
        ([1, 2], "client 2: its data is list"),
    ):
        with pytest.raises(DataError, match=words):
            Held.of(given, 2)


def test_other_classes_than_the_apps_are_refused(sites, encoding):
    context = context_of(data=str(sites / "south.csv"))
    held = held_by(lambda context: node_table(context, encoding), context, 1, 3)
    _check_classes(held, 2, 1)
    with pytest.raises(Refused, match="client 1: its data has 2 classes, and the app 5"):
        _check_classes(held, 5, 1)
