"""The replies of one round: each is checked on its own, then stored or averaged at once."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from torch import Tensor

from fedbasin.core.method import Plan, Replies
from fedbasin.core.tree import flatten, stack
from fedbasin.core.vectors import Weighting, shares
from fedbasin.deploy.wire import Codec, Part, Refused, content_bytes, number, read_tree, the_record


@dataclass(frozen=True)
class Guard:
    """What happens to an update that is far longer than the cohort's.

    Args:
        times: how many times the median norm an update may be.
        action: ``"clip"`` it to that length, or ``"drop"`` the client for the round.
    """

    times: float = 5.0
    action: Literal["clip", "drop"] = "clip"

    def __post_init__(self) -> None:
        if not self.times >= 1:
            raise ValueError(f"times must be at least 1, got {self.times}")
        if self.action not in ("clip", "drop"):
            raise ValueError(f"action must be 'clip' or 'drop', got {self.action!r}")


@dataclass(frozen=True)
class ReplyMetadata:
    """The numbers that a client sends with its model."""

    client: int
    weight: float
    steps: float
    lr_sum: float
    effective_steps: float
    last_loss: float
    mean_loss: float


@dataclass(frozen=True)
class Collected:
    """A round's replies as the method sees them."""

    replies: Replies
    statistics: Tensor  # [C, Q]
    losses: Tensor  # [C] mean over local training
    counted: frozenset[int] = frozenset()  # clients whose replies weigh something


@dataclass
class Collector:
    """Takes one reply after another.

    Args:
        codec: how models are read.
        round: finished rounds when the cohort was asked.
        plan: how it was told to train.
        weight_key: the metric that holds a client's number of samples.
        rules: how many client rules must report; 0 takes replies of any Flower client.
        stream: the weighting to average by at once, or None to store every model.
    """

    codec: Codec
    round: int
    plan: Plan
    weight_key: str = "num-examples"
    rules: int = 0
    stream: Weighting | None = None
    bytes_up: int = 0
    _metadata: list[ReplyMetadata] = field(default_factory=list)
    _models: list[tuple[Tensor, Tensor, tuple[Any, ...]]] = field(default_factory=list)
    _total: tuple[Tensor, Tensor] | None = None
    _counted: list[float] = field(default_factory=lambda: [0.0, 0.0])  # shares, samples

    @property
    def clients(self) -> set[int]:
        """Whose replies were taken."""
        return {each.client for each in self._metadata}

    def __len__(self) -> int:
        return len(self._metadata)

    @property
    def mergeable(self) -> bool:
        """Whether a reply that was taken weighs something."""
        return any(each.weight > 0 for each in self._metadata)

    def take(self, client: int, node: int, reply: Message) -> None:
        """Check a reply and take it, or refuse it with the reason."""
        if reply.metadata.src_node_id != node:
            raise Refused(f"it comes from node {reply.metadata.src_node_id}, node {node} was asked")
        if client in self.clients:
            raise Refused("it answers twice in one round")
        metadata = self._read_metadata(client, the_record(reply.content, MetricRecord))
        model = "arrays" if "report" in reply.content else None  # a report lies beside it
        parts = self.codec.parts(the_record(reply.content, ArrayRecord, model))
        if self.stream is None:
            reports = self._reports(reply)
            self._models.append((*self.codec.copied(parts), reports))
        else:
            self._add(parts, metadata.weight)
        self.bytes_up += content_bytes(reply.content)
        self._metadata.append(metadata)

    def agreed(self) -> int:
        """Return how many replies report alike, or all if replies are averaged at once."""
        shapes = Counter(_shape(reports) for _, _, reports in self._models)
        return max(shapes.values(), default=len(self))

    def outvoted(self, *, last: bool) -> list[int]:
        """Drop replies whose report has another structure than the majority's; return whose.

        With two halves nobody is dropped, unless it is the `last` vote of a round: then the
        structure that came first counts as the majority's.
        """
        shapes = [_shape(reports) for _, _, reports in self._models]
        if not last and 2 * self.agreed() <= len(shapes):
            return []
        usual = Counter(shapes).most_common(1)
        odd = [i for i, shape in enumerate(shapes) if shape != usual[0][0]]
        clients = [self._metadata[i].client for i in odd]
        for i in reversed(odd):
            del self._models[i]
            del self._metadata[i]
        return clients

    def finish(self, server: Tensor) -> Collected:
        """Return the replies in the order of client ids, as a matrix or as one mean; once only."""
        order = sorted(range(len(self)), key=lambda i: self._metadata[i].client)
        metadata = [self._metadata[i] for i in order]

        def column(name: str, dtype: torch.dtype = torch.float64) -> Tensor:
            values = [getattr(each, name) for each in metadata]
            return torch.tensor(values, dtype=dtype, device=server.device)

        empty = server.new_empty(len(metadata), 0)
        replies = Replies(
            models=empty,
            weights=column("weight"),
            clients=column("client", torch.int64),
            steps=column("steps"),
            lr_sum=column("lr_sum"),
            effective_steps=column("effective_steps"),
            last_loss=column("last_loss", server.dtype),
        )
        losses = column("mean_loss")
        counted = frozenset(each.client for each in metadata if each.weight > 0)
        if self.stream is not None:
            assert self._total is not None
            vector, buffers = self._total
            self._total = None  # the caller's alone from now on
            vector /= self._counted[0]
            buffers /= max(self._counted[1], 1e-300)
            one = replace(replies.averaged(self.stream), models=vector.to(server.device)[None])
            loss = (shares(replies.weights) @ losses)[None]
            return Collected(one, buffers.to(server.device)[None], loss, counted)
        models = [self._models[i] for i in order]
        self._models = []
        statistics = torch.stack([m[1] for m in models]).to(server.device)
        replies = replace(
            replies,
            models=torch.stack([m[0] for m in models]).to(server.device),
            reports=stack([m[2] for m in models]),
        )
        return Collected(replies, statistics, losses, counted)

    def _add(self, parts: list[Part], weight: float) -> None:
        if self._total is None:
            self._total = self.codec.zeros()
        share = weight if self.stream == "samples" else float(weight > 0)
        self.codec.add(parts, (share, weight), self._total)
        self._counted[0] += share
        self._counted[1] += weight

    def _read_metadata(self, client: int, metrics: MetricRecord) -> ReplyMetadata:
        for key, expected in (("server-round", self.round + 1), ("partition-id", client)):
            if key in metrics and metrics[key] != expected:
                raise Refused(f"it is for {key} {metrics[key]}, expected {expected}")
        own = "steps" in metrics
        if self.rules and not (own and "server-round" in metrics and "partition-id" in metrics):
            raise Refused("the method has client rules, which only fedbasin's ClientApp follows")
        key = "train_loss" if "train_loss" in metrics else "train-loss"
        told = isinstance(metrics.get(key), int | float)  # few methods ask for it
        mean_loss = number(metrics, key) if told else math.nan
        last_loss = mean_loss
        if own:
            key = "last-loss"
            last_loss = number(metrics, key)
        if abs(last_loss) > torch.finfo(self.codec.dtype).max:
            raise Refused(f"{key} is {last_loss}, beyond {self.codec.dtype}")
        if own:
            for key in ("lr-sum", "length"):  # updates are divided by them
                if 0 < number(metrics, key, least=0) < 1e-12:
                    raise Refused(f"{key} is {metrics[key]}, expected 0 or at least 1e-12")
        return ReplyMetadata(
            client=client,
            weight=number(metrics, self.weight_key, least=0),
            steps=number(metrics, "steps", least=0) if own else 1.0,
            lr_sum=number(metrics, "lr-sum", least=0) if own else self.plan.lr,
            effective_steps=number(metrics, "length", least=0) if own else 1.0,
            last_loss=last_loss,
            mean_loss=mean_loss,
        )

    def _reports(self, reply: Message) -> tuple[Any, ...]:
        """Return what the client's rules report."""
        if "report" not in reply.content:
            reports: Any = tuple(() for _ in range(self.rules))
        else:
            reports = read_tree(
                the_record(reply.content, ArrayRecord, "report"),
                the_record(reply.content, ConfigRecord, "report-shape"),
            )
        if not isinstance(reports, tuple) or len(reports) != self.rules:
            raise Refused(f"it must report on {self.rules} client rules")
        return reports


def _shape(tree: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (path, (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf)
        for path, leaf in flatten(tree)
    )


def guarded(
    replies: Replies, server: Tensor, guard: Guard
) -> tuple[Replies, list[tuple[int, str]]]:
    """Clip or drop updates that are far longer than the cohort's; say which, and how long."""
    moves = replies.models - server
    norms = moves.norm(dim=1)
    limit = guard.times * norms.median()
    far = norms > limit
    if len(norms) < 3 or not bool(far.any()):
        return replies, []
    said = [
        (int(client), f"its update is {float(norm / norms.median()):.3g} times the median norm")
        for client, norm in zip(replies.clients[far], norms[far], strict=True)
    ]
    if guard.action == "drop":
        return replies.take(torch.nonzero(~far)[:, 0]), said
    scale = torch.where(far, limit / norms, torch.ones_like(norms))
    return replace(replies, models=server + moves * scale[:, None]), said
