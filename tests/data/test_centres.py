"""FLamby's two tables: the published counts, and the scaling against pandas."""

import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedbasin.data import load
from fedbasin.data.dataset import DataError

FOLDER = os.environ.get("FEDBASIN_DATA")
HEART = "local/fed-heart-disease/flamby"
TCGA = "local/fed-tcga-brca/data"
NUMBERS = ["age", "sex", "trestbps", "chol", "fbs", "thalach", "exang", "oldpeak"]


def present(repo):
    missing = FOLDER is None or not Path(FOLDER, repo).is_dir()
    return pytest.mark.skipif(missing, reason=f"FEDBASIN_DATA holds no {repo}")


def loaded(name, tmp_path, folder=FOLDER):
    return load(name, data_dir=Path(folder), cache_dir=tmp_path / "cache")


def scaled_by_pandas(train, rows, by):
    """Return the 13 inputs as FLamby's text says, without any of our code."""
    both = pd.concat([train, rows], keys=["train", "rows"])
    dummies = pd.get_dummies(both[["cp", "restecg"]].astype("category"), drop_first=True)
    both = pd.concat([both[NUMBERS], dummies], axis=1).astype("float64")
    known, asked = both.loc["train"], both.loc["rows"]
    mean = known.groupby(by(train)).mean()
    std = known.groupby(by(train)).std() + 1e-9
    key = by(rows)
    return ((asked.to_numpy() - mean.loc[key].to_numpy()) / std.loc[key].to_numpy()).astype("f4")


def heart_frame(rng, rows):
    # every centre and level occurs, and column chol is constant in centre 1, as in Switzerland
    frame = pd.DataFrame(rng.normal(50, 10, (rows, len(NUMBERS))), columns=NUMBERS)
    frame["center"] = np.arange(rows) % 2
    frame["center_name"] = frame.center.map({0: "north", 1: "south"})
    frame.loc[frame.center == 1, "chol"] = 0.0
    frame["cp"] = 1 + np.arange(rows) // 2 % 4
    frame["restecg"] = np.arange(rows) // 2 % 3
    frame["num"] = rng.integers(0, 5, rows)
    frame["label"] = (frame.num > 0).astype("int8")
    return frame


@pytest.fixture
def made(tmp_path):
    rng = np.random.default_rng(0)
    frames = {"train": heart_frame(rng, 40), "test": heart_frame(rng, 26)}

    def write(**frames):
        folder = tmp_path / "hub" / HEART
        folder.mkdir(parents=True, exist_ok=True)
        for split, frame in frames.items():
            frame.to_parquet(folder / f"{split}-00000-of-00001.parquet")
        return tmp_path / "hub"

    return frames, write


def test_heart_disease_is_scaled_by_the_training_rows_of_each_centre(made, tmp_path):
    frames, write = made
    folder = write(**frames)
    ours = loaded("fed_heart_disease", tmp_path, folder)
    pooled = loaded("fed_heart_pooled", tmp_path, folder)
    assert ours.kind == "table" and ours.classes == ("healthy", "ill")
    assert ours.group_names == ("north", "south")
    train, test = frames["train"], frames["test"]
    for data, frame in ((ours.train, train), (ours.test, test), (pooled.test, test)):
        expected = scaled_by_pandas(train, frame, lambda rows: rows.center)
        assert data.inputs.dtype == np.float32
        np.testing.assert_allclose(data.inputs, expected, rtol=1e-5, atol=1e-6)
        assert data.labels.tolist() == frame.label.tolist()
        assert data.groups.tolist() == frame.center.tolist()
    together = scaled_by_pandas(train, train, lambda rows: rows.center * 0)
    np.testing.assert_allclose(pooled.train.inputs, together, rtol=1e-5, atol=1e-6)
    assert np.abs(pooled.train.inputs - ours.train.inputs).max() > 0.1


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda f: f.drop(columns="center_name"), "no column 'center_name'"),
        (lambda f: f.assign(cp=7), "'cp' of fed_heart_disease holds 7, expected one of"),
        (lambda f: f.assign(center=f.center * 2), r"numbered \[0, 2\], expected 0, 1"),
        (lambda f: f.assign(age="old"), "column 'age' holds no numbers"),
        (lambda f: f[f.center == 0], "centre 1 has 0 training rows"),
        (lambda f: f.assign(more=1), "have other columns"),
    ],
)
def test_other_files_are_refused(change, told, made, tmp_path):
    frames, write = made
    train = change(frames["train"])
    test = frames["test"] if "1 has 0" in told or "more" in train else change(frames["test"])
    with pytest.raises(DataError, match=told):
        loaded("fed_heart_disease", tmp_path, write(train=train, test=test))


@present(HEART)
def test_heart_disease_is_flamby_s(tmp_path):
    data = loaded("fed_heart_disease", tmp_path)
    assert data.group_names == ("cleveland", "hungarian", "switzerland", "va")
    assert np.bincount(data.train.groups).tolist() == [199, 172, 30, 85]
    assert np.bincount(data.test.groups).tolist() == [104, 89, 16, 45]
    ill = [np.bincount(part.groups, part.labels) for part in (data.train, data.test)]
    assert sum(ill).tolist() == [139, 98, 45, 101]
    frames = {
        split: pd.read_parquet(next(Path(FOLDER, HEART).glob(f"{split}-*.parquet")))
        for split in ("train", "test")
    }
    for split, rows in (("train", data.train), ("test", data.test)):
        expected = scaled_by_pandas(frames["train"], frames[split], lambda f: f.center)
        np.testing.assert_allclose(rows.inputs, expected, rtol=1e-5, atol=1e-5)


@present(TCGA)
def test_tcga_brca_is_flamby_s(tmp_path):
    data = loaded("fed_tcga_brca", tmp_path)
    regions = ("Northeast", "South", "West", "Midwest", "Europe", "Canada")
    assert data.group_names == regions and data.classes == ()
    assert np.bincount(data.train.groups).tolist() == [248, 156, 164, 129, 129, 40]
    assert np.bincount(data.test.groups).tolist() == [63, 40, 42, 33, 33, 11]
    deaths = [np.bincount(part.groups, part.labels[:, 1]) for part in (data.train, data.test)]
    assert [each.tolist() for each in deaths] == [[45, 35, 14, 16, 7, 2], [14, 4, 8, 3, 2, 1]]
    times = np.concatenate([data.train.labels[:, 0], data.test.labels[:, 0]])
    assert times.min() == 0 and times.max() == 8605 and (times == 0).sum() == 12
    assert data.train.inputs.shape == (866, 39) and data.train.inputs.dtype == np.float32
    age, others = data.train.inputs[:, 0], data.train.inputs[:, 1:]
    assert age.max() == 90 and set(np.unique(others)) == {0.0, 1.0}
