r"""How far models of a cohort lie from their mean and from each other.

locality      Delta = max_k |w_k - w|,  and the mean over k        (Zhou et al., Figure 3)
divergence    V = sum_k pi_k |w_k - sum_j pi_j w_j|^2              (Wang et al., FedCDA, eq. 8)
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fedbasin.core.vectors import shares, weighted_mean


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
