import importlib.util
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from fedbasin.partition import Pool, from_flower

POOL = Pool(np.arange(40) % 4, 4, np.arange(40) // 8)


class Columns(dict):
    """Stands in for datasets.Dataset: columns by name and rows by index."""

    @property
    def column_names(self):
        return list(self)

    def select(self, rows):
        return Columns({name: np.asarray(values)[rows] for name, values in self.items()})

    @classmethod
    def from_dict(cls, columns):
        return cls(columns)


class ByColumn:
    """Has what the documentation of flwr_datasets' Partitioner promises, and nothing else."""

    def __init__(self, column):
        self.column, self._dataset = column, None

    def is_dataset_assigned(self):
        return self._dataset is not None

    @property
    def dataset(self):
        return self._dataset

    @dataset.setter
    def dataset(self, value):
        assert self._dataset is None
        self._dataset = value

    @property
    def num_partitions(self):
        return len(set(np.asarray(self._dataset[self.column]).tolist()))

    def load_partition(self, partition_id):
        rows = np.flatnonzero(np.asarray(self._dataset[self.column]) == partition_id)
        return self._dataset.select(rows[::-1])  # Flower shuffles; the order is not to matter


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(Dataset=Columns))


@pytest.mark.parametrize(
    ("column", "names"),
    [("label", {}), ("group", {}), ("y", {"label": "y"}), ("who", {"group": "who"})],
)
def test_partitions_become_clients(stand_in, column, names):
    split = from_flower(ByColumn(column), POOL, **names)
    by = POOL.groups if column in ("group", "who") else POOL.labels
    expected = [np.flatnonzero(by == value).tolist() for value in range(by.max() + 1)]
    assert [client.tolist() for client in split.clients] == expected
    assert split.rows == 40


def test_a_used_partitioner_is_refused(stand_in):
    partitioner = ByColumn("label")
    from_flower(partitioner, POOL)
    with pytest.raises(ValueError, match="ByColumn already has a dataset: make a fresh one"):
        from_flower(partitioner, POOL)


def test_a_partitioner_of_columns_is_refused(stand_in):
    class Vertical(ByColumn):
        def load_partition(self, partition_id):
            return Columns({"label": self.dataset["label"]})

    with pytest.raises(ValueError, match="Vertical splits columns"):
        from_flower(Vertical("label"), POOL)


def test_overlapping_partitions_are_refused(stand_in):
    class Overlapping(ByColumn):
        def load_partition(self, partition_id):
            return self.dataset

    with pytest.raises(ValueError, match="more than once"):
        from_flower(Overlapping("label"), POOL)


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'fedbasin\[flower\]'"):
        from_flower(ByColumn("label"), POOL)


@pytest.mark.skipif(
    importlib.util.find_spec("flwr_datasets") is None,
    reason="flwr_datasets is not installed (extra 'flower')",
)
def test_with_real_flower_partitioners(monkeypatch):
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "0")
    from flwr_datasets import partitioner as flower

    pool = Pool(np.arange(400) % 4, 4, np.arange(400) // 50)
    drawn = from_flower(flower.DirichletPartitioner(5, "label", 0.5, 10), pool)
    assert len(drawn.clients) == 5 and drawn.sizes().sum() == 400 and drawn.sizes().min() >= 10
    by_writer = from_flower(flower.NaturalIdPartitioner("group"), pool)
    assert by_writer.sizes().tolist() == [50] * 8
    assert from_flower(flower.IidPartitioner(8), pool).sizes().tolist() == [50] * 8
