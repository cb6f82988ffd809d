"""The clients' own evaluations: averaged to one number a metric, or kept by client if allowed."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from flwr.app import Message, MetricRecord
from flwr.serverapp.strategy import Result

from fedbasin.core.limits import limit_of
from fedbasin.core.record import Headline, RoundRecord
from fedbasin.core.served import PREFIXES, Cell, ClientTable, columns_of
from fedbasin.deploy.bounds import MOST_NUMBERS, MOST_ROWS, check_size
from fedbasin.deploy.replies import FEWEST
from fedbasin.deploy.wire import LARGEST, Refused, fault, from_flower, number, the_record

_ADDRESS = ("server-round", "partition-id")  # numbers that say whose reply it is
_LONGEST_NAME = 64  # characters of a metric's name, which becomes a column of the records
_MOST_METRICS = 256  # of one client
_log = logging.getLogger("flwr")


class Evaluation(NamedTuple):
    """What one client measured."""

    node: int
    weight: float  # rows
    metrics: Mapping[str, float]


def _node(node: int) -> str:
    return f"node {node}"


def _nobody(node: int, reason: str) -> None:
    """Ignore a refused evaluation."""


def evaluations(
    replies: Iterable[Message],
    weight_key: str,
    *,
    most_rows: int = MOST_ROWS,
    ratios: Collection[str] = (),
    who: Callable[[int], str] = _node,
    refuse: Callable[[int, str], None] = _nobody,
) -> list[Evaluation]:
    """Return the evaluations that can be used; others are logged with the client and the reason.

    Args:
        replies: what clients measured.
        weight_key: the metric that holds a client's number of samples.
        most_rows: how many rows a client may state.
        ratios: metrics that are from 0 to 1.
        who: names a node's client.
        refuse: is told the node and the reason of each that cannot be used.
    """
    found = []
    failures = 0
    for reply in replies:
        node = reply.metadata.src_node_id
        try:
            if reply.has_error():
                raise Refused(fault(reply))
            check_size(reply.content, MOST_NUMBERS)
            metrics: MetricRecord = the_record(reply.content, MetricRecord)
            weight = number(metrics, weight_key, least=0)
            if weight > most_rows:
                raise Refused(f"{weight_key} is {weight:g}, expected at most {most_rows:g}")
            plain = {k: v for k, v in metrics.items() if isinstance(v, int | float)}
            if len(plain) > _MOST_METRICS:
                raise Refused(f"it has {len(plain)} metrics, expected at most {_MOST_METRICS}")
            for name, value in plain.items():
                if not name.isprintable() or len(name) > _LONGEST_NAME:
                    raise Refused(f"a metric is called {name[:_LONGEST_NAME]!r}")
                least, most = (0, 1) if name in ratios else (-LARGEST, LARGEST)
                if not least <= value <= most:  # false for NaN, too
                    raise Refused(f"{name} is {value}, expected {least:g} to {most:g}")
        except Refused as reason:
            failures += 1
            _log.warning("\t> No evaluation from %s: %s", who(node), reason)
            if not from_flower(reply):
                refuse(node, f"its evaluation: {reason}")
            continue
        named = {k: float(v) for k, v in plain.items() if k not in (weight_key, *_ADDRESS)}
        found.append(Evaluation(node, weight, named))
    _log.info("aggregate_evaluate: Received %s results and %s failures", len(found), failures)
    return found


def bounded(
    found: Sequence[Evaluation], weight: float | None
) -> tuple[list[Evaluation], list[tuple[int, str]]]:
    """Let no client count for more than `weight` times the median rows; say whose were bounded."""
    if weight is None:
        return list(found), []
    rows = torch.tensor([one.weight for one in found], dtype=torch.float64)
    limit = float(limit_of(rows, weight, least=FEWEST).most)
    said = [
        (one.node, f"its evaluation states {one.weight:g} rows and counts for {limit:g}")
        for one in found
        if one.weight > limit
    ]
    return [one._replace(weight=min(one.weight, limit)) for one in found], said


def mean_of(found: Sequence[Evaluation]) -> MetricRecord | None:
    """Return the mean of each metric, weighted by rows; not every client has every one."""
    total: dict[str, float] = {}
    weights: dict[str, float] = {}
    for one in found:
        for name, value in one.metrics.items():
            total[name] = total.get(name, 0.0) + one.weight * value
            weights[name] = weights.get(name, 0.0) + one.weight
    means = {k: total[k] / weights[k] for k in sorted(total) if weights[k] > 0}
    return MetricRecord(means) if means else None


def sums_only(means: MetricRecord | None, headlines: Sequence[Headline]) -> dict[str, float]:
    """Return the columns of a record where the server keeps no single client's score."""
    known = {} if means is None else dict(means)
    return {
        f"clients_{h.name}_mean_by_rows": float(known[h.name])
        for h in headlines
        if isinstance(known.get(h.name), int | float)
    }


def per_client(
    found: Sequence[Evaluation], headlines: Sequence[Headline], client_of: Mapping[int, int]
) -> tuple[dict[str, float], ClientTable]:
    """Return the columns of a record, and one line a client; only known metrics are kept.

    Args:
        found: what clients measured.
        headlines: the metrics of the task.
        client_of: which client each node is.
    """
    known = sorted((client_of[one.node], one) for one in found if one.node in client_of)
    rows = np.array([one.weight for _, one in known])
    table: dict[str, list[Cell]] = {
        "client": [client for client, _ in known],
        "held_out": [int(one.weight) for _, one in known],
    }
    columns: dict[str, float] = {}
    for headline in headlines:
        values = np.array([one.metrics.get(headline.name, math.nan) for _, one in known])
        columns |= columns_of("clients_", headline, values, rows)
        table[headline.name] = list(values.tolist())
    return columns, ClientTable(table)


def unheard(node: int, reason: str) -> None:
    """Log that the round stopped waiting for a client's evaluation."""
    _log.warning("\t> No evaluation from node %d: %s", node, reason)


def entered(
    record: RoundRecord, result: Result, clients: MetricRecord | None, server: MetricRecord | None
) -> RoundRecord:
    """Enter what clients and server measured into the round's record and Flower's result."""
    now = record.round
    notes = dict(record.notes)
    if clients is not None:
        _log.info("\t└──> Aggregated MetricRecord: %s", clients)
        result.evaluate_metrics_clientapp[now] = clients
        notes |= {f"clients_{name}": float(value) for name, value in clients.items()}
    measured = {
        name: value
        for name in record.metrics
        if not name.startswith(PREFIXES) and (value := record.metric(name)) is not None
    }
    if server is None and measured:
        server = MetricRecord(measured)
    if server is not None:
        _log.info("Global evaluation")
        _log.info("\t└──> MetricRecord: %s", server)
        result.evaluate_metrics_serverapp[now] = server
    metrics = dict(record.metrics)
    if not measured and server is not None:
        metrics |= {k: v for k, v in server.items() if isinstance(v, int | float)}
    return replace(record, metrics=metrics, notes=notes)
