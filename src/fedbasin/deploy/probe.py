"""The cohort's full gradients before it trains, for methods that ask for them."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from fedbasin.core.limits import limit_of
from fedbasin.core.method import Probe
from fedbasin.deploy.bounds import MOST_NUMBERS
from fedbasin.deploy.clients import ASK, Clients, TooFewNodes, reasons_of
from fedbasin.deploy.replies import FAR, FEWEST, Guard, clipped
from fedbasin.deploy.wire import Refused, number, read_tree, the_record, write_tree

GRADIENT = "gradient"  # what the server asks for
_log = logging.getLogger("flwr")


def gather_gradients(
    clients: Clients,
    nodes: Mapping[int, int],
    arrays: ArrayRecord,
    like: Tensor,
    timeout: float,
    least: int,
    guard: Guard | None = None,
) -> tuple[list[int], Probe]:
    """Return the clients that sent a gradient, in order, and what they sent: the server's part.

    Those that sent none are asked again while there are too few. A gradient that is far longer than
    the others is refused, and the guard bounds gradients and rows as it does replies.
    """
    content = RecordDict({"arrays": arrays, "config": ConfigRecord({ASK: GRADIENT})})
    gradients: dict[int, tuple[Tensor, float]] = {}
    most = 2 * like.numel() * like.element_size() + MOST_NUMBERS
    began = time.monotonic()
    while True:
        left = {client: node for client, node in nodes.items() if client not in gradients}
        answers, failed = clients.ask(left, content, timeout, most)
        for client, reply in answers.items():
            try:
                gradients[client] = _read(reply, like, clients.stated(client))
            except Refused as reason:
                failed[client] = str(reason)
        for client, why in failed.items():
            clients.refuse(nodes[client], f"its gradient: {why}")
            _log.warning(
                "client %d sends no gradient and is left out of this round: %s", client, why
            )
        if len(gradients) >= least:
            break
        nobody = not any(clients.silent(node) for node in left.values())
        if nobody or time.monotonic() - began > timeout + clients.patience:
            usable = f"{len(gradients)} of {least} clients sent a gradient"
            wanted = "this is corrected" if nobody else "more of them answer"
            raise TooFewNodes(f"{usable} ({reasons_of(failed)}); start again when {wanted}")
        time.sleep(1)
    for client, why in _far(gradients):
        del gradients[client]
        clients.refuse(nodes[client], why)
        _log.warning("client %d is left out of this round: %s", client, why)
    order = sorted(gradients)
    weights = torch.tensor([gradients[c][1] for c in order], dtype=torch.float64)
    rows = [gradients[c][0] for c in order]
    stacked = torch.stack(rows) if rows else like.new_empty(0, like.numel())
    if guard is not None and len(order) >= FEWEST:
        excess: dict[int, float] = {}
        stacked = clipped(stacked, guard.times, excess)
        for row, times in excess.items():
            why = f"its gradient is {guard.times * times:.3g} times the median norm: clipped"
            clients.refuse(nodes[order[row]], why)
            _log.warning("client %d: %s", order[row], why)
        if guard.weight is not None:
            weights = weights.clamp(max=limit_of(weights, guard.weight, lower=True).most)
    return order, Probe(stacked.to(like.device), weights.to(like.device))


def _far(gradients: Mapping[int, tuple[Tensor, float]]) -> list[tuple[int, str]]:
    """Return whose gradient is so long that it can be no gradient of the same model, and why."""
    lengths = [float(torch.linalg.vector_norm(g.double())) for g, _ in gradients.values()]
    norms = torch.tensor(lengths, dtype=torch.float64)
    limit = limit_of(norms, FAR, least=FEWEST, lower=True)
    return [
        (client, f"its gradient is {float(norm / limit.usual):.3g} times the median norm")
        for client, norm in zip(gradients, norms, strict=True)
        if norm > limit.most
    ]


def _read(reply: RecordDict, like: Tensor, rows: int | None) -> tuple[Tensor, float]:
    tree = read_tree(the_record(reply, ArrayRecord), the_record(reply, ConfigRecord))
    fits = isinstance(tree, tuple) and len(tree) == 1 and isinstance(tree[0], Tensor)
    if not fits or tree[0].shape != like.shape or tree[0].dtype != like.dtype:
        raise Refused(f"its gradient is not one vector of {like.numel()} numbers of {like.dtype}")
    weight = number(the_record(reply, MetricRecord), "num-examples", least=1)
    if rows is not None and weight != rows:
        raise Refused(f"num-examples is {weight:g}, it said {rows} when asked who it is")
    return tree[0], weight


def answer_gradient(gradient: Tensor, examples: int) -> RecordDict:
    """Return a client's gradient as a message: the client's part."""
    arrays, shape = write_tree((gradient,))
    metrics = MetricRecord({"num-examples": examples})
    return RecordDict({"arrays": arrays, "shape": shape, "metrics": metrics})
