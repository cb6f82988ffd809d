"""The lean step of a cohort on a CPU: one forward pass under `vmap`, one plain backward pass.

The losses of all rows are added and differentiated at once: a row's loss depends on its own model
alone, so the gradient of the sum is each row's own gradient. Nothing is compiled, and `torch.func`
takes no part in the backward pass. Models are written over where they lie. Rows go in blocks that
stay in a CPU's cache, and a block takes all its steps before the next one begins.

    no rules, SGD, dense layers and ReLU   batched products (`sim.dense`)
    no rules, SGD                          each layer's gradient is added where the layer lies
    other                                  the step of `local.step` under `vmap`, given the gradient

A rule that takes the gradient elsewhere than at the client's model (SAM) cannot be given it, and
raises `Elsewhere`. Its cohort takes the step of `sim.cohort`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fedbasin.core.rng import fold_in
from fedbasin.core.rule import Batch
from fedbasin.core.tree import mapped, tensors
from fedbasin.local.batches import AUGMENT, DROPOUT
from fedbasin.local.optimisers import SGD
from fedbasin.local.step import Aux, Loss, Point, local_loss, step
from fedbasin.local.train import Trainer
from fedbasin.sim.captured_step import BatchPlan, Progress
from fedbasin.sim.dense import Dense, losses_of
from fedbasin.sim.population import Population

BLOCK_BYTES = 4 << 20  # of models that advance together: with their gradients they stay in cache
_ALIGNED = 16  # numbers of at least four bytes

Add = Callable[[str, Tensor, Tensor | None], None]  # adds a multiple of a layer's gradient to it


class Elsewhere(RuntimeError):
    """A rule wants a gradient at another point than the client's model."""


class _WeightFirst(TorchFunctionMode):
    """Multiplies a dense layer's weight from the left, so that its gradient lies as it does.

    Torch's own product gives the gradient transposed, and to add that to the weight takes six times
    as long.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.linear and not kwargs and args[0].dim() == 2:
            inputs, weight, *bias = args
            outputs = torch.matmul(weight, inputs.mT).mT
            return outputs if not bias or bias[0] is None else outputs + bias[0]
        return func(*args, **(kwargs or {}))


class LeanStep:
    """All steps of a chunk of clients.

    Args:
        trainer: how a client trains.
        population: the clients' data.
    """

    def __init__(self, trainer: Trainer, population: Population) -> None:
        self._trainer = trainer
        self._population = population
        self._by_layer = trainer.in_place and type(trainer.optimiser) is SGD
        self.dense: Dense | None = None
        if self._by_layer:
            self.dense = Dense.of(trainer.net, trainer.task, population.inputs.dim())

    def advance(self, progress: Progress, batches: BatchPlan, steps: np.ndarray) -> Progress:
        """Take all steps; nothing given is changed.

        Args:
            progress: where the clients begin.
            batches: the batches of the clients.
            steps: steps of each client, falling.
        """
        point = mapped(_aligned, progress.point)
        vectors = point.vector
        block = max(1, BLOCK_BYTES // max(vectors.element_size() * vectors.shape[1], 1))
        weights = batches.real.to(self._trainer.net.dtype)
        losses = vectors.new_zeros(weights.shape[:2])
        for rows in np.array_split(np.arange(len(vectors)), -(-len(vectors) // block)):
            first = int(rows[0])
            counts = steps[rows]
            for number in range(int(counts[0])):
                active = slice(first, first + int((counts > number).sum()))
                batch = self._batch(batches, weights, active, number)
                losses[active, number] = self._one(point, batches, batch, active, number)
        samples = weights.sum(2)
        late = torch.arange(weights.shape[1], device=samples.device) >= batches.late[:, None]
        both = (losses * samples, samples)
        columns = [*both, *(each * late for each in both)]
        # one step after another, so that steps that only others take change no bit
        sums = torch.stack([column.cumsum(1)[:, -1] for column in columns], 1)
        point = mapped(torch.Tensor.contiguous, point)
        return Progress(point, progress.sums + sums, progress.number + int(steps[0]))

    def _batch(self, batches: BatchPlan, weights: Tensor, rows: slice, number: int) -> Batch:
        """Return the batches of some rows [A, B, ...]."""
        trainer = self._trainer
        index = batches.rows[rows, number]
        flat = index.flatten()
        raw = self._population.take(flat)
        labels = self._population.labels[flat].unflatten(0, index.shape)
        if trainer.augments:
            keys = fold_in(fold_in(batches.keys[rows], AUGMENT), number)
            inputs = torch.func.vmap(trainer.transform)(raw.unflatten(0, index.shape), keys)
        else:
            inputs = trainer.transform(raw, None).unflatten(0, index.shape)
        return Batch(inputs, labels, weights[rows, number])

    def _one(
        self, point: Point, batches: BatchPlan, batch: Batch, rows: slice, number: int
    ) -> Tensor:
        """Take one step of some rows; return their losses [A]."""
        key = None
        if self._trainer.draws:
            key = fold_in(fold_in(batches.keys[rows], DROPOUT), number)
        lr = batches.lr[rows] if batches.lr.dim() else batches.lr
        if self.dense is not None:
            views = self._views(point.vector[rows])
            losses, add = self.dense.gradients(views, batch)
            self._descend(point, rows, lr, add)
        elif self._by_layer:
            losses, add = self._gradients(point.vector[rows], batch, key)
            self._descend(point, rows, lr, add)
        else:
            losses = self._through_rules(point, batch, key, lr, rows)
        return losses

    def _descend(self, point: Point, rows: slice, lr: Tensor, add: Add) -> None:
        """Take a step of plain or heavy-ball SGD in place."""
        optimiser = self._trainer.optimiser
        assert isinstance(optimiser, SGD)
        vectors = point.vector[rows]
        if not optimiser.momentum:
            if optimiser.weight_decay:
                vectors.mul_(1 - _beside(lr, vectors) * optimiser.weight_decay)
            for name, part in self._views(vectors).items():
                add(name, part, -lr)
            return
        velocity = point.state.velocity[rows].mul_(optimiser.momentum)
        if optimiser.weight_decay:
            velocity.add_(vectors, alpha=optimiser.weight_decay)
        for name, part in self._views(velocity).items():
            add(name, part, None)
        vectors.addcmul_(velocity, _beside(-lr, vectors))

    def _gradients(self, vectors: Tensor, batch: Batch, key: Tensor | None) -> tuple[Tensor, Add]:
        """Return the losses [A], and what adds the gradient of each layer."""
        trainer = self._trainer
        parts = {n: part.detach().requires_grad_() for n, part in self._views(vectors).items()}

        def one(mine: Mapping[str, Tensor], inputs: Tensor, draws: Tensor | None) -> Tensor:
            return trainer.net.run(mine, inputs, key=draws, training=True).logits

        axes = (0, 0, None if key is None else 0)
        with _WeightFirst():
            outputs = torch.func.vmap(one, in_dims=axes)(parts, batch.inputs, key)
        losses = losses_of(trainer.task, outputs, batch)
        leaves = list(parts.values())
        gradients = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
        by_name = dict(zip(parts, gradients, strict=True))

        def add(name: str, part: Tensor, scale: Tensor | None) -> None:
            gradient = by_name[name]
            if gradient is None:
                return
            if scale is None:
                part.add_(gradient)
            else:
                part.addcmul_(gradient, _beside(scale, part))

        return losses.detach(), add

    def _through_rules(
        self, point: Point, batch: Batch, key: Tensor | None, lr: Tensor, rows: slice
    ) -> Tensor:
        """Take the step of `local.step` with gradients taken of all rows at once."""
        trainer = self._trainer
        here = mapped(lambda leaf: leaf[rows], point)
        drawn = None if key is None else 0

        def one_loss(each: Point, own: Batch, draws: Tensor | None) -> Any:
            return local_loss(
                each, own, draws, net=trainer.net, rules=trainer.rules, task=trainer.task
            )

        leaf = here.vector.detach().requires_grad_()
        with _WeightFirst():
            values, aux = torch.func.vmap(one_loss, in_dims=(0, 0, drawn))(
                here._replace(vector=leaf), batch, key
            )
        (gradients,) = torch.autograd.grad(values.sum(), leaf)
        # a carry that the loss left alone stays the same tensor, and is not written back
        aux = mapped(lambda leaf: leaf.detach() if leaf.requires_grad else leaf, aux)

        def one_step(
            each: Point, own: Batch, eta: Tensor, draws: Tensor | None, gradient: Tensor, kept: Aux
        ) -> tuple[Point, Tensor]:
            def given(loss: Loss, vector: Tensor) -> tuple[Tensor, Aux]:
                if vector is not each.vector:
                    raise Elsewhere
                return gradient, kept

            return step(
                each,
                own,
                eta,
                draws,
                net=trainer.net,
                rules=trainer.rules,
                optimiser=trainer.optimiser,
                clip=trainer.clip,
                task=trainer.task,
                differentiate=given,
            )

        axes = (0, 0, 0 if lr.dim() else None, drawn, 0, 0)
        with torch.no_grad():
            after, losses = torch.func.vmap(one_step, in_dims=axes)(
                here, batch, lr, key, gradients, aux
            )
            for old, new in zip(tensors(here), tensors(after), strict=True):
                if new is not old:
                    old.copy_(new)
        return losses.detach()

    def _views(self, vectors: Tensor) -> dict[str, Tensor]:
        """Return the layers of several models as views [A, ...]."""
        layout = self._trainer.net.layout
        parts = vectors.split(list(layout.sizes), 1)
        named = zip(layout.names, layout.shapes, parts, strict=True)
        return {name: part.view(len(vectors), *shape) for name, shape, part in named}


def _aligned(leaf: Tensor) -> Tensor:
    """Return a copy whose rows all begin at a multiple of 64 bytes.

    Products may round otherwise where memory is aligned otherwise; a client's result must not
    depend on the row it has.
    """
    if leaf.dim() != 2:
        return leaf.clone()
    whole = -(-leaf.shape[1] // _ALIGNED) * _ALIGNED
    return leaf.new_empty(len(leaf), whole)[:, : leaf.shape[1]].copy_(leaf)


def _beside(numbers: Tensor, rows: Tensor) -> Tensor:
    """Return a number for each row (or for all) in a shape that multiplies the rows."""
    return numbers.view(-1, *(1,) * (rows.dim() - 1))
