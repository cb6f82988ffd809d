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
from fedbasin.core.record import Headline, RoundRecord
from fedbasin.core.served import PREFIXES, worst_decile
from fedbasin.report.curves import COLOURS
from fedbasin.report.partition_figure import CLASS_COLOURS, order_of_clients
from fedbasin.report.runs import Run, headline_of_runs, shared_holdings
from fedbasin.report.served import served_data
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
        if self.key in record.metrics:
            return record.metric(self.key)
        return getattr(record, self.key, None)


_OF_RECORDS = (
    Measure("train_loss", "training loss"),
    Measure("update_norm", "norm of the update"),
    Measure("model_norm", "norm of the model"),
)


def chart_data(
    runs: Sequence[Run],
    looks: Sequence[tuple[str, str, str]],
    analyses: Sequence[Analysis],
    baseline: str = "fedavg",
) -> dict[str, Any]:
    """Gather what is drawn.

    Args:
        runs: the runs.
        looks: label, colour and dash of each method.
        analyses: what was found about the runs.
        baseline: the method the others are compared with.
    """
    measures = measures_of(runs)
    groups = by_label(runs)
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
        "served": served_data(runs, baseline),
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
        *_metric_measures(runs, records),
        *_OF_RECORDS,
        *(Measure(f"note_{name}", f"{name}, noted by the method") for name in single),
    ]
    return [one for one in known if any(one.read(record) is not None for record in records)]


def _metric_measures(runs: Sequence[Run], records: Sequence[RoundRecord]) -> list[Measure]:
    """Return how the metrics of the records are shown, the headline first."""
    headline = headline_of_runs(runs)
    send = f"{headline.name}_send"
    train = f"{headline.name}_train"
    unit = f", {headline.unit}" if headline.unit else ""
    name = headline.name.replace("_", " ")
    special = {
        headline.name: Measure(headline.name, f"test {name}{unit}", headline.scale),
        "loss": Measure("loss", "test loss"),
        send: Measure(send, f"test {name} of the broadcast model{unit}", headline.scale),
        train: Measure(train, f"{name} on clients' rows{unit}", headline.scale),
    }
    names = dict.fromkeys(name for record in records for name in record.metrics)
    others = {name: Measure(name, f"test {name.replace('_', ' ')}") for name in names}
    others |= {name: _client_measure(name, headline) for name in names if _of_clients(name)}
    names = {n: None for n in names if not _of_clients(n) or n in _shown_of_clients(headline)}
    return list((special | {name: others[name] for name in names if name not in special}).values())


def _of_clients(name: str) -> bool:
    return name.startswith(PREFIXES)


def _shown_of_clients(headline: Headline) -> tuple[str, ...]:
    """Return the columns of clients that have a curve: the headline's mean and worst decile."""
    return (f"clients_{headline.name}_mean", worst_decile(headline))


def _client_measure(name: str, headline: Headline) -> Measure:
    what = "worst decile of clients" if name == worst_decile(headline) else "mean over clients"
    unit = f", {headline.unit}" if headline.unit else ""
    words = headline.name.replace("_", " ")
    return Measure(name, f"{words}, {what}{unit}", headline.scale)


def _columns(run: Run, measures: Sequence[Measure]) -> dict[str, Any]:
    columns = {m.key: [_short(m.read(record), m.scale) for record in run.records] for m in measures}
    spent = [_short(record.notes.get("epsilon")) for record in run.records]
    return {
        "seed": run.seed,
        **({} if set(spent) == {None} else {"epsilon": spent}),
        "round": [record.round for record in run.records],
        "seconds": _sums(record.seconds for record in run.records),
        "bytes": _sums(record.bytes_down + record.bytes_up for record in run.records),
        "values": {key: column for key, column in columns.items() if set(column) != {None}},
    }


def _sums(steps: Iterable[float]) -> list[float | None]:
    return [_short(total) for total in accumulate(steps)]


def _short(value: Any, scale: float = 1.0) -> float | None:
    """Keep six digits, which is more than a chart shows; NaN and infinity become null."""
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
