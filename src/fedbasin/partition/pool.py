"""What a partition reads (`Pool`) and what it makes (`Partition`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_LARGEST = 1e100  # Dirichlet draws overflow beyond; they are even long before


@dataclass(frozen=True, eq=False)
class Pool:
    """The training rows that are to be shared out, seen only through their labels.

    Args:
        labels: int64 [n], the class of each row, in [0, classes). Without classes any numbers,
            [n] or [n, k]: the targets.
        classes: C, how many classes there are (some may have no rows); 0 where there are none.
        groups: int64 [n], the writer, role, domain or coarse class of each row, or None.
    """

    labels: npt.NDArray[Any]
    classes: int = 0
    groups: Ints | None = None

    def __post_init__(self) -> None:
        """Refuse labels and groups that no split could be made of."""
        whole("classes", self.classes, least=0)
        known = _whole_numbers("labels", self.labels) if self.classes else _targets(self.labels)
        object.__setattr__(self, "labels", known)
        if not self.labels.size:
            raise ValueError("labels is empty: there is nothing to share out")
        if self.classes:
            _check_range(self.labels, self.classes)
        if self.groups is not None:
            object.__setattr__(self, "groups", _whole_numbers("groups", self.groups))
            if len(self.groups) != self.rows:
                raise ValueError(
                    f"groups has {len(self.groups)} entries for {self.rows} rows: give one a row"
                )

    @property
    def rows(self) -> int:
        """How many rows there are, n."""
        return len(self.labels)

    @cached_property
    def class_sizes(self) -> Ints:
        """How many rows each class has, [classes]."""
        return np.bincount(self.labels, minlength=self.classes).astype(np.int64)

    def need_classes(self, partition: str) -> None:
        """Refuse data whose targets have no classes, and say what to write instead."""
        if not self.classes:
            raise ValueError(
                f"{partition} needs classes, and the targets have none: write "
                f"quantiles({partition}(...), bins=10) to split by quantiles of the target, or use "
                "iid, size_dirichlet(alpha=...) or natural"
            )

    def needed_groups(self, partition: str) -> Ints:
        """Return the groups, or say that this data has none and what `partition` wants them for."""
        if self.groups is None:
            raise ValueError(
                f"groups is None: {partition} needs data whose rows carry a writer, role, domain "
                "or coarse class; use "
                f"{'dirichlet' if self.classes else 'size_dirichlet'}(alpha=...) on data without "
                "them"
            )
        return self.groups

    def only(self, rows: Ints) -> Pool:
        """Return the pool of these rows alone."""
        groups = None if self.groups is None else self.groups[rows]
        return Pool(self.labels[rows], self.classes, groups)


@dataclass(frozen=True, eq=False)
class Partition:
    """Who holds which row: none twice, unless dealt `again`; one that nobody holds is dropped.

    Args:
        clients: for each of the N clients the sorted int64 indices of its rows.
        rows: how many rows the pool had.
        again: whether a row may be held more than once, where a partition deals rows anew.
    """

    clients: tuple[Ints, ...]
    rows: int
    again: bool = False

    def __post_init__(self) -> None:
        """Refuse rows that do not exist, are held twice or stand unsorted."""
        order = self.order
        if order.size and (order.min() < 0 or order.max() >= self.rows):
            raise ValueError(f"clients holds a row outside [0, {self.rows}): check the indices")
        if order.size and not self.again and np.bincount(order).max() > 1:
            twice = int(np.bincount(order).argmax())
            raise ValueError(f"clients holds row {twice} more than once: give it to one client")
        falls = np.flatnonzero(np.diff(order) < 0) + 1
        if not np.isin(falls, self.offsets).all():
            raise ValueError("clients holds unsorted rows: sort the indices of every client")

    @cached_property
    def order(self) -> Ints:
        """The rows of all clients one after another, int64 [m]."""
        parts = [np.asarray(part) for part in self.clients]
        return np.concatenate([*parts, np.empty(0, np.int64)]).astype(np.int64, copy=False)

    @cached_property
    def offsets(self) -> Ints:
        """Where each client begins in `order`, int64 [N + 1]."""
        return np.concatenate([[0], np.cumsum([len(part) for part in self.clients])]).astype(
            np.int64
        )

    def sizes(self) -> Ints:
        """How many rows each client holds, [N]."""
        return np.diff(self.offsets)

    def hold_out(
        self,
        share: float,
        rng: np.random.Generator,
        labels: npt.NDArray[Any] | None = None,
    ) -> tuple[Partition, Partition]:
        """Split every client's rows in two: those it trains on, and this share that it does not.

        Of n rows floor(share n) are held out, at least one and at most n - 1; a client with one row
        trains on it and has none held out. A row that several clients hold and one of them holds
        out is trained on by nobody.

        Args:
            share: of every client's rows, in [0, 1).
            rng: draws the rows.
            labels: the class of every row of the pool, int64 [rows]; each class then gives its
                share, to less than one row. None draws from all rows of a client alike.
        """
        kept = []
        held = []
        for mine in self.clients:
            order = rng.permutation(mine)
            count = _held_count(share, len(mine))
            if labels is not None:
                order = order[_spread(labels[order], count, rng)]
            held.append(np.sort(order[:count]))
            kept.append(np.sort(order[count:]))
        if self.again:
            out = np.unique(np.concatenate([*held, np.empty(0, np.int64)]))
            kept = [mine[~np.isin(mine, out)] for mine in kept]
            _refuse_emptied(kept, self.clients, share)
        return (
            Partition(tuple(kept), self.rows, self.again),
            Partition(tuple(held), self.rows, self.again),
        )

    def without(self, clients: Ints) -> Partition:
        """Return it with no rows at these clients, which keep their numbers."""
        away = set(clients.tolist())
        empty = np.empty(0, np.int64)
        parts = tuple(empty if i in away else mine for i, mine in enumerate(self.clients))
        return Partition(parts, self.rows, self.again)

    def counts(self, labels: npt.NDArray[Any], classes: int) -> Ints:
        """How many rows of each class each client holds, [N, classes]; [N, 0] without classes."""
        if not classes:
            return np.zeros((len(self.clients), 0), dtype=np.int64)
        owner = np.repeat(np.arange(len(self.clients)), self.sizes())
        cells = np.bincount(
            owner * classes + np.asarray(labels)[self.order],
            minlength=len(self.clients) * classes,
        )
        return cells.reshape(len(self.clients), classes).astype(np.int64)


def _held_count(share: float, rows: int) -> int:
    """How many of a client's rows are held out."""
    return min(max(int(share * rows + 1e-9), 1), rows - 1) if rows else 0


def _spread(labels: npt.NDArray[Any], count: int, rng: np.random.Generator) -> Ints:
    """Return an order of rows whose first `count` have every class in proportion.

    Rows are lined up class by class, and `count` of them are taken at equal distances from a drawn
    start (systematic sampling), so that a class of s rows gives s count / n of them, rounded down
    or up.
    """
    line = np.argsort(labels, kind="stable")
    if not count:
        return line
    step = len(line) / count
    places = ((np.arange(count) + rng.random()) * step).astype(np.int64)
    return np.concatenate([line[places], np.delete(line, places)])


def _refuse_emptied(kept: list[Ints], before: tuple[Ints, ...], share: float) -> None:
    for client, (left, had) in enumerate(zip(kept, before, strict=True)):
        if len(had) and not len(left):
            raise ValueError(
                f"share is {share}: client {client} is left without rows, since the split deals "
                "rows again and others hold all of its rows out; use a smaller share"
            )


def cut(order: Ints, sizes: Ints, rows: int) -> Partition:
    """Cut a list of rows into clients of the given sizes; clients are views of one array."""
    owner = np.full(rows, -1, dtype=np.int64)
    owner[order] = np.repeat(np.arange(len(sizes)), sizes)
    # A stable sort by owner leaves the rows of a client in ascending order.
    by_owner = np.argsort(owner, kind="stable")[rows - len(order) :]
    ends = np.cumsum(sizes).tolist()
    starts = [0, *ends[:-1]]
    parts = tuple(by_owner[a:b] for a, b in zip(starts, ends, strict=True))
    return Partition(parts, rows)


def even(total: int, parts: int) -> Ints:
    """Sizes of `parts` pieces of `total`, as equal as can be; the first ones get the odd rows."""
    return total // parts + (np.arange(parts) < total % parts).astype(np.int64)


def whole(field: str, value: int, least: int = 1) -> None:
    """Refuse a value that is not a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{field} is {value!r}: give a whole number, at least {least}")


def positive(field: str, value: float, zero: str = "") -> None:
    """Refuse what is not a finite number above 0 (or 0 itself, where `zero` says what it means)."""
    if not (0 < value <= _LARGEST or (zero and value == 0)):  # also false for NaN
        wanted = f"at least 0 ({zero})" if zero else "above 0"
        raise ValueError(f"{field} is {value!r}: give a finite number {wanted}, such as 0.1")


def enough(rows: int, clients: int, minimum: int) -> None:
    """Refuse a minimum size that no split of the rows can give."""
    if clients * minimum > rows:
        raise ValueError(
            f"minimum is {minimum}: {clients} clients would need {clients * minimum} rows and "
            f"there are {rows}; use minimum={rows // clients} or at most {rows // minimum} clients"
        )


def _check_range(labels: Ints, classes: int) -> None:
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise ValueError(
            f"labels holds {low if low < 0 else high}, outside [0, {classes}): "
            f"number the classes from 0 and give classes={max(high + 1, classes)}"
        )


def _targets(values: npt.ArrayLike) -> npt.NDArray[Any]:
    array = np.asarray(values)
    number = array.size == 0 or array.dtype.kind in "iuf"
    if not number or array.ndim not in (1, 2):
        raise ValueError(
            f"labels has shape {array.shape} and type {array.dtype}: give one number a row, or "
            "several columns of numbers"
        )
    if not np.isfinite(array).all():
        raise ValueError("labels holds NaN or infinity: remove such rows")
    return array


def _whole_numbers(field: str, values: Iterable[int]) -> Ints:
    array = np.asarray(values)
    if array.ndim != 1 or not (array.size == 0 or np.issubdtype(array.dtype, np.integer)):
        raise ValueError(
            f"{field} has shape {array.shape} and type {array.dtype}: give one integer a row"
        )
    return array.astype(np.int64, copy=False)
