"""The replies of one round: each is checked on its own, then stored or averaged at once."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from torch import Tensor

from fedbasin.core.limits import limit_of
from fedbasin.core.method import Replies
from fedbasin.core.tree import flatten, mapped, stack
from fedbasin.core.vectors import Weighting, shares
from fedbasin.deploy.bounds import Bounds
from fedbasin.deploy.wire import Codec, Part, Refused, number, read_tree, the_record

FAR = 100.0  # times the cohort's median, beyond which a loss or a report is refused
FEWEST = 3  # replies; the median of fewer says nothing about one of them


@dataclass(frozen=True)
class Guard:
    """What happens to a client whose influence is far above the cohort's median.

    Its influence is the length of its update and reports, and the number of rows it states. Each
    is compared with the cohort's median.

    Args:
        times: how many times the median norm an update or a report may be.
        action: ``"clip"`` it to that length, or ``"drop"`` the client for the round.
        weight: how many times the median number of samples a client may count for; with more, it
            counts as a client with so many: its samples, steps and update shrink alike. Its share
            of a cohort of C is then at most weight / (weight + C / 2). None has no limit.
    """

    times: float = 3.0
    action: Literal["clip", "drop"] = "clip"
    weight: float | None = 3.0

    def __post_init__(self) -> None:
        if not self.times >= 1:
            raise ValueError(f"times must be at least 1, got {self.times}")
        if self.action not in ("clip", "drop"):
            raise ValueError(f"action must be 'clip' or 'drop', got {self.action!r}")
        if self.weight is not None and not self.weight >= 1:
            raise ValueError(f"weight must be at least 1 or None, got {self.weight}")


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


@dataclass
class Collector:
    """Takes one reply after another.

    Args:
        codec: how models are read.
        round: finished rounds when the cohort was asked.
        bounds: what a reply may say.
        weight_key: the metric that holds a client's number of samples.
        rules: how many client rules must report; 0 takes replies of any Flower client.
        stream: the weighting to average by at once, or None to store every model.
        losses: whether the method needs the clients' losses.
    """

    codec: Codec
    round: int
    bounds: Bounds
    weight_key: str = "num-examples"
    rules: int = 0
    stream: Weighting | None = None
    losses: bool = False
    bytes_up: int = 0
    _metadata: list[ReplyMetadata] = field(default_factory=list)
    _models: list[tuple[Tensor, Tensor, tuple[Any, ...]]] = field(default_factory=list)
    _total: tuple[Tensor, Tensor] | None = None
    _counted: list[float] = field(default_factory=lambda: [0.0, 0.0])  # shares, samples

    @property
    def clients(self) -> set[int]:
        """Whose replies were taken."""
        return {each.client for each in self._metadata}

    @property
    def weights(self) -> dict[int, float]:
        """How many samples each reply that was taken counts for, as it came."""
        return {each.client: each.weight for each in self._metadata}

    def __len__(self) -> int:
        return len(self._metadata)

    @property
    def counted(self) -> frozenset[int]:
        """The clients whose replies weigh something."""
        return frozenset(each.client for each in self._metadata if each.weight > 0)

    def take(self, client: int, node: int, reply: Message, rows: int | None = None) -> None:
        """Check a reply and take it, or refuse it with the reason.

        Args:
            client: whose reply it is.
            node: which node was asked.
            reply: what came.
            rows: how many rows the client stated; None where it did not.
        """
        if reply.metadata.src_node_id != node:
            raise Refused(f"it comes from node {reply.metadata.src_node_id}, node {node} was asked")
        if client in self.clients:
            raise Refused("it answers twice in one round")
        size = self.bounds.size(reply.content)
        metadata = self._read_metadata(client, the_record(reply.content, MetricRecord), rows)
        model = "arrays" if "report" in reply.content else None  # a report lies beside it
        parts = self.codec.parts(the_record(reply.content, ArrayRecord, model))
        if self.stream is None:
            reports = self._reports(reply)
            self._models.append((*self.codec.copied(parts), reports))
        else:
            self._add(parts, metadata.weight)
        self.bytes_up += size
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

    def outlying(self) -> list[tuple[int, str]]:
        """Drop replies whose loss or report is far beyond the cohort's; return whose, and why.

        A reply that was averaged as it came loses its loss alone.
        """
        found = {i: why for i, why in self._far_losses() + self._far_reports()}
        named = [(self._metadata[i].client, why) for i, why in sorted(found.items())]
        if self.stream is not None:
            losses = torch.tensor([each.mean_loss for each in self._metadata], dtype=torch.float64)
            usual = float(losses.nanmedian())
            for i in found:
                self._metadata[i] = replace(self._metadata[i], last_loss=usual, mean_loss=usual)
            return named
        for i in sorted(found, reverse=True):
            del self._models[i]
            del self._metadata[i]
        return named

    def _far_losses(self) -> list[tuple[int, str]]:
        if len(self) < FEWEST:
            return []
        far = []
        for name in ("last_loss", "mean_loss"):
            losses = torch.tensor([getattr(e, name) for e in self._metadata], dtype=torch.float64)
            sizes = losses.abs()
            limit = limit_of(sizes, FAR, ~sizes.isnan(), plus=1.0, lower=True)
            for i in torch.nonzero(sizes > limit.most)[:, 0].tolist():
                usual = f"the cohort's median {float(limit.usual):.3g}"
                far.append((i, f"its loss is {float(losses[i]):.3g}, {usual}"))
        return far

    def _far_reports(self) -> list[tuple[int, str]]:
        if len(self._models) < FEWEST:
            return []
        far = []
        leaves = [dict(flatten(reports)) for _, _, reports in self._models]
        for path in leaves[0]:
            column = [each.get(path) for each in leaves]
            norms = torch.tensor([_norm(value) for value in column], dtype=torch.float64)
            limit = limit_of(norms, FAR, lower=True)
            for i in torch.nonzero(norms > limit.most)[:, 0].tolist():
                times = float(norms[i] / limit.usual)
                far.append((i, f"its report {path} is {times:.3g} times the median norm"))
        return far

    def finish(self, server: Tensor) -> Replies:
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
            train_loss=column("mean_loss"),
            buffers=empty,
        )
        if self.stream is not None:
            assert self._total is not None
            vector, buffers = self._total
            self._total = None  # the caller's alone from now on
            vector /= self._counted[0]
            buffers /= max(self._counted[1], 1e-300)
            return replace(
                replies.averaged(self.stream),
                models=vector.to(server.device)[None],
                train_loss=mean_loss(replies.weights, replies.train_loss)[None],
                buffers=buffers.to(server.device)[None],
            )
        models = [self._models[i] for i in order]
        self._models = []
        return replace(
            replies,
            models=torch.stack([m[0] for m in models]).to(server.device),
            buffers=torch.stack([m[1] for m in models]).to(server.device),
            reports=stack([m[2] for m in models]),
        )

    def _add(self, parts: list[Part], weight: float) -> None:
        if self._total is None:
            self._total = self.codec.zeros()
        share = weight if self.stream == "samples" else float(weight > 0)
        self.codec.add(parts, (share, weight), self._total)
        self._counted[0] += share
        self._counted[1] += weight

    def _read_metadata(self, client: int, metrics: MetricRecord, rows: int | None) -> ReplyMetadata:
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
        if self.losses and math.isnan(last_loss):
            raise Refused(
                "it reports no train_loss, which the method needs: the client's MetricRecord must "
                f"name its loss so; it has {', '.join(metrics)}"
            )
        if abs(last_loss) > torch.finfo(self.codec.dtype).max:
            raise Refused(f"{key} is {last_loss}, beyond {self.codec.dtype}")
        known = rows if self.weight_key == "num-examples" else None
        weight = self.bounds.rows(metrics, self.weight_key, known)
        steps = 1.0
        if own:
            steps = self.bounds.steps(metrics, weight if rows is None else rows)
        return ReplyMetadata(
            client=client,
            weight=weight,
            steps=steps,
            lr_sum=self.bounds.lr_sum(metrics, steps) if own else self.bounds.plan.lr,
            effective_steps=self.bounds.effective_steps(metrics, steps) if own else 1.0,
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


def mean_loss(weights: Tensor, losses: Tensor) -> Tensor:
    """Return the weighted mean of the losses [C] that clients report; NaN if none does."""
    told = losses.isfinite()
    if not bool(told.any()):
        return losses.new_tensor(math.nan)
    return shares(weights[told]) @ losses[told]


def _shape(tree: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (path, (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf)
        for path, leaf in flatten(tree)
    )


def _norm(value: Any) -> float:
    """Return the length of a report's array; 0 for what has none."""
    if not isinstance(value, Tensor):
        return 0.0
    return float(torch.linalg.vector_norm(value.double()))


class Excess(NamedTuple):
    """Whom the guard bounded, and why."""

    far: list[tuple[int, str]]  # clients whose update or report is far longer than the others'
    heavy: list[tuple[int, str]]  # clients that count for fewer samples than they state
    dropped: frozenset[int] = frozenset()  # clients whose replies are left out


def guarded(replies: Replies, server: Tensor, guard: Guard) -> tuple[Replies, Excess]:
    """Bound every client's samples, update and reports by the cohort's medians."""
    if len(replies.clients) < FEWEST:
        return replies, Excess([], [])
    replies, heavy = _weighed(replies, server, guard)
    excess: dict[int, float] = {}  # by row: times the limit
    moves = clipped(replies.models - server, guard.times, excess)
    said = {row: "its update" for row in excess}
    reports = mapped(lambda leaf: clipped(leaf, guard.times, excess), replies.reports)
    if not excess:
        return replies, Excess([], heavy)
    far = [
        (
            int(replies.clients[row]),
            f"{said.get(row, 'its report')} is {times} times the median norm: {guard.action}ped",
        )
        for row, times in ((row, f"{guard.times * excess[row]:.3g}") for row in sorted(excess))
    ]
    if guard.action == "drop":
        near = torch.ones(len(replies.clients), dtype=torch.bool, device=server.device)
        near[list(excess)] = False
        dropped = frozenset(client for client, _ in far)
        return replies.take(near), Excess(far, heavy, dropped)
    return replace(replies, models=server + moves, reports=reports), Excess(far, heavy)


def _weighed(
    replies: Replies, server: Tensor, guard: Guard
) -> tuple[Replies, list[tuple[int, str]]]:
    if guard.weight is None:
        return replies, []
    limit = limit_of(replies.weights, guard.weight, lower=True).most
    heavy = replies.weights > limit
    if not bool(heavy.any()):
        return replies, []
    said = [
        (int(client), f"it states {float(rows):g} rows and counts for {float(limit):g}")
        for client, rows in zip(replies.clients[heavy], replies.weights[heavy], strict=True)
    ]
    part = torch.where(heavy, limit / replies.weights, 1.0)
    shorter = (replies.models - server) * part.to(server.dtype)[:, None]
    bounded = replace(
        replies,
        models=torch.where(heavy[:, None], server + shorter, replies.models),
        weights=replies.weights * part,
        steps=replies.steps * part,
        lr_sum=replies.lr_sum * part,
        effective_steps=replies.effective_steps * part,
    )
    return bounded, said


def clipped(rows: Tensor, times: float, excess: dict[int, float]) -> Tensor:
    """Return rows [C, ...] of which none is too long; note by how much some were."""
    if not rows.is_floating_point():
        return rows
    norms = torch.linalg.vector_norm(rows[..., None].flatten(1), dim=1)
    limit = limit_of(norms, times, least=FEWEST, lower=True).most
    far = norms > limit
    if not bool(far.any()):
        return rows
    for row in torch.nonzero(far)[:, 0].tolist():
        excess.setdefault(row, float(norms[row] / limit))
    scale = torch.where(far, limit / norms, torch.ones_like(norms))
    clipped: Tensor = rows * scale.view(-1, *[1] * (rows.dim() - 1))
    return clipped
