"""Tables from outside (frames, files, rows in memory), read one column at a time.

Frames are recognised by the Arrow C stream, which pandas, polars and pyarrow all speak, so none of
them is imported. Of a parquet file one column is in memory at a time. A CSV file is read whole,
because the type of a column shows only in all of its values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import csv, parquet

from fedbasin.core.suggest import nearest
from fedbasin.data.dataset import DataError
from fedbasin.data.unpacking import check_stated, read_bounded

ColumnKind = Literal["number", "whole", "flag", "text", "category", "date", "empty", "other"]
KIND_NAMES: dict[ColumnKind, str] = {
    "number": "numbers",
    "whole": "whole numbers",
    "flag": "true or false",
    "text": "text",
    "category": "categories",
    "date": "dates or times",
    "empty": "nothing",
    "other": "lists, bytes or other values",
}
_LARGEST_CSV = 2**31 - 2  # bytes; the reader counts a block in 32 bits
_ROW = "row {} (counted from 0)"
NUMBER = r"^\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*$"  # text that stands for a number
_FLAG = r"^\s*(?i:true|false|0|1)\s*$"


@dataclass(frozen=True, eq=False)
class Part:
    """One file or frame of a table.

    Args:
        label: how errors call it, such as ``"site 'A'"``; empty for a table of one part.
        schema: names and types of its columns.
        rows: how many rows it has.
        read: returns a column by name.
    """

    label: str
    schema: pa.Schema
    rows: int
    read: Callable[[str], pa.ChunkedArray]


@dataclass(frozen=True, eq=False)
class Table:
    """Rows of one or several parts that have the same columns.

    Args:
        parts: the files or frames, one after another.
        kept: int64, the rows that count, of those of all parts; None for all.
    """

    parts: tuple[Part, ...]
    kept: NDArray[np.int64] | None = None

    @property
    def names(self) -> list[str]:
        """Return the names of the columns."""
        return list(self.parts[0].schema.names)

    def __len__(self) -> int:
        """How many rows count."""
        return sum(part.rows for part in self.parts) if self.kept is None else len(self.kept)

    def part_of_rows(self) -> NDArray[np.int64]:
        """Return the number of the part that each row is of."""
        numbers = np.repeat(np.arange(len(self.parts)), [part.rows for part in self.parts])
        return numbers if self.kept is None else numbers[self.kept]

    def only(self, rows: NDArray[np.bool_]) -> Table:
        """Return the table of the marked rows."""
        known = np.arange(len(self)) if self.kept is None else self.kept
        return replace(self, kept=known[rows])

    def place(self, row: int) -> str:
        """Say where a row stands, in its own file or frame."""
        number = row if self.kept is None else int(self.kept[row])
        for part in self.parts:
            if number < part.rows:
                return _ROW.format(number) + (f" of {part.label}" if part.label else "")
            number -= part.rows
        raise IndexError(f"the table has {len(self)} rows, there is no row {row}")

    def check_name(self, name: str, role: str) -> None:
        """Refuse the name of a column that is not there."""
        for part in self.parts:
            if name not in part.schema.names:
                where = f" in {part.label}" if part.label else ""
                fault = f"{role} {name!r} is no column{where}"
                hint = nearest(name, part.schema.names)
                raise DataError(f"{fault}; {hint}", f"{fault}: name it in the header")

    def kind(self, name: str) -> ColumnKind:
        """Return what a column holds; parts that disagree are refused."""
        found: dict[ColumnKind, str] = {}
        for part in self.parts:
            found.setdefault(_kind_of(part.schema.field(name).type), part.label)
        if len(found) > 1:
            found.pop("empty", None)
        kinds = set(found)
        if len(kinds) == 1:
            return kinds.pop()
        if kinds == {"whole", "number"}:
            return "number"
        if kinds == {"text", "category"}:
            return "category"
        said = " and ".join(f"{KIND_NAMES[kind]} in {label}" for kind, label in found.items())
        raise DataError(
            f"column {name!r} holds {said}: make them alike",
            "a column holds other values in one part of the table than in another: make them alike",
        )

    def column(self, name: str) -> pa.ChunkedArray:
        """Read a column, of one type for all parts: text and categories are strings."""
        kind = self.kind(name)
        types = {part.schema.field(name).type for part in self.parts}
        types.discard(pa.null())
        wanted = types.pop() if len(types) == 1 else pa.float64()
        if kind in ("text", "category"):
            wanted = pa.large_string()
        elif kind == "empty":
            wanted = pa.null()
        chunks: list[pa.Array] = []
        for part in self.parts:
            chunks.extend(_cast(part.read(name), wanted).chunks)
        whole = pa.chunked_array(chunks, type=wanted)
        return whole if self.kept is None else whole.take(pa.array(self.kept))

    def numbers(self, name: str) -> NDArray[Any]:
        """Read a column of numbers, or of true and false, as floats; missing ones are NaN."""
        column = self.column(name)
        if not pa.types.is_floating(column.type) or pa.types.is_float16(column.type):
            column = column.cast(pa.float64(), safe=False)
        values: NDArray[Any] = column.to_numpy()
        return values


def open_table(source: Any, *, label: str = "", text: Iterable[str] = ()) -> Table:
    """Open a table of any supported kind.

    Args:
        source: a frame of pandas, polars or pyarrow; the path of a CSV file, a parquet file or a
            folder of parquet files; or a list of mappings from column names to values.
        label: how errors call it; by default only files of several are named.
        text: columns that a CSV file has as text, whatever their values look like.
    """
    if isinstance(source, str | Path):
        parts = _files(Path(source).expanduser(), label, frozenset(text))
    elif isinstance(source, pa.Table) or hasattr(source, "__arrow_c_stream__"):
        parts = (_in_memory(_from_frame(source), label),)
    elif isinstance(source, list | tuple) and all(isinstance(row, Mapping) for row in source):
        parts = (_in_memory(_from_mappings(source), label),)
    else:
        raise DataError(
            f"a table is a frame (pandas, polars, pyarrow), a path or a list of dicts, got "
            f"{type(source).__name__}: use from_arrays for arrays"
        )
    table = Table(parts)
    for part in parts:
        _check_part(part, table.names)
    if not len(table):
        raise DataError(f"{label or 'the table'} has no rows: give some", "a table has no rows")
    return table


def joined(tables: Iterable[Table]) -> Table:
    """Return one table of the rows of several, which must have the same columns."""
    parts = [part for table in tables for part in table.parts]
    for part in parts:
        _check_part(part, list(parts[0].schema.names))
    return Table(tuple(parts))


def _check_part(part: Part, names: list[str]) -> None:
    """Refuse two columns of one name, and other columns than the first part has."""
    seen = set()
    for name in part.schema.names:
        if name in seen:
            where = f"{part.label} has" if part.label else "there are"
            raise DataError(
                f"{where} two columns named {name!r}: rename or remove one of them",
                f"{where} two columns of one name: rename or remove one of them",
            )
        seen.add(name)
    lacking = [name for name in names if name not in seen]
    if lacking:
        raise DataError(
            f"{part.label} lacks the column {lacking[0]!r}, which other parts have",
            f"{part.label} lacks a column that other parts have",
        )
    more = [name for name in part.schema.names if name not in names]
    if more:
        raise DataError(
            f"{part.label} has a column {more[0]!r}, which other parts lack",
            f"{part.label} has a column that other parts lack",
        )


def _kind_of(kind: pa.DataType) -> ColumnKind:
    """Return what an Arrow type stands for here."""
    types = pa.types
    if types.is_dictionary(kind):
        inner = _kind_of(kind.value_type)
        return "category" if inner in ("text", "whole", "flag", "empty") else inner
    tests: tuple[tuple[ColumnKind, bool], ...] = (
        ("flag", types.is_boolean(kind)),
        ("whole", types.is_integer(kind)),
        ("number", types.is_floating(kind) or types.is_decimal(kind)),
        ("text", types.is_string(kind) or types.is_large_string(kind)),
        ("text", types.is_string_view(kind)),
        ("date", types.is_temporal(kind)),
        ("empty", types.is_null(kind)),
    )
    return next((name for name, fits in tests if fits), "other")


def _cast(column: pa.ChunkedArray, wanted: pa.DataType) -> pa.ChunkedArray:
    """Return a column as the wanted type; categories become the text of their values."""
    if column.type == wanted:
        return column
    if pa.types.is_dictionary(column.type):
        # Not by cast, which lacks some types of text.
        decoded = [each.dictionary.cast(wanted).take(each.indices) for each in column.chunks]
        return pa.chunked_array(decoded, type=wanted)
    return column.cast(wanted, safe=False)


def _in_memory(table: pa.Table, label: str) -> Part:
    return Part(label, table.schema, table.num_rows, table.column)


def _without_index(schema: pa.Schema) -> list[str]:
    """Return the columns but those in which pandas stores its index."""
    known = (schema.metadata or {}).get(b"pandas")
    index = json.loads(known).get("index_columns", []) if known else []
    return [name for name in schema.names if name not in index]


def _from_frame(frame: Any) -> pa.Table:
    """Take a frame over through the Arrow C stream."""
    names = [str(name) for name in getattr(frame, "columns", ())]
    if isinstance(frame, pa.Table):
        return frame
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"there are two columns named {twice!r}: rename or remove one of them")
    try:
        table = pa.table(frame)
    except (pa.ArrowException, TypeError, ValueError) as error:
        for name in getattr(frame, "columns", ()):
            _array(str(name), list(frame[name]))  # the error that names the column and the row
        raise DataError(f"the frame cannot be read ({str(error).splitlines()[0]})") from error
    return table.select(_without_index(table.schema))


def _from_mappings(rows: list[Mapping[str, Any]] | tuple[Mapping[str, Any], ...]) -> pa.Table:
    """Make columns of mappings; a key that a mapping lacks is a missing value."""
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: _array(name, [row.get(name) for row in rows]) for name in names})


def _array(name: str, values: list[Any]) -> pa.Array:
    """Make a column of Python values; a value of another type than the rest is named."""
    try:
        return pa.array(values, from_pandas=True)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        kinds = [_python_kind(value) for value in values]
        known = [kind for kind in kinds if kind]
        usual = max(set(known), key=known.count) if known else ""
        row = next((at for at, kind in enumerate(kinds) if kind and kind != usual), None)
        if row is None:
            reason = str(error).splitlines()[0]
            raise DataError(f"column {name!r} cannot be read ({reason})") from error
        place = _ROW.format(row)
        fix = "correct it, or leave it out as missing (None)"
        fault = f"{values[row]!r:.40} is {kinds[row]} in a column of {usual}"
        raise DataError(
            f"column {name!r}, {place}: {fault}: {fix}",
            f"{place}: a value is of another type than the rest of its column: {fix}",
        ) from error


def _python_kind(value: Any) -> str:
    """Name what a Python value is; empty for a missing one."""
    if value is None or value != value:
        return ""
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "numbers"
    return "text" if isinstance(value, str) else type(value).__name__


def _files(path: Path, label: str, text: frozenset[str]) -> tuple[Part, ...]:
    """Open a CSV file, a parquet file or a folder of parquet files."""
    if path.is_dir():
        files = sorted(each for each in path.glob("*.parquet") if each.name[0] not in "._")
        if not files:
            raise _of_file(path, "is a folder without .parquet files: name a CSV file, or these")
        before = f"{label}, " if label else ""
        return tuple(_parquet(each, f"{before}{each.name}") for each in files)
    if not path.exists():
        raise DataError(f"there is no file {path}: check the path", f"there is no file {path.name}")
    if path.suffix.lower() in (".parquet", ".pq"):
        return (_parquet(path, label),)
    if path.suffix.lower() in (".csv", ".tsv"):
        return (_in_memory(_read_csv(path, text), label),)
    raise _of_file(path, "is no table that can be read: give .csv, .tsv or .parquet")


def _parquet(path: Path, label: str) -> Part:
    """Open a parquet file; columns are read when asked for."""
    try:
        with parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            rows = file.metadata.num_rows
            check_stated(path, file.metadata)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error
    names = _without_index(schema)
    chosen = pa.schema([field for field in schema if field.name in names])
    return Part(label, chosen, rows, partial(_read_parquet, path))


def _read_parquet(path: Path, name: str) -> pa.ChunkedArray:
    try:
        with parquet.ParquetFile(path) as file:
            return read_bounded(path, file, name)
    except (pa.ArrowException, OSError, KeyError) as error:
        raise _unreadable(path, error) from error


def _read_csv(path: Path, text: frozenset[str]) -> pa.Table:
    """Read a CSV file as one block, so that types are found from all rows and not the first."""
    size = path.stat().st_size
    if size > _LARGEST_CSV:
        raise _of_file(path, f"has {size / 1e9:.1f} GB, CSV files may have 2: write it as parquet")
    odd = []

    def refuse(row: Any) -> str:
        odd.append(row)
        return "error"

    separator = "\t" if path.suffix.lower() == ".tsv" else ","
    try:
        table = csv.read_csv(
            path,
            read_options=csv.ReadOptions(block_size=size + 1, use_threads=False),
            parse_options=csv.ParseOptions(
                delimiter=separator, newlines_in_values=True, invalid_row_handler=refuse
            ),
            convert_options=csv.ConvertOptions(
                strings_can_be_null=True, column_types=dict.fromkeys(text, pa.string())
            ),
        )
    except (pa.ArrowException, OSError) as error:
        if odd:
            # The parser counts lines from 1 and the header as one of them.
            place = _ROW.format(odd[0].number - 2) if odd[0].number else "a row"
            fault = (
                f"{place} has {odd[0].actual_columns} values and the header names "
                f"{odd[0].expected_columns}"
            )
            fix = f"quote values that hold a {separator!r}"
            raise DataError(
                f"{path}: {fault}: {odd[0].text[:60]!r}; {fix}", f"{path.name}: {fault}; {fix}"
            ) from error
        raise _unreadable(path, error) from error
    if table.num_columns == 1 and ";" in table.column_names[0]:
        raise _of_file(path, "separates columns by ';': write it with commas, or as parquet")
    return table


def first_odd(column: pa.ChunkedArray, *, flags: bool = False) -> int:
    """Return the row of the first value that is text and stands for no number.

    Where there is none, every value is of the wrong type: then it is the first row with a value.

    Args:
        column: with at least one value.
        flags: whether values are to be true or false, in place of numbers.
    """
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        fits = pc.match_substring_regex(column, _FLAG if flags else NUMBER)
        row: int = pc.index(fits, pa.scalar(False)).as_py()
        if row >= 0:
            return row
    first: int = pc.index(column.is_valid(), pa.scalar(True)).as_py()
    return first


def _of_file(path: Path, fault: str) -> DataError:
    """Return the error of a file; its folder is for the full text alone."""
    return DataError(f"{path} {fault}", f"{path.name} {fault}")


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(
        f"{path} cannot be read ({str(error).splitlines()[0]}): write it again",
        f"{path.name} cannot be read: write it again",
    )
