r"""Server-FT: train the merged model on labelled rows the server holds.

    w+ = the inner method's model after `epochs` passes of descent on  mean_x CE(z_w(x), y)

With ten rows a class, which the FedLAW paper takes, many passes overfit: it takes 2, and reports
that 100 hurt.

Settings. The FedLAW paper's text: Adam(0.5, 0.999), the default here; its code takes the clients'
SGD with momentum 0.9 and their learning rate, `optimiser="sgd"` with betas=(0.9, 0.999),
weight_decay=0.0005 and keep_momentum=True: it lives through the run there. The learning rate 0.001
is our choice, the text gives none.

Departures from the paper: none known.
Cost: none for clients. Server: `epochs` x batches forward and backward passes; 3 models of memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from fedbasin.core.catalogue import entry
from fedbasin.core.method import Context, Method, Replies, Served
from fedbasin.core.rng import Key
from fedbasin.core.space import Range
from fedbasin.methods.fedavg import FedAvg
from fedbasin.methods.parts.refine import Loss, Optimiser, Refinement, Refiner


@entry(
    "method",
    paper="Li et al., ICML 2023 (baseline)",
    url="https://arxiv.org/abs/2302.10911",
    needs=("proxy",),
    is_fedavg_when={"epochs": 0},
    tunable={"lr": Range(1e-5, 0.01, "log"), "epochs": Range(1, 10, "log", whole=True)},
)
@dataclass(frozen=True)
class ServerFT(Refiner):
    """Fine-tune the merged model on labelled rows of the server.

    Args:
        inner: the method that makes the model to start from.
        epochs: passes over the server's rows in a round; 0 is the inner method.
        lr: learning rate; 0 is the inner method too.
        optimiser: ``"adam"``, or ``"sgd"`` with the first beta as momentum.
        betas: of Adam.
        batch: rows in a step.
        weight_decay: of SGD.
        keep_momentum: whether SGD goes on with the momentum of the round before.
    """

    inner: Method = field(default_factory=FedAvg)
    epochs: int = 2
    lr: float = 0.001
    optimiser: Optimiser = "adam"
    betas: tuple[float, float] = (0.5, 0.999)
    batch: int = 128
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
            weight_decay=self.weight_decay,
            keep_momentum=self.keep_momentum,
        )

    def loss(
        self, server: Tensor, fresh: Served, replies: Replies, context: Context, key: Key
    ) -> Loss:
        """Learn the labels."""
        return context.need("proxy", self).loss
