"""The cohort executor: all clients of a round advance together as one matrix [C, P].

The step that `local.step` writes for one client runs under `vmap`, compiled once for all
numbers of active clients. Clients are ordered by how many steps they have left; as they
finish, the active set shrinks through a short ladder of sizes, so little work is wasted and
few shapes are compiled. Batches, gathers, augmentation and the step counter live on the
device: a step costs the host one launch. Uncompiled on a CPU a cohort takes the step of
`sim.lean`, which equals this one to rounding.

Several launches, of runs that train alike, are answered together: a row is then a client of one
of them, with the run's own model, learning rate and randomness.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedbasin.core.method import Probe, Replies
from fedbasin.core.rng import Key, fold_in, keys_tensor
from fedbasin.core.round import Gathered, Launch, ProbeRequest, Sent
from fedbasin.core.rule import Batch, Finish, Start
from fedbasin.core.tree import concatenated, flatten, mapped, rebuild, row, stack
from fedbasin.local.batches import AUGMENT, DROPOUT, cohort_rows, count_steps
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
from fedbasin.sim.lean import Elsewhere, LeanStep
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
    lean: bool = True  # whether the lean step is taken where nothing is compiled
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
        key: the randomness of launches that bring none.
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

    @property
    def exact(self) -> bool:
        """Whether only clients with a step left advance: nothing is compiled or captured."""
        return not self.compiled and not self.population.inputs.is_cuda

    @property
    def lean(self) -> bool:
        """Whether the lean step is taken; `vmap` alone has no rule for recurrent layers."""
        return self.exact and self.counters.lean and self.trainer.net.compiles

    def train(self, launches: Sequence[Launch]) -> list[Gathered]:
        """Train the cohorts of all launches together, where what they send has one shape."""
        if len(launches) > 1 and not _of_one_shape(launches):
            return [self._train([launch])[0] for launch in launches]
        return self._train(launches)

    def _train(self, launches: Sequence[Launch]) -> list[Gathered]:
        batch = self.trainer.batch
        sizes = [self.population.sizes[each.cohort + each.first] for each in launches]
        steps = [
            np.array([count_steps(each.plan, int(n), batch) for n in mine], dtype=np.int64)
            for each, mine in zip(launches, sizes, strict=True)
        ]
        counts = [len(each.cohort) for each in launches]
        rows = _Rows(
            launches,
            np.repeat(np.arange(len(launches)), counts),
            np.concatenate([each.cohort for each in launches]),
            np.concatenate(steps),
        )
        order = np.argsort(-rows.steps, kind="stable")
        back = torch.from_numpy(np.argsort(order)).to(launches[0].sent.vector.device)
        return self._in_chunks(
            order,
            launches[0].sent,
            lambda part: self._chunk(rows.take(part)),
            lambda parts: _gathered(_joined(parts, back), counts),
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
            f"{width} clients side by side ran out of memory; continuing with "
            f"{self.counters.width}. Set sim.chunk = {self.counters.width} to start there.",
            stacklevel=4,
        )

    def probe(self, requests: Sequence[ProbeRequest]) -> list[Probe]:
        """Return the full gradients of each request's cohort at the model it was sent."""
        return [self._probe(each.cohort + each.first, each.sent) for each in requests]

    def _probe(self, cohort: np.ndarray, sent: Sent) -> Probe:
        trainer = self.trainer
        people = self.population
        stacked = self._in_chunks(
            cohort, sent, lambda part: gradients(trainer, people, part, sent), torch.cat
        )
        return Probe(stacked, people.weights(cohort))

    def facts(self) -> dict[str, Any]:
        """Name the executor, how many shapes it compiled, and how little it wasted."""
        return {
            "executor": "cohort",
            "shapes_compiled": self.counters.compiled,
            "share_useful_steps": self.counters.share_useful,
        }

    def _chunk(self, rows: _Rows) -> _Part:
        """Train clients that are sorted by falling number of steps."""
        trainer = self.trainer
        vector, _ = rows.sent(lambda sent: sent.vector)
        buffers, _ = rows.sent(lambda sent: sent.buffers)
        batches, sizes = self._batch_plan(rows)
        own = stack([r.states.get(c) for r, c in rows.pairs()])
        starts = self._starts(rows, sizes, batches, own)
        begin = [
            torch.func.vmap(lambda s, r=rule: r.begin(s, trainer.net), in_dims=(dims,))(start)
            for rule, (start, dims) in zip(trainer.rules, starts, strict=True)
        ]
        count = len(rows.clients)
        point = Point(
            vector.expand(count, -1),
            own[-1] if trainer.keep_optimiser else self._fresh(rows.launches[0].sent.vector, count),
            buffers.expand(count, -1),
            tuple(begin),
        )
        zero = torch.zeros((), dtype=torch.int64, device=vector.device)
        sums = vector.new_zeros(count, 4)
        progress = Progress(point, sums, zero)
        if not self.lean:
            progress = cloned(progress)  # rows of their own, not one row repeated
        try:
            progress = self._advance(progress, batches, rows.steps)
        except Elsewhere:
            self.counters.lean = False
            return self._chunk(rows)
        rates = torch.tensor(
            [r.plan.lr for r, _ in rows.pairs()], dtype=torch.float64, device=vector.device
        )
        taken = batches.limit.to(vector.dtype)
        ended = Finish(progress.point.vector, taken, taken * batches.lr)
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
            lr_sum=batches.limit.to(torch.float64) * rates,
            effective_steps=torch.tensor(
                [trainer.length(int(k)) for k in rows.steps],
                dtype=torch.float64,
                device=vector.device,
            ),
            last_loss=progress.sums[:, 2] / progress.sums[:, 3].clamp(min=1),
            train_loss=progress.sums[:, 0] / progress.sums[:, 1].clamp(min=1),
            buffers=progress.point.buffers,
            reports=tuple(report for _, report in ends),
        )
        states = tuple(state for state, _ in ends)
        if trainer.keep_optimiser:
            states = (*states, progress.point.state)
        return _Part(replies, states)

    def _fresh(self, vector: Tensor, count: int) -> Any:
        """Return the optimiser's first state for `count` clients."""
        state = self.trainer.optimiser.init(vector)
        return mapped(lambda leaf: leaf.expand(count, *leaf.shape), state)

    def _batch_plan(self, rows: _Rows) -> tuple[BatchPlan, Tensor]:
        vector = rows.launches[0].sent.vector
        device = vector.device
        batch = self.trainer.batch
        clients = rows.ids
        steps = rows.steps
        sizes = torch.from_numpy(self.population.sizes[clients]).to(device)
        limit = torch.from_numpy(steps.astype(np.int64)).to(device)
        passes = -(-self.population.sizes[clients] // batch)
        keys = keys_tensor(
            [client_key(r.key or self.key, r.sent.round, int(c)) for r, c in rows.pairs()], device
        )
        first = torch.from_numpy(self.population.offsets[clients]).to(device)
        late = torch.from_numpy(steps - passes).to(device)
        who = torch.from_numpy(rows.clients.astype(np.int64)).to(device)
        if self.exact:
            most = max(int(self.population.sizes[clients].max()), 1)
            longest = max(int(steps.max()), 1)
        else:
            # One shape for all rounds: as many steps as the largest client of the population takes,
            # now or in an earlier round, where a plan asks for ever fewer.
            most = max(int(self.population.sizes.max()), 1)
            asked = max(count_steps(each.plan, most, batch) for each in rows.launches)
            longest = max(asked, self.counters.longest, 1)
            self.counters.longest = longest
        chances = self._chances(clients, most)
        epochs = max(1, int(np.max(-(-steps // np.maximum(passes, 1)))))
        index, real = cohort_rows(keys, sizes, limit, batch, longest, most, epochs, chances)
        rates = [each.plan.lr for each in rows.launches]
        lr = torch.tensor(rates, dtype=vector.dtype, device=device)
        lr = lr[0] if rows.alone else lr[torch.from_numpy(rows.which).to(device)]
        return BatchPlan(index + first[:, None, None], real, keys, limit, late, who, lr), sizes

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
        self, rows: _Rows, sizes: Tensor, batches: BatchPlan, own: tuple[Any, ...]
    ) -> list[tuple[Start, Start]]:
        """Return what each rule begins with, and along which axes it is mapped over clients."""
        trainer = self.trainer
        if not trainer.rules:
            return []  # without rules nothing uses the counts
        dtype = trainer.net.dtype
        who = torch.from_numpy(rows.ids.astype(np.int64)).to(sizes.device)
        counts = self.population.class_counts_of(who, trainer.classes)
        vector, axis = rows.sent(lambda sent: sent.vector)
        buffers, _ = rows.sent(lambda sent: sent.buffers)
        now, _ = rows.sent(lambda sent: sent.vector.new_tensor(float(sent.round)))
        starts = []
        of_rules = own[: len(trainer.rules)]  # after them comes the optimiser's, if it is kept
        for i, mine in enumerate(of_rules):
            shared, _ = rows.sent(lambda sent: sent.shared[i])  # noqa: B023  (called at once)
            start = Start(
                vector=vector,
                shared=shared,
                client_state=mine,
                round=now,
                lr=batches.lr,
                steps=batches.limit.to(dtype),
                epoch_steps=(batches.limit - batches.late).to(dtype),
                examples=sizes.to(dtype),
                class_counts=counts.to(dtype),
                survey=self._survey(i, rows),
                buffers=buffers,
            )
            across = axis
            if axis is not None:  # a number beside tensors is the same for all
                across = rebuild(shared, lambda _, leaf: 0 if isinstance(leaf, Tensor) else None)
            starts.append((start, Start(axis, across, 0, axis, axis, 0, 0, 0, 0, 0, axis)))  # type: ignore[arg-type]
        return starts

    def _survey(self, i: int, rows: _Rows) -> Any:
        """Return what a rule finds at each client [A, ...], launch by launch."""
        rule = self.trainer.rules[i]
        if not rule.surveys:
            return ()
        found = []
        places = []
        for number, launch in enumerate(rows.launches):
            mine = np.flatnonzero(rows.which == number)
            sent = launch.sent
            found.append(
                survey(rule, sent.shared[i], self.trainer, self.population, rows.ids[mine], sent)
            )
            places.append(mine)
        if rows.alone:
            return found[0]
        back = torch.from_numpy(np.argsort(np.concatenate(places)))
        return mapped(lambda leaf: leaf[back.to(leaf.device)], concatenated(found))

    def _advance(self, progress: Progress, batches: BatchPlan, steps: np.ndarray) -> Progress:
        """Take all steps, on fewer and fewer clients."""
        if self.lean:
            progress = LeanStep(self.trainer, self.population).advance(progress, batches, steps)
            self.counters.useful += int(steps.sum())
            self.counters.total += int(steps.sum())
            return progress
        done = 0
        last = int(steps.max())
        while done < last:
            active = int((steps > done).sum())
            width = active
            until = int(steps[active - 1])
            if not self.exact:
                width, until = self._rung(steps, active, done)
            progress = self._segment(progress, batches, width, until - done)
            self.counters.useful += int(np.clip(steps[:width] - done, 0, until - done).sum())
            self.counters.total += width * (until - done)
            done = until
        return progress

    def _rung(self, steps: np.ndarray, active: int, done: int) -> tuple[int, int]:
        """Return how many clients advance together, of the few sizes there are, and until when."""
        last = int(steps.max())
        ladder = COARSE if any(step.fixed for step in self._steps.values()) else LADDER
        width = min(rung(active, ladder), len(steps))
        below = [size for size in ladder if size < width]
        # Stay at this width until the active clients fit the next rung below.
        fits = int(steps[below[-1]]) if below else last
        return width, min(max(fits, done + 1), last)

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
        augment = dropout = None
        if trainer.augments:
            augment = fold_in(fold_in(batches.keys, AUGMENT), number)
        if trainer.draws:
            dropout = fold_in(fold_in(batches.keys, DROPOUT), number)
        index = rows if self.population.places is None else self.population.places[rows]
        raw = inputs[index]
        label = labels[rows]

        def one(
            point: Point,
            raw: Tensor,
            label: Tensor,
            weight: Tensor,
            a: Tensor | None,
            d: Tensor | None,
            lr: Tensor,
        ) -> Any:
            batch = Batch(trainer.transform(raw, a), label, weight)
            return step(
                point,
                batch,
                lr,
                d,
                net=trainer.net,
                task=trainer.task,
                rules=trainer.rules,
                optimiser=trainer.optimiser,
                clip=trainer.clip,
                differentiate=by_transform,
            )

        given = (progress.point, raw, label, weight, augment, dropout, batches.lr)
        axes = (0, 0, 0, 0, *(0 if each is not None and each.dim() else None for each in given[4:]))
        after, loss = torch.func.vmap(one, in_dims=axes)(*given)
        active = number < batches.limit
        point = after if self.exact else advanced(active, after, progress.point)
        samples = weight.sum(1)
        both = torch.stack([loss * samples, samples], 1) * active[:, None]
        late = (number >= batches.late)[:, None]
        sums = progress.sums + torch.cat([both, both * late], 1)
        return Progress(point, sums, number + 1)


def _graph_pool() -> Any:
    return torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None


class _Rows(NamedTuple):
    """Clients that advance together, each of one launch."""

    launches: Sequence[Launch]
    which: np.ndarray  # [A] the launch of each
    clients: np.ndarray  # [A] its id in its run
    steps: np.ndarray  # [A]

    @property
    def alone(self) -> bool:
        """Whether all are of one launch."""
        return len(self.launches) == 1

    @property
    def ids(self) -> np.ndarray:
        """Ids in the executor's population."""
        ids: np.ndarray = self.clients + np.array([r.first for r in self.launches])[self.which]
        return ids

    def take(self, part: np.ndarray) -> _Rows:
        """Return some of them, with those launches alone that they belong to."""
        present, which = np.unique(self.which[part], return_inverse=True)
        launches = [self.launches[i] for i in present]
        return _Rows(launches, which, self.clients[part], self.steps[part])

    def pairs(self) -> list[tuple[Launch, int]]:
        """Return the launch of each client, with the client's id in its run."""
        clients = self.clients.tolist()
        return [(self.launches[i], c) for i, c in zip(self.which, clients, strict=True)]

    def sent(self, what: Callable[[Sent], Any]) -> tuple[Any, int | None]:
        """Return what the clients were sent, and its axis of clients: none where it is one."""
        values = [what(each.sent) for each in self.launches]
        if self.alone:
            return values[0], None
        which = torch.from_numpy(self.which)
        return mapped(lambda leaf: leaf[which.to(leaf.device)], stack(values)), 0


class _Part(NamedTuple):
    """The result of one chunk."""

    replies: Replies
    own: tuple[Any, ...]


def _joined(parts: list[_Part], back: Tensor) -> _Part:
    """Put the chunks together in the order of the launches and their cohorts."""
    return mapped(lambda leaf: leaf[back], concatenated(parts))


def _gathered(part: _Part, counts: list[int]) -> list[Gathered]:
    """Return what the cohort of each launch sends back."""
    found = []
    end = 0
    for count in counts:
        rows = slice(end, end + count)
        end += count
        mine = part
        if len(counts) > 1:  # copies: a view would hold on to all runs' models
            mine = mapped(lambda leaf: leaf[rows].clone(), part)  # noqa: B023  (called at once)
        weights = mine.replies.weights
        own = [row(mine.own, i) for i in range(count)]
        loss = (mine.replies.train_loss * weights).sum() / weights.sum()
        found.append(Gathered(mine.replies, own, loss))
    return found


def _of_one_shape(launches: Sequence[Launch]) -> bool:
    """Whether what launches bring can be stacked: one tree, the same numbers beside tensors."""

    def shape(launch: Launch) -> list[Any]:
        sent = launch.sent
        leaves = flatten((sent.vector, sent.buffers, sent.shared))
        return [(path, _described(leaf)) for path, leaf in leaves]

    first = shape(launches[0])
    return all(shape(launch) == first for launch in launches[1:])


def _described(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf
