"""What data a run was begun on: kept with it, so that it goes on with no other."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedbasin.core.record import RecordError, RunFolder, read_object, write_atomically


def identity(train: np.ndarray, test: np.ndarray, clients: Sequence[np.ndarray]) -> dict[str, Any]:
    """Count the rows of a dataset; hash its labels and which rows of them each client holds."""
    found = hashlib.blake2b(digest_size=8)
    for part in (np.array([len(held) for held in clients]), *clients, train, test):
        found.update(part.astype(np.int64).tobytes())
    return {"rows": len(train) + len(test), "hash": found.hexdigest()}


def begun_on(folder: RunFolder) -> dict[str, Any]:
    """Read what data a run was begun on; nothing where it was begun before that was kept."""
    path = folder.path / "data.json"
    return read_object(path) if path.exists() else {}


def refuse_other(folder: RunFolder, data: Mapping[str, Any]) -> None:
    """Refuse to go on with a run on other data than it was begun on."""
    known = begun_on(folder)
    if known and data and known != data:
        raise RecordError(
            f"{folder.path} was begun on other data: {known.get('rows')} rows (hash "
            f"{known.get('hash')}), and at hand are {data['rows']} ({data['hash']}); give it those "
            "it was begun on (--data-dir or FEDBASIN_DATA) or start again in a new folder"
        )


def keep(folder: RunFolder, data: Mapping[str, Any]) -> None:
    """Refuse other data; write down what a new run is begun on."""
    refuse_other(folder, data)
    if data and not folder.checkpoint.exists():  # else it was begun on what nobody knows
        write_atomically(folder.path / "data.json", json.dumps(data) + "\n")
