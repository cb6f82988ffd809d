r"""Server-FT: train the merged model on labelled rows the server holds.

    w+ = the inner method's model after `epochs` passes of descent on  mean_x CE(z_w(x), y)

With ten rows a class, which the FedLAW paper takes, many passes overfit: it takes 2, and reports
that 100 hurt.

Settings. The FedLAW paper's text: Adam(0.5, 0.999), the default here; its code takes the clients'
SGD with momentum 0.9, `optimiser="sgd"` with betas=(0.9, 0.999) and their learning rate. The
learning rate 0.001 is our choice, the text gives none.

Departures from the paper: none known.
Cost: none for clients. Server: `epochs` x batches forward and backward passes; 3 models of memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from fedbasin.core.catalogue import entry
from fedbasin.core.method import Context, Method, Replies, Served, Wrapper
from fedbasin.core.space import Range
from fedbasin.methods.fedavg import FedAvg
from fedbasin.methods.parts.refine import Optimiser, Refinement, shifted


@entry(
    "method",
    paper="Li et al., ICML 2023 (baseline)",
    url="https://arxiv.org/abs/2302.10911",
    needs=("proxy",),
    is_fedavg_when={"epochs": 0},
    tunable={"lr": Range(1e-5, 0.01, "log"), "epochs": Range(1, 10, "log", whole=True)},
)
@dataclass(frozen=True)
class ServerFT(Wrapper):
    """Fine-tune the merged model on labelled rows of the server.

    Args:
        inner: the method that makes the model to start from.
        epochs: passes over the server's rows in a round; 0 is the inner method.
        lr: learning rate; 0 is the inner method too.
        optimiser: ``"adam"``, or ``"sgd"`` with the first beta as momentum.
        betas: of Adam.
        batch: rows in a step.
    """

    inner: Method = field(default_factory=FedAvg)
    epochs: int = 2
    lr: float = 0.001
    optimiser: Optimiser = "adam"
    betas: tuple[float, float] = (0.5, 0.999)
    batch: int = 128

    def __post_init__(self) -> None:
        self._refinement()  # checks the settings

    def _refinement(self) -> Refinement:
        return Refinement(self.optimiser, self.lr, self.betas, self.epochs, self.batch)

    def step(
        self, own: tuple[()], server: Tensor, fresh: Served, replies: Replies, context: Context
    ) -> tuple[Served, tuple[()]]:
        """Fine-tune."""
        if not self.epochs:
            return fresh, own
        proxy = context.need("proxy", self)
        key = context.key.fold("serverft")
        return shifted(fresh, self._refinement().run(fresh.send, proxy.loss, proxy, key)), own
