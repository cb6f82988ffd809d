"""The server's half of a round, once the replies are there: merge, and score what counts."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedbasin.core.archive import ArchiveError
from fedbasin.core.evaluator import Evaluator
from fedbasin.core.method import Context, Method, ReplyError
from fedbasin.core.record import RoundRecord
from fedbasin.core.tree import tensors
from fedbasin.core.vectors import shares, weighted_mean
from fedbasin.deploy.replies import Collected, Guard, guarded
from fedbasin.sim.rounds import BufferPolicy, Server, notes_of

_PIECE = 1 << 18  # elements that are looked at together
_log = logging.getLogger("flwr")
Say = Callable[[int, str], None]  # a client and why it is named


@dataclass(frozen=True)
class Merger:
    """How the server merges and scores.

    Args:
        method: how models are merged.
        buffers: what happens to BatchNorm statistics.
        recalibrate: renews statistics for a model, for the policy of that name.
        guard: what happens to updates that are far longer than the others.
        test: rows that the scored model is tested on.
    """

    method: Method
    buffers: BufferPolicy = "mean"
    recalibrate: Callable[[Tensor, Tensor], Tensor] | None = None
    guard: Guard | None = None
    test: Evaluator | None = None

    def __post_init__(self) -> None:
        if self.buffers == "recalibrate" and self.recalibrate is None:
            raise ValueError("buffers='recalibrate' needs recalibrate=, a function of a model")

    def merge(
        self, server: Server, collected: Collected, context: Context, say: Say
    ) -> tuple[Server, RoundRecord, frozenset[int]]:
        """Return the server with the merged model, what the record says, and who was merged.

        Replies were checked one by one as they came in. Where they make no model together, the
        server stays as it is, and the record notes ``merge_refused``.
        """
        replies, merged, far = collected.replies, collected.counted, set()
        if self.guard is not None:
            replies, named = guarded(replies, server.send, self.guard)
            for client, reason in named:
                far.add(client)
                say(client, f"{reason}: {self.guard.action}ped")
            if self.guard.action == "drop":
                merged -= far
        # A far update's statistics and loss are not to be trusted either, clipped or not.
        clients = collected.replies.clients
        near = torch.tensor([c not in far for c in clients.tolist()], device=clients.device)
        share = shares(collected.replies.weights[near])
        loss = float(share @ collected.losses[near])
        mean = weighted_mean(collected.statistics[near], share)
        buffers = server.buffers if self.buffers == "keep" else mean
        if isinstance(context.proxy, Evaluator):
            context = replace(context, proxy=replace(context.proxy, buffers=buffers))
        known = {id(leaf) for leaf in tensors(server.state)}
        try:
            served, state = self.method.aggregate(server.state, server.send, replies, context)
            made = [t for t in tensors(state) if t.is_floating_point() and id(t) not in known]
            for values in (served.send, served.score, buffers, *made):
                if not values.sum().isfinite():
                    raise ReplyError("what finite replies make together is not finite")
        except (ArchiveError, OSError):  # the server's own trouble
            raise
        except Exception:  # finite numbers and reports of any shape: anything may come of them
            _log.exception("round %d: %s refuses it and keeps its model", server.round, self.method)
            record = RoundRecord(server.round, train_loss=loss, notes={"merge_refused": 1.0})
            return server, record, frozenset()
        if self.recalibrate is not None and self.buffers == "recalibrate" and buffers.numel():
            buffers = self.recalibrate(served.score, buffers)
        after = Server(server.round, served.send, served.score, buffers, state)
        record = RoundRecord(
            round=after.round,
            train_loss=loss,
            update_norm=_distance(after.send, server.send),
            model_norm=float(after.score.norm()),
            notes=notes_of(served),
        )
        return after, record, merged

    def score(self, record: RoundRecord, server: Server, *, last: bool) -> RoundRecord:
        """Add what the test rows say, where there are some."""
        if self.test is None:
            return record
        began = time.perf_counter()
        metrics = self.test.of_round(server.score, server.send, server.buffers, last=last)
        return replace(record, metrics=metrics, seconds_evaluate=time.perf_counter() - began)


def _distance(a: Tensor, b: Tensor) -> float:
    """Return |a - b| without a third model in memory."""
    pieces = zip(a.split(_PIECE), b.split(_PIECE), strict=True)
    return math.sqrt(sum(float((x - y).double().square().sum()) for x, y in pieces))
