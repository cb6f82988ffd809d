r"""FedLAW: learn how much each client counts, and by how much the merged model shrinks.

Aggregation weights need not sum to one: a sum gamma a little below 1 acts like weight decay on
the global model. In every round the server fits gamma and the relative weights lambda to a
small labelled proxy set, from lambda = p (data sizes) and gamma = `gamma` on:

    w^{t+1} = gamma m,   m = x + eta_g sum_i lambda_i (y_i - x)             (eta_g: `server_lr`)
    lambda_i = u(z_i) / sum_j u(z_j),   gamma = u(c)
    u(v) = exp(v) ("exponential")  or  v^2 ("quadratic")

z and c follow Adam(0.5, 0.999) down the proxy loss for `epochs` passes, at a learning rate that
halves every 20 of them. A step takes one backward pass and two matrix-vector products, and no
graph is built through the C models (parts/mixture.py has the gradients).

The paper's parts: learn="none" with `gamma` below 1 is global weight shrinking, "gamma" its
adaptive form, "lambda" attentive LAW (stopped early by `stop_round`), "both" FedLAW. `swa` fits
lambda alone, at a learning rate that rises to 0.05, takes the mean of z over the epochs from
the 7th on, and then fits gamma.

Departures from the paper: `guard`. While m is no better on the proxy set than the zero model,
which says nothing, shrinking always helps, round after round, until the model is zero and stays
so; gamma is not fitted then. Elsewhere the ratio r = |gamma eta_g g| / |(1 - gamma) x| of update
to shrinking, about 20 in the paper's runs, stays above `guard` after every step, at the lambda of
that step, and with `guard_growth` also where gamma is above 1. Without it gamma may go above 1: on
easy data (digits) a surer model lowers the proxy loss, and the norm grows where the paper's falls.
docs/methods/fedlaw.md has the evidence; `guard=0` is the paper. "quadratic"
starts from data sizes, as the text says (the code: uniform). Where swa has 6 epochs or fewer for
lambda, its last z counts (the code: the first).
FedLAW-SWA fits lambda first and gamma second, as the code does; the text fits gamma first and
lambda with SWA second, and says that the other order works as well.
Cost: none for clients. Server: `epochs` x batches forward and backward passes and twice as many
C x P mat-vecs (three times with the guard); 3 models of memory beside the replies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedbasin.core.bounds import at_least, within
from fedbasin.core.catalogue import entry
from fedbasin.core.method import Context, Method, Proxy, Replies, Served
from fedbasin.core.rng import Key
from fedbasin.core.rule import Rules
from fedbasin.core.space import Options, Range
from fedbasin.core.vectors import Weighting, shares
from fedbasin.local.batches import proxy_batches
from fedbasin.methods.parts.descent import Adam
from fedbasin.methods.parts.mixture import CURVES, Mixture, Parameterisation

Learn = Literal["both", "gamma", "lambda", "none"]
_HALVED_EVERY = 20  # epochs
# Of swa.
_SETTLE = 6  # epochs along a cosine
_COSINE = 100  # epochs of that cosine
_RISE = 10  # epochs of rising
_SWA_LR = 0.05  # the learning rate reached
_PROGRESS = 1e-4  # a fall of the loss by a smaller share is a plateau


class Stage(NamedTuple):
    """One descent: what moves, for how many epochs, at which learning rates."""

    weights: bool  # whether z moves
    gamma: bool  # whether c moves
    epochs: int
    rate: Callable[[int], float]  # epoch -> learning rate
    averages: bool = False  # whether the mean over the late epochs counts, not the last point


class Notes(NamedTuple):
    """What a round leaves in the record."""

    gamma: Tensor
    lambdas: Tensor  # [C] in the order of the cohort; 0 for a client without samples
    gradient_norm: Tensor  # |g|, g = sum_i lambda_i (x - y_i)
    ratio: Tensor  # |gamma eta_g g| / |(1 - gamma) x|; infinite (null) at gamma = 1
    proxy_loss_before: Tensor  # with p and the initial gamma; NaN (null) without a proxy set
    proxy_loss_after: Tensor
    fit_path: Tensor | None = None  # [(E + 1) (C + 1)] lambdas, gamma: at first, after each epoch


@entry(
    "method",
    paper="Li et al., ICML 2023",
    url="https://arxiv.org/abs/2302.10911",
    needs=("proxy",),
    is_fedavg_when={"epochs": 0, "gamma": 1.0, "server_lr": 1.0},
    tunable={"lr": Range(0.001, 0.1, "log"), "learn": Options("both", "gamma", "lambda")},
)
@dataclass(frozen=True)
class FedLAW(Method):
    """Fit the clients' weights and their sum to a small labelled set on the server.

    Args:
        learn: what is fitted, ``"both"``, ``"gamma"``, ``"lambda"`` or ``"none"``.
        gamma: the sum of weights to start from, and to keep where it is not fitted.
        guard: least ratio r of update to shrinking; gamma is not fitted while the mean is no
            better than the zero model. 0 is the paper: gamma may be anything.
        guard_growth: hold r above `guard` where the model grows too; growing is mostly a gain.
        swa: fit lambda, averaged over epochs, for half of the epochs, then gamma for the rest.
        parameterisation: u, ``"exponential"`` or ``"quadratic"``.
        epochs: passes over the proxy set in a round, E_s.
        lr: of Adam.
        batch: rows of the proxy set in a step.
        patience: end a descent when so many epochs brought no progress; 0 never does.
        stop_round: from this round on lambda = p; None fits it in every round.
        server_lr: eta_g, the server's step along the updates.
        weighting: p by ``"samples"`` (n_i) or ``"uniform"``.
        trace: record lambda and gamma after each epoch too, for ``fedbasin analyze fit``.
        local: rules that clients follow beyond SGD.
    """

    learn: Learn = "both"
    gamma: float = within("(0, inf)", words="must be above 0", default=1.0)
    guard: float = at_least(0, default=5.0)
    guard_growth: bool = False
    swa: bool = False
    parameterisation: Parameterisation = "exponential"
    epochs: int = at_least(0, default=100)
    lr: float = within("(0, inf)", words="must be above 0", default=0.01)
    batch: int = at_least(1, default=128)
    patience: int = at_least(0, default=0)
    stop_round: int | None = at_least(0, default=None)
    server_lr: float = within("(0, inf)", words="must be above 0", default=1.0)
    weighting: Weighting = "samples"
    trace: bool = False
    local: Rules = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.swa and self.learn not in ("both", "lambda"):
            raise ValueError(
                f"swa averages lambda: learn is {self.learn!r}, not 'both' or 'lambda'"
            )

    def aggregate(
        self, state: tuple[()], server: Tensor, replies: Replies, context: Context
    ) -> tuple[Served, tuple[()]]:
        """Fit z and c to the proxy set, then merge."""
        spared = "proxy" in self.optional_needs
        proxy = context.proxy if spared else context.need("proxy", self)
        counted = replies.weights > 0
        models = replies.models if bool(counted.all()) else replies.models[counted]
        merge = Mixture(server, models, self.server_lr, CURVES[self.parameterisation])
        weights = shares(replies.weights[counted], self.weighting)
        gamma = weights.new_tensor(self.gamma)
        model = first = merge.model(weights, gamma)
        path = [torch.cat([weights, gamma[None]])]
        stages = self._stages(context)
        if proxy is not None and stages:
            free = merge.curve.inverse(torch.cat([weights, gamma[None]]))
            for number, stage in enumerate(stages):
                key = context.key.fold("fedlaw", number)
                free, walked = self._fit(stage, free, merge, proxy, key)
                path += [torch.cat([w, g[None]]) for w, g in map(merge.read, walked)]
            weights, gamma = merge.read(free)
            model = merge.model(weights, gamma)
        step = (merge.mean(weights) - server).norm()
        notes = Notes(
            gamma=gamma,
            lambdas=weights.new_zeros(len(counted)).masked_scatter(counted, weights),
            gradient_norm=step / self.server_lr,
            ratio=gamma * step / ((1 - gamma).abs() * server.norm()),
            proxy_loss_before=_loss(proxy, first),
            proxy_loss_after=_loss(proxy, model),
            fit_path=_placed(torch.stack(path), counted).flatten() if self.trace else None,
        )
        return Served(model, model, notes), state

    @property
    def optional_needs(self) -> frozenset[str]:
        """Weights that are not learnt need no proxy set."""
        return frozenset() if self.epochs and self.learn != "none" else frozenset({"proxy"})

    def _stages(self, context: Context) -> list[Stage]:
        """Return the descents of this round; none where nothing is fitted."""
        stopped = self.stop_round is not None and context.round >= self.stop_round
        weights = self.learn in ("both", "lambda") and not stopped
        gamma = self.learn in ("both", "gamma")
        if not self.epochs or not (weights or gamma):
            return []
        if not (self.swa and weights):
            return [Stage(weights, gamma, self.epochs, self._halved)]
        share = self.epochs // 2 if gamma else self.epochs
        averaged = Stage(True, False, share, self._raised, averages=True)
        return [averaged, Stage(False, True, share, self._halved)] if gamma else [averaged]

    def _halved(self, epoch: int) -> float:
        return self.lr * 0.5 ** (epoch // _HALVED_EVERY)

    def _raised(self, epoch: int) -> float:
        """Fall along a cosine for a few epochs, then rise along another one."""
        settled = min(epoch, _SETTLE)
        low = self.lr * (1 + math.cos(math.pi * settled / _COSINE)) / 2
        risen = (1 - math.cos(math.pi * min((epoch - settled) / _RISE, 1.0))) / 2
        return low + risen * (_SWA_LR - low)

    def _moves(self, stage: Stage, free: Tensor, merge: Mixture, proxy: Proxy) -> Tensor:
        """Return which of (z, c) move, 1 or 0."""
        moves = torch.full_like(free, float(stage.weights and merge.differ))
        moves[-1] = float(stage.gamma)
        if stage.gamma and self.guard:
            mean = merge.mean(merge.read(free)[0])
            with torch.no_grad():
                moves[-1] = float(proxy.loss(mean) < proxy.loss(torch.zeros_like(mean)))
        return moves

    def _guarded(self, free: Tensor, merge: Mixture) -> Tensor:
        """Return (z, c) with c inside the ends that hold for the lambda of this z."""
        least, most = _ends(merge.mean(merge.read(free)[0]), merge.server, self.guard)
        free = free.clone()
        free[-1] = free[-1].maximum(merge.curve.inverse(least.to(free.dtype)))
        if self.guard_growth:
            free[-1] = free[-1].minimum(merge.curve.inverse(most.to(free.dtype)))
        return free

    def _fit(
        self, stage: Stage, free: Tensor, merge: Mixture, proxy: Proxy, key: Key
    ) -> tuple[Tensor, list[Tensor]]:
        """Return (z, c) after one descent, and after each of its epochs."""
        moves = self._moves(stage, free, merge, proxy)
        if not bool(moves.any()):
            return free, []
        guarded = self.guard > 0 and bool(moves[-1])
        adam = Adam.at(free)
        walked: list[Tensor] = []
        best = math.inf
        idle = 0
        for epoch in range(stage.epochs):
            losses = []
            for rows in proxy_batches(key.tensor(free.device), epoch, proxy.size, self.batch):
                gradient, loss = merge.gradient(free, partial(proxy.loss, rows=rows))
                free, adam = adam.step(free, moves * gradient, stage.rate(epoch))
                free = self._guarded(free, merge) if guarded else free
                losses.append(loss)
            walked.append(free)
            if self.patience and not stage.averages:
                mean = float(torch.stack(losses).mean())
                if mean < best * (1 - _PROGRESS):
                    best = mean
                    idle = 0
                else:
                    idle += 1
                if idle >= self.patience:
                    break
        late = walked[_SETTLE:] if stage.averages else []
        return (torch.stack(late).mean(0) if late else free), walked


def _placed(path: Tensor, counted: Tensor) -> Tensor:
    """Return a path of (lambda, gamma) with a 0 for each client without samples."""
    wide = path.new_zeros(len(path), len(counted) + 1)
    wide[:, torch.cat([counted, counted.new_ones(1)])] = path
    return wide


def _ends(mean: Tensor, server: Tensor, ratio: float) -> tuple[Tensor, Tensor]:
    """Return the gammas below and above 1 at which gamma |m - x| = ratio |1 - gamma| |x|."""
    size = (ratio * server.norm()).clamp(min=torch.finfo(server.dtype).tiny)
    step = (mean - server).norm() / size
    return torch.reciprocal(1 + step), torch.reciprocal((1 - step).clamp(min=0))


@torch.no_grad()
def _loss(proxy: Proxy | None, model: Tensor) -> Tensor:
    """Return the proxy loss of a model, NaN without a proxy set."""
    return model.new_tensor(math.nan) if proxy is None else proxy.loss(model)
