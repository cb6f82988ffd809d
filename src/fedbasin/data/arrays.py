"""Writing the arrays of a cache entry, a bounded piece at a time."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedbasin.data.dataset import DataError

CACHE_VARIABLE = "FEDBASIN_CACHE"
Progress = Callable[[str, int, int], None]
_SPARE_BYTES = 64_000_000


@dataclass(frozen=True)
class Contents:
    """What a builder learned about the data while writing its arrays."""

    classes: tuple[str, ...]
    group_names: tuple[str, ...] = ()


class Writer:
    """Sends every row of the source files to its place in the train or the test arrays.

    Args:
        folder: where the arrays are written.
        labels: int64 [n], of all rows in the order of the files.
        groups: int64 [n], or None without groups.
        is_test: bool [n], which rows belong to the test split.
        shape: of one input.
    """

    def __init__(
        self,
        folder: Path,
        labels: NDArray[np.int64],
        groups: NDArray[np.int64] | None,
        is_test: NDArray[np.bool_],
        shape: tuple[int, ...],
    ) -> None:
        self._is_test = is_test
        self._place = np.where(is_test, np.cumsum(is_test), np.cumsum(~is_test)) - 1
        self._inputs = []
        for split, rows in (("train", ~is_test), ("test", is_test)):
            if not rows.any():
                raise DataError(
                    f"of {len(rows)} rows none is left for the {split} split; use more data"
                )
            np.save(folder / f"{split}_labels.npy", labels[rows], allow_pickle=False)
            if groups is not None:
                np.save(folder / f"{split}_groups.npy", groups[rows], allow_pickle=False)
            self._inputs.append(_create(folder, f"{split}_inputs", (int(rows.sum()), *shape)))

    def put(self, first: int, inputs: NDArray[np.uint8]) -> None:
        """Write the inputs of the rows that begin with number `first`."""
        span = slice(first, first + len(inputs))
        is_test = self._is_test[span]
        for array, rows in zip(self._inputs, (~is_test, is_test), strict=True):
            array[self._place[span][rows]] = inputs[rows]


def _create(folder: Path, name: str, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Create a uint8 array on disk to be filled piece by piece.

    Room is checked first: writing to a mapped file on a full disk kills the process.
    """
    needed = int(np.prod(shape))
    if shutil.disk_usage(folder).free < needed + _SPARE_BYTES:
        raise DataError(
            f"the cache folder {folder.parent} lacks {needed / 1e6:.0f} MB of room; "
            f"make room, or name another folder with --cache-dir or {CACHE_VARIABLE}"
        )
    array: NDArray[np.uint8] = np.lib.format.open_memmap(
        folder / f"{name}.npy", mode="w+", dtype=np.uint8, shape=shape
    )
    return array
