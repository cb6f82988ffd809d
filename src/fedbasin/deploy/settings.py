"""The settings of a strategy beside the method and Flower's own arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from fedbasin.core.evaluator import Evaluator
from fedbasin.core.method import Context, Plan, Proxy
from fedbasin.core.metric import GroupMetric, metrics_of
from fedbasin.core.net import Net
from fedbasin.core.record import Headline
from fedbasin.core.round import Statistics
from fedbasin.core.task import CLASSIFICATION, Task
from fedbasin.deploy.bounds import MOST_ROWS
from fedbasin.deploy.own_rows import Held
from fedbasin.deploy.replies import Guard
from fedbasin.sim import Federation
from fedbasin.sinks import Target

Arrays: TypeAlias = tuple[Any, Any]  # inputs and targets, of NumPy or torch
_ROWS = "arrays (x, y), or an Evaluator"


@dataclass(frozen=True)
class ServerSide:
    """What the server has, and what it may know of the clients.

    Args:
        net: the network, a module or a `Net`: for methods that treat its head apart, and for
            arrays in `proxy` or `evaluator`.
        schedule: the plan of each round; by default ``train_config["lr"]`` and one epoch.
        batch: the clients' batch size, for methods that ask for it.
        proxy: labelled rows on the server, for methods that learn from them: arrays ``(x, y)`` or
            an `Evaluator`. Arrays become inputs of the network as a client's do in `client_app`.
        context: what else the method may know, as a simulation has it. Overrides `batch` and
            `proxy`.
        evaluator: rows that the scored model is tested on after each round, of the same kinds.
        statistics: what happens to BatchNorm statistics.
        counts: how class counts reach methods that need them: each client's in ``"plain"``, or
            their sum alone by way of encryption.
        classes: number of classes, for private counts; the evaluator's by default.
        task: what the network's outputs mean; the evaluator's by default, or classification.
    """

    net: Net | nn.Module | None = None
    schedule: Callable[[int], Plan] | None = None
    batch: int = 0
    proxy: Proxy | Arrays | None = None
    context: Context | None = None
    evaluator: Evaluator | Arrays | None = None
    statistics: Statistics = field(default_factory=Statistics)
    counts: Literal["plain", "private"] = "plain"
    classes: int = 0
    task: Task | None = None

    def __post_init__(self) -> None:
        """Refuse what would fail in a round, where it would be taken for a fault of the replies."""
        _check("net", self.net, (Net, nn.Module), "a torch module")
        _check("context", self.context, Context, "a Context")
        _check("statistics", self.statistics, Statistics, "Statistics('keep') or another policy")
        _check("task", self.task, Task, "a task such as Binary()")
        if self.schedule is not None and not callable(self.schedule):
            raise _wrong("schedule", self.schedule, "a function of the round that returns a Plan")
        if self.counts not in ("plain", "private"):
            raise _wrong("counts", self.counts, "'plain' or 'private'")
        if self.context is not None:
            _check_proxy("context.proxy", self.context.proxy, "an Evaluator")
        _ = (self.proxy_rows, self.test_rows)  # which check what they are made of

    @cached_property
    def network(self) -> Net | None:
        """The network as a function of vectors, in the floating type of a module that was given."""
        if not isinstance(self.net, nn.Module):
            return self.net
        types = [p.dtype for p in self.net.parameters() if p.is_floating_point()]
        return Net(self.net, dtype=types[0] if types else torch.float32)

    @cached_property
    def proxy_rows(self) -> Proxy | None:
        """The rows to learn from."""
        if isinstance(self.proxy, tuple):
            return self._evaluator("proxy", self.proxy)
        _check_proxy("proxy", self.proxy, _ROWS)
        return self.proxy

    @cached_property
    def test_rows(self) -> Evaluator | None:
        """The rows to test on."""
        if isinstance(self.evaluator, tuple):
            return self._evaluator("evaluator", self.evaluator)
        _check("evaluator", self.evaluator, Evaluator, _ROWS)
        return self.evaluator

    def _evaluator(self, name: str, arrays: Arrays) -> Evaluator:
        """Return arrays as rows of the network, which must be able to take them."""
        if len(arrays) != 2:
            raise _wrong(name, arrays, _ROWS)
        if self.network is None:
            raise ValueError(f"ServerSide: {name} is arrays, and net is missing: give the module")
        try:
            held = Held.of(arrays, 0).on(self.network.device)
            assert held.transform is not None  # that of arrays is known
            transform = partial(held.transform, dtype=self.network.dtype)
            task = self.task or CLASSIFICATION
            rows = Evaluator(self.network, held.rows.inputs, held.rows.labels, transform, task)
            rows.score(self.network.initial()[0])
        except Exception as error:  # whatever a module raises on rows that do not fit it
            why = str(error).removeprefix("client 0: ")
            raise ValueError(
                f"ServerSide: the network cannot score {name}=(x, y): {why}; give rows that fit "
                "net and task"
            ) from error
        return rows

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
        return torch.device("cpu") if self.network is None else self.network.device

    def check_type(self, arrays: torch.dtype) -> None:
        """Refuse first arrays of another floating type than the network's."""
        if self.network is not None and self.network.dtype != arrays:
            raise ValueError(
                f"initial_arrays are {arrays}, and ServerSide(net=...) runs in "
                f"{self.network.dtype}: give both in one type"
            )

    def known_classes(self) -> int:
        """Return the number of classes."""
        if self.classes or self.test_rows is None:
            return self.classes
        return self.test_rows.classes

    def known_task(self) -> Task:
        """Return what the network's outputs mean."""
        if self.task is not None:
            return self.task
        return CLASSIFICATION if self.test_rows is None else self.test_rows.task

    def headline(self) -> Headline:
        """Return the metric that the run is judged by."""
        return Headline() if self.test_rows is None else self.test_rows.headline

    def client_headlines(self) -> list[Headline]:
        """Return the metrics that clients are scored by: those of the task."""
        if self.test_rows is not None:
            own = self.test_rows.metrics
        else:
            own = tuple(m for m in metrics_of(self.known_task()) if m.scalar)
        return [metric.headline for metric in own if not isinstance(metric, GroupMetric)]


def _check(name: str, value: object, kinds: Any, wanted: str) -> None:
    """Refuse a value that is given and is of another kind."""
    if value is not None and not isinstance(value, kinds):
        raise _wrong(name, value, wanted)


def _check_proxy(name: str, value: object, wanted: str) -> None:
    """Refuse a value that is given and is not a `Proxy`."""
    if value is not None and not all(hasattr(value, part) for part in ("size", "logits", "loss")):
        raise _wrong(name, value, wanted)


def _wrong(name: str, value: object, wanted: str) -> ValueError:
    shown = repr(value) if isinstance(value, str | int | float) else f"a {type(value).__name__}"
    return ValueError(f"ServerSide: {name} is {shown[:100]}; give {wanted}")


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
