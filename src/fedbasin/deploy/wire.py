"""Models, trees and numbers to and from Flower's records; everything that arrives is checked.

A model travels under the network's own parameter names, as in any Flower app, so that clients
and strategies of others understand it. Trees (what a method broadcasts, what a rule reports)
travel as named arrays beside a skeleton in JSON. Arrays are in NumPy's own format without
pickle, and are looked at where they lie.
"""

from __future__ import annotations

import io
import json
import math
from collections import namedtuple
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from fedbasin.core.net import Net
from fedbasin.core.tree import parts_of
from fedbasin.core.vectors import Layout

SKELETON = "skeleton"  # the key under which a tree's shape travels
_STATISTICS = ("running_mean", "running_var")  # what BatchNorm calls its float buffers
_DEEPEST, _LONGEST = 8, 1 << 16  # of a skeleton: levels, characters
_CHUNK = 1 << 20  # elements that are worked on at once


class Refused(ValueError):
    """A message that must not be used, with the reason."""


def read_array(array: Array) -> np.ndarray:
    """Return an array as a read-only view of the received bytes."""
    if array.stype != "numpy.ndarray":
        raise Refused(f"an array is stored as {array.stype!r}, expected 'numpy.ndarray'")
    head = io.BytesIO(array.data)
    try:
        first = np.lib.format.read_magic(head) == (1, 0)
        read = np.lib.format.read_array_header_1_0 if first else _read_header_2_0
        shape, fortran, dtype = read(head)
    except (ValueError, EOFError, SyntaxError) as error:
        raise Refused(f"an array cannot be read: {error}") from error
    if dtype.kind not in "biuf" or not dtype.isnative or (fortran and len(shape) > 1):
        raise Refused(f"an array of type {dtype} or order Fortran is not accepted")
    size = math.prod(shape)
    if len(array.data) - head.tell() != dtype.itemsize * size:
        raise Refused(f"an array of shape {shape} does not fill its {len(array.data)} bytes")
    if not size:
        return np.zeros(shape, dtype)
    return np.frombuffer(array.data, dtype, size, head.tell()).reshape(shape)


def _read_header_2_0(head: io.BytesIO) -> Any:
    return np.lib.format.read_array_header_2_0(head)


def all_finite(values: np.ndarray) -> bool:
    """Whether no number is NaN or Inf; both carry over to the least or the largest."""
    return values.size == 0 or bool(np.isfinite(values.min()) and np.isfinite(values.max()))


def add_scaled(total: np.ndarray, values: np.ndarray, scale: float) -> None:
    """Add ``scale * values`` to a total in place, with little memory beside them."""
    flat, scratch = values.reshape(-1), np.empty(min(_CHUNK, values.size), total.dtype)
    for start in range(0, flat.size, _CHUNK):
        part = flat[start : start + _CHUNK]
        np.multiply(part, scale, out=scratch[: part.size], casting="same_kind")
        total[start : start + part.size] += scratch[: part.size]


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
        """Lay out the arrays of a network; without the network, BatchNorm is told by its names."""
        found = {name: read_array(array) for name, array in arrays.items()}
        if net is not None:
            layout, statistics = net.layout, net.buffer_layout
            missing = [n for n in (*layout.names, *statistics.names) if n not in found]
            if missing:
                raise Refused(f"the arrays lack {', '.join(missing[:5])} of the network")
        else:
            floats = {
                n: torch.from_numpy(a.copy()) for n, a in found.items() if a.dtype.kind == "f"
            }
            own = {n: n.split(".")[-1] in _STATISTICS for n in floats}
            layout = Layout.of((n, t) for n, t in floats.items() if not own[n])
            statistics = Layout.of((n, t) for n, t in floats.items() if own[n])
        moving = (*layout.names, *statistics.names)
        types = {str(found[name].dtype) for name in moving}
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

    def views(self, record: ArrayRecord) -> Iterator[tuple[Layout, str, np.ndarray]]:
        """Yield every part of a model that came in; wrong names, shapes, types are refused."""
        odd = [n for n in record if n not in self.order]
        if odd:
            raise Refused(f"the model has arrays of other names: {', '.join(sorted(odd)[:5])}")
        for layout in (self.layout, self.statistics):
            for name, shape in zip(layout.names, layout.shapes, strict=True):
                if name not in record:
                    raise Refused(f"the model lacks {name}")
                values = read_array(record[name])
                if values.shape != shape:
                    raise Refused(f"{name} has shape {values.shape}, expected {shape}")
                if str(values.dtype) != str(self.dtype).removeprefix("torch."):
                    raise Refused(f"{name} is {values.dtype}, expected {self.dtype}")
                yield layout, name, values

    def check(self, record: ArrayRecord) -> None:
        """Refuse a model that is of the wrong length or type, or not finite."""
        for _, name, values in self.views(record):
            if not all_finite(values):
                raise Refused(f"{name} holds NaN or Inf")

    def add(
        self, record: ArrayRecord, scales: tuple[float, float], totals: tuple[Tensor, Tensor]
    ) -> None:
        """Add a checked model to two vectors in place, its parts and its statistics scaled."""
        parts = {
            id(layout): (total.numpy(), scale)
            for layout, total, scale in zip(
                (self.layout, self.statistics), totals, scales, strict=True
            )
        }
        for layout, name, values in self.views(record):
            total, scale = parts[id(layout)]
            add_scaled(total[layout.slices[name]], values, scale)

    def read(self, record: ArrayRecord) -> tuple[Tensor, Tensor]:
        """Return a checked model as new vectors [P] and [Q]."""
        self.check(record)
        vector = torch.empty(self.layout.size, dtype=self.dtype)
        buffers = torch.empty(self.statistics.size, dtype=self.dtype)
        targets = {id(self.layout): vector.numpy(), id(self.statistics): buffers.numpy()}
        for layout, name, values in self.views(record):
            targets[id(layout)][layout.slices[name]] = values.reshape(-1)
        return vector, buffers


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
    text, taken = shape.get(SKELETON), set()
    if not isinstance(text, str) or len(text) > _LONGEST:
        raise Refused("a tree has no skeleton, or one that is too long")

    def grown(node: Any, path: str, depth: int) -> Any:
        if depth > _DEEPEST:
            raise Refused(f"a tree is deeper than {_DEEPEST} levels")
        if node is None:
            return leaf(path)
        if isinstance(node, list):
            inner = [(str(i), part) for i, part in enumerate(node)]
        elif isinstance(node, dict) and set(node) == {"="}:
            return scalar(node["="], path)
        elif isinstance(node, dict):
            inner = list(node.items())
        else:
            raise Refused(f"a tree's skeleton is damaged at {path!r}")
        parts = [grown(part, f"{path}.{n}" if path else n, depth + 1) for n, part in inner]
        return tuple(parts) if isinstance(node, list) else _named(tuple(node))(*parts)

    def leaf(path: str) -> Tensor:
        if path not in arrays:
            raise Refused(f"a tree lacks the array {path!r}")
        values = read_array(arrays[path])
        if values.dtype.kind == "f" and not all_finite(values):
            raise Refused(f"{path} holds NaN or Inf")
        taken.add(path)
        return torch.from_numpy(values.copy())

    def scalar(value: Any, path: str) -> Any:
        if not (value is None or isinstance(value, bool | int | float | str)):
            raise Refused(f"{path} is a {type(value).__name__}, expected a number or text")
        return value

    try:
        bones = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refused(f"a tree's skeleton is not JSON: {error}") from error
    tree = grown(bones, "", 0)
    if set(arrays) != taken:
        odd = sorted(set(arrays) - taken)
        raise Refused(f"a tree has arrays without a place: {', '.join(odd[:5])}")
    return tree


@lru_cache(256)
def _named(fields: tuple[str, ...]) -> Any:
    """Return a named tuple with these fields; a name that is no plain word is refused."""
    for name in fields:
        if not name.isidentifier() or name.startswith("_") or len(name) > 64:
            raise Refused(f"a tree has a part called {name[:64]!r}")
    return namedtuple("Received", fields)


def number(record: Mapping[str, Any], key: str, *, least: float = -math.inf) -> float:
    """Return a finite number of a record, or say what is wrong with it."""
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise Refused(f"{key} is {value!r}, expected a finite number")
    if value < least:
        raise Refused(f"{key} is {value}, expected at least {least:g}")
    return value


def the_record(content: RecordDict, kind: type[Any], key: str | None = None) -> Any:
    """Return a message's record of a kind: the one under the key, or the only one there is."""
    found = {k: v for k, v in content.items() if isinstance(v, kind)}
    if key is not None and key in found:
        return found[key]
    if key is None and len(found) == 1:
        return next(iter(found.values()))
    wanted = f"the {kind.__name__} {key!r}" if key else f"exactly one {kind.__name__}"
    raise Refused(f"the message has {len(found)} of {kind.__name__}, expected {wanted}")


def fault(reply: Message) -> str:
    """Return the last line of a reply's error, which names the exception."""
    lines = (reply.error.reason or "").strip().splitlines()
    return lines[-1] if lines else f"Flower's error code {reply.error.code}"


def content_bytes(content: RecordDict) -> int:
    """Count the bytes of a message's arrays and numbers as they travel."""
    total = 0
    for record in content.values():
        if isinstance(record, ArrayRecord):
            total += sum(len(array.data) for array in record.values())
        elif isinstance(record, MetricRecord | ConfigRecord):
            total += record.count_bytes()
    return total
