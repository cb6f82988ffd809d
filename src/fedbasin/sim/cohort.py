"""The cohort executor: all clients of a round advance together as one matrix [C, P].

The step that `local.step` writes for one client runs under `vmap`, compiled once for all
numbers of active clients. Clients are ordered by how many steps they have left; as they
finish, the active set shrinks through a short ladder of sizes, so little work is wasted and
few shapes are compiled. Batches, gathers, augmentation and the step counter live on the
device: a step costs the host one launch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedbasin.core.method import Plan, Probe, Replies
from fedbasin.core.rng import Key, fold_in, keys_tensor
from fedbasin.core.round import Gathered, ProbeRequest, Sent, TrainRequest
from fedbasin.core.rule import Batch, Finish, Start
from fedbasin.core.tree import mapped, row, stack, tensors
from fedbasin.local.batches import AUGMENT, DROPOUT, count_steps
from fedbasin.local.draws import cohort_rows
from fedbasin.local.step import Aux, Loss, Point, step
from fedbasin.local.train import Trainer
from fedbasin.sim.captured_step import (
    BatchPlan,
    CapturedStep,
    Progress,
    advanced,
    cloned,
    first_rows,
    in_place,
    overlaid,
    repeated,
)
from fedbasin.sim.loop import Executor, client_key
from fedbasin.sim.memory import SHARE, client_bytes, free_bytes
from fedbasin.sim.population import Population
from fedbasin.sim.survey import gradients, survey

if TYPE_CHECKING:
    from fedbasin.sim.tracing import Compiled

LADDER = (1, 2, 3, 4, 5, 6, 8, 10, 13, 16, 20, 25, 32, 40, 50, 64, 80, 100)  # finer wastes less
COARSE = (1, 2, 4, 7, 10, 16, 25, 40, 64, 100)  # for a step that is compiled for each size
_One = TypeVar("_One")  # what comes of a chunk
_All = TypeVar("_All")  # and of all of them


class Unsupported(RuntimeError):
    """A network or rule that cannot run as a cohort, with the reason."""


def by_transform(loss: Loss, vector: Tensor) -> tuple[Tensor, Aux]:
    """Differentiate with `torch.func`, which `vmap` understands."""
    gradient, (_, aux) = torch.func.grad_and_value(loss, has_aux=True)(vector)
    return gradient, aux


def rung(active: int, ladder: tuple[int, ...] = LADDER) -> int:
    """Return the smallest size of the ladder that is at least `active`."""
    return next((size for size in ladder if size >= active), -(-active // 50) * 50)


@dataclass
class Counters:
    """What the executor has done so far."""

    compiled: int = 0  # how often the step was compiled
    width: int = 0  # most clients that advance together; 0 until it is known
    longest: int = 0  # most steps that a client of the population has been asked for
    useful: int = 0  # client-steps that trained
    total: int = 0  # client-steps that were computed

    @property
    def share_useful(self) -> float:
        """Share of the computed client-steps that trained a client."""
        return self.useful / max(self.total, 1)


@dataclass(frozen=True)
class CohortExecutor(Executor):
    """Train a cohort as one matrix.

    Args:
        trainer: how a client trains.
        population: the clients' data.
        key: the randomness of requests that bring none.
        compiled: whether the step is compiled, once for all sizes of the active set. Otherwise it
            runs eagerly under `vmap` (captured as a graph on CUDA).
        chunk: most clients that advance together; 0 takes as many as the memory holds.
        memory: bytes that they may take; 0 is a share of what is free.
        backend: the compiler.
    """

    trainer: Trainer
    population: Population
    key: Key
    compiled: bool = True
    chunk: int = 0
    memory: int = 0
    backend: str = "inductor"
    counters: Counters = field(default_factory=Counters)
    _captured: dict[tuple[int, int], CapturedStep] = field(default_factory=dict, init=False)
    _steps: dict[int, Compiled] = field(default_factory=dict, init=False)  # by most steps
    _pool: Any = field(default_factory=lambda: _graph_pool(), init=False)

    def __post_init__(self) -> None:
        if self.trainer.net.has_statistics:
            raise Unsupported("BatchNorm statistics cannot be kept apart under vmap")

    def train(self, requests: Sequence[TrainRequest]) -> list[Gathered]:
        """Train the cohort of each request, one request after another."""
        return [self._train(request) for request in requests]

    def _train(self, request: TrainRequest) -> Gathered:
        cohort = request.cohort
        sent = request.sent
        sizes = self.population.sizes[cohort]
        steps = np.array([count_steps(request.plan, int(n), self.trainer.batch) for n in sizes])
        order = np.argsort(-steps, kind="stable")
        back = torch.from_numpy(np.argsort(order)).to(sent.vector.device)
        return self._in_chunks(
            order,
            sent,
            lambda part: self._chunk(cohort[part], steps[part], request),
            lambda parts: _joined(parts, back),
        )

    def _in_chunks(
        self,
        order: np.ndarray,
        sent: Sent,
        work: Callable[[np.ndarray], _One],
        join: Callable[[list[_One]], _All],
    ) -> _All:
        """Work on clients in chunks that fit in memory, smaller ones after memory runs out."""
        while True:
            width = self._width(len(order), sent.vector)
            try:
                parts = np.split(order, range(width, len(order), width))
                return join([work(part) for part in parts])
            except torch.OutOfMemoryError:
                if width == 1:
                    raise
            self._shrink(width)  # out of the handler, which holds on to what ran out

    def _width(self, clients: int, vector: Tensor) -> int:
        """Return how many clients advance together, in chunks of even size that fit in memory."""
        if not self.counters.width:
            budget = self.memory or int(SHARE * free_bytes(vector.device))
            fits = budget // max(client_bytes(self.trainer, self.population, vector), 1)
            self.counters.width = self.chunk or max(1, fits)
        chunks = -(-clients // self.counters.width)
        return -(-clients // chunks)

    def _shrink(self, width: int) -> None:
        """Halve the chunk after running out of memory, and warn."""
        self.counters.width = -(-width // 2)
        self._captured.clear()
        torch.cuda.empty_cache()
        warnings.warn(
            f"{width} clients side by side ran out of memory; going on with "
            f"{self.counters.width}. Set sim.chunk = {self.counters.width} to start there.",
            stacklevel=4,
        )

    def probe(self, requests: Sequence[ProbeRequest]) -> list[Probe]:
        """Return the full gradients of each request's cohort at the model it was sent."""
        return [self._probe(*request) for request in requests]

    def _probe(self, cohort: np.ndarray, sent: Sent) -> Probe:
        trainer = self.trainer
        people = self.population
        stacked = self._in_chunks(
            cohort, sent, lambda part: gradients(trainer, people, part, sent), torch.cat
        )
        return Probe(stacked, people.weights(cohort))

    def zero_state(self, vector: Tensor) -> tuple[Any, ...]:
        """Return what a client keeps before its first round."""
        return self.trainer.zero_state(vector)

    def facts(self) -> dict[str, Any]:
        """Name the executor, how many shapes it compiled, and how little it wasted."""
        return {
            "executor": "cohort",
            "shapes_compiled": self.counters.compiled,
            "share_useful_steps": self.counters.share_useful,
        }

    def _chunk(self, clients: np.ndarray, steps: np.ndarray, request: TrainRequest) -> _Part:
        """Train clients that are sorted by falling number of steps."""
        sent = request.sent
        plan = request.plan
        trainer = self.trainer
        device = sent.vector.device
        batches, sizes = self._batch_plan(clients, steps, sent, plan, request.key or self.key)
        own = stack([request.states.get(int(client)) for client in clients])
        starts = self._starts(clients, sizes, batches, sent, plan, own)
        begin = [
            torch.func.vmap(lambda s, r=rule: r.begin(s, trainer.net), in_dims=(dims,))(start)
            for rule, (start, dims) in zip(trainer.rules, starts, strict=True)
        ]
        count = len(clients)
        point = Point(
            sent.vector.expand(count, -1),
            own[-1] if trainer.keep_optimiser else self._fresh(sent.vector, count),
            sent.buffers.expand(count, -1),
            tuple(begin),
        )
        zero = torch.zeros((), dtype=torch.int64, device=device)
        sums = sent.vector.new_zeros(count, 4)
        progress = cloned(Progress(point, sums, zero))  # rows of their own, not one row repeated
        progress = self._advance(progress, batches, steps)
        lr_sum = batches.limit.to(sent.vector.dtype) * plan.lr
        ended = Finish(progress.point.vector, batches.limit.to(sent.vector.dtype), lr_sum)
        ends = []
        uploaded = ended
        for rule, carry, (start, dims) in zip(
            trainer.rules, progress.point.carries, starts, strict=True
        ):
            axes = (0, dims, 0)
            ends.append(torch.func.vmap(rule.end, in_dims=axes)(carry, start, ended))
            sent_back = torch.func.vmap(rule.upload, in_dims=axes)(carry, start, uploaded)
            uploaded = uploaded._replace(vector=sent_back)
        replies = Replies(
            models=uploaded.vector,
            weights=sizes.to(torch.float64),
            clients=batches.clients,
            steps=batches.limit.to(torch.float64),
            lr_sum=batches.limit.to(torch.float64) * plan.lr,
            effective_steps=torch.tensor(
                [trainer.length(int(k)) for k in steps], dtype=torch.float64, device=device
            ),
            last_loss=progress.sums[:, 2] / progress.sums[:, 3].clamp(min=1),
            reports=tuple(report for _, report in ends),
        )
        losses = progress.sums[:, 0] / progress.sums[:, 1].clamp(min=1)
        states = tuple(state for state, _ in ends)
        if trainer.keep_optimiser:
            states = (*states, progress.point.state)
        return _Part(replies, progress.point.buffers, states, losses)

    def _fresh(self, vector: Tensor, count: int) -> Any:
        """Return the optimiser's first state for `count` clients."""
        state = self.trainer.optimiser.init(vector)
        return mapped(lambda leaf: leaf.expand(count, *leaf.shape), state)

    def _batch_plan(
        self, clients: np.ndarray, steps: np.ndarray, sent: Sent, plan: Plan, key: Key
    ) -> tuple[BatchPlan, Tensor]:
        device = sent.vector.device
        batch = self.trainer.batch
        sizes = torch.from_numpy(self.population.sizes[clients]).to(device)
        limit = torch.from_numpy(steps.astype(np.int64)).to(device)
        passes = -(-self.population.sizes[clients] // batch)
        keys = keys_tensor([client_key(key, sent.round, int(c)) for c in clients], device)
        first = torch.from_numpy(self.population.offsets[clients]).to(device)
        late = torch.from_numpy(steps - passes).to(device)
        who = torch.from_numpy(clients.astype(np.int64)).to(device)
        # One shape for all rounds: as many steps as the largest client of the population takes, now
        # or in an earlier round, where a plan asks for ever fewer.
        most = max(int(self.population.sizes.max()), 1)
        longest = max(count_steps(plan, most, batch), self.counters.longest, 1)
        self.counters.longest = longest
        chances = self._chances(clients, most)
        epochs = max(1, int(np.max(-(-steps // np.maximum(passes, 1)))))
        rows, real = cohort_rows(keys, sizes, limit, batch, longest, most, epochs, chances)
        lr = torch.tensor(plan.lr, dtype=sent.vector.dtype, device=device)
        return BatchPlan(rows + first[:, None, None], real, keys, limit, late, who, lr), sizes

    def _chances(self, clients: np.ndarray, most: int) -> Tensor | None:
        """Return how likely each row of each client is [C, most], where a rule draws rows."""
        if self.trainer.drawer is None:
            return None
        chances = [self.trainer.chances(self.population.shard(int(c)).labels) for c in clients]
        pad = torch.nn.functional.pad
        return torch.stack(
            [pad(each, (0, most - len(each))) for each in chances if each is not None]
        )

    def _starts(
        self,
        clients: np.ndarray,
        sizes: Tensor,
        batches: BatchPlan,
        sent: Sent,
        plan: Plan,
        own: tuple[Any, ...],
    ) -> list[tuple[Start, Start]]:
        """Return what each rule begins with, and along which axes it is mapped over clients."""
        dtype = sent.vector.dtype
        trainer = self.trainer
        if not trainer.rules:
            return []  # without rules nothing uses the counts
        counts = self.population.class_counts_of(batches.clients, trainer.classes)
        now = torch.tensor(float(sent.round), dtype=dtype, device=sent.vector.device)
        starts = []
        of_rules = own[: len(trainer.rules)]  # after them comes the optimiser's, if it is kept
        for rule, shared, mine in zip(trainer.rules, sent.shared, of_rules, strict=True):
            start = Start(
                vector=sent.vector,
                shared=shared,
                client_state=mine,
                round=now,
                lr=batches.lr,
                steps=batches.limit.to(dtype),
                epoch_steps=(batches.limit - batches.late).to(dtype),
                examples=sizes.to(dtype),
                class_counts=counts.to(dtype),
                survey=survey(rule, shared, trainer, self.population, clients, sent),
                buffers=sent.buffers,
            )
            starts.append((start, Start(None, None, 0, None, None, 0, 0, 0, 0, 0, None)))  # type: ignore[arg-type]
        return starts

    def _advance(self, progress: Progress, batches: BatchPlan, steps: np.ndarray) -> Progress:
        """Take all steps, on fewer and fewer clients."""
        done = 0
        last = int(steps.max())
        while done < last:
            active = int((steps > done).sum())
            ladder = COARSE if any(step.fixed for step in self._steps.values()) else LADDER
            width = min(rung(active, ladder), len(steps))
            below = [size for size in ladder if size < width]
            # Stay at this width until the active clients fit the next rung below.
            fits = int(steps[below[-1]]) if below else last
            until = min(max(fits, done + 1), last)
            progress = self._segment(progress, batches, width, until - done)
            self.counters.useful += int(np.clip(steps[:width] - done, 0, until - done).sum())
            self.counters.total += width * (until - done)
            done = until
        return progress

    def _segment(self, progress: Progress, batches: BatchPlan, width: int, count: int) -> Progress:
        """Take `count` steps on the first `width` clients."""
        whole = len(progress.sums)
        shape = (width, batches.rows.shape[1])
        if shape not in self._captured:
            on_cuda = self.population.inputs.is_cuda
            one: Any = in_place(self._one_step) if on_cuda else self._one_step
            step = plain = repeated(one)
            if self.compiled:
                from fedbasin.sim.tracing import Compiled  # brings in the compiler, for seconds

                step = self._steps.setdefault(shape[1], Compiled(one, self.backend))
            self._captured[shape] = CapturedStep(step, plain, self.population, self._pool)
        captured = self._captured[shape]
        if width == whole:
            part = captured.run(progress, batches, count)
        else:
            part = captured.run(first_rows(progress, width), first_rows(batches, width), count)
            part = overlaid(part, progress, width)
        self.counters.compiled = sum(step.count for step in self._steps.values())
        return part

    def _one_step(
        self, progress: Progress, batches: BatchPlan, inputs: Tensor, labels: Tensor
    ) -> Progress:
        """Advance every client that has a step left by one step."""
        trainer = self.trainer
        number = progress.number
        rows = batches.rows.index_select(1, number[None])[:, 0]  # [A, B]
        weight = batches.real.index_select(1, number[None])[:, 0].to(trainer.net.dtype)
        augment = fold_in(fold_in(batches.keys, AUGMENT), number)
        dropout = fold_in(fold_in(batches.keys, DROPOUT), number)
        raw = inputs[rows]
        label = labels[rows]

        def one(
            point: Point, raw: Tensor, label: Tensor, weight: Tensor, a: Tensor, d: Tensor
        ) -> Any:
            batch = Batch(trainer.transform(raw, a), label, weight)
            return step(
                point,
                batch,
                batches.lr,
                d,
                net=trainer.net,
                task=trainer.task,
                rules=trainer.rules,
                optimiser=trainer.optimiser,
                clip=trainer.clip,
                differentiate=by_transform,
            )

        after, loss = torch.func.vmap(one)(progress.point, raw, label, weight, augment, dropout)
        active = number < batches.limit
        point = advanced(active, after, progress.point)
        samples = weight.sum(1)
        both = torch.stack([loss * samples, samples], 1) * active[:, None]
        late = (number >= batches.late)[:, None]
        sums = progress.sums + torch.cat([both, both * late], 1)
        return Progress(point, sums, number + 1)


def _graph_pool() -> Any:
    return torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None


class _Part(NamedTuple):
    """The result of one chunk."""

    replies: Replies
    buffers: Tensor
    own: tuple[Any, ...]
    losses: Tensor


def _joined(parts: list[_Part], back: Tensor) -> Gathered:
    """Put the chunks together in the order of the cohort."""
    joined = parts[0]
    if len(parts) > 1:
        leaves = [iter(tensors(part)) for part in parts]
        joined = mapped(lambda _: torch.cat([next(each) for each in leaves]), parts[0])
    joined = mapped(lambda leaf: leaf[back], joined)
    weights = joined.replies.weights
    own = [row(joined.own, i) for i in range(len(back))]
    loss = (joined.losses * weights).sum() / weights.sum()
    return Gathered(joined.replies, joined.buffers, own, loss)
