"""State to and from safetensors: exact, atomic, and free of pickle.

Tensors go into the file under their path in the tree; numbers, strings and a checksum go into
its header as JSON. Reading needs a tree of the same shape (what `init` returns), so nothing in
the file decides which code runs.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedbasin.core.files import parsed_json, replacing
from fedbasin.core.tree import Leaf, flatten, restore

_SUM = "=checksum"  # no path of a tree


class StateError(ValueError):
    """A state file that cannot be used, with the reason and what to do."""


def save(path: Path, tree: Any) -> None:
    """Write a tree so that the file is either the old one or the new one, never a mixture."""
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, Leaf] = {}
    owners: set[int] = set()
    for name, leaf in flatten(tree):
        if not isinstance(leaf, Tensor):
            scalars[name] = leaf
            continue
        tensor = leaf.detach().cpu().contiguous()
        # The format refuses tensors that share memory, as `send` and `score` often do.
        if tensor.untyped_storage().data_ptr() in owners:
            tensor = tensor.clone()
        owners.add(tensor.untyped_storage().data_ptr())
        tensors[name] = tensor
    scalars[_SUM] = _checksum(tensors, scalars)
    # All in one entry: the format writes several in any order, and equal trees make equal files.
    write(path, tensors, {"scalars": json.dumps(scalars)})


def write(path: Path, tensors: dict[str, Tensor], header: dict[str, str] | None = None) -> None:
    """Write tensors that share no memory to a safetensors file, whole or not at all."""
    with replacing(path) as temporary:
        mode = temporary.stat().st_mode  # the user's own; the format's writer makes it private
        try:
            save_file(tensors, temporary, metadata=header)
        except SafetensorError as error:  # a full disk
            raise OSError(str(error)) from error
        temporary.chmod(mode)


def read(path: Path) -> dict[str, Leaf]:
    """Read all leaves of a state file by path."""
    try:
        with safe_open(path, framework="pt") as file:
            leaves: dict[str, Leaf] = parsed_json((file.metadata() or {}).get("scalars", "{}"))
            # A copy: a product of matrices may round otherwise where memory is aligned otherwise.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        if not isinstance(leaves, dict):
            raise ValueError("its scalars are no object of JSON")
        written = str(leaves.pop(_SUM, _checksum(tensors, leaves)))
        # Files of older versions sum up their tensors alone.
        if written != _checksum(tensors, leaves if "." in written else None):
            raise ValueError("its bytes are not those that were written")
        leaves.update(tensors)
    except FileNotFoundError as error:
        raise StateError(f"{path} does not exist") from error
    except (SafetensorError, OSError, ValueError) as error:
        raise StateError(
            f"{path} is not a whole state file ({error}); delete it, and what needs it begins anew"
        ) from error
    return leaves


def _checksum(tensors: Mapping[str, Tensor], scalars: Mapping[str, Leaf] | None = None) -> str:
    """Sum up all bytes of tensors in the order of the names, then what stands beside them."""
    checksum = 0
    for name in sorted(tensors):
        checksum = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, checksum)
    if scalars is None:
        return f"{checksum:08x}"
    beside = zlib.crc32(json.dumps(scalars, sort_keys=True).encode())
    return f"{checksum:08x}.{beside:08x}"


def load(path: Path, template: Any) -> Any:
    """Read a tree of the template's shape; tensors go to the template's device and dtype."""
    try:
        return restore(template, read(path))
    except KeyError as error:
        raise StateError(f"{path}: {error.args[0]}") from error


def same(a: Any, b: Any) -> bool:
    """Whether two trees hold equal leaves at equal paths, bit for bit."""
    left, right = dict(flatten(a)), dict(flatten(b))
    if left.keys() != right.keys():
        return False
    for path, leaf in left.items():
        other = right[path]
        if isinstance(leaf, Tensor) != isinstance(other, Tensor):
            return False
        if isinstance(leaf, Tensor) and isinstance(other, Tensor):
            if leaf.dtype != other.dtype or not torch.equal(leaf, other):
                return False
        elif leaf != other:
            return False
    return True
