"""What the rest of fedbasin sees of data: rows, a dataset, and its three disjoint parts.

Inputs stay as the bytes they were published in (pixels, character numbers); scaling and
augmentation happen later, on the training device (`fedbasin.data.transform`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Kind = Literal["image", "text"]


class DataError(RuntimeError):
    """Data that is missing, altered, unreadable or not what it should be, and what to do."""


@dataclass(frozen=True, eq=False)
class Rows:
    """One split: inputs, labels and, where the data has them, the group of every row.

    Args:
        inputs: uint8, images ``[n, channels, height, width]`` or tokens ``[n, length]``.
        labels: int64 ``[n]``, the class of each row.
        groups: int64 ``[n]``, the writer, role or domain of each row; None without groups.
    """

    inputs: NDArray[np.uint8]
    labels: NDArray[np.int64]
    groups: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        """Check that the arrays fit together."""
        wanted = (("inputs", np.uint8), ("labels", np.int64), ("groups", np.int64))
        for name, dtype in wanted:
            array = getattr(self, name)
            if array is None:
                continue
            if array.dtype != dtype or len(array) != len(self.labels):
                raise ValueError(
                    f"{name} must hold {len(self.labels)} rows of {np.dtype(dtype).name}, "
                    f"got {len(array)} of {array.dtype.name}"
                )

    def __len__(self) -> int:
        """How many rows there are."""
        return len(self.labels)

    def take(self, index: Any) -> Rows:
        """Return the rows an index array, mask or slice names, in that order, read-only."""
        parts = [None if a is None else a[index] for a in (self.inputs, self.labels, self.groups)]
        for part in parts:
            if part is not None:
                part.flags.writeable = False
        inputs, labels, groups = parts
        assert inputs is not None and labels is not None
        return Rows(inputs, labels, groups)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A named dataset: its two published splits and what its numbers mean.

    Args:
        name: the name it was loaded by.
        kind: ``"image"`` or ``"text"``.
        train: the rows clients learn from.
        test: the rows that are scored.
        classes: the name of every class, by label.
        group_names: the name of every group, by number; empty without groups.
        mean: per channel, subtracted from inputs scaled to [0, 1].
        std: per channel, what the difference is divided by.
    """

    name: str
    kind: Kind
    train: Rows
    test: Rows
    classes: tuple[str, ...]
    group_names: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()


@dataclass(frozen=True, eq=False)
class Splits:
    """Three disjoint sets of rows: to train on, for the server's own use, and to score.

    Args:
        train: rows the clients share out.
        proxy: class-balanced rows held by the server (FedLAW, FedDF, FedBE); None if not asked for.
        test: rows that are scored; never a proxy row.
    """

    train: Rows
    proxy: Rows | None
    test: Rows
