"""FLamby's tables: a run against NumPy alone, the numbers in print, and the results that ship."""

import os
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedbasin.core.method import Plan
from fedbasin.core.record import RunFolder
from fedbasin.core.rng import root
from fedbasin.experiment import from_mapping, run
from fedbasin.experiment.assemble import build
from fedbasin.local.batches import batches
from fedbasin.papers import load_table, reason
from fedbasin.papers.grid import experiment_of, settings_of
from fedbasin.papers.results import shipped
from fedbasin.sim.loop import client_key

FOLDER = os.environ.get("FEDBASIN_DATA")
TCGA = "local/fed-tcga-brca/data"
absent = FOLDER is None or not Path(FOLDER, TCGA).is_dir()
TABLES = {name: load_table(f"flamby/{name}") for name in ("tcga-brca", "heart-disease")}


def axis(axes, name):
    return next(each for each in axes if each.name == name)


def frame(split):
    return pd.read_parquet(next(Path(FOLDER, TCGA).glob(f"{split}-*.parquet")))


def arrays(rows):
    """Inputs with a column of ones for the bias, times and events."""
    numbers = rows.drop(columns=["center", "region", "event", "time"]).to_numpy(np.float64)
    return np.c_[numbers, np.ones(len(rows))], rows.time.to_numpy(), rows.event.to_numpy()


def cox_gradient(weights, inputs, time, event):
    """The gradient of the mean over rows of event * (log of the risk set's sum - score)."""
    score = inputs @ weights
    slope = -event.astype(np.float64)
    for row in np.flatnonzero(event):
        at_risk = time >= time[row]
        hazard = np.exp(score - score[at_risk].max()) * at_risk
        slope += hazard / hazard.sum()
    return inputs.T @ slope / len(score)


def c_index(score, time, event):
    """The share of comparable pairs in the right order, pair by pair."""
    right = []
    for i in np.flatnonzero(event):
        for j in range(len(time)):
            if time[j] > time[i] or (time[j] == time[i] and not event[j]):
                right.append(1.0 if score[i] > score[j] else 0.5 if score[i] == score[j] else 0.0)
    return np.mean(right)


@pytest.mark.skipif(absent, reason=f"FEDBASIN_DATA holds no {TCGA}")
def test_fedavg_of_the_cox_model_is_that_of_numpy(tmp_path):
    table = TABLES["tcga-brca"]
    settings = settings_of(table, axis(table.rows, "fedavg"), table.columns[0])
    settings |= {"rounds": 2, "seed": 42}
    settings["sim"] |= {"precision": "fp64", "device": "cpu"}
    experiment = from_mapping(settings)
    weights = build(experiment, data_dir=Path(FOLDER)).net.initial()[0].numpy().copy()
    train, test = frame("train"), frame("test")
    for round in range(2):
        ends = []
        for centre in range(6):
            inputs, time, event = arrays(train[train.center == centre])
            mine = weights.copy()
            key = client_key(root(42), round, centre).tensor()
            for rows in batches(key, Plan(lr=0.1, epochs=None, steps=100), len(time), 8):
                taken = rows.numpy()
                mine -= 0.1 * cox_gradient(mine, inputs[taken], time[taken], event[taken])
            ends.append(mine)
        sizes = train.center.value_counts().sort_index().to_numpy()
        weights = np.average(ends, axis=0, weights=sizes)
    run(experiment, tmp_path / "run", data_dir=Path(FOLDER))
    last = RunFolder(tmp_path / "run").read_rounds()[-1]
    assert last.model_norm == pytest.approx(np.linalg.norm(weights), rel=1e-9)
    inputs, time, event = arrays(test)
    score = inputs @ weights
    centres = [
        c_index(score[held], time[held], event[held])
        for held in (test.center.to_numpy() == centre for centre in range(6))
    ]
    assert last.metric("c_index") == pytest.approx(c_index(score, time, event), abs=1e-12)
    assert last.metrics["c_index_by_group"] == pytest.approx(centres, abs=1e-12)
    assert last.metric("c_index_group_mean") == pytest.approx(np.mean(centres), abs=1e-12)


def test_the_mean_over_centres_in_print_is_that_of_the_centres():
    # the rounded numbers by centre that FLamby stores
    by_centre = {
        "heart-disease": {
            "pooled": (0.783, 0.764, 0.750, 0.644),
            "local 2": (0.481, 0.391, 0.725, 0.671),
            "fedavg": (0.731, 0.719, 0.650, 0.640),
            "fedadam": (0.752, 0.746, 0.738, 0.667),
        },
        "tcga-brca": {
            "pooled": (0.773, 0.582, 0.706, 0.629, 0.766, 0.600),
            "local 5": (0.586, 0.791, 0.739, 0.425, 0.940, 0.667),
            "fedavg": (0.745, 0.627, 0.691, 0.675, 0.787, 0.867),
            "fedadagrad": (0.848, 0.623, 0.872, 0.679, 0.855, 1.000),
        },
    }
    for name, rows in by_centre.items():
        table = TABLES[name]
        for row, numbers in rows.items():
            printed = table.printed(axis(table.rows, row), axis(table.columns, "centres"))
            assert printed.value == pytest.approx(100 * np.mean(numbers), abs=0.11), (name, row)


@pytest.mark.parametrize(("name", "rows", "clients", "batch", "epochs", "rounds"), [
    ("tcga-brca", 866, 6, 8, 30, 5), ("heart-disease", 486, 4, 4, 50, 15),
])  # fmt: skip
def test_settings_are_flamby_s(name, rows, clients, batch, epochs, rounds):
    table = TABLES[name]
    assert rows // clients // batch * epochs // 100 == rounds and table.seeds == (
        42,
        43,
        44,
        45,
        46,
    )
    for row in table.rows:
        if reason(table, row, table.columns[0]):
            continue
        made = experiment_of(table, row, table.columns[0], seed=42)
        assert made.local.batch == batch and made.model == "logistic"
        if row.name == "pooled" or row.name.startswith("local "):
            assert (made.rounds, made.local.epochs, made.local.steps) == (1, epochs, 0)
            assert made.local.optimiser == "adam"
        else:
            assert (made.rounds, made.local.steps) == (rounds, 100)
            assert made.local.optimiser == "sgd" and made.partition.clients == clients


def test_every_cell_that_can_run_has_a_line_for_each_seed():
    counts = Counter((line.table, line.row, line.column) for line in shipped())
    for table in TABLES.values():
        for row in table.rows:
            for column in table.columns:
                wanted = 0 if reason(table, row, column) else len(table.seeds)
                assert counts[table.name, row.name, column.name] == wanted, (row.name, column.name)
    lines = [line for line in shipped() if line.table.startswith("flamby/")]
    assert all(line.commit and not line.reduced and not line.partial for line in lines)
