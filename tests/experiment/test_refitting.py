"""Rows that clients hold out, and clients that never take part, reach no mean and no deviation."""

import json
from dataclasses import replace

import numpy as np
import pandas
import pytest

import fedbasin as fb
from fedbasin import Experiment, PartitionConfig
from fedbasin.data import from_table
from fedbasin.experiment.rows import cut_rows
from fedbasin.experiment.sharing import StoredDataset

TARGET = {"target": "died", "client": "hospital"}
TEST = 30


def table(rows=150, seed=0):
    rng = np.random.default_rng(seed)
    frame = pandas.DataFrame({"age": rng.normal(60, 10, rows), "pulse": rng.normal(70, 9, rows)})
    frame["sex"] = rng.choice(["f", "m"], rows)
    frame["smoker"] = rng.choice([True, False], rows)
    frame["constant"] = 5.0
    frame.loc[::7, "age"] = np.nan
    frame["smoker"] = frame["smoker"].astype("boolean")
    frame.loc[3::11, "smoker"] = pandas.NA
    frame["hospital"] = rng.choice(["north", "south", "west"], rows)
    frame["died"] = rng.integers(0, 2, rows)
    return frame


def experiment(**partition):
    settings = {"how": "natural", "clients": 0, "hold_out": 0.3} | partition
    return Experiment(
        task="binary", model="logistic", rounds=2, partition=PartitionConfig(**settings)
    ).resolved()


@pytest.fixture(scope="module")
def frame():
    return table()


@pytest.fixture(scope="module")
def data(frame):
    return from_table(frame, test=table(TEST, 1), missing="indicator", **TARGET)


@pytest.mark.parametrize("partition", [{}, {"hold_out": 0.0, "unseen": 0.4}, {"unseen": 0.4}])
def test_it_is_the_encoding_of_the_rows_that_are_trained_on(frame, data, partition):
    rows = cut_rows(experiment(**partition), data)
    trained = np.unique(rows.parts.order)
    assert 0 < len(trained) < len(frame)
    fresh = from_table(
        frame.iloc[trained], test=frame.drop(frame.index[trained]), missing="indicator", **TARGET
    )
    assert len(rows.encoding.columns) == len(fresh.encoding.columns) == 5
    for ours, theirs in zip(rows.encoding.columns, fresh.encoding.columns, strict=True):
        assert (ours.name, ours.kind) == (theirs.name, theirs.kind)
        if ours.kind != "category":
            assert ours.mean == pytest.approx(theirs.mean, rel=1e-6)
        if ours.kind == "number":
            assert ours.std == pytest.approx(theirs.std, rel=1e-6)
    inputs = rows.splits.train.inputs
    np.testing.assert_allclose(inputs[trained], fresh.train.inputs, atol=1e-5)
    np.testing.assert_allclose(np.delete(inputs, trained, 0), fresh.test.inputs, atol=1e-5)
    tested = fresh.encoding.apply(table(TEST, 1))
    np.testing.assert_allclose(rows.splits.test.inputs, tested, atol=1e-5)
    assert not data.train.inputs.flags.writeable and inputs is not data.train.inputs


def test_the_servers_rows_are_encoded_alike(frame, data):
    server = replace(experiment(), data=replace(experiment().data, proxy_rows=20))
    rows = cut_rows(server, data)
    again = {row.tobytes() for row in rows.encoding.apply(frame).round(4) + 0.0}
    assert {row.tobytes() for row in rows.splits.proxy.inputs.round(4) + 0.0} <= again


def test_what_stands_in_held_out_rows_changes_no_model_of_a_table(frame, data, tmp_path):
    """The marker: held-out rows hold a huge number, or none, and the models are equal."""
    held = cut_rows(experiment(), data).held.order
    marked = frame.copy()
    marked.loc[frame.index[held], "pulse"] = 1e6
    marked.loc[frame.index[held[::2]], "pulse"] = np.nan
    other = from_table(marked, test=table(TEST, 1), missing="mean", **TARGET)
    plain = from_table(frame, test=table(TEST, 1), missing="mean", **TARGET)
    models = []
    for name, each in (("plain", plain), ("marked", other)):
        run = fb.run(experiment(), tmp_path / name, data=each, progress=False)
        models.append(run.model().state_dict())
        kept = json.loads((tmp_path / name / "encoding.json").read_text())
        assert kept["columns"][1]["mean"] == pytest.approx(70, abs=3)
    for ours, theirs in zip(*(model.values() for model in models), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-3)


def test_nothing_changes_without_rows_held_out_or_with_an_encoding_of_the_users(frame, data):
    assert cut_rows(experiment(hold_out=0.0), data).encoding is data.encoding
    given = from_table(frame, test=table(TEST, 1), encoding=data.encoding, **TARGET)
    rows = cut_rows(experiment(), given)
    assert rows.encoding is data.encoding and rows.splits.train.inputs is given.train.inputs


def test_other_processes_get_the_gaps_too(data, tmp_path):
    opened = StoredDataset.write(data, tmp_path / "stored").dataset
    assert opened.fitted and np.array_equal(opened.train.missing, data.train.missing)
    ours, theirs = (cut_rows(experiment(), each) for each in (data, opened))
    assert ours.encoding == theirs.encoding
