"""Who is served: the scores of clients for each method, against the baseline, alone and pooled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from fedbasin.core.record import Headline
from fedbasin.core.served import WAYS, ClientTable, Floats
from fedbasin.report.paired import ClientGains, client_gains
from fedbasin.report.runs import Run, headline_of_runs
from fedbasin.report.table import by_label

_MOST_CLIENTS = 5000  # of one run that the page holds


@dataclass(frozen=True)
class ServedLine:
    """How one method serves clients: means over its seeds."""

    method: str
    seeds: int
    mean: float  # over clients
    decile: float  # nine of ten clients do as well or better
    worst: float
    ways: Mapping[str, float]  # mean over clients of models at home, alone and pooled, if known
    gains: ClientGains | None  # against the baseline
    worse_alone: float | None  # share of clients for which training alone is better


def client_headline(runs: Sequence[Run]) -> Headline | None:
    """Return the metric that clients are compared by; None where no run scored clients.

    It is the runs' headline, or the metric that this is the mean over groups of.
    """
    headline = headline_of_runs(runs)
    name = headline.name.removesuffix("_group_mean")
    name = name.removeprefix("clients_").removesuffix("_mean_by_rows")  # a federation without tests
    known = any(run.clients is not None and name in run.clients.columns for run in runs)
    return headline._replace(name=name) if known else None


def served_lines(runs: Sequence[Run], baseline: str) -> list[ServedLine]:
    """Return one line a method whose runs scored clients, in the order of the other tables."""
    headline = client_headline(runs)
    if headline is None:
        return []
    groups = by_label([run for run in runs if run.clients is not None])
    theirs = next((m for m in groups.values() if m[0].method == baseline), [])
    alone = _by_seed(theirs, f"{headline.name}_alone")
    lines = []
    for label, members in groups.items():
        ours = _by_seed(members, headline.name)
        if not ours:
            continue
        against = None
        if members is not theirs and theirs:
            against = client_gains(
                ours,
                _by_seed(theirs, headline.name),
                higher_is_better=headline.higher_is_better,
            )
        lines.append(_line(label, headline, members, ours, against, alone))
    return lines


def _line(
    label: str,
    headline: Headline,
    members: Sequence[Run],
    ours: Mapping[int, Floats],
    against: ClientGains | None,
    alone: Mapping[int, Floats],
) -> ServedLine:
    ways = {}
    for way in WAYS[1:]:
        known = _by_seed(members, headline.name + way)
        if known:
            ways[way.strip("_")] = fmean(float(np.nanmean(v)) for v in known.values())
    own_alone = _by_seed(members, f"{headline.name}_alone") or alone
    lost = client_gains(ours, own_alone, higher_is_better=headline.higher_is_better)
    tail = 0.1 if headline.higher_is_better else 0.9
    least = np.nanmin if headline.higher_is_better else np.nanmax
    return ServedLine(
        method=label,
        seeds=len(ours),
        mean=fmean(float(np.nanmean(v)) for v in ours.values()),
        decile=fmean(float(np.nanquantile(v, tail)) for v in ours.values()),
        worst=fmean(float(least(v)) for v in ours.values()),
        ways=ways,
        gains=against,
        worse_alone=None if lost is None else lost.lose / lost.clients,
    )


def _by_seed(runs: Sequence[Run], name: str) -> dict[int, Floats]:
    """Return the scores [N] of the clients that take part, by seed; NaN for others."""
    found = {}
    for run in runs:
        table = run.clients
        values = None if table is None else table.numbers(name)
        if table is None or values is None or not np.isfinite(values).any():
            continue
        found[run.seed] = np.where(_seen(table), values, np.nan)
    return found


def _seen(table: ClientTable) -> np.ndarray:
    return np.array([cell is not False for cell in table.columns.get("seen", [True] * len(table))])


def say_gains(gains: ClientGains) -> str:
    """Write how many clients gain and lose, with the interval over seeds."""
    said = f"{gains.gain} of {gains.clients} clients gain, {gains.lose} lose"
    if gains.low is None or gains.high is None:
        return f"{said} (one seed: no interval)"
    interval = f"{100 * gains.low:+.0f} to {100 * gains.high:+.0f} %"
    return f"{said} (gain - lose {100 * gains.balance:+.0f} %, 95 % over seeds {interval})"


def served_text(runs: Sequence[Run], baseline: str = "fedavg") -> str:
    """Return what a comparison prints about clients: mean and worst decile, who gains and loses."""
    headline = client_headline(runs)
    if headline is None:
        return ""
    unit = f" {headline.unit}" if headline.unit else ""
    lines = [f"Clients' own rows, {headline.words}:"]
    for line in served_lines(runs, baseline):
        said = f"  {line.method}: mean {headline.shown(line.mean)}{unit}, "
        said += f"worst decile {headline.shown(line.decile)}{unit}"
        if line.gains is not None:
            said += f"; against {baseline} {say_gains(line.gains)}"
        if line.worse_alone is not None:
            said += f"; {100 * line.worse_alone:.0f} % of clients do better alone"
        lines.append(said)
    return "\n".join(lines)


def served_data(runs: Sequence[Run], baseline: str) -> dict[str, Any] | None:
    """Return what the page draws of clients; None where none were scored."""
    headline = client_headline(runs)
    if headline is None:
        return None
    methods = []
    for label, members in by_label(runs).items():
        tables = [(run.seed, run.clients) for run in members if run.clients is not None]
        shown = [_seed_data(seed, table, headline) for seed, table in tables]
        if shown:
            methods.append({"label": label, "runs": shown})
    first = next((run.label for run in runs if run.method == baseline and run.clients), None)
    return {
        "title": headline.title,
        "higher": headline.higher_is_better,
        "baseline": first,
        "methods": methods,
    }


def _seed_data(seed: int, table: ClientTable, headline: Headline) -> dict[str, Any]:
    columns: dict[str, Any] = {"seed": seed}
    for name in ("client", "rows", "held_out", "classes", "took_part"):
        if name in table.columns:
            columns[name] = table.columns[name][:_MOST_CLIENTS]
    columns["group"] = table.texts("group")[:_MOST_CLIENTS]
    columns["seen"] = _seen(table).tolist()[:_MOST_CLIENTS]
    for way in WAYS:
        values = table.numbers(headline.name + way)
        if values is not None:
            scaled = headline.scale * values[:_MOST_CLIENTS]
            columns[way.strip("_") or "federated"] = [
                float(f"{v:.5g}") if np.isfinite(v) else None for v in scaled.tolist()
            ]
    return columns
