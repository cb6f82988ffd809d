"""The Python objects of a run: data in memory, a network or the function that makes it.

A config file cannot hold them, so it holds their names. A run folder also holds a hash of the
network's start, so that the run is resumed with the same objects or refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from fedbasin.core.net import Net
from fedbasin.core.record import RecordError, RunFolder, read_object, write_atomically
from fedbasin.data import Dataset

Factory = Callable[[tuple[int, ...], int], nn.Module]


@dataclass(frozen=True, eq=False)
class Objects:
    """The objects of a run.

    Args:
        data: rows in memory; None where `data.name` says what to load.
        model: a module, whose weights are the start, or a function ``(shape, outputs) -> module``;
            None where `model` is an expression of the catalogue.
    """

    data: Dataset | None = None
    model: nn.Module | Factory | None = None


def model_name(model: object) -> str:
    """Return what to call a network given as an object: its class or function."""
    named: Any = type(model) if isinstance(model, nn.Module) else model
    return str(getattr(named, "__name__", type(named).__name__))


def record_model(folder: RunFolder, name: str, net: Net) -> None:
    """Record the start of a network given as an object; refuse another one on resume.

    Args:
        folder: the run's folder.
        name: what the configuration calls it.
        net: the network as it was built for this run.
    """
    path = folder.path / "model.json"
    now = {"name": name, "hash": _hash_of(net)}
    if not path.exists():
        write_atomically(path, json.dumps(now) + "\n")
        return
    known = read_object(path)
    if known != now:
        raise RecordError(
            f"{folder.path} was begun with the network {known.get('name')} (hash "
            f"{known.get('hash')}), and model= is {name} ({now['hash']}); give it the network it "
            "was begun with, or start again in a new folder"
        )


def _hash_of(net: Net) -> str:
    """Hash names, types and values of all tensors of a network at its start."""
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(net.state_dict(*net.initial()).items()):
        array = tensor.float() if tensor.is_floating_point() else tensor
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(array.contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()
