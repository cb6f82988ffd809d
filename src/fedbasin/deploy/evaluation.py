"""What clients measure on data of their own, as one number each."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable

from flwr.app import Message, MetricRecord

from fedbasin.deploy.wire import Refused, fault, number, the_record

_ADDRESS = ("server-round", "partition-id")  # numbers that say whose reply it is
_log = logging.getLogger("flwr")


def mean_metrics(replies: Iterable[Message], weight_key: str) -> MetricRecord | None:
    """Return the weighted mean of the clients' metrics; None where there are none."""
    total: dict[str, float] = {}
    weights, count, failures = 0.0, 0, 0
    for reply in replies:
        try:
            if reply.has_error():
                raise Refused(fault(reply))
            metrics: MetricRecord = the_record(reply.content, MetricRecord)
            weight = number(metrics, weight_key, least=0)
            plain = {k: v for k, v in metrics.items() if isinstance(v, int | float)}
            bad = [k for k, v in plain.items() if not math.isfinite(v)]
            if bad:
                raise Refused(f"{bad[0]} is {plain[bad[0]]}")
        except Refused as reason:
            failures += 1
            node = reply.metadata.src_node_id
            _log.warning("\t> No evaluation from node %d: %s", node, reason)
            continue
        count, weights = count + 1, weights + weight
        for name in plain.keys() - {weight_key, *_ADDRESS}:
            total[name] = total.get(name, 0.0) + weight * plain[name]
    _log.info("aggregate_evaluate: Received %s results and %s failures", count, failures)
    return MetricRecord({k: total[k] / weights for k in sorted(total)}) if weights else None


def unheard(node: int, reason: str) -> None:
    """Say that a client's evaluation is not waited for."""
    _log.warning("\t> No evaluation from node %d: %s", node, reason)
