r"""FedAvg: the weighted mean of the models a cohort sends back.

    w^{t+1} = sum_{i in S_t} p_i y_i,   p_i = n_i / sum_{j in S_t} n_j  ("samples")
                                        p_i = 1 / |S_t|                 ("uniform")

Departures from the paper: none known.
Cost: one model down, one up; C x P multiplications and no memory on the server.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedbasin.core.catalogue import entry
from fedbasin.core.method import Averaging
from fedbasin.core.rule import Rules
from fedbasin.core.vectors import Weighting


@entry(
    "method",
    paper="McMahan et al., AISTATS 2017",
    url="https://arxiv.org/abs/1602.05629",
    tunable="nothing: it averages, and only the clients' settings matter",
)
@dataclass(frozen=True)
class FedAvg(Averaging):
    """Weighted mean of the clients' models.

    Args:
        weighting: p_i by ``"samples"`` (n_i) or ``"uniform"``.
        local: rules that clients follow beyond SGD, as in ``fedavg(local=prox(mu=0.1))``.

    >>> import torch
    >>> from fedbasin.testing import replies_of
    >>> replies = replies_of(torch.tensor([[0.0, 2.0], [4.0, 6.0]]), weights=[3, 1])
    >>> served, _ = FedAvg().aggregate((), torch.zeros(2), replies, None)
    >>> served.send
    tensor([1., 3.])
    """

    weighting: Weighting = "samples"
    local: Rules = ()
