r"""Why the mean of client models has the loss it has: Zhou et al. (IMA), Theorem 1 and Lemma 1.

With f_k(x) the class probabilities of client k's model, y the one-hot label, pi_k = n_k / n, D_k
the rows of client k, and E the mean over several draws of the models (seeds, or late rounds):

    TrainBias_k(x) = [x in D_k]     (y - E f_k(x))
    HeterBias_k(x) = [x not in D_k] (y - E f_k(x))
    E |y - sum_k pi_k f_k|^2 = |T|^2 + |H|^2 + 2 <T, H> + sum_k pi_k^2 Var_k
                               + sum_{k != j} pi_k pi_j Cov_kj,
    T = sum_k pi_k TrainBias_k,  H = sum_k pi_k HeterBias_k

in the mean over rows. This is exact for the ensemble; the model with the mean weights differs
from it by O(Delta^2), Delta = max_k |w_k - sum_j pi_j w_j| (locality, the fifth factor). The
theorem prints the bias without its square; the proof has it.

Corollary 1, for clients of equal size: sum_{j != k} Cov_jk / K^2 >= (K - 1) / K E_x min Cov_jk.

How far models of a cohort lie from their mean and from each other:

    locality      Delta = max_k |w_k - w|,  and the mean over k        (Zhou et al., Figure 3)
    divergence    V = sum_k pi_k |w_k - sum_j pi_j w_j|^2              (Wang et al., FedCDA, eq. 8)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedbasin.core.evaluator import Evaluator, Landscape, Tick, no_tick
from fedbasin.core.rng import Key
from fedbasin.core.vectors import shares, weighted_mean


class Factors(NamedTuple):
    """The parts of the ensemble's squared error; five sum to `ensemble_loss`."""

    train_bias: float  # mean |T|^2
    heter_bias: float  # mean |H|^2
    cross: float  # 2 mean <T, H>
    variance: float
    covariance: float
    covariance_bound: float  # (K - 1) / K mean over rows of min_{j != k} Cov_jk (Corollary 1)
    ensemble_loss: float  # E |y - sum_k pi_k f_k|^2, measured
    own_rows: float  # sum_k pi_k mean over D_k of |y - E f_k|, Figure 2's training bias
    other_rows: float  # the same over all rows that are not k's, its heterogeneous bias


def decompose(outputs: Tensor, labels: Tensor, share: Tensor, own: Tensor) -> Factors:
    """Take the squared error of a weighted ensemble apart.

    Args:
        outputs: class probabilities [D, K, n, classes] of D draws of K clients' models.
        labels: int64 [n].
        share: n_k or pi_k [K]; only their proportions count.
        own: bool [K, n], whether a row belongs to a client.
    """
    outputs = outputs.double()
    share = share.double() / share.double().sum()
    target = torch.nn.functional.one_hot(labels, outputs.shape[-1]).double()
    mean = outputs.mean(0)  # [K, n, classes]
    bias = target - mean
    inside = own[..., None].double()
    train = torch.einsum("k,knc->nc", share, inside * bias)
    heter = torch.einsum("k,knc->nc", share, (1 - inside) * bias)
    spread = outputs - mean
    whole = torch.einsum("k,dknc->dnc", share, spread)
    variance = (share**2 * spread.square().sum(-1).mean((0, 2))).sum()
    ensemble = torch.einsum("k,dknc->dnc", share, outputs)
    sizes = bias.norm(dim=-1)  # [K, n]

    # Cov_jk of each row [n, K, K]; K <= some tens of clients.
    pairs = torch.einsum("djnc,dknc->njk", spread, spread) / len(outputs)
    count = outputs.shape[1]
    apart = pairs + torch.diag(torch.full((count,), torch.inf, dtype=torch.float64))
    least = apart.amin((1, 2)) if count > 1 else torch.zeros(len(labels), dtype=torch.float64)

    def mean_size(rows: Tensor) -> float:
        count = rows.sum(1)
        each = (sizes * rows).sum(1) / count.clamp(min=1)
        part = share * (count > 0)  # a client that holds none of the rows has no say
        return float((part * each).sum() / part.sum()) if bool(part.any()) else float("nan")

    return Factors(
        train_bias=float(train.square().sum(-1).mean()),
        heter_bias=float(heter.square().sum(-1).mean()),
        cross=float(2 * (train * heter).sum(-1).mean()),
        variance=float(variance),
        # sum_{k, j} pi_k pi_j Cov_kj is the variance of the ensemble; k = j is `variance`.
        covariance=float(whole.square().sum(-1).mean() - variance),
        covariance_bound=float((count - 1) / count * least.mean()),
        ensemble_loss=float((target - ensemble).square().sum(-1).mean()),
        own_rows=mean_size(own),
        other_rows=mean_size(~own),
    )


def squared_error(probabilities: Tensor, labels: Tensor) -> float:
    """Return the mean over rows of ``|y - f|^2`` for one model's probabilities [n, classes]."""
    target = torch.nn.functional.one_hot(labels, probabilities.shape[-1]).double()
    return float((target - probabilities.double()).square().sum(-1).mean())


class Gap(NamedTuple):
    """Ensemble against averaged model as deviations shrink (Lemma 1)."""

    scale: Tensor  # [S] deviations are multiplied by this
    distance: Tensor  # [S] Delta
    gap: Tensor  # [S] mean over rows of |f_ensemble - f_average|
    order: float  # slope of log gap over log Delta between the two smallest scales


def ensemble_gap(
    evaluator: Evaluator, models: Tensor, weights: Tensor, halvings: int = 5, tick: Tick = no_tick
) -> Gap:
    """Shrink the deviations of models [K, P] from their mean by halves; the gap falls by 4s."""
    share = shares(weights)
    mean = weighted_mean(models, share)
    scales = torch.tensor([0.5**k for k in range(halvings + 1)], dtype=torch.float64)
    centre = evaluator.outputs(mean[None])[0].double().softmax(-1)
    deviations = models - mean
    gaps = []
    for scale in scales.tolist():
        each = evaluator.outputs(mean + scale * deviations).double().softmax(-1)
        together = torch.einsum("k,knc->nc", share.to(each.device), each)
        gaps.append(float((together - centre).norm(dim=-1).mean()))
        tick(len(models))
    gap = torch.tensor(gaps, dtype=torch.float64)
    order = float((gap[-2] / gap[-1]).log2()) if gap[-1] > 0 else float("nan")
    return Gap(scales, scales * float(deviations.norm(dim=1).max()), gap, order)


class Averaging(NamedTuple):
    """Error of averaged models against how many are averaged."""

    averaged: Tensor  # [K] how many, 1 to K
    mean: Tensor  # [K] error over the drawn subsets
    low: Tensor  # [K]
    high: Tensor  # [K]


def error_by_count(
    evaluator: Landscape,
    models: Tensor,
    weights: Tensor,
    key: Key,
    subsets: int = 10,
    tick: Tick = no_tick,
) -> Averaging:
    """Average random subsets of models [K, P], weighted by samples, and measure each mean."""
    table = _subsets(weights, key, subsets)
    error = evaluator.measure(table.flatten(0, 1), models, tick).error
    return _by_count(error.view(table.shape[:2]))


def ensemble_by_count(
    evaluator: Evaluator, models: Tensor, weights: Tensor, key: Key, subsets: int = 10
) -> Averaging:
    """Average what the same subsets say, as class probabilities, in place of their weights."""
    said = torch.softmax(evaluator.outputs(models).double(), 2)  # [K, n, classes]
    error = [
        (torch.einsum("sk,knc->snc", part, said).argmax(2) != evaluator.labels).double().mean(1)
        for part in _subsets(weights, key, subsets).to(said)
    ]
    return _by_count(torch.stack(error).cpu())


def _subsets(weights: Tensor, key: Key, subsets: int) -> Tensor:
    """Return the shares [K, subsets, K] of K clients in random subsets of 1 to K of them."""
    total = len(weights)
    draws = key.fold("subsets").numpy()
    table = torch.zeros(total, subsets, total, dtype=torch.float64)
    for count in range(1, total + 1):
        for draw in range(subsets):
            chosen = torch.from_numpy(draws.permutation(total)[:count])
            table[count - 1, draw, chosen] = shares(weights[chosen]).double().cpu()
    return table


def _by_count(error: Tensor) -> Averaging:
    counts = torch.arange(1, len(error) + 1)
    return Averaging(counts, error.mean(1), error.min(1).values, error.max(1).values)


def linear_cka(x: Tensor, y: Tensor) -> Tensor:
    """Return the linear CKA of outputs [n, c] and [n, d] of two models on the same rows.

    |Y'X|_F^2 / (|X'X|_F |Y'Y|_F) with centred columns: 1 where one is a rotation and scaling
    of the other.
    """
    x, y = (part.double() - part.double().mean(0) for part in (x, y))
    cka: Tensor = (y.T @ x).square().sum() / ((x.T @ x).norm() * (y.T @ y).norm())
    return cka


def cka_matrix(outputs: Tensor) -> Tensor:
    """Return the linear CKA of every pair of models' outputs [K, n, c], as [K, K]."""
    centred = outputs.double() - outputs.double().mean(1, keepdim=True)
    crossed = torch.einsum("inc,jnd->ijcd", centred, centred).square().sum((2, 3))
    own = crossed.diagonal().sqrt()
    return crossed / (own[:, None] * own)


def mean_of_pairs(matrix: Tensor) -> float:
    """Return the mean of a matrix [K, K] off its diagonal; NaN where there is no pair."""
    count = len(matrix)
    if count < 2:
        return float("nan")
    return float((matrix.sum() - matrix.diagonal().sum()) / (count * (count - 1)))


class Locality(NamedTuple):
    """Distances of one cohort."""

    farthest: float  # max_k |w_k - w|
    mean: float
    divergence: float  # V of the cohort's models around their own weighted mean


def locality(models: Tensor, server: Tensor, weights: Tensor) -> Locality:
    """Return how far models [C, P] lie from the server's model [P]."""
    distances = (models - server).norm(dim=1).double()
    share = shares(weights).to(distances)
    around = (models - weighted_mean(models, share)).norm(dim=1).double()
    return Locality(
        float(distances.max()), float(distances.mean()), float((share * around.square()).sum())
    )
