r"""FedBE: draw more models from a distribution around the clients', and distil them all.

Part by part (a part is one tensor of the network), with b the model that was sent:

    u_i = (y_i - b) / |y_i - b|,  U = mean u_i,  V = max(mean u_i^2 - U^2, 1e-5)
    L = mean |y_i - b|
    sample = b + L (U + s sqrt(V) z),   z ~ N(0, 1)                   (mode "gaussian")
    sample = sum_i a_i y_i,   a ~ Dirichlet(1, ..., 1)                (mode "dirichlet")

Teachers are the inner method's model, `samples` such draws and the clients' models, all alike:

    target(x) = mean_k softmax(z_k(x)), each raised to 1/T and normalised    (mix "probabilities")
    target(x) = softmax( 1/T mean_k z_k(x) )                                 (mix "logits")
    w+ = the inner method's model after descent on  mean_x KL( target(x) || softmax(z_w(x)) )

A part that no client moved has u_i = 0 and stays where it is.

Settings. The defaults are the paper's: 10 draws, T = 0.5, 20 epochs of SGD 0.001 with momentum 0.9,
averaged every 25 steps from step 500 on (a small proxy set never gets there; then the last model
counts). The FedLAW paper: `fedbe(samples=1, mix="logits", temperature=1.0, epochs=100,
optimiser="adam", betas=(0.5, 0.999), average_every=0)`; its code takes the clients' SGD,
`optimiser="sgd", weight_decay=0.0005, keep_momentum=True`.

Departures from the paper: a constant learning rate under the average. Buffers are never drawn:
all models share the round's merged statistics.
Cost: none for clients. Server: m + samples + 1 forward passes over the rows, then `epochs` x
batches forward and backward passes; samples + 4 models of memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from fedbasin.core.bounds import above, at_least
from fedbasin.core.catalogue import entry
from fedbasin.core.method import Context, Method, Replies, Served
from fedbasin.core.rng import Key, normal
from fedbasin.core.space import Range
from fedbasin.core.vectors import Layout, weighted_mean
from fedbasin.methods.fedavg import FedAvg
from fedbasin.methods.parts.refine import (
    Loss,
    Optimiser,
    Refinement,
    Refiner,
    distillation,
    teacher_logits,
)

_LEAST_VARIANCE = 1e-5


@entry(
    "method",
    paper="Chen & Chao, ICLR 2021",
    url="https://arxiv.org/abs/2009.01974",
    needs=("proxy", "classes"),
    is_fedavg_when={"epochs": 0},
    tunable={"lr": Range(0.0001, 0.1, "log"), "scale": Range(0.01, 1.0, "log")},
)
@dataclass(frozen=True)
class FedBE(Refiner):
    """Distil the clients' models and draws around them into the merged one.

    Args:
        inner: the method that makes the model to start from.
        samples: how many models are drawn, M.
        scale: s, the spread of the draws; 0 draws their centre.
        mode: what they are drawn from.
        mix: whether ``"probabilities"`` or ``"logits"`` of teachers are averaged.
        temperature: T; below 1 sharpens the target.
        with_mean: whether the inner method's model is a teacher.
        with_clients: whether the clients' models are.
        epochs: passes over the server's rows in a round; 0 is the inner method.
        lr: learning rate.
        optimiser: ``"sgd"`` with the first beta as momentum, or ``"adam"``.
        betas: of Adam.
        batch: rows in a step.
        cosine: whether the learning rate falls to 0 along a cosine.
        clip: largest norm of a gradient; 0 does not clip.
        average_from: the step from which models of the descent are averaged.
        average_every: the steps between two of them; 0 averages none.
        weight_decay: of SGD.
        keep_momentum: whether SGD goes on with the momentum of the round before.
    """

    inner: Method = field(default_factory=FedAvg)
    samples: int = at_least(0, default=10)
    scale: float = at_least(0, default=0.1)
    mode: Literal["gaussian", "dirichlet"] = "gaussian"
    mix: Literal["probabilities", "logits"] = "probabilities"
    temperature: float = above(0, default=0.5)
    with_mean: bool = True
    with_clients: bool = True
    epochs: int = 20
    lr: float = 0.001
    optimiser: Optimiser = "sgd"
    betas: tuple[float, float] = (0.9, 0.999)
    batch: int = 128
    cosine: bool = False
    clip: float = 0.0
    average_from: int = 500
    average_every: int = 25
    weight_decay: float = 0.0
    keep_momentum: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.samples or self.with_mean or self.with_clients):
            raise ValueError("there is no teacher: set samples, with_mean or with_clients")

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
            average_from=self.average_from,
            average_every=self.average_every,
            weight_decay=self.weight_decay,
            keep_momentum=self.keep_momentum,
        )

    def streams(self) -> None:
        """Every reply counts."""
        return None

    def loss(
        self, server: Tensor, fresh: Served, replies: Replies, context: Context, key: Key
    ) -> Loss:
        """Draw, then distil."""
        proxy = context.need("proxy", self)
        counted = torch.nonzero(replies.weights > 0)[:, 0]
        models = replies.models[counted[replies.clients[counted].argsort()]]
        teachers = [fresh.send] if self.with_mean else []
        teachers += models if self.with_clients else []
        teachers += self._drawn(server, models, context.layout, key)
        return distillation(proxy, self._target(teacher_logits(proxy, teachers)))

    def _drawn(self, base: Tensor, models: Tensor, layout: Layout, key: Key) -> Iterator[Tensor]:
        """Yield the drawn models."""
        if self.mode == "dirichlet":
            for number in range(self.samples):
                weights = key.fold(number).numpy().dirichlet([1.0] * len(models))
                yield weighted_mean(models, torch.from_numpy(weights).to(base.device))
            return
        centre, spread = gaussian(base, models, layout)
        counter = torch.arange(base.numel(), device=base.device)
        for number in range(self.samples):
            noise = normal(key.fold(number).tensor(base.device), counter).to(base.dtype)
            yield centre + self.scale * spread * noise

    def _target(self, logits: Tensor) -> Tensor:
        """Return what the student shall say [n, classes], from logits [teachers, n, classes]."""
        if self.mix == "logits":
            return torch.softmax(logits.mean(0) / self.temperature, 1)
        shares = torch.softmax(logits, 2).mean(0)
        return torch.softmax(shares.clamp(min=1e-30).log() / self.temperature, 1)


def gaussian(base: Tensor, models: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Return the centre b + L U and the spread L sqrt(V), each [P]."""
    centre = base.clone()
    spread = torch.zeros_like(base)
    for part in layout.slices.values():
        moved = models[:, part] - base[part]
        lengths = moved.norm(dim=1, keepdim=True)
        units = torch.where(lengths > 0, moved / lengths, 0.0)
        mean = units.mean(0)
        length = lengths.mean()
        variance = (units.square().mean(0) - mean.square()).clamp(min=_LEAST_VARIANCE)
        centre[part] += length * mean
        spread[part] = length * variance.sqrt()
    return centre, spread
