"""Reading parquet files from outside: schema, labels and groups, checked before they are used."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbasin.data.dataset import DataError
from fedbasin.data.layout import SourceFile
from fedbasin.data.sources import Part
from fedbasin.data.unpacking import check_stated, read_bounded


@dataclass(frozen=True)
class Columns:
    """The columns of one file that are read, and its class names where it states them."""

    inputs: str
    label: str
    group: str | None
    class_names: tuple[str, ...] = ()


@contextmanager
def open_parquet(file: SourceFile) -> Iterator[Any]:
    """Open a parquet file; an error of the reader becomes a `DataError` that names the file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file.path) as reader:
            check_stated(file.path, reader.metadata)
            yield reader
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(
            f"{file.path} is not a readable parquet file ({reason}); fetch or copy it again"
        ) from error


def find_columns(file: SourceFile, part: Part) -> Columns:
    """Find the image and label columns, from the part's description or the file's own schema."""
    with open_parquet(file) as reader:
        schema = reader.schema_arrow
    features = _features(schema)
    inputs = part.inputs or _only(file, "image", _image_columns(schema, features), None)
    labels = [name for name, feature in features.items() if feature.get("_type") == "ClassLabel"]
    whole = _integer_columns(schema)
    if not (part.label or labels or whole):
        raise DataError(
            f"{file.path} has no column of labels, that is of whole numbers; its columns are "
            + ", ".join(f"{field.name} ({field.type})" for field in schema)
            + ". Write the classes as numbers from 0, or read the file as a table "
            "(--data FILE --target COLUMN)"
        )
    label = part.label or _only(file, "label", labels or whole, "label")
    group = part.group if part.group in schema.names or not part.group_optional else None
    for name, is_right, kind in (
        (inputs, _is_image, "images {bytes, path}"),
        (label, _is_integer, "integer labels"),
        (group, _is_group, "text or integer groups"),
    ):
        if name is not None:
            _check_column(file, schema, name, is_right, kind)
    names = features.get(label, {}).get("names") or ()
    return Columns(inputs, label, group, tuple(map(str, names)))


def check_text_columns(file: SourceFile, names: tuple[str, ...]) -> None:
    """Refuse a file that lacks one of these text columns."""
    with open_parquet(file) as reader:
        for name in names:
            _check_column(file, reader.schema_arrow, name, _is_text, "text")


def read_column(file: SourceFile, name: str) -> list[Any]:
    """Read one small column whole; an empty cell is an error naming its row."""
    with open_parquet(file) as reader:
        values: list[Any] = _whole(file, reader, name).to_pylist()
    return values


def read_labels(file: SourceFile, name: str, classes: int | None) -> NDArray[np.int64]:
    """Read the labels of a file and check that they lie in 0 .. classes - 1."""
    with open_parquet(file) as reader:
        labels: NDArray[np.int64] = _whole(file, reader, name).to_numpy().astype(np.int64)
    bad = np.flatnonzero((labels < 0) | (labels >= (classes or np.iinfo(np.int64).max)))
    if len(bad):
        limit = f"0..{classes - 1}" if classes else "0 or more"
        raise DataError(
            f"{file.path} row {bad[0]}: label {labels[bad[0]]} in {name!r} must be {limit}; "
            "the file does not fit this dataset (unlabelled test rows are often -1)"
        )
    return labels


def batches(file: SourceFile, name: str, size: int) -> Iterator[tuple[int, list[Any]]]:
    """Yield (first row, values) of a column, a bounded number of rows at a time."""
    first = 0
    with open_parquet(file) as reader:
        for batch in reader.iter_batches(batch_size=size, columns=[name]):
            yield first, batch.column(0).to_pylist()
            first += len(batch)


def read_groups(columns: list[tuple[SourceFile, str]]) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Number the groups of several files in sorted order; return every row's number, and the names.

    Args:
        columns: each file with the column that names its rows' groups.
    """
    names: dict[Any, int] = {}
    parts = []
    for file, name in columns:
        with open_parquet(file) as reader:
            # Each name becomes a Python object once, not once a row: there may be millions of rows.
            column = _whole(file, reader, name).combine_chunks().dictionary_encode()
            values = column.dictionary.to_pylist()
            numbers = [names.setdefault(value, len(names)) for value in values]
            parts.append(np.array(numbers, dtype=np.int64)[column.indices.to_numpy()])
    ordered = sorted(names)
    rank = np.empty(len(names), dtype=np.int64)
    rank[[names[value] for value in ordered]] = np.arange(len(names))
    return rank[np.concatenate(parts)], tuple(map(str, ordered))


def _whole(file: SourceFile, reader: Any, name: str) -> Any:
    """Read one column of an open file and refuse empty cells."""
    column = read_bounded(file.path, reader, name)
    if column.null_count:
        row = column.is_null().to_pylist().index(True)
        raise DataError(f"{file.path} row {row}: {name!r} is empty; fetch or copy the file again")
    return column


def _features(schema: Any) -> dict[str, dict[str, Any]]:
    """Return the column descriptions that Hugging Face writes into a file; empty without them."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {name: feature for name, feature in features.items() if isinstance(feature, dict)}
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}


def _only(file: SourceFile, kind: str, columns: list[str], option: str | None) -> str:
    """Return the only column, or refuse the file because it has none or several."""
    if len(columns) == 1:
        return columns[0]
    seen = f"several {kind} columns ({', '.join(columns)})" if columns else f"no {kind} column"
    way_out = f"; choose one with ?{option}=COLUMN" if option and columns else ""
    raise DataError(f"{file.path} has {seen}, fedbasin needs exactly one{way_out}")


def _check_column(file: SourceFile, schema: Any, name: str, is_right: Any, kind: str) -> None:
    """Refuse a file that lacks a column or holds something else in it."""
    if name not in schema.names:
        raise DataError(
            f"{file.path} has no column {name!r} (it has: {', '.join(schema.names)}); "
            "it is not this dataset, or another version of it"
        )
    if not is_right(schema.field(name).type):
        raise DataError(
            f"{file.path}: column {name!r} holds {schema.field(name).type}, expected {kind}"
        )


def _image_columns(schema: Any, features: dict[str, dict[str, Any]]) -> list[str]:
    """Columns declared as images, or else those of the hub's image form."""
    declared = [name for name, feature in features.items() if feature.get("_type") == "Image"]
    return declared or [name for name in schema.names if _is_image(schema.field(name).type)]


def _integer_columns(schema: Any) -> list[str]:
    """Columns of whole numbers."""
    return [name for name in schema.names if _is_integer(schema.field(name).type)]


def _is_image(type_: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_struct(type_) and type_.get_field_index("bytes") >= 0)


def _is_integer(type_: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(type_))


def _is_text(type_: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_))


def _is_group(type_: Any) -> bool:
    return _is_text(type_) or _is_integer(type_)
