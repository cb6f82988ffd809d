"""The settings of a strategy beside the method and Flower's own arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from fedbasin.core.evaluator import Evaluator
from fedbasin.core.method import Context, Plan
from fedbasin.core.metric import GroupMetric, metrics_of
from fedbasin.core.net import Net
from fedbasin.core.record import Headline
from fedbasin.core.round import Statistics
from fedbasin.core.task import CLASSIFICATION, Task
from fedbasin.deploy.bounds import MOST_ROWS
from fedbasin.deploy.replies import Guard
from fedbasin.sim import Federation
from fedbasin.sinks import Target


@dataclass(frozen=True)
class ServerSide:
    """What the server has, and what it may know of the clients.

    Args:
        net: the network, for methods that treat its head apart.
        schedule: the plan of each round; by default ``train_config["lr"]`` and one epoch.
        batch: the clients' batch size, for methods that ask for it.
        proxy: labelled rows on the server, for methods that learn from them.
        context: what else the method may know, as a simulation has it. Overrides `batch` and
            `proxy`.
        evaluator: rows that the scored model is tested on after each round.
        statistics: what happens to BatchNorm statistics.
        counts: how class counts reach methods that need them: each client's in ``"plain"``, or
            their sum alone by way of encryption.
        classes: number of classes, for private counts; the evaluator's by default.
        task: what the network's outputs mean; the evaluator's by default, or classification.
    """

    net: Net | None = None
    schedule: Callable[[int], Plan] | None = None
    batch: int = 0
    proxy: Evaluator | None = None
    context: Context | None = None
    evaluator: Evaluator | None = None
    statistics: Statistics = field(default_factory=Statistics)
    counts: Literal["plain", "private"] = "plain"
    classes: int = 0
    task: Task | None = None

    @classmethod
    def of(
        cls, federation: Federation, *, counts: Literal["plain", "private"] = "plain"
    ) -> ServerSide:
        """Return the server's side of a simulated federation."""
        return cls(
            net=federation.net,
            schedule=federation.schedule,
            context=federation.context,
            evaluator=federation.evaluator,
            statistics=Statistics(federation.buffers, federation.recalibrate),
            counts=counts,
        )

    @property
    def device(self) -> torch.device:
        """Where the server's models are."""
        return torch.device("cpu") if self.net is None else self.net.device

    def known_classes(self) -> int:
        """Return the number of classes."""
        if self.classes or self.evaluator is None:
            return self.classes
        return self.evaluator.classes

    def known_task(self) -> Task:
        """Return what the network's outputs mean."""
        if self.task is not None:
            return self.task
        return CLASSIFICATION if self.evaluator is None else self.evaluator.task

    def headline(self) -> Headline:
        """Return the metric that the run is judged by."""
        return Headline() if self.evaluator is None else self.evaluator.headline

    def client_headlines(self) -> list[Headline]:
        """Return the metrics that clients are scored by: those of the task."""
        if self.evaluator is not None:
            own = self.evaluator.metrics
        else:
            own = tuple(m for m in metrics_of(self.known_task()) if m.scalar)
        return [metric.headline for metric in own if not isinstance(metric, GroupMetric)]


@dataclass(frozen=True)
class Handling:
    """How replies are waited for and taken.

    Args:
        guard: what happens to clients whose updates are far longer than the others'.
        stream: whether to average replies as they arrive, where the method allows it; ``"auto"``
            does so for cohorts that would take more than 256 MiB.
        patience: seconds to wait for nodes that are needed.
        most_rows: how many rows a client may state.
        most_bytes: how many bytes a reply to a round may take; by default the model twice, and
            four times for each client rule, which may report.
        bind_keys: whether a client's number belongs to the first node key that claims it, also
            after a restart (``seats.toml`` in the run folder). For federations whose nodes have
            registered keys; a node without one has a new key at every start.
    """

    guard: Guard | None = None
    stream: bool | Literal["auto"] = "auto"
    patience: float = 600.0
    most_rows: int = MOST_ROWS
    most_bytes: int | None = None
    bind_keys: bool = False


@dataclass(frozen=True)
class Records:
    """What a federation writes to disk.

    Args:
        folder: where records and checkpoints go. A run resumes from a checkpoint in it. None
            keeps records in memory alone.
        checkpoint_every: save after every k rounds. With 1, a stopped run resumes in the round
            it was in; with more, clients that keep a state of their own may be ahead of it.
        facts: what the summary says beside the measured numbers.
        log: where else records and summary go, as in `fedbasin.run`; needs a folder.
    """

    folder: Path | str | None = None
    checkpoint_every: int = 1
    facts: Mapping[str, Any] = field(default_factory=dict)
    log: Sequence[Target] = ()

    def __post_init__(self) -> None:
        if self.checkpoint_every < 1:
            raise ValueError(f"checkpoint_every must be at least 1, got {self.checkpoint_every}")
        if self.log and self.folder is None:
            raise ValueError("log needs a folder for the run: give folder=... too")
