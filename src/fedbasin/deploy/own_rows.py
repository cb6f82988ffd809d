"""The rows of a client: from a `Dataset`, from arrays, or from a file of its own.

A node that has a file of its own names it in its configuration, so the server never learns of it:

    flower-supernode ... --node-config "partition-id=0 num-partitions=3 data='/srv/site-a.csv'"
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context

from fedbasin.data import DataError, Dataset, Encoding, Rows, from_table
from fedbasin.data.transform import Transform as DataTransform
from fedbasin.local.train import Shard, Transform
from fedbasin.sim.population import as_tensor

PATH = "data"  # where a node's configuration names its file

Given = Shard | Dataset | tuple[Any, Any]  # rows as stored, with a test set, or arrays (x, y)
Data = Callable[[int, int], Given] | Callable[[Context], Given]


@dataclass(frozen=True)
class Held:
    """What one client holds.

    Args:
        rows: to train on.
        held_out: to evaluate on; None where nothing was set aside.
        transform: turns the rows into inputs of the network; None where only the app knows.
        classes: how many classes the targets have; None where only the app knows.
    """

    rows: Shard
    held_out: Shard | None = None
    transform: Transform | None = None
    classes: int | None = None

    @classmethod
    def of(cls, given: Given, client: int) -> Held:
        """Read what a client was given; whatever is wrong with it names the client.

        Args:
            given: a `Shard`, which passes as it is; a `Dataset`, whose test rows are held out; or
                arrays ``(x, y)`` of NumPy or torch. Of arrays, uint8 [n, channels, height, width]
                is images, scaled to [0, 1]; other numbers are taken as they are.
            client: the client's number.
        """
        if isinstance(given, Shard):
            return cls(given)
        if isinstance(given, Dataset):
            transform = DataTransform.of(given)
            return cls(_shard(given.train), _shard(given.test), transform, len(given.classes))
        if not isinstance(given, tuple) or len(given) != 2:
            fault = (
                f"client {client}: its data is {type(given).__name__}: give a fedbasin.data.Dataset"
                ", arrays (x, y), or a Shard"
            )
            raise DataError(fault, fault)
        try:
            rows = _rows(*given)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"client {client}: {error}",
                f"client {client}: its arrays (x, y) are not rows that a client can train on",
            ) from error
        pixels = rows.inputs.dtype == np.uint8 and rows.inputs.ndim == 4
        if not pixels:
            return cls(_shard(rows), transform=DataTransform(kind="table"))
        channels = rows.inputs.shape[1]
        scaled = DataTransform((0.0,) * channels, (1.0,) * channels)
        return cls(_shard(rows), transform=scaled)

    def on(self, device: torch.device) -> Held:
        """Return the same with its rows on a device."""
        rows = _moved(self.rows, device)
        aside = None if self.held_out is None else _moved(self.held_out, device)
        return replace(self, rows=rows, held_out=aside)


def held_by(data: Data, context: Context, client: int, clients: int) -> Held:
    """Call a user's data function for one client; whatever is wrong with the data names the client.

    Args:
        data: takes ``(client, clients)``, or Flower's context of the node if it needs one argument.
        context: of the node.
        client: the client's number.
        clients: how many there are.
    """
    call: Callable[..., Given] = data
    try:
        given = call(context) if _takes_context(call) else call(client, clients)
    except DataError as error:
        raise error.within(f"client {client}: ") from error
    return Held.of(given, client)


def node_table(context: Context, encoding: Encoding | Path | str, **settings: Any) -> Dataset:
    """Read the table that a node's configuration names, as an encoding says.

    All nodes take one encoding, so that columns and classes mean the same everywhere. It is made
    once, from a sample or by a simulation, whose run folder holds it as ``encoding.json``.

    Args:
        context: of the node, which is started with ``--node-config "data='/srv/site-a.csv'"``.
        encoding: the encoding, or the path of its file.
        settings: further arguments of `fedbasin.data.from_table`, such as ``test=0.3``.
    """
    path = context.node_config.get(PATH)
    if not isinstance(path, str) or not path:
        fix = f"start it with --node-config \"{PATH}='/srv/site-a.csv'\" beside its partition-id"
        raise DataError(
            f"the node does not say where its table is ({PATH} is {path!r}): {fix}",
            f"the node does not say where its table is: {fix}",
        )
    return read_table(path, encoding, **settings)


def read_table(path: Path | str, encoding: Encoding | Path | str, **settings: Any) -> Dataset:
    """Read a table as an encoding says; errors name the file.

    Args:
        path: the table.
        encoding: the encoding, or the path of its file.
        settings: further arguments of `fedbasin.data.from_table`, such as ``test=0.3``.
    """
    if not isinstance(encoding, Encoding):
        encoding = read_encoding(encoding)
    targets = encoding.targets
    target = targets[0] if len(targets) == 1 else targets
    try:
        return from_table(path, target, encoding=encoding, **settings)
    except DataError as error:
        if str(path) in str(error):
            raise
        raise error.within(f"{path}: ", f"{Path(path).name}: ") from error


def read_encoding(path: Path | str) -> Encoding:
    """Read an encoding from its file; errors name the file."""
    try:
        return Encoding.from_json(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        fix = "write one with dataset.encoding.to_json(), or take that of a run folder"
        raise DataError(
            f"the encoding {path} cannot be read ({error.strerror}): {fix}",
            f"the encoding {Path(path).name} cannot be read: {fix}",
        ) from error
    except (DataError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: {error}", f"{Path(path).name} is no encoding") from error


def _takes_context(call: Callable[..., Any]) -> bool:
    """Whether a data function needs one argument, the context, and not a client's two numbers."""
    try:
        parameters = inspect.signature(call).parameters.values()
    except ValueError:  # built-in functions have no signature
        return False
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in parameters if p.kind in places and p.default is p.empty]
    return len(needed) == 1


def _rows(x: Any, y: Any) -> Rows:
    """Return arrays as checked rows."""
    inputs = _array(x)
    labels = _array(y)
    if inputs.dtype == np.bool_:
        inputs = inputs.astype(np.uint8)
    if inputs.ndim == 1:
        inputs = inputs[:, None]
    if labels.dtype.kind in "biu":
        labels = labels.astype(np.int64)
    elif labels.dtype.kind == "f":
        labels = labels.astype(np.float32)
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    rows = Rows(inputs, labels)
    if not len(rows):
        raise ValueError("it holds no rows: give some, or leave the client out")
    return rows


def _array(values: Any) -> np.ndarray:
    """Return an array of NumPy, from a tensor, a list or whatever NumPy takes."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        if str(values.dtype) == "torch.bfloat16":  # NumPy has no such type
            values = values.float()
    return np.asarray(values)


def _moved(shard: Shard, device: torch.device) -> Shard:
    return Shard(shard.inputs.to(device), shard.labels.to(device))


def _shard(rows: Rows) -> Shard:
    return Shard(as_tensor(rows.inputs), as_tensor(rows.labels))
