"""Small files that would fill the memory."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from fedbasin.data import DataError, from_table, unpacking
from fedbasin.data.layout import SourceFile
from fedbasin.data.parquet import open_parquet, read_column
from fedbasin.data.unpacking import read_bounded

ROWS = 3000
LABELS = pa.array([row % 2 for row in range(ROWS)])


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Write a table with a column `x`; the bounds are smaller here."""
    monkeypatch.setattr(unpacking, "_UNPACKED", 1 << 20)
    monkeypatch.setattr(unpacking, "_PACKED", 1000)

    def write(x, y=LABELS):
        path = tmp_path / "small.parquet"
        parquet.write_table(pa.table({"x": x, "y": y}), path, compression="zstd")
        return path

    return write


def columns_of(monkeypatch):
    """Note which columns are read whole."""
    read = []
    real = parquet.ParquetFile.read
    monkeypatch.setattr(
        parquet.ParquetFile, "read", lambda *a, **k: (read.append(k["columns"]), real(*a, **k))[1]
    )
    return read


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["x" * 20_000] * ROWS),  # one text, named in every row
        pa.array([[0.0] * 1500] * ROWS),
        pa.array([{"bytes": b"x" * 20_000}] * ROWS),
    ],
    ids=["text", "lists", "structs"],
)
def test_a_value_that_every_row_names_is_refused_before_it_fills_the_memory(
    written, monkeypatch, column
):
    path = written(column)
    assert path.stat().st_size * 1000 < column.nbytes
    read = columns_of(monkeypatch)
    before = pa.total_allocated_bytes()
    with pytest.raises(DataError, match=r"small\.parquet has [\d,]+ bytes and would unpack to"):
        from_table(path, target="y")
    assert ["x"] not in read
    file = SourceFile("small", path, None, "train", path.stat().st_size, 0)
    with pytest.raises(DataError, match="would unpack to"):
        read_column(file, "x")
    assert pa.total_allocated_bytes() - before < column.nbytes / 2


def test_equal_rows_without_end_are_refused_by_what_the_file_states(written):
    count = 2_000_000
    path = written(pa.array(np.zeros(count)), pa.array(np.zeros(count, dtype=np.int8)))
    assert path.stat().st_size * 1000 < count * 16
    with pytest.raises(DataError, match="would unpack to"):
        from_table(path, target="y")
    file = SourceFile("small", path, None, "train", path.stat().st_size, 0)
    with pytest.raises(DataError, match="would unpack to"), open_parquet(file):
        pass


@pytest.mark.parametrize(
    "column",
    [
        pa.array([f"word {row % 700}" if row % 7 else None for row in range(ROWS)]),
        pa.array(np.arange(float(ROWS))),
        pa.array([row % 3 == 0 for row in range(ROWS)]),
        pa.array([f"c{row % 3}" for row in range(ROWS)]).dictionary_encode(),
        pa.array([[row] for row in range(ROWS)]),
    ],
    ids=["text", "numbers", "flags", "categories", "lists"],
)
def test_columns_of_real_rows_are_read_as_they_are(written, column):
    path = written(column)
    with parquet.ParquetFile(path) as reader:
        whole = reader.read(columns=["x"]).column("x")
        assert read_bounded(path, reader, "x").to_pylist() == whole.to_pylist()


def test_a_file_without_rows_is_read(written):
    path = written(pa.array([], type=pa.string()), pa.array([], type=pa.int64()))
    with parquet.ParquetFile(path) as reader:
        assert read_bounded(path, reader, "x").to_pylist() == []
