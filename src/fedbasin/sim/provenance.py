"""The data of a run, recorded in its folder, so that it resumes on the same data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedbasin.core.record import RecordError, RunFolder, read_object, write_atomically


def identity(
    train: np.ndarray,
    test: np.ndarray,
    clients: Sequence[np.ndarray],
    inputs: Sequence[np.ndarray] = (),
) -> dict[str, Any]:
    """Count the rows of a dataset; hash its labels and which rows of them each client holds.

    Args:
        train: labels of the training rows.
        test: labels of the rows that are scored.
        clients: the training rows that each client holds.
        inputs: of both; only those that are not uint8 are hashed. Pixels and characters are told
            apart by their source, and hashing them would take long.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in (np.array([len(held) for held in clients]), *clients, train, test):
        _add(digest, part)
    for part in inputs:
        if part.dtype != np.uint8:
            _add(digest, part)
    return {"rows": len(train) + len(test), "hash": digest.hexdigest()}


def _add(digest: hashlib.blake2b, part: np.ndarray) -> None:
    """Hash an array: classes by their numbers alone, anything else with its type and shape."""
    if part.ndim == 1 and np.issubdtype(part.dtype, np.integer):
        digest.update(part.astype(np.int64).tobytes())
        return
    digest.update(f"{part.dtype.str} {part.shape}".encode())
    digest.update(np.ascontiguousarray(part).data)


def begun_on(folder: RunFolder) -> dict[str, Any]:
    """Read the data that a run was begun on. Empty for runs made by older versions."""
    path = folder.path / "data.json"
    return read_object(path) if path.exists() else {}


def refuse_other(folder: RunFolder, data: Mapping[str, Any]) -> None:
    """Refuse to resume a run on other data than it was begun on."""
    known = begun_on(folder)
    if known and data and known != data:
        raise RecordError(
            f"{folder.path} was begun on other data: {known.get('rows')} rows (hash "
            f"{known.get('hash')}), and at hand are {data['rows']} ({data['hash']}); give it those "
            "it was begun on (--data-dir or FEDBASIN_DATA, in Python also data=) or start again "
            "in a new folder"
        )


def record_data(folder: RunFolder, data: Mapping[str, Any]) -> None:
    """Record the data of a new run. Refuse to resume a run on other data."""
    refuse_other(folder, data)
    if data and not folder.checkpoint.exists():  # else the data of the original run are unknown
        write_atomically(folder.path / "data.json", json.dumps(data) + "\n")
