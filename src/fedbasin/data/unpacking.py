"""Small parquet files that would fill the memory are refused.

A parquet file may store a long value once and name it in a million rows, or a million equal rows
as one. What it states of its size is not trusted: columns are counted while they are read.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbasin.data.dataset import DataError

if TYPE_CHECKING:
    import pyarrow as pa

_CELL = 8  # bytes of a number in memory
_UNPACKED = 256 << 20  # bytes that any file may unpack to
_PACKED = 2000  # times its own size that a larger one may
_ROWS = 256  # rows of unknown length that are read at once


def check_stated(path: Path, metadata: Any) -> None:
    """Refuse a file whose own figures say that it unpacks beyond the bound."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    stored = sum(group.total_byte_size for group in groups)
    _check(path, max(stored, metadata.num_rows * metadata.num_columns * _CELL))


def read_bounded(path: Path, reader: Any, name: str) -> pa.ChunkedArray:
    """Read a column of an open parquet file, and stop where it grows beyond the bound.

    Args:
        path: where the file lies.
        reader: the open `ParquetFile`.
        name: the column.
    """
    import pyarrow as pa

    kind = reader.schema_arrow.field(name).type
    if pa.types.is_primitive(kind):  # as long as its rows
        check_stated(path, reader.metadata)
        return reader.read(columns=[name], use_threads=False).column(name)
    parts = []
    size = 0
    for batch in reader.iter_batches(batch_size=_ROWS, columns=[name], use_threads=False):
        size += batch.nbytes
        _check(path, size)
        parts.append(batch.column(0))
    whole = pa.table({name: pa.chunked_array(parts, type=kind)})
    return whole.combine_chunks().column(name)


def _check(path: Path, size: int) -> None:
    own = path.stat().st_size
    if size > max(_UNPACKED, _PACKED * own):
        raise DataError(
            f"{path} has {own:,} bytes and would unpack to {size:,} or more: no table of real "
            "rows packs so well; write the rows that you need to another file"
        )
