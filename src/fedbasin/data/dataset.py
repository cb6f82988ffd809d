"""What the rest of fedbasin sees of data: rows, a dataset, and its three disjoint parts.

Inputs stay as the numbers they were published in (pixels, character numbers, columns of a table);
scaling and augmentation happen later, on the training device (`fedbasin.data.transform`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fedbasin.core.errors import TwoTextError

if TYPE_CHECKING:
    from fedbasin.data.encoding import Encoding

Kind = Literal["image", "text", "table"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_FLOATS = (np.float16, np.float32, np.float64)
_CHECKED_AT_ONCE = 1 << 22  # numbers: looking for NaN takes little memory beside the data


class DataError(TwoTextError, RuntimeError):
    """Data that is missing, altered, unreadable or not what it should be, and what to do.

    A bare text names files without their folders, columns that the caller or an encoding named,
    rows by number, the kind of fault, and what to do. It names no value, no column that was read
    from a file, no client and no picture.
    """

    def within(self, place: str, bare: str = "") -> DataError:
        """Return the error with a place before both texts.

        Args:
            place: such as ``"client 3: "``.
            bare: the place without what must not leave the machine, where it differs.
        """
        return DataError(f"{place}{self}", f"{bare or place}{self.bare}")


@dataclass(frozen=True, eq=False)
class Rows:
    """One split: inputs, labels and, where the data has them, the group of every row.

    NaN and infinity are refused: fill or remove such rows first.

    Args:
        inputs: images uint8 ``[n, channels, height, width]``, tokens ``[n, length]`` of any integer
            type, or the numbers of a table, of sensors or of sequences ``[n, ...]`` of any integer
            type, float16, float32 or float64.
        labels: what is to be predicted. int64 ``[n]``, the class of each row; or targets without
            classes: float32 ``[n]`` or ``[n, k]``, int64 ``[n, k]`` (or ``[n]``, as counts are).
        groups: int64 ``[n]``, the writer, role or domain of each row; None without groups.
        missing: bool ``[n, k]``, which of a table's k columns of numbers and flags had no value;
            None where all had one.
        origin: int64 ``[n]``, which row of a whole split each row is, for rows that are looked up
            there; None if they are not.
    """

    inputs: NDArray[Any]
    labels: NDArray[Any]
    groups: NDArray[np.int64] | None = None
    missing: NDArray[np.bool_] | None = None
    origin: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        """Check that the arrays fit together and hold numbers only."""
        _check_inputs(self.inputs)
        _check_labels(self.labels)
        if self.groups is not None and (self.groups.dtype != np.int64 or self.groups.ndim != 1):
            raise ValueError(
                f"groups must be int64 [n], got {self.groups.dtype.name} {list(self.groups.shape)}"
            )
        for name in ("inputs", "groups", "missing"):
            array = getattr(self, name)
            if array is not None and len(array) != len(self.labels):
                raise ValueError(
                    f"{name} has {len(array)} rows and labels has {len(self.labels)}: give as many"
                )
        _refuse_gaps("inputs", self.inputs)
        _refuse_gaps("labels", self.labels)

    def __len__(self) -> int:
        """How many rows there are."""
        return len(self.labels)

    def take(self, index: Any) -> Rows:
        """Return the rows an index array, mask or slice names, in that order, read-only."""
        whole = (self.inputs, self.labels, self.groups, self.missing, self.origin)
        parts = [None if each is None else each[index] for each in whole]
        for part in parts:
            if part is not None:
                part.flags.writeable = False
        inputs, labels, groups, missing, origin = parts
        assert inputs is not None and labels is not None
        return Rows(inputs, labels, groups, missing, origin)


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """A named dataset: its two published splits and what its numbers mean.

    Args:
        name: the name it was loaded by.
        kind: ``"image"`` (uint8 pixels), ``"text"`` (whole numbers that a network looks up) or
            ``"table"`` (numbers that a network takes as they are: tables, sensors, sequences).
        train: the rows clients learn from.
        test: the rows that are scored.
        classes: the name of every class, by label; empty where the targets have no classes.
        group_names: the name of every group, by number; empty without groups.
        mean: of images, per channel, subtracted from inputs scaled to [0, 1].
        std: of images, per channel, what the difference is divided by.
        encoding: how the columns of a table became numbers; None for other data.
        clients: whether groups are the clients of a federation. Then those with training rows have
            the first numbers; others are only tested on.
        fitted: whether `encoding` was fitted on the training rows. Where clients hold some of them
            out, it is fitted again without these (`fedbasin.data.fitting`).
    """

    name: str
    kind: Kind
    train: Rows
    test: Rows
    classes: tuple[str, ...]
    group_names: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    encoding: Encoding | None = None
    clients: bool = False
    fitted: bool = False

    def __post_init__(self) -> None:
        """Check that the splits are alike and that the labels are what `classes` says."""
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}: available: {', '.join(KINDS)}")
        for name, split in (("train", self.train), ("test", self.test)):
            if not len(split):
                raise ValueError(f"{name} of {self.name} has no rows: give some")
        for name in ("inputs", "labels"):
            train, test = getattr(self.train, name), getattr(self.test, name)
            if (train.dtype, train.shape[1:]) != (test.dtype, test.shape[1:]):
                raise ValueError(
                    f"{name} of a row is {train.dtype.name} {list(train.shape[1:])} in train and "
                    f"{test.dtype.name} {list(test.shape[1:])} in test: make them alike"
                )
        inputs = self.train.inputs
        if self.kind == "image" and (inputs.dtype != np.uint8 or inputs.ndim != 4):
            raise ValueError(
                "inputs of kind 'image' must be uint8 [n, channels, height, width], got "
                f"{inputs.dtype.name} {list(inputs.shape)}: use kind 'table' for other numbers"
            )
        if self.kind == "text" and not np.issubdtype(inputs.dtype, np.integer):
            raise ValueError(
                f"inputs of kind 'text' must be whole numbers, got {inputs.dtype.name}: use kind "
                "'table' for numbers that the network takes as they are"
            )
        if self.classes:
            for split in (self.train, self.test):
                _check_classes(split.labels, len(self.classes))
        if self.clients and self.train.groups is None:
            raise ValueError("clients is True and train has no groups: give the client of each row")

    def __repr__(self) -> str:
        """Say what there is; the arrays themselves would fill pages."""
        inputs = self.train.inputs
        parts = [
            f"{len(self.train):,} rows to train on",
            f"{len(self.test):,} to score",
            f"{inputs.dtype.name} {list(inputs.shape[1:])} each",
            f"{len(self.classes):,} classes" if self.classes else "targets without classes",
        ]
        if self.group_names:
            groups = "clients" if self.clients else "groups"
            parts.append(f"{len(self.group_names):,} {groups}")
        return f"<{self.kind} {self.name}: {', '.join(parts)}>"


@dataclass(frozen=True, eq=False)
class Splits:
    """Three disjoint sets of rows: to train on, for the server's own use, and to score.

    Args:
        train: rows the clients share out.
        proxy: rows held by the server (FedLAW, FedDF, FedBE); None if not asked for.
        test: rows that are scored; never a proxy row.
    """

    train: Rows
    proxy: Rows | None
    test: Rows


def _check_inputs(inputs: NDArray[Any]) -> None:
    """Refuse inputs that are no rows of numbers."""
    number = np.issubdtype(inputs.dtype, np.integer) or inputs.dtype.type in _FLOATS
    if not number or np.issubdtype(inputs.dtype, np.timedelta64):
        raise ValueError(
            f"inputs is {inputs.dtype.name}: give whole numbers, float16, float32 or float64 (turn "
            "categories into numbers or 0/1 columns first)"
        )
    if inputs.dtype == np.uint64 and inputs.size and inputs.max() > np.iinfo(np.int64).max:
        raise ValueError("inputs holds numbers beyond int64, which torch cannot index by")
    if inputs.ndim < 2:
        raise ValueError(
            f"inputs has shape {list(inputs.shape)}: give [n, ...], such as inputs[:, None] for "
            "one number a row"
        )


def _check_labels(labels: NDArray[Any]) -> None:
    """Refuse targets of another type or of more than two axes."""
    if labels.dtype not in (np.int64, np.float32):
        raise ValueError(
            f"labels is {labels.dtype.name}: give int64 for classes and tokens, float32 for other "
            "targets, such as labels.astype(np.float32)"
        )
    if labels.ndim not in (1, 2) or 0 in labels.shape[1:]:
        raise ValueError(
            f"labels has shape {list(labels.shape)}: give [n], or [n, k] for k targets a row"
        )


def _check_classes(labels: NDArray[Any], classes: int) -> None:
    """Refuse labels that are not numbers of classes."""
    if labels.dtype != np.int64 or labels.ndim != 1:
        raise ValueError(
            f"labels is {labels.dtype.name} {list(labels.shape)} and there are {classes} classes: "
            "give int64 [n], or classes=() for targets without classes"
        )
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise ValueError(
            f"labels holds {low if low < 0 else high}, outside [0, {classes}): number the classes "
            "from 0 and name each of them in classes"
        )


def _refuse_gaps(name: str, array: NDArray[Any]) -> None:
    """Refuse NaN and infinity, and name the first row that has one."""
    gap = first_gap(array)
    if gap is not None:
        raise ValueError(
            f"{name} holds {array[gap]} in row {gap[0]}: fill in a number, or remove the row"
        )


def first_gap(array: NDArray[Any]) -> tuple[int, ...] | None:
    """Return where the first NaN or infinity is; None where all numbers are finite."""
    if array.dtype.kind != "f":
        return None
    step = max(1, _CHECKED_AT_ONCE // max(1, int(np.prod(array.shape[1:]))))
    for first in range(0, len(array), step):
        bad = ~np.isfinite(array[first : first + step])
        if bad.any():
            row, *place = (int(axis[0]) for axis in np.nonzero(bad))
            return (first + row, *place)
    return None
