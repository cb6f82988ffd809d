r"""What happens to scarce classes: accuracy by class, and minority collapse.

Classes are ordered by how many training rows they have: the first third is the head, the last
the tail. With a_c the classifier's row of class c, m_c the mean feature of class c, mu the mean
of the m_c, and cos of a row always after centring rows on their mean:

    rows     mean cos(a_c, a_d) over pairs of tail classes (head, middle): where scarce classes
             collapse onto each other it goes to 1; balanced training tends to -1 / (C - 1)
    align    mean over a third of cos(a_c, m_c - mu)                               (NC3)
    spread   standard deviation of cos(m_c - mu, m_d - mu) over pairs               (NC2)
    within   mean |h - m_c|^2 over mean |m_c - mu|^2                               (NC1)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

THIRDS = ("head", "middle", "tail")


class ByClass(NamedTuple):
    """Accuracy by class and by third."""

    accuracy: Tensor  # [classes]; NaN for a class without rows
    thirds: Tensor  # [3] mean accuracy of head, middle and tail classes


class Collapse(NamedTuple):
    """How classifier rows and features are placed."""

    rows: Tensor  # [3] mean cosine between classifier rows within each third
    align: Tensor  # [3] mean cosine of a class's row and its mean feature
    spread: float
    within: float


def thirds(counts: Tensor) -> list[Tensor]:
    """Return the class numbers of head, middle and tail, from training rows by class."""
    order = counts.cpu().argsort(descending=True, stable=True)
    return list(order.tensor_split(3))


def accuracy_by_class(answers: Tensor, labels: Tensor, counts: Tensor) -> ByClass:
    """Score answers [n] against labels [n]; `counts` are training rows by class."""
    classes = len(counts)
    right = torch.bincount(labels[answers == labels], minlength=classes).double().cpu()
    accuracy = right / torch.bincount(labels, minlength=classes).double().cpu()
    return ByClass(accuracy, torch.stack([accuracy[part].nanmean() for part in thirds(counts)]))


def collapse(rows: Tensor, features: Tensor, labels: Tensor, counts: Tensor) -> Collapse:
    """Measure how classes are placed.

    Args:
        rows: weights of the last linear layer, [classes, d].
        features: what it is given, [n, d].
        labels: int64 [n]; every class must be there.
        counts: training rows by class.
    """
    rows = rows.double().cpu()
    features = features.double().cpu()
    labels = labels.cpu()
    present = torch.bincount(labels, minlength=len(rows))
    if bool((present == 0).any()):
        raise ValueError(f"no row of class {int((present == 0).nonzero()[0])}; measure on more")
    means = torch.zeros_like(rows).index_add_(0, labels, features) / present[:, None]
    centred = means - means.mean(0)
    rows = rows - rows.mean(0)
    among_rows = _cosines(rows, rows)
    among_means = _cosines(centred, centred)
    own = _cosines(rows, centred).diagonal()
    pairs = ~torch.eye(len(rows), dtype=torch.bool)
    within = (features - means[labels]).square().sum(1).mean()
    parts = thirds(counts)
    return Collapse(
        rows=torch.stack([among_rows[p][:, p][pairs[p][:, p]].mean() for p in parts]),
        align=torch.stack([own[part].mean() for part in parts]),
        spread=float(among_means[pairs].std(correction=0)),
        within=float(within / centred.square().sum(1).mean()),
    )


def _cosines(a: Tensor, b: Tensor) -> Tensor:
    """Return the cosine of every row of a with every row of b."""
    left, right = (m / m.norm(dim=1, keepdim=True).clamp(min=1e-300) for m in (a, b))
    cosines: Tensor = left @ right.T
    return cosines
