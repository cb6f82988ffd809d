r"""FedWCM: FedCM whose weights and momentum follow how long-tailed the data are.

    client:  v <- v - eta (alpha_r g(v) + (1 - alpha_r) Delta_r)
    server:  w_k = exp(s_k / T) / sum_{j in S} exp(s_j / T)                      (eq. 4)
             Delta_{r+1} = sum_k w_k (x - y_k) / (eta B_k),    x+ = x + eta_g sum_k w_k (y_k - x)
             alpha_{r+1} from what the cohort holds                              (eq. 5)

FedWCM-X (`unequal`), for clients with unlike amounts of data: eta B^ / B_k in place of eta on
client k, with B_k its local steps and B^ those of an even split, and w_k n_k in place of w_k.

Three parts are chosen by name. With p_k the class shares of client k, D those of all data, u = 1/C,
TV(a, b) = |a - b|_1 / 2 and the imbalance I(a) = TV(a, u) / (1 - 1/C), I = I(D):

    score        "scarcity"   s_k = sum_c p_k(c) (u - D(c))                      (eq. 3)
                 "tv"         s_k = TV(p_k, D)
                 "inverse"    s_k = sum_c p_k(c) min(10, u / D(c)) / 10
    temperature  "imbalance"  T = tau (1 - I) / I
                 "fixed"      T = tau
    momentum     "mix"        alpha_{r+1} = alpha + (1 - alpha) I I(sum_k w_k p_k)
                 "scores"     alpha_{r+1} = alpha + kappa I max(0, mean s - mean_S s) / std s
                 "fixed"      alpha_{r+1} = alpha

with alpha_{r+1} kept within [alpha, alpha_max]. Where I = 0 the defaults are FedCM. Adaptive
optimisers on clients are refused: (x - y_k) / (eta B_k) is no gradient then.

PAPER: the client step, alpha_0 = 0.1, the softmax, one score for each client computed once from D,
T that grows as data get balanced, FedWCM-X. RECONSTRUCTION: every formula of the list above, since
equations (3) and (5) and T are not in the text at hand; docs/methods/fedwcm.md gives the reasons.

Departures from the paper: the printed x - eta_g Delta with Delta = mean (y_k - x) ascends; signs
and scales are FedCM's. FedWCM-X's printed weights sum to about 1/|S|; ours are renormalised.
Privacy: the server sees all class counts, or, with momentum="scores" or "fixed", only D (gathered
under encryption, `fedbasin.local.private_counts`) and each client's score s_k.
Cost: two models down (x, Delta), one up; one model of memory and |S| x P more work on the server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedbasin.core.bounds import above, within
from fedbasin.core.catalogue import entry
from fedbasin.core.method import Context, Method, Replies, Served
from fedbasin.core.protocols import ScoresCounts
from fedbasin.core.rule import LocalRule, Rules, Setting
from fedbasin.core.space import Range
from fedbasin.core.vectors import Weighting, shares, weighted_mean
from fedbasin.local.batches import count_steps
from fedbasin.methods.parts.client_momentum import (
    ClientMomentum,
    Counted,
    EvenMomentum,
    SharedMomentum,
    counted_rows,
    mean_direction,
    steps_counted,
)

_TINY = 1e-12
_RAREST = 10.0  # a class counts as at most this many times rarer than in balanced data


class Census(NamedTuple):
    """Who holds what, in float64."""

    mixes: Tensor  # [N, classes] p_k; zeros for a client without rows
    held: Tensor  # [N] whether a client holds rows
    overall: Tensor  # [classes] D
    imbalance: Tensor  # 0-d, I: 0 is balanced, 1 is a single class


class Cohort(NamedTuple):
    """What a rule for the momentum may look at."""

    census: Census
    scores: Tensor  # [N] s_k
    clients: Tensor  # [C] ids
    weights: Tensor  # [C] w_k
    present: Tensor  # [C] 1/C for those that count


def unevenness(mix: Tensor) -> Tensor:
    """Return TV(mix, u) / (1 - 1/C): 0 for equal classes, 1 for a single one."""
    classes = mix.shape[-1]
    return (mix - 1 / classes).abs().sum(-1) / 2 / (1 - 1 / classes)


def census(counts: Tensor) -> Census:
    """Turn class counts [N, classes] into shares."""
    amounts = counts.to(torch.float64)
    rows = amounts.sum(1, keepdim=True)
    overall = amounts.sum(0) / amounts.sum()
    return Census(amounts / rows.clamp(min=1), rows[:, 0] > 0, overall, unevenness(overall))


def scarcity(found: Census) -> Tensor:
    """Score a client by how much it holds of what is scarce overall."""
    return found.mixes @ (1 / len(found.overall) - found.overall)


def distance(found: Census) -> Tensor:
    """Score a client by how far its classes are from the overall ones; 0 without rows."""
    return (found.mixes - found.overall).abs().sum(1) / 2 * found.held


def inverse(found: Census) -> Tensor:
    """Score a client by the mean rarity of its rows, clipped, in [0, 1]."""
    rarity = 1 / len(found.overall) / found.overall
    return found.mixes @ (rarity.clamp(max=_RAREST) / _RAREST)


def by_imbalance(tau: float, found: Census) -> Tensor:
    """Return tau (1 - I) / I: infinite for balanced data, nearly 0 for a single class."""
    return tau * (1 - found.imbalance).clamp(min=_TINY) / found.imbalance


def by_mix(method: FedWCM, cohort: Cohort) -> Tensor:
    """Trust the momentum less, the less even the classes that went into it."""
    bias = unevenness(cohort.weights @ cohort.census.mixes[cohort.clients])
    return method.alpha + (1 - method.alpha) * cohort.census.imbalance * bias


def by_scores(method: FedWCM, cohort: Cohort) -> Tensor:
    """Trust the momentum less after a cohort that is poorer in scarce classes than all clients."""
    everyone = cohort.scores[cohort.census.held]
    lack = everyone.mean() - cohort.present @ cohort.scores[cohort.clients]
    spread = everyone.std(correction=0).clamp(min=_TINY)
    return method.alpha + method.kappa * cohort.census.imbalance * lack.clamp(min=0) / spread


SCORES: dict[str, Callable[[Census], Tensor]]
SCORES = {"scarcity": scarcity, "tv": distance, "inverse": inverse}
TEMPERATURES: dict[str, Callable[[float, Census], Tensor]]
TEMPERATURES = {"imbalance": by_imbalance, "fixed": lambda tau, c: c.imbalance.new_tensor(tau)}
MOMENTA: dict[str, Callable[[FedWCM, Cohort], Tensor]]
MOMENTA = {"mix": by_mix, "scores": by_scores, "fixed": lambda m, c: c.weights.new_tensor(m.alpha)}


@dataclass(frozen=True)
class FedWCMState:
    """What the server remembers."""

    momentum: Tensor  # [P] Delta_r
    alpha: Tensor  # 0-d float64, alpha_r


class FedWCMNotes(NamedTuple):
    """What a round leaves in the record."""

    alpha: Tensor  # of this round
    imbalance: Tensor  # I
    effective_clients: Tensor  # 1 / sum w_k^2
    momentum_norm: Tensor  # |Delta|, of the next broadcast
    client_scores: Tensor  # [C] s_k of the cohort
    shares: Tensor  # [C] w_k, what each client's model counts


@entry(
    "method",
    paper="Li et al., ICPP 2025",
    url="https://arxiv.org/abs/2507.14980",
    needs=("class_counts", "plain_sgd"),
    is_fedavg_when=dict(tau=inf, momentum="fixed", alpha=1.0, unequal=False, server_lr=1.0),
    down=2.0,
    tunable={"alpha": Range(0.03, 1.0, "log"), "server_lr": Range(0.3, 3.0, "log")},
)
@dataclass(frozen=True)
class FedWCM(ScoresCounts, Method):
    """FedCM for long-tailed data: clients with scarce classes count more, momentum is adapted.

    Args:
        score: s_k, what gives a client weight.
        temperature: T, how it follows from `tau`.
        tau: the scale of T; infinite gives equal weights.
        momentum: how alpha follows from the cohort.
        alpha: alpha_0, the gradient's share in the first round and the least later.
        alpha_max: the most that alpha becomes.
        kappa: the strength of ``momentum="scores"``.
        unequal: FedWCM-X, for clients with unlike amounts of data.
        counted: B_k by the ``"steps"`` a client took, or by its ``"rows"`` as FL-Simulator has it
            (see FedCM); not for FedWCM-X.
        server_lr: eta_g, the server's step along the mean update.
        local: further rules for the clients.
    """

    score: Literal["scarcity", "tv", "inverse"] = "scarcity"
    temperature: Literal["imbalance", "fixed"] = "imbalance"
    tau: float = above(0, default=0.3)
    momentum: Literal["mix", "scores", "fixed"] = "mix"
    alpha: float = within("(0, 1]", default=0.1)
    alpha_max: float = within("(0, 1]", default=0.9)
    kappa: float = above(0, default=0.3)
    unequal: bool = False
    counted: Counted = "steps"
    server_lr: float = above(0, default=1.0)
    local: Rules = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.unequal and self.counted == "rows":
            raise ValueError("unequal=True evens out steps: write counted='steps', got 'rows'")

    @property
    def weighting(self) -> Weighting:
        """What the weights are before the scores: FedWCM-X counts samples."""
        return "samples" if self.unequal else "uniform"

    def init(self, server: Tensor, context: Context) -> FedWCMState:
        """Start with Delta = 0 and the first alpha."""
        self._known(context)
        alpha = torch.tensor(self.alpha, dtype=torch.float64, device=server.device)
        return FedWCMState(torch.zeros_like(server), alpha)

    def own_rules(self) -> tuple[LocalRule, ...]:
        """Return the mixture."""
        return (EvenMomentum() if self.unequal else ClientMomentum(),)

    def own_broadcast(
        self, state: FedWCMState, server: Tensor, context: Context
    ) -> tuple[Any, ...]:
        """Send Delta and alpha beside the model, and B^ for FedWCM-X."""
        steps = server.new_tensor(_even_steps(context)) if self.unequal else None
        return (SharedMomentum(state.momentum, state.alpha.to(server.dtype), steps),)

    def cautions(self, setting: Setting) -> Iterator[str]:
        """Name a count by rows."""
        yield from super().cautions(setting)
        yield from counted_rows(self.counted)

    def aggregate(
        self, state: FedWCMState, server: Tensor, replies: Replies, context: Context
    ) -> tuple[Served, FedWCMState]:
        """Weigh the clients by their scores, step, and renew Delta and alpha."""
        found, scores = self._known(context)
        heat = TEMPERATURES[self.temperature](self.tau, found)
        before = shares(replies.weights, self.weighting)
        share = torch.softmax(scores[replies.clients] / heat + before.log(), 0)
        mean = weighted_mean(replies.models, share)
        model = mean if self.server_lr == 1 else server + self.server_lr * (mean - server)
        steps = steps_counted(self.counted, replies, context)
        even = _even_steps(context) if self.unequal else steps
        delta = mean_direction(replies, share, server, even)
        cohort = Cohort(found, scores, replies.clients, share, shares(replies.weights, "uniform"))
        alpha = MOMENTA[self.momentum](self, cohort)
        alpha = alpha.clamp(self.alpha, max(self.alpha, self.alpha_max))
        notes = FedWCMNotes(
            alpha=state.alpha,
            imbalance=found.imbalance,
            effective_clients=1 / share.square().sum(),
            momentum_norm=delta.norm(),
            client_scores=scores[replies.clients],
            shares=share,
        )
        return Served(send=model, score=model, notes=notes), FedWCMState(delta, alpha)

    def score_counts(self, counts: Tensor, total: Tensor) -> float:
        """Return s_k as client k computes it, once D is announced."""
        mine = census(counts[None])
        overall = census(total[None]).overall
        return float(SCORES[self.score](mine._replace(overall=overall))[0])

    def _known(self, context: Context) -> tuple[Census, Tensor]:
        """Return who holds what, and every client's score, from plain or from private counts."""
        private = context.private_counts
        if context.class_counts is not None or private is None:
            found = census(_counts(context))
            return found, SCORES[self.score](found)
        if self.momentum == "mix":
            raise ValueError(
                "fedwcm(momentum='mix') looks at each client's classes; where those are private, "
                "write momentum='scores' or momentum='fixed'"
            )
        everyone = census(private.total[None])
        return everyone._replace(held=private.rows > 0), private.scores


def _counts(context: Context) -> Tensor:
    """Return the clients' class counts [N, classes], or say what is missing."""
    counts = context.need("class_counts", "fedwcm")
    if counts.shape[1] < 2:
        raise ValueError(f"fedwcm needs two classes, class_counts has {counts.shape[1]}")
    return counts


def _even_steps(context: Context) -> int:
    """Return B^, the steps of a client if all rows were shared out evenly."""
    if context.plan is None or context.batch < 1:
        raise ValueError("fedwcm(unequal=True) needs the clients' plan and batch in the Context")
    private = context.private_counts
    plain = context.class_counts is not None or private is None
    rows = _counts(context).sum(1) if plain else private.rows  # type: ignore[union-attr]
    even = -(-int(rows.sum()) // int((rows > 0).sum()))
    return count_steps(context.plan, even, context.batch)
