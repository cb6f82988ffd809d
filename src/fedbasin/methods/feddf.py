r"""FedDF: distil the cohort's models into their mean, on rows the server holds.

    target(x) = softmax( 1/m sum_i z_i(x) )       z_i: logits of client i's model, m clients
    w+ = the inner method's model after descent on  mean_x KL( target(x) || softmax(z_w(x)) )

The start is the inner method's (FedAvg's by default, weighted by samples); teachers count alike.
No label is used, unless `holdout` keeps rows aside to stop at the best model.

Settings. The paper: Adam 0.001 along a cosine over 10^4 batches of 128, clipped at 5, stopped after
10^3 batches without progress on validation rows: `feddf(holdout=0.2, patience=..., epochs=...)`.
The FedLAW paper: 100 epochs with Adam(0.5, 0.999), `feddf(betas=(0.5, 0.999), cosine=False,
clip=0.0)`; its code takes the clients' SGD with their learning rate, `optimiser="sgd",
weight_decay=0.0005, keep_momentum=True`.

Departures from the paper: epochs count, not batches, since small proxy sets would otherwise be seen
thousands of times a round; progress is the cross-entropy on the rows kept aside, not accuracy.
Teachers are not dropped. All models run in evaluation mode; with BatchNorm they share the round's
merged statistics.
Cost: none for clients. Server: m forward passes over the rows (targets are found once), then
`epochs` x batches forward and backward passes; 3 models of memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedbasin.core.catalogue import entry
from fedbasin.core.method import Context, Method, Replies, Served
from fedbasin.core.rng import Key
from fedbasin.core.space import Range
from fedbasin.methods.fedavg import FedAvg
from fedbasin.methods.parts.refine import (
    Loss,
    Optimiser,
    Refinement,
    Refiner,
    distillation,
    teacher_logits,
)


@entry(
    "method",
    paper="Lin et al., NeurIPS 2020",
    url="https://arxiv.org/abs/2006.07242",
    needs=("proxy", "classes"),
    is_fedavg_when={"epochs": 0},
    tunable={"lr": Range(1e-5, 0.01, "log")},
)
@dataclass(frozen=True)
class FedDF(Refiner):
    """Distil the clients' models into the merged one on the server's rows.

    Args:
        inner: the method that makes the model to start from.
        epochs: passes over the server's rows in a round; 0 is the inner method.
        lr: learning rate.
        optimiser: ``"adam"``, or ``"sgd"`` with the first beta as momentum.
        betas: of Adam.
        batch: rows in a step.
        cosine: whether the learning rate falls to 0 along a cosine.
        clip: largest norm of a gradient; 0 does not clip.
        holdout: share of the rows kept aside to return the best model on; needs labels.
        patience: stop after so many epochs without progress there; 0 never does.
        weight_decay: of SGD.
        keep_momentum: whether SGD goes on with the momentum of the round before.
    """

    inner: Method = field(default_factory=FedAvg)
    epochs: int = 100
    lr: float = 0.001
    optimiser: Optimiser = "adam"
    betas: tuple[float, float] = (0.9, 0.999)
    batch: int = 128
    cosine: bool = True
    clip: float = 5.0
    holdout: float = 0.0
    patience: int = 0
    weight_decay: float = 0.0
    keep_momentum: bool = False

    def refinement(self) -> Refinement:
        """Return how the model is trained."""
        return Refinement(
            self.optimiser,
            self.lr,
            self.betas,
            self.epochs,
            self.batch,
            self.cosine,
            self.clip,
            self.holdout,
            self.patience,
            weight_decay=self.weight_decay,
            keep_momentum=self.keep_momentum,
        )

    def streams(self) -> None:
        """Every reply counts."""
        return None

    def loss(
        self, server: Tensor, fresh: Served, replies: Replies, context: Context, key: Key
    ) -> Loss:
        """Distil the replies."""
        proxy = context.need("proxy", self)
        logits = teacher_logits(proxy, list(replies.models[replies.weights > 0]))
        return distillation(proxy, torch.softmax(logits.mean(0), 1))
