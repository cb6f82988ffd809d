"""What each client gets: scores by client as columns of a record, and as a table of clients.

A column is named after whose scores it sums up, the metric and what is made of it:
``clients_accuracy_p10`` is the 10th percentile over the clients that take part,
``unseen_accuracy_mean`` the mean over those that never do. A client for which a metric is undefined
(AUROC of one class) is left out and counted.

This module reads and writes text only, so reports need no tensors.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedbasin.core.record import Headline, RecordError, RoundRecord

Floats = NDArray[np.float64]
Cell = str | float | int | bool | None
PREFIXES = ("clients_", "unseen_")  # of the columns here; no metric's name may begin so
WAYS = ("", "_home", "_alone", "_pooled")  # whose model a client's score is of: federated, ...
_TEXT = ("group",)


def columns_of(
    prefix: str, headline: Headline, values: NDArray[np.float64], rows: NDArray[np.int64]
) -> dict[str, float]:
    """Return what a record says about the scores of some clients by one metric.

    Args:
        prefix: whose scores they are, ``"clients_"`` or ``"unseen_"``.
        headline: the metric: its name and direction.
        values: the score of every client, [N]; NaN where it is undefined.
        rows: how many rows it was scored on, [N]; clients without rows are left out.
    """
    held = rows > 0
    defined = held & np.isfinite(values)
    name = f"{prefix}{headline.name}"
    columns = {f"{name}_undefined": float((held & ~defined).sum())}
    known = values[defined]
    if not len(known):
        return columns
    low, high = np.quantile(known, (0.1, 0.9))
    return {
        f"{name}_mean": float(known.mean()),
        f"{name}_mean_by_rows": float(np.average(known, weights=rows[defined])),
        f"{name}_std": float(known.std()),
        f"{name}_worst": float(known.min() if headline.higher_is_better else known.max()),
        f"{name}_p10": float(low),
        f"{name}_p90": float(high),
        **columns,
    }


def worst_decile(headline: Headline) -> str:
    """Return the column of the score that nine of ten clients reach or better."""
    tail = "p10" if headline.higher_is_better else "p90"
    return f"clients_{headline.name}_{tail}"


def share_worse(headline: Headline, values: Floats, others: Floats) -> float | None:
    """Return the share of clients whose score is worse than another one; None without any."""
    both = np.isfinite(values) & np.isfinite(others)
    if not both.any():
        return None
    gaps = (values - others)[both]
    return float((gaps < 0).mean() if headline.higher_is_better else (gaps > 0).mean())


def took_part(
    records: Sequence[RoundRecord], cohort: Callable[[int], NDArray[np.int64]], clients: int
) -> dict[str, list[Cell]]:
    """Return how often each client took part, and what methods noted about it, by column.

    A note that is a list of one number a reply (FedLAW's lambdas) becomes a column: its mean over
    the rounds in which the client took part.

    Args:
        records: all rounds.
        cohort: returns who answered in a round, counted from 0.
        clients: how many clients there are.
    """
    times = np.zeros(clients, dtype=np.int64)
    sums: dict[str, Floats] = {}
    for record in records:
        answered = cohort(record.round - 1)
        times[answered] += 1
        for name, note in record.notes.items():
            if isinstance(note, list) and len(note) == len(answered) == record.replies:
                total = sums.setdefault(name, np.zeros(clients))
                total[answered] += [math.nan if each is None else each for each in note]
    columns: dict[str, list[Cell]] = {"took_part": list(times.tolist())}
    for name, total in sums.items():
        shown = [t / n if n else None for t, n in zip(total.tolist(), times.tolist(), strict=True)]
        columns[name] = list(shown)
    return columns


@dataclass(frozen=True, eq=False)
class ClientTable:
    """One line a client: what it is, how often it took part, and the scores it gets.

    Args:
        columns: by name one cell a client. ``client`` is its number, ``group`` its domain or
            hospital, ``seen`` whether it may take part, ``rows`` and ``held_out`` what it trains on
            and is scored on, ``classes`` how many classes it holds (or ``target_mean``). A metric's
            name is the score of the federated model; with ``_home`` after fine-tuning at home, with
            ``_alone`` of a model trained there alone, with ``_pooled`` of one trained on all rows.
    """

    columns: Mapping[str, list[Cell]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.columns.get("client", ()))

    def numbers(self, name: str) -> Floats | None:
        """Return a column of numbers [N], NaN where there is none; None without the column."""
        cells = self.columns.get(name)
        if cells is None:
            return None
        return np.array([math.nan if c is None else float(c) for c in cells], dtype=np.float64)

    def texts(self, name: str) -> list[str]:
        """Return a column as texts; empty ones without the column."""
        return [str(cell or "") for cell in self.columns.get(name, [None] * len(self))]

    def to_csv(self) -> str:
        """Write one line a client; numbers that do not exist are empty."""
        out = io.StringIO()
        writer = csv.writer(out)
        writer.writerow(self.columns)
        for line in zip(*self.columns.values(), strict=True):
            writer.writerow([_written(cell) for cell in line])
        return out.getvalue()

    @classmethod
    def read(cls, path: Path) -> ClientTable:
        """Read what `to_csv` wrote; a file that is something else is an error that names it."""
        try:
            with path.open(newline="", encoding="utf-8") as file:
                header, *lines = csv.reader(file)
            if header[:1] != ["client"] or len(set(header)) < len(header):
                raise ValueError("its first column is not client, or a column is there twice")
            table = zip(*lines, strict=True) if lines else [()] * len(header)
            columns = {
                name: [_read(name, cell) for cell in cells]
                for name, cells in zip(header, table, strict=True)
            }
        except (ValueError, IndexError, csv.Error) as error:
            raise RecordError(f"{path} is no table of clients ({error}); remove it") from error
        return cls(columns)


def _written(cell: Cell) -> str:
    if cell is None or (isinstance(cell, float) and not math.isfinite(cell)):
        return ""
    return repr(cell) if isinstance(cell, float) else str(cell)


def _read(name: str, cell: str) -> Cell:
    if name in _TEXT:
        return cell
    if not cell:
        return None
    if cell in ("True", "False"):
        return cell == "True"
    return int(cell) if cell.lstrip("-").isdecimal() else float(cell)
