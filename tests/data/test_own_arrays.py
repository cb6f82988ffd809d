import numpy as np
import pytest
import torch

from fedbasin.data import DataError, from_arrays, from_torch


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        (np.float64, np.float32),
        (np.float32, np.float32),
        (np.float16, np.float16),
        (np.int32, np.int32),
        (np.uint8, np.uint8),
        (np.bool_, np.uint8),
    ],
)
def test_inputs_of_any_type(dtype, stored):
    x = np.random.default_rng(0).integers(0, 2, (40, 3)).astype(dtype)
    y = np.arange(40) % 2
    data = from_arrays(x, y)
    assert data.kind == "table" and data.train.inputs.dtype == stored
    assert len(data.train) == 32 and np.bincount(data.test.labels).tolist() == [4, 4]
    both = np.concatenate([data.train.inputs, data.test.inputs])
    assert sorted(map(bytes, both)) == sorted(map(bytes, x.astype(stored)))
    assert from_arrays(torch.from_numpy(x), torch.from_numpy(y)).name == data.name
    assert from_arrays(x.tolist(), y.tolist()).classes == ("0", "1")
    with pytest.raises(ValueError, match="read-only"):
        data.train.inputs[0] = 0


def test_tensors_that_numpy_lacks():
    x = torch.ones(10, 2, dtype=torch.bfloat16, requires_grad=True)
    assert from_arrays(x, [0, 1] * 5).train.inputs.dtype == np.float32
    assert from_arrays(np.arange(10.0), [0, 1] * 5).train.inputs.shape == (8, 1)


@pytest.mark.parametrize(
    ("y", "classes", "dtype", "shape"),
    [
        (np.array(["no", "yes"] * 10), ("no", "yes"), np.int64, ()),
        (np.array(["no", "yes"] * 10, object), ("no", "yes"), np.int64, ()),
        (np.array([False, True] * 10), ("False", "True"), np.int64, ()),
        (np.array([7, 3] * 10, np.uint8), ("3", "7"), np.int64, ()),
        (np.array([[7], [3]] * 10), ("3", "7"), np.int64, ()),
        (np.linspace(0, 1, 20), (), np.float32, ()),
        (np.ones((20, 2)), (), np.float32, (2,)),
        (np.ones((20, 3), bool), (), np.int64, (3,)),
    ],
)
def test_targets(y, classes, dtype, shape):
    data = from_arrays(np.ones((20, 2)), y)
    assert data.classes == classes
    assert data.train.labels.dtype == dtype and data.train.labels.shape[1:] == shape
    if classes:
        both = np.concatenate([data.train.labels, data.test.labels])
        wanted = [str(value) for value in np.ravel(y)]
        assert sorted(classes[label] for label in both) == sorted(wanted)


def test_images_and_tokens():
    pixels = np.zeros((20, 3, 4, 4), np.uint8)
    y = [0, 1] * 10
    image = from_arrays(pixels, y)
    assert image.kind == "image" and image.mean == (0.0,) * 3 and image.std == (1.0,) * 3
    assert from_arrays(pixels, y, kind="table").kind == "table"
    assert from_arrays(pixels.astype(np.float32), y).kind == "table"
    assert from_arrays(np.zeros((20, 5), int), y, kind="text").kind == "text"
    with pytest.raises(DataError, match=r"channels last: give x.transpose"):
        from_arrays(pixels.transpose(0, 2, 3, 1), y)
    with pytest.raises(DataError, match="images must be uint8"):
        from_arrays(pixels.astype(int), y, kind="image")


def test_clients_and_test_sets():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(100, 2))
    y = rng.normal(size=100)
    who = np.array(["b", "a", "c", "d"])[np.arange(100) % 4]
    rows = from_arrays(x, y, who)
    assert rows.clients and rows.group_names == ("a", "b", "c", "d")
    assert np.bincount(rows.test.groups).tolist() == [5, 5, 5, 5]
    for group, row in zip(rows.train.groups, rows.train.inputs, strict=True):
        at = int(np.flatnonzero(x[:, 0].astype(np.float32) == row[0])[0])
        assert rows.group_names[group] == who[at]
    whole = from_arrays(x, y, who, test_by="clients", test=0.25)
    assert set(whole.train.groups) == {0, 1, 2} and set(whole.test.groups) == {3}
    when = rng.permutation(100)
    late = from_arrays(x, y, who, test_by="time", time=when, test=0.1)
    assert sorted(late.test.labels) == sorted(y[when >= 90].astype(np.float32))
    dates = np.datetime64("2020-01-01") + when.astype("m8[D]")
    assert from_arrays(x, y, who, test_by="time", time=dates, test=0.1).name == late.name
    apart = from_arrays(x[:90], y[:90], who[:90], test=(x[90:], y[90:], who[90:]))
    assert np.array_equal(apart.test.labels, y[90:].astype(np.float32)) and len(apart.train) == 90


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.full((20, 2), np.nan)}, r"x holds nan in row 0 \(counted from 0\), column 0"),
        ({"x": np.full((20, 2), 1e300)}, r"x holds inf in row 0"),
        ({"x": np.full((20, 2), "a")}, "x is str.*: give numbers; use from_table"),
        ({"x": np.zeros((19, 2))}, "y has 20 rows and x has 19: give as many"),
        ({"y": [0.5, None] * 10}, r"y, row 1 \(counted from 0\): the value is missing"),
        ({"y": np.array(["a", 1] * 10, object)}, "y holds values of several types"),
        ({"y": np.zeros((20, 1, 1))}, r"y has shape \[20, 1, 1\]"),
        ({"y": [1] * 20}, "y has one class, '1'"),
        ({"clients": ["a"] * 20}, "there is one client to train on .'a'.: a federation needs two"),
        ({"clients": ["a"] * 19}, "clients has 19 rows and x has 20"),
        ({"clients": [0, 1] * 10, "test_by": "clients"}, "one client .*1 only for testing"),
        ({"test_by": "clients"}, "no clients are given"),
        ({"test_by": "time"}, "no time is given"),
        ({"test_by": "time", "time": np.zeros(20)}, "have one time, 0.0"),
        ({"test": (np.zeros((3, 2)), [0, 1, 2])}, r"row 22 .*'2' occurs in test rows only"),
        ({"test": (np.zeros((3, 5)), [0, 1, 1])}, r"a row of x is \[2\] and one of the test"),
        ({"test": np.zeros(3)}, r"test must be a share between 0 and 1, or a tuple \(x, y\)"),
        ({"test": 0}, "test is 0: give a share"),
        ({"kind": "sound"}, "kind is 'sound': available: image, text, table"),
    ],
)
def test_bad_arrays(change, message):
    good = {"x": np.zeros((20, 2)), "y": [0, 1] * 10}
    with pytest.raises(DataError, match=message):
        from_arrays(**(good | change))


def test_a_torch_dataset():
    x = torch.randn(30, 2, 3)
    y = torch.arange(30) % 3
    data = from_torch(torch.utils.data.TensorDataset(x, y), clients=[0, 1] * 15, name="arrays")
    assert data.name == from_arrays(x, y, [0, 1] * 15).name
    other = torch.utils.data.TensorDataset(x[:5], y[:5])
    assert len(from_torch(torch.utils.data.TensorDataset(x, y), test=other).test) == 5
    ragged = [(torch.ones(2), 0), (torch.ones(3), 1)]
    with pytest.raises(DataError, match=r"row 1 .*x is \[3\], and \[2\] in row 0"):
        from_torch(ragged)
    with pytest.raises(DataError, match="expected a pair"):
        from_torch([torch.ones(2)])


def test_a_dataset_shows_its_facts_and_not_its_arrays():
    rng = np.random.default_rng(0)
    made = from_arrays(rng.normal(size=(50, 3)), np.arange(50) % 2, clients=np.arange(50) % 5)
    assert repr(made) == (
        f"<table {made.name}: 40 rows to train on, 10 to score, float32 [3] each, 2 classes, "
        "5 clients>"
    )
    assert "targets without classes" in repr(from_arrays(rng.normal(size=(50, 3)), rng.random(50)))
