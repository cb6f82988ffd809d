"""The worker executor: the clients of a round are divided among processes of one thread each.

For networks whose step is mostly arithmetic (convolutions on a CPU), where neither a matrix of
clients nor torch's own threads help. Every process is a loop executor for its share, so the
result is the loop's, whatever the number of workers. Rows, models and states lie in shared
memory; the pipes carry only where they lie.
"""

from __future__ import annotations

import signal
import traceback
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing import get_context

from fedbasin.core.method import Plan, Probe
from fedbasin.core.rng import Key
from fedbasin.core.round import Gathered, Launch, ProbeRequest, Sent
from fedbasin.core.tree import rebuild, tensors
from fedbasin.local.batches import count_steps
from fedbasin.local.train import Trained, Trainer
from fedbasin.sim.allocator import keep_freed_memory
from fedbasin.sim.loop import LoopExecutor, gather
from fedbasin.sim.population import Population

_LINE = 64  # tensors begin at multiples of a cache line


class WorkerError(RuntimeError):
    """A worker process that failed or ended, with its error."""


class _Place:
    """The place of a tensor in shared memory. It is a leaf to the trees of `core.tree`."""

    def __init__(self, at: int, shape: torch.Size, dtype: torch.dtype) -> None:
        self.at = at
        self.shape = shape
        self.dtype = dtype

    def view(self, memory: Tensor) -> Tensor:
        """Return the tensor."""
        size = self.shape.numel() * self.dtype.itemsize
        return memory[self.at : self.at + size].view(self.dtype).view(self.shape)


class _Order(NamedTuple):
    """A worker's share of a round, tensors replaced by their places."""

    clients: list[int]
    sent: Any
    own: list[Any]
    plan: Plan
    key: Key
    down: Tensor | None  # new memory for orders, where the old is too small


@dataclass
class _Worker:
    """A process and the memory shared with it, in both directions."""

    process: Any
    pipe: Connection
    down: Tensor
    up: Tensor


@dataclass(frozen=True)
class WorkerExecutor:
    """Train a cohort in several processes.

    Args:
        trainer: how a client trains.
        population: the clients' data, on the CPU.
        key: the randomness of launches that bring none.
        workers: number of processes; they start with the first round.
    """

    trainer: Trainer
    population: Population
    key: Key
    workers: int
    _running: list[_Worker] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"workers must be at least 1, got {self.workers}")
        if self.population.inputs.device.type != "cpu":
            raise ValueError("worker processes train on a CPU; use sim.workers = 1 on a GPU")

    def train(self, launches: Sequence[Launch]) -> list[Gathered]:
        """Train the cohort of each launch, one launch after another."""
        try:
            return [self._train(launch) for launch in launches]
        except BaseException:
            self.close()  # the others' answers would be taken for the next round's
            raise

    def probe(self, requests: Sequence[ProbeRequest]) -> list[Probe]:
        """Return the cohorts' full gradients, computed in this process: one pass over the rows."""
        return LoopExecutor(self.trainer, self.population, self.key).probe(requests)

    def facts(self) -> dict[str, Any]:
        """Name the executor and its processes."""
        return {"executor": "workers", "workers": self.workers}

    def close(self) -> None:
        """End the processes; the next round starts new ones."""
        _stop(self._running)

    def _train(self, launch: Launch) -> Gathered:
        cohort = launch.cohort
        sent = launch.sent
        plan = launch.plan
        key = launch.key or self.key
        if not self._running:
            self._start()
        steps = [
            count_steps(plan, int(n), self.trainer.batch) for n in self.population.sizes[cohort]
        ]
        shares = shared_out(steps, self.workers)
        busy = [(w, share) for w, share in zip(self._running, shares, strict=True) if share]
        for worker, share in busy:
            clients = [int(cohort[i]) for i in share]
            own = [launch.states.get(client) for client in clients]
            (sent_at, own_at), down = _written((sent, tuple(own)), worker.down)
            fresh = down if down is not worker.down else None
            worker.down = down
            _send(worker, _Order(clients, sent_at, list(own_at), plan, key, fresh))
        trained: list[Trained | None] = [None] * len(cohort)
        for worker, share in busy:
            for i, one in zip(share, _collected(worker), strict=True):
                trained[i] = one
        return gather(cohort, [one for one in trained if one is not None], sent.vector)

    def _start(self) -> None:
        self.population.inputs.share_memory_()
        self.population.labels.share_memory_()
        spawned = get_context("spawn")
        for _ in range(self.workers):
            ours, theirs = spawned.Pipe()
            process = spawned.Process(
                target=_work,
                args=(theirs, self.trainer, self.population, self.key),
                daemon=True,
            )
            process.start()
            theirs.close()
            empty = torch.empty(0, dtype=torch.uint8)
            self._running.append(_Worker(process, ours, empty, empty))
        weakref.finalize(self, _stop, self._running)


def shared_out(steps: list[int], workers: int) -> list[list[int]]:
    """Deal positions to workers, longest first, each to the one with the least to do.

    >>> shared_out([5, 1, 4, 2], 2)
    [[0, 1], [2, 3]]
    """
    loads = [0] * workers
    shares: list[list[int]] = [[] for _ in range(workers)]
    for position in sorted(range(len(steps)), key=lambda i: -steps[i]):
        least = loads.index(min(loads))
        loads[least] += steps[position]
        shares[least].append(position)
    return [sorted(share) for share in shares]


def _send(worker: _Worker, message: Any) -> None:
    try:
        worker.pipe.send(message)
    except (BrokenPipeError, ConnectionResetError) as error:
        raise _ended(worker) from error


def _receive(worker: _Worker) -> Any:
    try:
        answer = worker.pipe.recv()
    except (EOFError, ConnectionResetError) as error:
        raise _ended(worker) from error
    if isinstance(answer, ValueError):
        raise answer
    if isinstance(answer, WorkerError):
        raise answer
    return answer


def _ended(worker: _Worker) -> WorkerError:
    worker.process.join(5)
    return WorkerError(
        f"a worker process ended with status {worker.process.exitcode}; -9 is most often a lack of "
        "memory, then lower sim.workers; 1 often a script that starts a run outside "
        'if __name__ == "__main__":'
    )


def _collected(worker: _Worker) -> list[Trained]:
    """Return what a worker trained; its tensors are copies, the memory is used again."""
    answer = _receive(worker)
    if isinstance(answer, int):  # it needs so much memory to answer
        worker.up = _memory(answer)
        _send(worker, worker.up)
        answer = _receive(worker)
    trained: list[Trained] = list(_read(answer, worker.up, copied=True))
    return trained


def _stop(running: list[_Worker]) -> None:
    for worker in running:
        worker.pipe.close()
    for worker in running:
        worker.process.join(5)
        if worker.process.is_alive():
            worker.process.terminate()
    running.clear()


def _work(pipe: Connection, trainer: Trainer, population: Population, key: Key) -> None:
    """Answer orders until the pipe is closed; runs in a process of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when a run stops
    torch.set_num_threads(1)
    keep_freed_memory()
    executor = LoopExecutor(trainer, population, key)
    down = up = torch.empty(0, dtype=torch.uint8)
    while True:
        try:
            order: _Order = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        down = down if order.down is None else order.down
        try:
            answer = tuple(_trained(executor, order, down))
        except ValueError as error:
            pipe.send(ValueError(str(error)))
            continue
        except Exception:
            pipe.send(WorkerError(traceback.format_exc()))
            continue
        need = _bytes(answer)
        if need > up.numel():
            pipe.send(need)
            up = pipe.recv()
        pipe.send(_written(answer, up)[0])


def _trained(executor: LoopExecutor, order: _Order, down: Tensor) -> list[Trained]:
    sent: Sent = _read(order.sent, down, copied=False)
    return [
        executor.one(client, sent, order.plan, _read(own, down, copied=False), order.key)
        for client, own in zip(order.clients, order.own, strict=True)
    ]


def _memory(size: int) -> Tensor:
    shared: Tensor = torch.empty(size, dtype=torch.uint8).share_memory_()
    return shared


def _room(leaf: Tensor) -> int:
    return -(-leaf.numel() * leaf.element_size() // _LINE) * _LINE


def _bytes(tree: Any) -> int:
    return sum(_room(leaf) for leaf in tensors(tree))


def _written(tree: Any, memory: Tensor) -> tuple[Any, Tensor]:
    """Write a tree's tensors into shared memory, new if it is too small; return their places."""
    need = _bytes(tree)
    at = 0
    if need > memory.numel():
        memory = _memory(need)

    def place(_: str, leaf: Any) -> Any:
        nonlocal at
        if not isinstance(leaf, Tensor):
            return leaf
        here = _Place(at, leaf.shape, leaf.dtype)
        here.view(memory).copy_(leaf)
        at += _room(leaf)
        return here

    return rebuild(tree, place), memory


def _read(tree: Any, memory: Tensor, *, copied: bool) -> Any:
    """Return a tree with the tensors that lie at its places."""

    def leaf_at(_: str, leaf: Any) -> Any:
        if not isinstance(leaf, _Place):
            return leaf
        return leaf.view(memory).clone() if copied else leaf.view(memory)

    return rebuild(tree, leaf_at)
