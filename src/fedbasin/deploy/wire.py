"""Models, trees and numbers to and from Flower's records; everything that arrives is checked.

A model travels under the network's own parameter names, as in any Flower app, so that clients
and strategies of others understand it. Trees (what a method broadcasts, what a rule reports)
travel as named arrays beside a skeleton in JSON. Arrays are in NumPy's own format without
pickle, and are read in place.
"""

from __future__ import annotations

import io
import json
import math
from collections import namedtuple
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from keyword import iskeyword
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from scipy.linalg.blas import daxpy, saxpy
from torch import Tensor

from fedbasin.core.errors import TwoTextError
from fedbasin.core.net import Net
from fedbasin.core.tree import parts_of
from fedbasin.core.vectors import Layout

_NUMPY = "numpy.ndarray"  # how Flower names the only format that is read
SKELETON = "skeleton"  # the key under which a tree's shape travels
_STATISTICS = ("running_mean", "running_var")  # what BatchNorm calls its float buffers
_DEEPEST = 8  # levels of a skeleton
_LONGEST = 1 << 16  # characters of a skeleton
_LONGEST_REASON = 300  # characters
_CLIENT_FAULTS = (1, 2)  # Flower's codes for an app that cannot be loaded, or raises
LARGEST = 1e15  # the squares of 10^8 such numbers add up in float32
_MOST_AXES = 32  # of an array
_MOST = 2.0**53  # of anything counted: beyond, sums are no longer whole numbers, or overflow


class Refused(TwoTextError, ValueError):
    """A message that must not be used, with the reason.

    The reason quotes messages and settings, never rows, so it is the bare text too.
    """

    def __init__(self, reason: str) -> None:
        shown = printable(reason)
        super().__init__(shown, shown)


def printable(text: str) -> str:
    """Return text as one short line without control characters: it may quote what a node sent."""
    shown = text[:_LONGEST_REASON]
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in shown)


def read_array(array: Array) -> np.ndarray:
    """Return an array as a read-only view of the received bytes, also in Fortran's order."""
    if array.stype != _NUMPY:
        raise Refused(f"an array is stored as {array.stype!r}, expected {_NUMPY!r}")
    head = io.BytesIO(array.data)
    try:
        first = np.lib.format.read_magic(head) == (1, 0)
        read = np.lib.format.read_array_header_1_0 if first else _read_header_2_0
        shape, fortran, dtype = read(head)
        plain = dtype.kind in "biuf" and dtype.itemsize <= 8 and dtype.isnative
        if not plain:
            raise Refused(f"type {dtype} is not accepted")
        if len(shape) > _MOST_AXES or any(length < 0 for length in shape):
            raise Refused(f"its {len(shape)} axes are over {_MOST_AXES}, or one is below 0")
        size = math.prod(shape)
        if len(array.data) - head.tell() != dtype.itemsize * size:
            raise Refused(f"shape {shape} does not fill its {len(array.data)} bytes")
        if not size:
            return np.zeros(shape, dtype)
        values = np.frombuffer(array.data, dtype, size, head.tell())
        return values.reshape(shape, order="F" if fortran else "C")
    except Exception as error:  # NumPy's reader raises many kinds of errors on forged bytes
        raise Refused(f"an array cannot be read: {error}") from error


def _read_header_2_0(head: io.BytesIO) -> Any:
    return np.lib.format.read_array_header_2_0(head)


def add_scaled(total: np.ndarray, values: np.ndarray, scale: float) -> None:
    """Add ``scale * values`` to a total of the same type in place, in one pass."""
    if values.size:
        axpy = saxpy if total.dtype == np.float32 else daxpy
        added = axpy(values.reshape(-1), total, a=scale)
        assert added is total or np.shares_memory(added, total)


class Part(NamedTuple):
    """One array of a model."""

    trained: bool  # whether it belongs to the vector [P]; else to the statistics [Q]
    place: slice
    values: np.ndarray  # read-only, as they lie in the message


@dataclass(frozen=True)
class Codec:
    """How one network's vectors become arrays by name, and back.

    Args:
        layout: the parts of a vector [P].
        statistics: the parts of the float buffers [Q].
        dtype: floating type of both.
        fixed: arrays that never travel back: integer buffers and frozen parts.
        order: all names, as the network's `state_dict` has them.
    """

    layout: Layout
    statistics: Layout
    dtype: torch.dtype
    fixed: Mapping[str, Array]
    order: tuple[str, ...]

    @classmethod
    def of(cls, arrays: ArrayRecord, net: Net | None = None) -> Codec:
        """Lay out the arrays of a network; without it, BatchNorm is recognised by its names."""
        values = {name: read_array(array) for name, array in arrays.items()}
        if net is not None:
            layout = net.layout
            statistics = net.buffer_layout
            missing = [n for n in (*layout.names, *statistics.names) if n not in values]
            if missing:
                raise Refused(f"the arrays lack {', '.join(missing[:5])} of the network")
        else:
            floats = {
                n: torch.from_numpy(a.copy()) for n, a in values.items() if a.dtype.kind == "f"
            }
            own = {n: n.split(".")[-1] in _STATISTICS for n in floats}
            layout = Layout.of((n, t) for n, t in floats.items() if not own[n])
            statistics = Layout.of((n, t) for n, t in floats.items() if own[n])
        moving = (*layout.names, *statistics.names)
        types = {str(values[name].dtype) for name in moving}
        if len(types) != 1 or not types <= {"float32", "float64"}:
            raise Refused(f"the network's arrays are {sorted(types)}; use float32 or float64 alone")
        fixed = {name: array for name, array in arrays.items() if name not in moving}
        return cls(layout, statistics, getattr(torch, types.pop()), fixed, tuple(arrays))

    def write(self, vector: Tensor, buffers: Tensor, *, whole: bool = True) -> ArrayRecord:
        """Return vectors as arrays by name, with or without those that never change."""
        parts = self.layout.views(vector) | self.statistics.views(buffers)
        arrays = {n: Array(t.detach().cpu().numpy()) for n, t in parts.items()}
        if whole:
            arrays |= self.fixed
        return ArrayRecord({name: arrays[name] for name in self.order if name in arrays})

    def parts(self, record: ArrayRecord) -> list[Part]:
        """Return the parts of a model that came in, where they lie in the message.

        Wrong names, shapes and types are refused, and so is what is not finite.
        """
        odd = [n for n in record if n not in self.order]
        if odd:
            raise Refused(f"the model has arrays of other names: {', '.join(sorted(odd)[:5])}")
        parts = []
        for layout in (self.layout, self.statistics):
            for name, shape in zip(layout.names, layout.shapes, strict=True):
                if name not in record:
                    raise Refused(f"the model lacks {name}")
                values = self._values(record[name], name, shape)
                check_values(values, name)
                if name.endswith("running_var") and values.size and values.min() < 0:
                    raise Refused(f"{name} is {values.min():g} at its least, expected at least 0")
                parts.append(Part(layout is self.layout, layout.slices[name], values))
        return parts

    def _values(self, array: Array, name: str, shape: tuple[int, ...]) -> np.ndarray:
        plain = str(self.dtype).removeprefix("torch.")
        head = _header(plain, shape)
        size = math.prod(shape)
        if array.stype == _NUMPY and array.data.startswith(head) and size:  # the usual case
            dtype = np.dtype(plain)
            if len(array.data) == len(head) + size * dtype.itemsize:
                return np.frombuffer(array.data, dtype, size, len(head)).reshape(shape)
        values = read_array(array)
        if values.shape != shape:
            raise Refused(f"{name} has shape {values.shape}, expected {shape}")
        if str(values.dtype) != plain:
            raise Refused(f"{name} is {values.dtype}, expected {plain}")
        return values

    def add(
        self, parts: list[Part], scales: tuple[float, float], totals: tuple[Tensor, Tensor]
    ) -> None:
        """Add a model's parts to two vectors in place: scaled, and its statistics by their own."""
        vector, buffers = (total.numpy() for total in totals)
        for part in parts:
            if part.trained:
                add_scaled(vector[part.place], part.values, scales[0])
            else:
                add_scaled(buffers[part.place], part.values, scales[1])

    @property
    def vector_bytes(self) -> int:
        """How many bytes one vector [P] takes."""
        return self.layout.size * self.dtype.itemsize

    @property
    def model_bytes(self) -> int:
        """How many bytes a whole model takes, with statistics and what never changes."""
        fixed = sum(len(array.data) for array in self.fixed.values())
        return self.vector_bytes + self.statistics.size * self.dtype.itemsize + fixed

    def zeros(self) -> tuple[Tensor, Tensor]:
        """Return new zero vectors [P] and [Q]."""
        vector = torch.zeros(self.layout.size, dtype=self.dtype)
        return vector, torch.zeros(self.statistics.size, dtype=self.dtype)

    def read(self, record: ArrayRecord) -> tuple[Tensor, Tensor]:
        """Return a model that came in as new vectors [P] and [Q]."""
        return self.copied(self.parts(record))

    def copied(self, parts: list[Part]) -> tuple[Tensor, Tensor]:
        """Return a model's parts as new vectors [P] and [Q]."""
        vector = torch.empty(self.layout.size, dtype=self.dtype)
        buffers = torch.empty(self.statistics.size, dtype=self.dtype)
        for part in parts:
            target = vector if part.trained else buffers
            target.numpy()[part.place] = part.values.reshape(-1)
        return vector, buffers


@lru_cache(4096)
def _header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return how NumPy begins the file of such an array."""
    head = io.BytesIO()
    one = np.lib.format.header_data_from_array_1_0(np.broadcast_to(np.empty((), dtype), shape))
    np.lib.format.write_array_header_1_0(head, one | {"fortran_order": False})
    return head.getvalue()


def write_tree(tree: Any) -> tuple[ArrayRecord, ConfigRecord]:
    """Return the arrays of a tree by path, and its skeleton."""
    arrays: dict[str, Array] = {}

    def bones(node: Any, path: str) -> Any:
        parts = parts_of(node)
        if parts is None:
            if not isinstance(node, Tensor):
                return {"=": node}
            arrays[path] = Array(np.asarray(node.detach().cpu().numpy()))
            return None
        inner = {name: bones(part, f"{path}.{name}" if path else name) for name, part in parts}
        plain = isinstance(node, tuple) and not hasattr(node, "_fields")
        return list(inner.values()) if plain else inner

    skeleton = json.dumps(bones(tree, ""))
    return ArrayRecord(arrays), ConfigRecord({SKELETON: skeleton})


def read_tree(arrays: ArrayRecord, shape: ConfigRecord) -> Any:
    """Build a tree of tuples and named tuples from what `write_tree` gave."""
    text = shape.get(SKELETON)
    if not isinstance(text, str) or len(text) > _LONGEST:
        raise Refused("a tree has no skeleton, or one that is too long")
    try:
        bones = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refused(f"a tree's skeleton is not JSON: {error}") from error
    reader = _TreeReader(arrays)
    tree = reader.node(bones, "", 0)
    odd = sorted(set(arrays) - reader.used)
    if odd:
        raise Refused(f"a tree has arrays without a place: {', '.join(odd[:5])}")
    return tree


class _TreeReader:
    """Builds a tree from its skeleton and remembers which arrays it used.

    Args:
        arrays: the tree's tensors by path.
    """

    def __init__(self, arrays: ArrayRecord) -> None:
        self._arrays = arrays
        self.used: set[str] = set()

    def node(self, bones: Any, path: str, depth: int) -> Any:
        """Return the part of the tree at a path."""
        if depth > _DEEPEST:
            raise Refused(f"a tree is deeper than {_DEEPEST} levels")
        if bones is None:
            return self._leaf(path)
        if isinstance(bones, list):
            inner = [(str(i), part) for i, part in enumerate(bones)]
            return tuple(self._parts(inner, path, depth))
        if not isinstance(bones, dict):
            raise Refused(f"a tree's skeleton is damaged at {path!r}")
        if set(bones) == {"="}:
            return _scalar(bones["="], path)
        parts = self._parts(list(bones.items()), path, depth)
        return _named(tuple(bones))(*parts)

    def _parts(self, inner: list[tuple[str, Any]], path: str, depth: int) -> list[Any]:
        return [self.node(part, f"{path}.{n}" if path else n, depth + 1) for n, part in inner]

    def _leaf(self, path: str) -> Tensor:
        if path not in self._arrays:
            raise Refused(f"a tree lacks the array {path!r}")
        values = read_array(self._arrays[path])
        if values.dtype.kind == "f":
            check_values(values, path)
        self.used.add(path)
        return torch.from_numpy(values.copy())


def _scalar(value: Any, path: str) -> Any:
    if not (value is None or isinstance(value, bool | int | float | str)):
        raise Refused(f"{path} is a {type(value).__name__}, expected a number or text")
    if isinstance(value, float) and not math.isfinite(value):
        raise Refused(f"{path} is {value}, expected a finite number")
    return value


@lru_cache(256)
def _named(fields: tuple[str, ...]) -> Any:
    """Return a named tuple with these fields; a name that is no plain word is refused."""
    for name in fields:
        word = name.isascii() and name.isidentifier() and not iskeyword(name)
        if not word or name.startswith("_") or len(name) > 64:
            raise Refused(f"a tree has a part called {name[:64]!r}")
    return namedtuple("Received", fields)


def number(record: Mapping[str, Any], key: str, *, least: float = -math.inf) -> float:
    """Return a finite number of a record, or say what is wrong with it."""
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise Refused(f"{key} is {value!r}, expected a finite number")
    if value < least:
        raise Refused(f"{key} is {value}, expected at least {least:g}")
    if least >= 0 and value > _MOST:  # it counts something, and is added up
        raise Refused(f"{key} is {value:g}, expected at most {_MOST:g}")
    return value


def the_record(content: RecordDict, kind: type[Any], key: str | None = None) -> Any:
    """Return a message's record of a kind: the one under the key, or the only one there is."""
    records = {k: v for k, v in content.items() if isinstance(v, kind)}
    if key is not None and key in records:
        return records[key]
    if key is None and len(records) == 1:
        return next(iter(records.values()))
    wanted = f"the {kind.__name__} {key!r}" if key else f"exactly one {kind.__name__}"
    raise Refused(f"the message has {len(records)} of {kind.__name__}, expected {wanted}")


def from_flower(reply: Message) -> bool:
    """Whether Flower answers with an error for a node that is gone, and not the node's own app."""
    return bool(reply.has_error()) and reply.error.code not in _CLIENT_FAULTS


def fault(reply: Message) -> str:
    """Return the last line of a reply's error: it names the exception."""
    lines = (reply.error.reason or "").strip().splitlines()
    return printable(lines[-1]) if lines else f"Flower's error code {reply.error.code}"


def content_bytes(content: RecordDict) -> int:
    """Count the bytes of a message's arrays and numbers as they travel."""
    total = 0
    for record in content.values():
        if isinstance(record, ArrayRecord):
            total += sum(len(array.data) for array in record.values())
        elif isinstance(record, MetricRecord | ConfigRecord):
            total += sum(len(key) + _value_bytes(value) for key, value in record.items())
    return total


def check_values(values: np.ndarray, name: str) -> None:
    """Refuse what is not finite, or would not be in a sum of squares, which many methods form."""
    flat = values.ravel(order="K")  # no copy, whatever the order
    with np.errstate(over="ignore", invalid="ignore"):
        if float(flat @ flat) <= LARGEST**2:  # the usual case, in one pass
            return
    low = float(values.min())
    high = float(values.max())
    if not (math.isfinite(low) and math.isfinite(high)):
        raise Refused(f"{name} holds NaN or Inf")
    if max(high, -low) > LARGEST:
        raise Refused(f"{name} holds values beyond {LARGEST:g}")


def _value_bytes(value: Any) -> int:
    # Flower's own count refuses empty text and empty bytes, which a client may send.
    if isinstance(value, list):
        return sum(map(_value_bytes, value))
    if isinstance(value, str | bytes):
        return len(value)
    return 1 if isinstance(value, bool) else 8
