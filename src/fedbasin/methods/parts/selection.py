r"""Choose one model of each client so that the chosen ones lie close together.

For clients n with weights omega_n and total Omega, of which some are fixed and the others
have a few candidates a_i each,

    J = 1/Omega sum_n omega_n F_n + L/2 V,
    V = 1/Omega sum_n omega_n |w^n - wbar|^2 = 1/Omega sum_n omega_n |w^n|^2 - |wbar|^2.

With S_0 the weighted sum of the fixed models, everything that depends on the choice I is in
inner products of the candidates and S_0:

    J = const + sum_{i in I} linear_i + sum_{i < j in I} pair_ij,
    linear_i = omega_i F_i / Omega
             + L/2 (omega_i |a_i|^2 / Omega - (omega_i^2 |a_i|^2 + 2 omega_i a_i . S_0) / Omega^2),
    pair_ij  = - L omega_i omega_j a_i . a_j / Omega^2.

So one matrix product over the P parameters (`gram`) serves all combinations, and each costs
a handful of additions. V does not change when all models are shifted: vectors are centred
on the server's model, where the differences are not lost to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

MOST_COMBINATIONS = 20_000_000
_BLOCK = 1 << 21  # numbers that are in float64 at a time
_TIE = 1e-12  # differences of J below this share of its terms are rounding


@torch.no_grad()
def gram(rows: Sequence[Tensor], centre: Tensor, fixed: Tensor) -> np.ndarray:
    """Return the inner products [R + 1, R + 1] of R centred vectors and one more, in float64.

    Args:
        rows: R vectors [P], on any device.
        centre: [P], taken from each of them.
        fixed: [P] in float64, the sum S_0 of vectors that are centred already.
    """
    count = len(rows) + 1
    width = max(1, _BLOCK // count)
    total = torch.zeros(count, count, dtype=torch.float64, device=centre.device)
    whole = total.new_empty(count, min(width, len(centre)))
    for begin in range(0, len(centre), width):
        part = slice(begin, begin + width)
        block = whole[:, : len(centre) - begin]
        for place, row in zip(block, rows, strict=False):
            place.copy_(row[part])
        block[:-1] -= centre[part]
        block[-1] = fixed[part]
        total += block @ block.T
    return total.cpu().numpy()


@dataclass(frozen=True)
class Candidates:
    """What there is to choose from: R candidates of C clients, grouped by client, newest first.

    Args:
        gram: [R + 1, R + 1] inner products; the last row is the sum S_0 of the fixed models.
        losses: [R] F_i; zeros leave the loss out.
        weights: [C] omega_n.
        counts: how many candidates each client has.
        fixed_weight: the sum of omega_n over the fixed clients.
        smoothness: L.
    """

    gram: np.ndarray
    losses: np.ndarray
    weights: np.ndarray
    counts: tuple[int, ...]
    fixed_weight: float = 0.0
    smoothness: float = 1.0

    @cached_property
    def owner(self) -> np.ndarray:
        """The client [R] of each candidate."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def rows(self, client: int) -> np.ndarray:
        """Return the candidates of a client, newest first."""
        return np.flatnonzero(self.owner == client)


def choose(
    candidates: Candidates, batches: Sequence[np.ndarray], *, polish: bool = False
) -> np.ndarray:
    """Return the chosen candidate [C] of each client; ties go to the newest.

    Batch by batch, the best combination of a batch is taken for good; batches that are still
    to come are left out of J. One batch of all clients gives the least J there is.

    Args:
        candidates: what there is to choose from.
        batches: client positions; each client in one batch.
        polish: then change one client at a time for as long as J falls.
    """
    chosen = np.full(len(candidates.counts), -1)
    for batch in batches:
        chosen[batch] = _best(candidates, batch, chosen)
    improving = polish
    while improving:
        improving = False
        for client in range(len(chosen)):
            better = _better(candidates, client, chosen)
            improving |= better != chosen[client]
            chosen[client] = better
    return chosen


@dataclass(frozen=True)
class _Terms:
    """The parts of J that depend on the choice."""

    linear: np.ndarray  # [R]
    pair: np.ndarray  # [R, R]

    @property
    def tie(self) -> float:
        """How far apart J may be by rounding alone."""
        return _TIE * float(np.abs(self.linear).max() + np.abs(self.pair).max())


def _terms(candidates: Candidates, chosen: np.ndarray, open_weight: float) -> _Terms:
    """Return the terms of J over the fixed, the chosen (not -1) and the open clients."""
    done = np.flatnonzero(chosen >= 0)
    mass = candidates.fixed_weight + candidates.weights[done].sum() + open_weight
    products = candidates.gram[:-1, :-1]
    pull = candidates.gram[:-1, -1] + products[:, chosen[done]] @ candidates.weights[done]
    square = products.diagonal()
    weight = candidates.weights[candidates.owner]
    spread = weight * square / mass - (weight**2 * square + 2 * weight * pull) / mass**2
    return _Terms(
        linear=weight * candidates.losses / mass + candidates.smoothness / 2 * spread,
        pair=-candidates.smoothness * np.outer(weight, weight) * products / mass**2,
    )


def _better(candidates: Candidates, client: int, chosen: np.ndarray) -> int:
    """Return the best candidate of a client beside the others' choices, or its present one."""
    others = chosen.copy()
    others[client] = -1
    terms = _terms(candidates, others, candidates.weights[client])
    rows = candidates.rows(client)
    best = rows[terms.linear[rows].argmin()]
    gain = terms.linear[chosen[client]] - terms.linear[best]
    return int(best if gain > terms.tie else chosen[client])


def _best(candidates: Candidates, batch: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Return the best combination for a batch beside what is chosen already."""
    groups = [candidates.rows(client) for client in batch]
    several = [n for n, rows in enumerate(groups) if len(rows) > 1]
    check_combinations([len(groups[n]) for n in several])
    settled = chosen.copy()
    for client, rows in zip(batch, groups, strict=True):
        settled[client] = rows[0] if len(rows) == 1 else -1
    picked: np.ndarray = settled[batch]
    if several:
        terms = _terms(candidates, settled, candidates.weights[batch[several]].sum())
        picked[several] = _search(terms, [groups[n] for n in several])
    return picked


def check_combinations(counts: Sequence[int]) -> None:
    """Refuse a batch whose combinations are too many to try."""
    if math.prod(counts) > MOST_COMBINATIONS:
        raise ValueError(
            f"a batch of {len(counts)} clients with up to {max(counts)} models each has about "
            f"10^{sum(map(math.log10, counts)):.0f} combinations, more than {MOST_COMBINATIONS:,}: "
            "cut the cohort into more `batches` (strategy='greedy') or lower `memory`"
        )


def _search(terms: _Terms, groups: list[np.ndarray]) -> np.ndarray:
    """Return the combination of one row from each group with the least sum of terms.

    The groups are cut in two. A combination of the whole is a pair of combinations of the
    halves, and what the halves cost each other is one matrix product.
    """
    half = len(groups) // 2
    left, right = _grid(groups[:half]), _grid(groups[half:])
    ends = _inside(terms, right)
    belongs = np.zeros((len(right), len(terms.linear)))
    np.put_along_axis(belongs, right, 1.0, axis=1)
    tie = terms.tie
    lowest = math.inf
    place = 0
    step = max(1, _BLOCK // len(right))
    for begin in range(0, len(left), step):
        part = left[begin : begin + step]
        between = terms.pair[part].sum(1) @ belongs.T
        costs = (_inside(terms, part)[:, None] + ends + between).ravel()
        if costs.min() < lowest - tie:
            lowest = costs.min()
            place = begin * len(right) + int(np.argmax(costs <= lowest + tie))
    return np.concatenate([left[place // len(right)], right[place % len(right)]])


def _grid(groups: list[np.ndarray]) -> np.ndarray:
    """Return all ways [n, m] to take one row from each of m groups, the first of each first."""
    if not groups:
        return np.zeros((1, 0), dtype=np.int64)
    return np.stack(np.meshgrid(*groups, indexing="ij"), -1).reshape(-1, len(groups))


def _inside(terms: _Terms, combinations: np.ndarray) -> np.ndarray:
    """Return the sum [n] of the terms within each combination [n, m]."""
    total: np.ndarray = terms.linear[combinations].sum(1)
    for second in range(1, combinations.shape[1]):
        for first in range(second):
            total = total + terms.pair[combinations[:, first], combinations[:, second]]
    return total
