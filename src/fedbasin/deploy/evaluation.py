"""The clients' own evaluations, averaged to one number a metric."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from flwr.app import Message, MetricRecord
from flwr.serverapp.strategy import Result

from fedbasin.core.record import RoundRecord
from fedbasin.deploy.bounds import MOST_NUMBERS, MOST_ROWS, check_size
from fedbasin.deploy.wire import LARGEST, Refused, fault, number, the_record

_ADDRESS = ("server-round", "partition-id")  # numbers that say whose reply it is
_log = logging.getLogger("flwr")


def mean_metrics(
    replies: Iterable[Message],
    weight_key: str,
    *,
    most_rows: int = MOST_ROWS,
    ratios: Collection[str] = (),
    who: Callable[[int], str] = lambda node: f"node {node}",
) -> MetricRecord | None:
    """Return the weighted mean of the clients' metrics; None where there are none.

    Args:
        replies: what clients measured.
        weight_key: the metric that holds a client's number of samples.
        most_rows: how many rows a client may state.
        ratios: metrics that are from 0 to 1.
        who: names a node's client.
    """
    total: dict[str, float] = {}
    weights: dict[str, float] = {}  # by metric: not every client has every one
    count = failures = 0
    for reply in replies:
        try:
            if reply.has_error():
                raise Refused(fault(reply))
            check_size(reply.content, MOST_NUMBERS)
            metrics: MetricRecord = the_record(reply.content, MetricRecord)
            weight = number(metrics, weight_key, least=0)
            if weight > most_rows:
                raise Refused(f"{weight_key} is {weight:g}, expected at most {most_rows:g}")
            plain = {k: v for k, v in metrics.items() if isinstance(v, int | float)}
            for name, value in plain.items():
                least, most = (0, 1) if name in ratios else (-LARGEST, LARGEST)
                if not least <= value <= most:  # false for NaN, too
                    raise Refused(f"{name} is {value}, expected {least:g} to {most:g}")
        except Refused as reason:
            failures += 1
            node = reply.metadata.src_node_id
            _log.warning("\t> No evaluation from %s: %s", who(node), reason)
            continue
        count += 1
        for name in plain.keys() - {weight_key, *_ADDRESS}:
            total[name] = total.get(name, 0.0) + weight * plain[name]
            weights[name] = weights.get(name, 0.0) + weight
    _log.info("aggregate_evaluate: Received %s results and %s failures", count, failures)
    means = {k: total[k] / weights[k] for k in sorted(total) if weights[k] > 0}
    return MetricRecord(means) if means else None


def unheard(node: int, reason: str) -> None:
    """Log that a client's evaluation is not waited for any more."""
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
        name: value for name in record.metrics if (value := record.metric(name)) is not None
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
