r"""FedCDA: average models of different rounds, one of each client, that lie close together.

A client that trains well ends near another local optimum in each round it takes part. The
server keeps the last K models of every client and picks, for those that just took part, the
ones closest to the models picked for all others; their mean is then close to each of them.

    J     = 1/M sum_n F_n(w^n) + L/2 V,   V = 1/M sum_n |w^n - wbar|^2,  wbar = 1/M sum_n w^n
    w^{t+1} = wbar of the picked models                                                (eq. 5, 6)

over the M clients seen so far; F_n is the mean training loss of the client's last local epoch.
The cohort is shuffled into B near-equal batches; batch after batch, the best of all
combinations of its clients' models is picked, beside the picks of clients that did not take
part and of earlier batches, and without the batches to come (eq. 8, "greedy"). One batch of
the whole cohort is eq. 7 ("exact"). "global" picks for all M clients anew in every round, those
of the cohort or not (eq. 5, which is eq. 3 with gradients taken as zero, and eq. 4 then the mean
wbar); its K^M combinations are few enough for about 15 clients. The first T_w rounds are FedAvg
and fill the memory.
With weights omega_n each 1/M above is omega_n / sum omega ("samples": omega_n = n_n).

Departures from the paper: clients that were never seen have no model and are left out of all
means, where the paper divides by N. T_w is 0.25 R by default, the paper's 50 of 200 rounds.
Equal J picks the newest model. `polish`, `weighting`, `merge` and `store` are ours. The paper
calls other aggregation rules orthogonal: `merge` is one, such as fedlaw, in place of the mean
wbar. It is handed the picked models as if all M clients had just sent them, with weights omega_n
and from the model x that was sent, and it acts from round T_w on; J stays as above.
Cost: one model down, one up. With C clients in a cohort: one product of a [C K, P] matrix with
itself, then sum_b K^|batch b| combinations of a few additions each (at most 2e7). Memory:
N K P numbers + 8 P bytes; with store="disk" these numbers lie in files, and main memory holds
what a round looks at, the C K P of its cohort, mapped. `merge` reads all M P numbers in a round.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedbasin.core.archive import Archive
from fedbasin.core.bounds import at_least
from fedbasin.core.catalogue import entry
from fedbasin.core.method import Context, Method, Replies, ReplyError, Served, Wrapper
from fedbasin.core.protocols import needs_gradients
from fedbasin.core.rule import Rules, Setting
from fedbasin.core.space import Range
from fedbasin.core.vectors import Weighting
from fedbasin.methods.fedavg import FedAvg
from fedbasin.methods.parts.memory import Memory, empty
from fedbasin.methods.parts.selection import Candidates, check_combinations, choose, gram

Strategy = Literal["greedy", "exact", "global", "newest", "random"]
Store = Literal["memory", "device", "disk"]


class FedCDANotes(NamedTuple):
    """What is recorded of a round."""

    divergence_newest: float  # V if the cohort's newest models were picked
    divergence: float  # V of the picked models
    loss: float  # mean F_n of the picked models; 0 counts for a client that reports none
    age: float  # rounds since the picked models were trained, mean over all clients seen
    older: float  # share of those picked for whose pick is not their newest model
    picked_age: Tensor  # [C] rounds since each client's picked model was trained


@entry(
    "method",
    paper="Wang et al., ICLR 2024",
    url="https://openreview.net/forum?id=nbPGqeH3lt",
    needs=("losses",),
    is_fedavg_when={"warmup": 10**9, "warmup_by": "fedavg", "weighting": "samples"},
    tunable={"memory": Range(2, 6, whole=True), "warmup": Range(0.0, 0.75)},
)
@dataclass(frozen=True)
class FedCDA(Method):
    """Average the models of several rounds, one of each client, that diverge least.

    Args:
        memory: K, how many models of each client are kept.
        batches: B, into how many batches a cohort is cut for ``"greedy"``; at most its size.
        warmup: T_w, a number of rounds (50) or, below 1, a share of them (0.25).
        smoothness: L, the weight of the divergence against the loss.
        strategy: how models are picked, of the cohort or, by ``"global"``, of all clients;
            ``"newest"`` and ``"random"`` are baselines.
        loss_term: whether F_n counts; if not, only the divergence does.
        weighting: omega_n by ``"uniform"`` (the paper) or ``"samples"``.
        polish: after ``"greedy"``, change one client at a time for as long as J falls.
        warmup_by: what the first rounds send: ``"fedavg"`` (n_n weights) or ``"newest"``, the
            mean of the newest model of every client seen.
        merge: a method of the server alone that merges the picked models, as in
            ``fedcda(merge=fedlaw)``; None is their mean.
        store: keep models in main ``"memory"``, on the server's ``"device"`` or on ``"disk"``.
        local: rules that clients follow beyond SGD.
    """

    memory: int = at_least(1, default=3)
    batches: int = at_least(1, default=3)
    warmup: int | float = 0.25
    smoothness: float = at_least(0, default=1.0)
    strategy: Strategy = "greedy"
    loss_term: bool = True
    weighting: Weighting = "uniform"
    polish: bool = False
    warmup_by: Literal["fedavg", "newest"] = "fedavg"
    merge: Method | None = None
    store: Store = "memory"
    local: Rules = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup < 0 or (isinstance(self.warmup, float) and self.warmup >= 1):
            raise ValueError(
                "warmup is a number of rounds (50) or a share of them in [0, 1) (0.25), "
                f"got {self.warmup}"
            )
        if self.polish and self.strategy != "greedy":
            raise ValueError(f"polish improves strategy='greedy', got strategy={self.strategy!r}")
        if self.merge is not None:
            _check_merge(self.merge)

    def init(self, server: Tensor, context: Context) -> Memory:
        """Start with an empty memory, beside it the state of `merge`."""
        if self.strategy == "global":
            check_combinations([self.memory] * context.able)
        self._files(context)  # says what is missing before the run
        where = {"memory": "cpu", "device": str(server.device), "disk": None}[self.store]
        memory = empty(context.clients, self.memory, server, where=where)
        if self.merge is None:
            return memory
        return replace(memory, merge=self.merge.init(server, context))

    def cautions(self, setting: Setting) -> Iterator[str]:
        """Pass the cautions of `merge` on."""
        yield from super().cautions(setting)
        if self.merge is not None:
            yield from self.merge.cautions(setting)

    def begins(self, context: Context) -> int:
        """Return T_w, the first round whose models are picked across rounds."""
        share = isinstance(self.warmup, float)
        return int(self.warmup * context.rounds + 1e-9) if share else int(self.warmup)

    def aggregate(
        self, state: Memory, server: Tensor, replies: Replies, context: Context
    ) -> tuple[Served, Memory]:
        """Remember the replies, pick a model of each client that sent one, and merge."""
        cohort = self._checked(replies)
        files = self._files(context)
        now = context.round
        clients = cohort.clients.tolist()
        weights = cohort.weights if self.weighting == "samples" else torch.ones(len(clients))
        warm = now < self.begins(context)
        if self.strategy == "global" and not warm:
            clients = sorted({*clients, *torch.nonzero(state.picked >= 0)[:, 0].tolist()})
        fixed = state.let_go(clients, files).remember(cohort, weights, now, files)
        latest = [fixed.history(n)[0] for n in clients]
        picks = latest
        newest = after = fixed.pick(clients, picks, files)
        if not warm and self.strategy != "newest":
            picks = self._pick(fixed, server, clients, context)
            after = fixed.pick(clients, picks, files)
        if files is not None:
            files.keep((n, r) for n in range(context.clients) for r in after.history(n))
        model = (after.total / after.picked_weight).to(server.dtype)
        if warm and self.warmup_by == "fedavg":
            model = FedAvg().aggregate((), server, replies, context)[0].send
        notes = FedCDANotes(
            divergence_newest=newest.divergence(),
            divergence=after.divergence(),
            loss=after.mean(after.losses),
            age=float((now - after.picked[after.picked >= 0]).double().mean()),
            older=sum(a != b for a, b in zip(picks, latest, strict=True)) / len(clients),
            picked_age=now - after.picked[cohort.clients.cpu()].cpu(),
        )
        if warm or self.merge is None:
            return Served(model, model, notes), after
        merged, own = self.merge.aggregate(after.merge, server, after.picks(server, files), context)
        return merged.noted(notes), replace(after, merge=own)

    def _pick(
        self, fixed: Memory, server: Tensor, clients: list[int], context: Context
    ) -> list[int]:
        """Return the round of the model picked for each client, beside those that are fixed."""
        draws = context.key.fold("fedcda").numpy()
        files = self._files(context)
        histories = [fixed.history(n) for n in clients]
        if self.strategy == "random":
            return [int(draws.choice(rounds)) for rounds in histories]
        records = [(n, r) for n, rounds in zip(clients, histories, strict=True) for r in rounds]
        models = [fixed.model(n, r, files) for n, r in records]
        losses = torch.cat([fixed.losses[n][fixed.rounds[n] == r] for n, r in records])
        candidates = Candidates(
            gram=gram(models, server, fixed.total - fixed.picked_weight * server.double()),
            losses=(losses if self.loss_term else torch.zeros_like(losses)).numpy(),
            weights=fixed.weights[clients].numpy(),
            counts=tuple(len(rounds) for rounds in histories),
            fixed_weight=fixed.picked_weight,
            smoothness=self.smoothness,
        )
        batches = np.array_split(draws.permutation(len(clients)), self._cuts(len(clients)))
        return [records[row][1] for row in choose(candidates, batches, polish=self.polish)]

    def _cuts(self, cohort: int) -> int:
        """Return into how many batches a cohort is cut."""
        return 1 if self.strategy in ("exact", "global") else min(self.batches, cohort)

    @property
    def optional_needs(self) -> frozenset[str]:
        """The clients' losses, where only the divergence counts."""
        return frozenset() if self.loss_term else frozenset({"losses"})

    def _checked(self, replies: Replies) -> Replies:
        """Return the replies that count, in the order of client ids."""
        counted = torch.nonzero(replies.weights > 0)[:, 0]
        cohort = replies.take(counted[replies.clients[counted].argsort()])
        clients = cohort.clients.tolist()
        for n, loss in zip(clients, cohort.last_loss.tolist(), strict=True):
            if clients.count(n) > 1:
                raise ReplyError(f"client {n} answers twice in one round; fedcda takes one model")
            if self.loss_term and not math.isfinite(loss):
                raise ReplyError(
                    f"client {n} reports a loss of {loss}; fedcda(loss_term=False) does without"
                )
        if not self.loss_term:
            cohort = replace(cohort, last_loss=cohort.last_loss.nan_to_num(nan=0.0))
        if self.strategy in ("greedy", "exact"):
            check_combinations([self.memory] * -(-len(clients) // self._cuts(len(clients))))
        return cohort

    def _files(self, context: Context) -> Archive | None:
        """Return where models lie, if they lie on disk."""
        return context.need("archive", self) if self.store == "disk" else None


def _check_merge(merge: Method) -> None:
    """Refuse a method that cannot merge picked models, saying what to write instead."""
    base = merge
    plans = False
    while isinstance(base, Wrapper):
        plans |= type(base).plan is not Wrapper.plan
        base = base.inner
    plans |= type(base).plan is not Method.plan
    if merge.rules() or needs_gradients(merge):
        why = "asks something of the clients; rules for them go into fedcda(local=...)"
    elif plans:
        why = "sets how clients train; put it around fedcda, as in ima(fedcda)"
    elif isinstance(base, FedCDA):
        why = "picks models itself; give its settings to the one fedcda"
    else:
        return
    raise ValueError(f"merge={merge} {why}")
