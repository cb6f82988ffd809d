r"""The curvature of the loss: top eigenvalues of its Hessian by Lanczos, without the Hessian.

A Hessian-vector product H v is the gradient of <gradient, v>: two passes backward.
`scipy.sparse.linalg.eigsh` finds the algebraically largest eigenvalues from such products.
Li et al. (FedLAW), Figures 4 and 10: lambda_1, lambda_1 / lambda_5, and the loss at w + s v_1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh
from torch import Tensor
from torch.func import grad, vjp

from fedbasin.analyze.landscape import Slice
from fedbasin.core.evaluator import Evaluator, Landscape, Tick, no_tick
from fedbasin.core.rng import Key


class Curvature(NamedTuple):
    """The largest eigenvalues and how well they are known."""

    values: Tensor  # [k] largest first
    vectors: Tensor  # [k, P] of length 1
    residual: float  # |H v_1 - lambda_1 v_1|
    products: int  # Hessian-vector products taken

    @property
    def ratio(self) -> float:
        """lambda_1 / lambda_k: large where one direction is much sharper than the rest."""
        return float(self.values[0] / self.values[-1])


def hessian_product(evaluator: Evaluator, model: Tensor) -> Callable[[Tensor], Tensor]:
    """Return v -> H v for the mean loss over the evaluator's rows at a model [P]."""

    def product(direction: Tensor) -> Tensor:
        total = torch.zeros_like(model)
        for cut in evaluator.cuts():
            slope = grad(lambda vector, cut=cut: evaluator.summed_loss(vector, cut))
            total += vjp(slope, model)[1](direction)[0]
        return total / len(evaluator)

    return product


def top_eigenvalues(
    product: Callable[[Tensor], Tensor],
    model: Tensor,
    key: Key,
    *,
    count: int = 5,
    tolerance: float = 1e-4,
    tick: Tick = no_tick,
) -> Curvature:
    """Return the `count` algebraically largest eigenvalues of a symmetric operator.

    Args:
        product: v -> H v.
        model: [P], for the length, type and device of v.
        key: the randomness of the first vector.
        count: how many.
        tolerance: relative accuracy of the eigenvalues.
        tick: told of each product.
    """
    size = model.numel()
    taken = 0
    if not 1 <= count < size:
        raise ValueError(f"count must be from 1 to {size - 1}, got {count}")

    def on_host(vector: np.ndarray) -> np.ndarray:
        nonlocal taken
        taken += 1
        tick(1)
        given = torch.from_numpy(np.ascontiguousarray(vector.reshape(-1)))
        return product(given.to(model)).double().cpu().numpy()

    operator = LinearOperator((size, size), matvec=on_host, dtype=np.float64)
    start = key.fold("lanczos").numpy().standard_normal(size)
    try:
        values, vectors = eigsh(operator, k=count, which="LA", v0=start, tol=tolerance)
    except ArpackNoConvergence as error:
        raise ValueError(
            f"Lanczos did not find {count} eigenvalues in {taken} products; ask for fewer, or "
            "measure on more rows"
        ) from error
    order = np.argsort(-values)
    largest = torch.from_numpy(values[order])
    columns = torch.from_numpy(vectors[:, order].T.copy())
    top = columns[0].to(model)
    residual = float((product(top) - float(largest[0]) * top).norm())
    return Curvature(largest, columns, residual, taken)


def slice_along(
    evaluator: Landscape, model: Tensor, direction: Tensor, steps: Tensor, tick: Tick = no_tick
) -> Slice:
    """Measure w + s v for a model [P], a direction [P] and steps s [M]."""
    weights = torch.stack([torch.ones_like(steps), steps], dim=1)
    models = torch.stack([model, direction.to(model)])
    return Slice(steps, *evaluator.measure(weights, models, tick))
