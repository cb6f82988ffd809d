"""The training step of one number of clients that advance together.

On CUDA the step, compiled or not, is captured as a graph, so that it costs the host one launch.
On other devices it is called.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from fedbasin.core.tree import Tree, mapped, tensors
from fedbasin.local.step import Point
from fedbasin.sim.population import Population


class BatchPlan(NamedTuple):
    """The batches that a chunk of clients trains on. Rows are clients."""

    rows: Tensor  # int64 [A, K, B] rows of the population
    real: Tensor  # bool [A, K, B] whether a row is a sample or padding
    keys: Tensor  # int64 [A, 2]
    limit: Tensor  # int64 [A] steps of each client
    late: Tensor  # int64 [A] the step at which its last epoch begins
    clients: Tensor  # int64 [A] ids
    lr: Tensor  # 0-d


class Progress(NamedTuple):
    """How far a chunk has come."""

    point: Point  # leaves [A, ...]
    sums: Tensor  # [A, 4] loss and samples of the whole round, then of the last epoch
    number: Tensor  # 0-d int64, the next step


class CapturedStep:
    """The step for one number of active clients.

    Args:
        step: the step itself, compiled or not; on CUDA it writes over the progress it is given.
        plain: the same, not compiled, for when compiling fails.
        population: the data it reads.
        pool: memory that captured graphs of one executor share; they never run at once.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        plain: Callable[..., Any],
        population: Population,
        pool: Any = None,
    ) -> None:
        self._step = step
        self._plain = plain
        self._pool = pool
        self._data = (population.inputs, population.labels)
        self._captures = population.inputs.is_cuda
        self._graph: torch.cuda.CUDAGraph | None = None
        self._progress: Progress
        self._batch_plan: BatchPlan

    def run(self, progress: Progress, batches: BatchPlan, count: int) -> Progress:
        """Take `count` steps; nothing given is changed."""
        try:
            return self._run(progress, batches, count)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # compilers fail in many ways; what is ours fails again below
            if self._step is self._plain:
                raise
            first = str(error).strip().split("\n", 1)[0]
            warnings.warn(f"the step runs uncompiled, it cannot be compiled: {first}", stacklevel=2)
            self._step = self._plain
            return self._run(progress, batches, count)

    def _run(self, progress: Progress, batches: BatchPlan, count: int) -> Progress:
        if not self._captures:
            after: Progress = self._step(progress, batches, *self._data, count=count)
            return after
        if self._graph is None:
            self._capture(progress, batches)
        assert self._graph is not None
        _copy(self._batch_plan, batches)
        _copy(self._progress, progress)
        for _ in range(count):
            self._graph.replay()
        return cloned(self._progress)

    def _capture(self, progress: Progress, batches: BatchPlan) -> None:
        """Record one step that reads and writes buffers of its own."""
        self._progress = cloned(progress)
        self._batch_plan = cloned(batches)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with _tuned(), torch.cuda.stream(stream):
            for _ in range(2):
                self._progress.number.zero_()  # steps are taken in place: stay within the plan
                self._step(self._progress, self._batch_plan, *self._data)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with _tuned(), _uncollected(), torch.cuda.graph(graph, pool=self._pool):
            self._step(self._progress, self._batch_plan, *self._data)
        self._graph = graph


def _tuned() -> AbstractContextManager[None]:
    """Let cuDNN try its kernels and use the fastest: a step's shapes never change."""
    tf32 = torch.backends.cudnn.allow_tf32
    return torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=tf32)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Keep Python from collecting garbage: a graph that dies would break the one being recorded."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def repeated(one_step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step that can be taken several times at once, as a compiled one can."""

    def advance(progress: Any, batches: BatchPlan, *data: Tensor, count: int = 1) -> Any:
        for _ in range(count):
            progress = one_step(progress, batches, *data)
        return progress

    return advance


def in_place(one_step: Callable[..., Progress]) -> Callable[..., None]:
    """Return a step that writes over the progress it is given, without a copy of its own."""

    def advance(progress: Progress, batches: BatchPlan, *data: Tensor) -> None:
        after = one_step(progress, batches, *data)
        for old, new in zip(tree_leaves(progress), tree_leaves(after), strict=True):
            if new is not old:
                old.copy_(new)

    return advance


def _copy(into: Any, values: Any) -> None:
    for old, new in zip(tensors(into), tensors(values), strict=True):
        old.copy_(new)


def cloned(tree: Tree) -> Tree:
    """Return a tree whose tensors are contiguous copies."""
    return mapped(lambda leaf: leaf.clone(memory_format=torch.contiguous_format), tree)


def first_rows(tree: Any, width: int) -> Any:
    """Return the first rows of every leaf that has one row a client."""
    return mapped(lambda leaf: leaf[:width] if leaf.dim() else leaf, tree)


def overlaid(part: Progress, whole: Progress, width: int) -> Progress:
    """Return the whole with its first rows replaced; the step number is the part's."""
    new = iter(tensors(part))

    def over(old: Tensor) -> Tensor:
        leaf = next(new)
        return torch.cat([leaf, old[width:]]) if old.dim() else leaf

    return mapped(over, whole)


def advanced(active: Tensor, new: Point, old: Point) -> Point:
    """Return the new rows of active clients, and the old rows of those without a step left."""

    def choose(after: Tensor, before: Tensor) -> Tensor:
        if after is before:  # what a rule carries along and does not change
            return before
        return torch.where(active.view(-1, *(1,) * (before.dim() - 1)), after, before)

    point: Point = tree_map(choose, new, old)
    return point
