"""Data in memory as a `Dataset` that is named by what it holds."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbasin.data.dataset import Dataset, Kind, Rows
from fedbasin.data.encoding import Encoding
from fedbasin.data.holdout import Plan

_DIGITS = 8


def content_hash(dataset: Dataset) -> str:
    """Return 8 hexadecimal digits of BLAKE2b over all that a dataset holds but its name.

    That is: kind, classes, group names, mean and std, whether groups are clients, and of train and
    test the types, shapes and bytes of inputs, labels, groups and, where there are any, gaps.
    """
    digest = hashlib.blake2b(digest_size=_DIGITS // 2)
    facts = (dataset.kind, dataset.classes, dataset.group_names, dataset.mean, dataset.std)
    digest.update(repr((*facts, dataset.clients)).encode())
    for rows in (dataset.train, dataset.test):
        for array in (rows.inputs, rows.labels, rows.groups):
            if array is None:
                digest.update(b"none")
                continue
            digest.update(repr((array.dtype.str, array.shape)).encode())
            whole = np.ascontiguousarray(array)
            digest.update(whole.reshape(-1).view(np.uint8).data)
        if rows.missing is not None:
            digest.update(np.packbits(rows.missing).data)
    return digest.hexdigest()


def named_by_content(name: str) -> bool:
    """Whether a name is one that `finished` gives: data in memory, which no name can load."""
    return re.fullmatch(rf".+-[0-9a-f]{{{_DIGITS}}}", name) is not None


def finished(
    name: str,
    kind: Kind,
    plan: Plan,
    inputs: tuple[NDArray[Any], NDArray[Any]],
    encoding: Encoding | None = None,
    missing: NDArray[np.bool_] | None = None,
    *,
    fitted: bool = False,
) -> Dataset:
    """Put a planned dataset together and name it ``"{name}-{hash}"``.

    Args:
        name: what the user calls it.
        kind: of the inputs.
        plan: targets, clients and test rows.
        inputs: of the training rows, and of the test rows.
        encoding: how a table became these inputs.
        missing: which numbers and flags of all rows had no value (see `Rows`).
        fitted: whether the encoding was fitted on the training rows.
    """
    splits = []
    for array, rows in zip(inputs, (~plan.is_test, plan.is_test), strict=True):
        groups = None if plan.clients is None else plan.clients.codes[rows]
        labels = plan.labels.values[rows]
        gaps = None if missing is None else missing[rows]
        for part in (array, labels, groups, gaps):
            if part is not None:
                part.flags.writeable = False
        splits.append(Rows(array, labels, groups, gaps))
    train, test = splits
    channels = train.inputs.shape[1] if kind == "image" else 0
    unnamed = Dataset(
        name,
        kind,
        train,
        test,
        plan.labels.classes,
        () if plan.clients is None else plan.clients.names,
        (0.0,) * channels,
        (1.0,) * channels,
        encoding,
        plan.clients is not None,
        fitted,
    )
    return replace(unnamed, name=f"{name}-{content_hash(unnamed)}")
