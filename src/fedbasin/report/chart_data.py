"""What the page's charts are drawn from, as plain values for JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from fedbasin.core.figure_data import Analysis
from fedbasin.core.holdings import Holdings
from fedbasin.core.record import RoundRecord
from fedbasin.report.curves import COLOURS
from fedbasin.report.partition_figure import CLASS_COLOURS, order_of_clients
from fedbasin.report.runs import Run, shared_holdings
from fedbasin.report.table import by_label

_MOST_BARS = 120


@dataclass(frozen=True)
class Measure:
    """A number that records hold, and how a chart shows it."""

    key: str
    label: str
    scale: float = 1.0

    def read(self, record: RoundRecord) -> Any:
        """Return the number, or None; what a method notes goes by ``note_``."""
        if self.key.startswith("note_"):
            return record.notes.get(self.key.removeprefix("note_"))
        return getattr(record, self.key)


_MEASURES = (
    Measure("accuracy", "test accuracy, %", 100.0),
    Measure("loss", "test loss"),
    Measure("accuracy_send", "test accuracy of the broadcast model, %", 100.0),
    Measure("accuracy_train", "accuracy on clients' rows, %", 100.0),
    Measure("train_loss", "training loss"),
    Measure("update_norm", "norm of the update"),
    Measure("model_norm", "norm of the model"),
)


def chart_data(
    runs: Sequence[Run], looks: Sequence[tuple[str, str, str]], analyses: Sequence[Analysis]
) -> dict[str, Any]:
    """Gather what is drawn.

    Args:
        runs: the runs.
        looks: label, colour and dash of each method.
        analyses: what was found about the runs.
    """
    measures, groups = measures_of(runs), by_label(runs)
    return {
        "methods": [
            {
                "label": label,
                "colour": colour,
                "dash": dash,
                "runs": [_columns(run, measures) for run in groups[label]],
            }
            for label, colour, dash in looks
        ],
        "measures": {measure.key: measure.label for measure in measures},
        "holdings": [_holdings(*found) for found in shared_holdings(runs)],
        "colours": COLOURS,
        "classColours": CLASS_COLOURS,
        "analyses": [json.loads(analysis.to_json())["panels"] for analysis in analyses],
    }


def measures_of(runs: Sequence[Run]) -> list[Measure]:
    """Return the measures that some record has: the common ones, then the methods' own."""
    records = [record for run in runs for record in run.records]
    noted = {name: value for record in records for name, value in record.notes.items()}
    single = sorted(name for name, value in noted.items() if isinstance(value, int | float))
    known = [
        *_MEASURES,
        *(Measure(f"note_{name}", f"{name}, noted by the method") for name in single),
    ]
    return [one for one in known if any(one.read(record) is not None for record in records)]


def _columns(run: Run, measures: Sequence[Measure]) -> dict[str, Any]:
    columns = {m.key: [_short(m.read(record), m.scale) for record in run.records] for m in measures}
    return {
        "seed": run.seed,
        "round": [record.round for record in run.records],
        "seconds": _sums(record.seconds for record in run.records),
        "bytes": _sums(record.bytes_down + record.bytes_up for record in run.records),
        "values": {key: column for key, column in columns.items() if set(column) != {None}},
    }


def _sums(steps: Iterable[float]) -> list[float | None]:
    return [_short(total) for total in accumulate(steps)]


def _short(value: Any, scale: float = 1.0) -> float | None:
    """Keep six digits, which is more than a chart shows; what is no number becomes null."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    short = float(f"{scale * value:.6g}")
    return int(short) if short.is_integer() else short


def _holdings(title: str, held: Holdings) -> dict[str, Any]:
    order = order_of_clients(held.stacked, _MOST_BARS)
    return {
        "title": title,
        "classes": held.classes,
        "clients": order.tolist(),
        "counts": held.stacked[order].tolist(),
        "total": len(held.sizes),
        "inOrder": bool(np.all(np.diff(order) == 1)),
    }
