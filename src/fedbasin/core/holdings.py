"""Who holds what: each client's rows, and its rows of each class, as a CSV file pandas opens."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedbasin.core.record import RecordError


@dataclass(frozen=True, eq=False)
class Holdings:
    """What the clients hold.

    Args:
        classes: the name of every class, by label; empty where the targets have no classes.
        counts: rows of each class that each client holds, [N, C].
        corrupted: the clients that have labels exchanged.
        rows: rows that each client holds, [N]; None adds up the counts, where there are classes.
    """

    classes: tuple[str, ...]
    counts: NDArray[np.int64]
    corrupted: frozenset[int] = frozenset()
    rows: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        """Refuse holdings that do not say how many rows clients hold."""
        if not self.classes and self.rows is None:
            raise ValueError("rows is None and there are no classes: give the rows of each client")

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Rows that each client holds, [N]."""
        sizes: NDArray[np.int64] = self.counts.sum(axis=1) if self.rows is None else self.rows
        return sizes

    @property
    def stacked(self) -> NDArray[np.int64]:
        """What a bar of each client is stacked of: its rows by class, or all of them [N, 1]."""
        return self.counts if self.classes else self.sizes[:, None]

    def to_csv(self) -> str:
        """Write one line a client: number, rows, whether corrupted if any is, rows by class."""
        out = io.StringIO()
        writer = csv.writer(out)
        mark = ["corrupted"] if self.corrupted else []
        writer.writerow(["client", "rows", *mark, *map(_as_text, self.classes)])
        sizes = self.sizes.tolist()
        for client, row in enumerate(self.counts.tolist()):
            marked = [client in self.corrupted for _ in mark]
            writer.writerow([client, sizes[client], *marked, *row])
        return out.getvalue()

    @classmethod
    def read(cls, path: Path) -> Holdings:
        """Read what `to_csv` wrote; a file that is something else is an error that names it."""
        try:
            with path.open(newline="", encoding="utf-8") as file:
                header, *rows = csv.reader(file)
            if header[:2] != ["client", "rows"]:
                raise ValueError("its columns are not client, rows and one for each class")
            marks = [row[2:3] for row in rows] if header[2:3] == ["corrupted"] else []
            corrupted = frozenset(at for at, mark in enumerate(marks) if mark == ["True"])
            first = 3 if corrupted else 2  # a class may have that name too
            classes = tuple(name.removeprefix("'") for name in header[first:])
            counts = np.array([[int(cell) for cell in row[first:]] for row in rows], dtype=np.int64)
            counts = counts.reshape(len(rows), len(classes))
            sizes = None if classes else np.array([int(row[1]) for row in rows], dtype=np.int64)
        except (ValueError, IndexError, OverflowError, csv.Error) as error:
            raise RecordError(
                f"{path} is no table of clients and classes ({error}); remove it"
            ) from error
        if min(counts.min(initial=0), 0 if sizes is None else sizes.min(initial=0)) < 0:
            raise RecordError(f"{path} contains a negative count; remove it")
        return cls(classes, counts, corrupted, sizes)


def _as_text(name: str) -> str:
    """Write a name so that a spreadsheet does not take it for a formula."""
    return f"'{name}" if name[:1] in ("=", "+", "-", "@", "\t", "\r", "'") else name
