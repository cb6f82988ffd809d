"""Who holds what: rows of each class that each client holds, as a CSV file pandas opens."""

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
        classes: the name of every class, by label.
        counts: rows of each class that each client holds, [N, C].
    """

    classes: tuple[str, ...]
    counts: NDArray[np.int64]

    def to_csv(self) -> str:
        """Write one line a client: its number, its rows and its rows of every class."""
        out = io.StringIO()
        writer = csv.writer(out)
        writer.writerow(["client", "rows", *self.classes])
        for client, row in enumerate(self.counts.tolist()):
            writer.writerow([client, sum(row), *row])
        return out.getvalue()

    @classmethod
    def read(cls, path: Path) -> Holdings:
        """Read what `to_csv` wrote; a file that is something else is an error that names it."""
        try:
            with path.open(newline="", encoding="utf-8") as file:
                header, *rows = csv.reader(file)
            if header[:2] != ["client", "rows"]:
                raise ValueError("its columns are not client, rows and one for each class")
            classes = tuple(header[2:])
            counts = np.array([[int(cell) for cell in row[2:]] for row in rows], dtype=np.int64)
            counts = counts.reshape(len(rows), len(classes))
        except (ValueError, OverflowError, csv.Error) as error:
            raise RecordError(
                f"{path} is no table of clients and classes ({error}); remove it"
            ) from error
        if counts.size and counts.min() < 0:
            raise RecordError(f"{path} says that a client holds less than no rows; remove it")
        return cls(classes, counts)
