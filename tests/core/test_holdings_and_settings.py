import tomllib

import numpy as np
import pandas
import pytest

from fedbasin.core.holdings import Holdings
from fedbasin.core.record import RecordError
from fedbasin.core.settings import flatten, nest, write_toml

NAMES = ("cat", 'say "hi", a\nb', "<script>", "\r")
COUNTS = np.array([[1, 0, 2, 0], [0, 0, 0, 0], [3, 4, 5, 6]])


def test_what_clients_hold_goes_to_a_file_and_back(tmp_path):
    path = tmp_path / "partition.csv"
    path.write_bytes(Holdings(NAMES, COUNTS).to_csv().encode())
    found = Holdings.read(path)
    assert found.classes == NAMES and found.counts.tolist() == COUNTS.tolist()
    table = pandas.read_csv(path)
    assert table["rows"].tolist() == [3, 0, 18] and table["client"].tolist() == [0, 1, 2]
    assert found.corrupted == frozenset() and len(table.columns) == 2 + len(NAMES)


@pytest.mark.parametrize("names", [NAMES, ("corrupted", *NAMES[1:])], ids=["plain", "like a class"])
@pytest.mark.parametrize("corrupted", [frozenset(), frozenset({0, 2})], ids=["none", "two"])
def test_corrupted_clients_are_marked_and_read_back(tmp_path, names, corrupted):
    path = tmp_path / "partition.csv"
    path.write_bytes(Holdings(names, COUNTS, corrupted).to_csv().encode())
    found = Holdings.read(path)
    assert found.classes == names and found.counts.tolist() == COUNTS.tolist()
    assert found.corrupted == corrupted
    if corrupted:
        table = pandas.read_csv(path)
        assert table[table["corrupted"]]["client"].tolist() == [0, 2]


def test_without_classes_there_are_rows_alone(tmp_path):
    path = tmp_path / "partition.csv"
    sizes = np.array([3, 0, 18])
    held = Holdings((), np.zeros((3, 0), np.int64), rows=sizes)
    path.write_bytes(held.to_csv().encode())
    table = pandas.read_csv(path)
    assert list(table.columns) == ["client", "rows"] and table["rows"].tolist() == [3, 0, 18]
    found = Holdings.read(path)
    assert found.classes == () and found.sizes.tolist() == [3, 0, 18]
    assert found.stacked.tolist() == [[3], [0], [18]]
    with_classes = Holdings(NAMES, COUNTS)
    assert with_classes.sizes.tolist() == [3, 0, 18] and with_classes.stacked is COUNTS
    with pytest.raises(ValueError, match="rows is None and there are no classes: give the rows"):
        Holdings((), np.zeros((3, 0), np.int64))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "client,rows\n0\n",
        "client,rows\n0,x\n",
        "client,rows\n0,-1\n",
        "client,rows,a\n0,1\n",
        "client,rows,a\n0,1,x\n",
        "a,b,c\n0,1,1\n",
        "client,rows,a\n0,1,-1\n",
        "client,rows,corrupted,a\n0,1,True,1\n1,1\n",
    ],
)
def test_another_table_is_refused_by_name(tmp_path, text):
    path = tmp_path / "partition.csv"
    path.write_text(text)
    with pytest.raises(RecordError, match=r"partition\.csv .*remove it"):
        Holdings.read(path)


def test_settings_read_back_as_they_were_written():
    settings = {
        "method": 'a "quoted" \\ name\nand\x7f é <b>',
        "rounds": 3,
        "local": {"lr": 1e-5, "nesterov": True, "decay": 0.0},
        "snapshots": {"rounds": [1, 2]},
    }
    assert tomllib.loads(write_toml(settings)) == settings
    flat = flatten(settings)
    assert flat["local.lr"] == 1e-5 and flat["rounds"] == 3
    assert nest(flat) == settings
