"""The server half: a method merges what a cohort sends back.

A method is a frozen dataclass of hyper-parameters with pure functions, state in and state
out. It never sees training data, the engine or the network. What it needs from outside it
declares on its card, and finds in the `Context`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar, overload

import torch
from torch import Tensor

from fedbasin.core.archive import Archive
from fedbasin.core.bounds import Bounded
from fedbasin.core.expressions import ExpressionError, text
from fedbasin.core.net import Net
from fedbasin.core.permutations import Group
from fedbasin.core.rng import Key
from fedbasin.core.rule import LocalRule, Rules, Setting, as_rules
from fedbasin.core.tree import mapped
from fedbasin.core.vectors import Layout, Weighting, shares, weighted_mean

EffectiveSteps = Callable[[int, float], float | None]  # (K, eta mu) -> a_i of FedNova
Report = TypeVar("Report", bound=tuple[Any, ...])


class ReplyError(ValueError):
    """A reply that must not be aggregated, with the client named."""


@dataclass(frozen=True)
class Plan:
    """How clients train in one round.

    Args:
        lr: learning rate, eta.
        epochs: passes over the client's data, or None when `steps` is given.
        steps: number of mini-batches, or None when `epochs` is given.
    """

    lr: float
    epochs: int | None = 1
    steps: int | None = None

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(f"give epochs or steps, got epochs={self.epochs}, steps={self.steps}")
        if not self.lr >= 0:
            raise ValueError(f"lr must be a number of at least 0, got {self.lr}")


class Proxy(Protocol):
    """A small labelled set on the server, as methods see it: a loss and its size."""

    @property
    def size(self) -> int:
        """Number of rows."""
        ...

    def logits(self, vector: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return the logits [n, classes] of a model on the chosen rows (all by default)."""
        ...

    def loss(self, vector: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return the mean cross-entropy of a model, differentiable in the vector."""
        ...


@dataclass(frozen=True)
class Probe:
    """Full-batch gradients of a cohort at the model it is about to train."""

    gradients: Tensor  # [C, P]
    weights: Tensor  # [C] number of samples, n_i


@dataclass(frozen=True)
class PrivateCounts:
    """What the server knows of clients that keep their class counts to themselves."""

    total: Tensor  # [classes] rows of all clients together
    scores: Tensor  # [N] what each client makes of its own counts, `ScoresCounts`
    rows: Tensor  # [N] how many rows each holds


class Sampling(NamedTuple):
    """How cohorts are drawn, for methods whose guarantee depends on it."""

    kind: Literal["poisson", "fixed", "other"]  # each on its own; so many of all; anything else
    expected: float  # mean size of a cohort, M
    clients: int  # of how many they are drawn


_NEEDED = {  # what is missing, and how a run provides it
    "proxy": "labelled rows on the server: set data.proxy_per_class or data.proxy_rows",
    "class_counts": "the clients' class counts: take data with classes",
    "archive": "files for the clients' models: start it as a run with a folder",
    "permutations": "to know which neurons may change places: take a network of the catalogue, "
    "or derive them by fedbasin.models.symmetries.permutations",
}


@dataclass(frozen=True)
class Context:
    """What surrounds a round.

    Args:
        layout: names of the parts of a vector.
        clients: how many clients there are in all, which bounds their ids.
        holders: how many of them hold rows and can take part; 0 where it is not known.
        rounds: how many rounds the run has, R.
        key: the randomness of this round's server step.
        round: how many rounds are finished, t.
        lr: the learning rate the cohort used.
        plan: how the cohort trains, once a round has begun.
        batch: the clients' batch size, B; 0 where it is not known.
        examples: mean number of samples of a client; 0 where it is not known.
        effective_steps: how many gradients K steps of a client add up to, by K and eta mu of a
            proximal term; None where that is not known.
        proxy: server data, for methods that need ``"proxy"``.
        class_counts: [N, classes] samples by client and class, for those that need them.
        private_counts: what stands in for them where clients do not show them.
        archive: files for models of clients, for methods that keep them on disk.
        net: the network as a function of vectors, for methods that run its head.
        probe: this cohort's gradients, for methods that ask for them before training.
        permutations: which units may change places, for methods that match neurons.
        sampling: how cohorts are drawn; None where it is not known.
        real: whether the clients are real, so that nobody may draw the server's noise again.
        answered: how many clients answered in this round, once it is known; 0 before.
    """

    layout: Layout
    clients: int
    rounds: int
    key: Key
    round: int = 0
    lr: float = 0.0
    plan: Plan | None = None
    batch: int = 0
    examples: float = 0.0
    effective_steps: EffectiveSteps | None = None
    proxy: Proxy | None = None
    class_counts: Tensor | None = None
    private_counts: PrivateCounts | None = None
    archive: Archive | None = None
    net: Net | None = None
    probe: Probe | None = None
    permutations: tuple[Group, ...] | None = None
    sampling: Sampling | None = None
    real: bool = False
    answered: int = 0
    holders: int = 0

    @property
    def able(self) -> int:
        """How many clients can take part, N of the methods' means over all clients."""
        return self.holders or self.clients

    def at(self, round: int, lr: float, plan: Plan | None = None) -> Context:
        """Return the context of one round."""
        return replace(self, round=round, lr=lr, plan=plan, key=self.key.fold("server", round))

    @overload
    def need(self, what: Literal["proxy"], by: object) -> Proxy: ...

    @overload
    def need(self, what: Literal["class_counts"], by: object) -> Tensor: ...

    @overload
    def need(self, what: Literal["archive"], by: object) -> Archive: ...

    @overload
    def need(self, what: Literal["permutations"], by: object) -> tuple[Group, ...]: ...

    def need(self, what: str, by: object) -> Any:
        """Return what a method or rule (`by`) cannot do without, or say how to provide it."""
        value = getattr(self, what)
        if value is None:
            raise ValueError(f"{by} needs {_NEEDED[what]}, or give Context({what}=...)")
        return value


@dataclass(frozen=True)
class Replies:
    """What a cohort of C clients sends back."""

    models: Tensor  # [C, P] trained models, y_i
    weights: Tensor  # [C] number of samples, n_i
    clients: Tensor  # [C] client ids
    steps: Tensor  # [C] local steps taken, K_i
    lr_sum: Tensor  # [C] sum of step sizes
    # [C] how many gradients the local update adds up to, a_i of FedNova; K_i under an adaptive
    # optimiser, whose steps have no such length
    effective_steps: Tensor
    last_loss: Tensor  # [C] mean training loss of the last local epoch
    train_loss: Tensor  # [C] mean loss of the local training; NaN of a client that keeps it back
    buffers: Tensor  # [C, Q] statistics, such as BatchNorm's
    reports: tuple[Any, ...] = ()  # what each client rule reports, in the order of `rules`

    def check(self, server: Tensor) -> None:
        """Refuse replies that are of the wrong length or not finite, naming the client."""
        count = len(self.clients)
        if self.models.shape != (count, server.numel()):
            raise ReplyError(
                f"replies are {tuple(self.models.shape)}, expected {count} clients "
                f"x {server.numel()} parameters"
            )
        if count == 0:
            raise ReplyError("a round needs at least one reply")
        weighed = torch.isfinite(self.weights) & (self.weights >= 0)
        # NaN and Inf survive a sum, which reads the models once; isfinite would four times.
        if not bool((torch.isfinite(self.models.sum(1)) & weighed).all()):
            good = torch.isfinite(self.models).all(1) & weighed
            if not bool(good.all()):
                bad = int(self.clients[int(torch.nonzero(~good)[0])])
                raise ReplyError(
                    f"client {bad} sent a model or weight that is NaN, Inf or negative"
                )
        if not bool(self.weights.sum() > 0):
            raise ReplyError("all replies have weight zero")

    def report(self, kind: type[Report]) -> Report:
        """Return what the cohort's clients report under a named tuple type, each leaf [C, ...].

        Where two rules report the same type, it is the first one's, and a method's own rules
        come first. Reports that travelled are known by the names of their fields.
        """
        for report in self.reports:
            if isinstance(report, kind):
                return report
            if getattr(report, "_fields", None) == getattr(kind, "_fields", "none"):
                return kind(*report)
        known = [getattr(report, "_fields", type(report).__name__) for report in self.reports]
        raise ReplyError(f"no client rule reports a {kind.__name__}; reported: {known}")

    def take(self, index: Tensor) -> Replies:
        """Return the chosen rows, in that order."""
        return mapped(lambda column: column[index], self)

    def averaged(self, weighting: Weighting) -> Replies:
        """Return the cohort as one client that holds all samples and sends the mean, no reports."""
        share = shares(self.weights, weighting)

        def mean(column: Tensor) -> Tensor:
            return weighted_mean(column, share)[None]

        return Replies(
            models=mean(self.models),
            weights=self.weights.sum()[None],
            clients=self.clients[:1],
            steps=mean(self.steps),
            lr_sum=mean(self.lr_sum),
            effective_steps=mean(self.effective_steps),
            last_loss=mean(self.last_loss),
            train_loss=mean(self.train_loss),
            buffers=mean(self.buffers),
        )


@dataclass(frozen=True)
class Served:
    """The result of a round: the model that clients start from next, and the one that is scored."""

    send: Tensor  # [P] broadcast to the next cohort
    score: Tensor  # [P] evaluated and shipped
    notes: Any = ()  # named tuples of numbers for the run's record

    def moved(self, send: Tensor) -> Served:
        """Send another model; a scored model of its own moves by the same difference."""
        score = send if self.score is self.send else self.score + (send - self.send)
        return replace(self, send=send, score=score)

    def noted(self, notes: Any) -> Served:
        """Add a named tuple of numbers to the record."""
        return replace(self, notes=(notes, self.notes))


class Method(Bounded, ABC):
    """How the server merges. Subclasses are frozen dataclasses entered in the catalogue.

    A base combines replies and says what clients do: `own_rules` with `own_broadcast`, then the
    user's rules in its field `local`. A `Wrapper` adds a step of its own to another method. What
    only few methods do, they say by a class of `fedbasin.core.protocols`.
    """

    local: Rules = ()  # further rules for the clients, for methods that have the field

    @abstractmethod
    def aggregate(
        self, state: Any, server: Tensor, replies: Replies, context: Context
    ) -> tuple[Served, Any]:
        """Merge the replies of clients that started from `server`; return new state too."""

    def init(self, server: Tensor, context: Context) -> Any:
        """Return the state before the first round; its shape (as a tree) never changes."""
        return ()

    def own_rules(self) -> tuple[LocalRule, ...]:
        """Return the method's own client rules."""
        return ()

    def own_broadcast(self, state: Any, server: Tensor, context: Context) -> tuple[Any, ...]:
        """Return what is sent beside the model, one entry for each of `own_rules`."""
        return tuple(rule.shared(context) for rule in self.own_rules())

    @property
    def optional_needs(self) -> frozenset[str]:
        """What its card asks for and these settings can do without."""
        return frozenset()

    def rules(self) -> tuple[LocalRule, ...]:
        """Return what clients do beyond plain SGD, the method's own rules first."""
        return (*self.own_rules(), *as_rules(self.local))

    def broadcast(self, state: Any, server: Tensor, context: Context) -> tuple[Any, ...]:
        """Return what is sent beside the model: one entry for each of `rules`."""
        added = tuple(rule.shared(context) for rule in as_rules(self.local))
        return (*self.own_broadcast(state, server, context), *added)

    def plan(self, schedule: Callable[[int], Plan], context: Context) -> Plan:
        """Return how clients train in round ``context.round``; `schedule` is the configured one."""
        return schedule(context.round)

    def streams(self) -> Weighting | None:
        """Return how replies may be averaged as they arrive, or None where each one counts.

        A method that names a weighting promises that `aggregate` gives the same for the cohort
        and for `Replies.averaged`: a server then never holds more than one reply.
        """
        return None

    def cautions(self, setting: Setting) -> Iterator[str]:
        """Yield warnings: why, with these settings, the method may not behave as in its paper."""
        for rule in self.rules():
            yield from rule.cautions(setting)

    def __str__(self) -> str:
        try:
            return text(self)
        except ExpressionError:  # a method that is not in the catalogue
            return repr(self)


class Averaging(Method):
    """A method that takes the weighted mean of the replies.

    Subclasses have a field ``weighting`` and write what follows from the mean alone in `serve`;
    replies may then be averaged as they arrive. A subclass that looks at single replies or
    reports overrides `aggregate`.
    """

    weighting: Weighting  # p_i
    server_lr: float = 1.0  # eta_g, the server's step along the mean update

    def mean(self, replies: Replies) -> Tensor:
        """Return sum_i p_i y_i [P]."""
        return weighted_mean(replies.models, shares(replies.weights, self.weighting))

    def stepped(self, server: Tensor, mean: Tensor) -> Tensor:
        """Return w + eta_g (mean - w) [P]."""
        return mean if self.server_lr == 1 else server + self.server_lr * (mean - server)

    def serve(
        self, state: Any, server: Tensor, mean: Tensor, context: Context
    ) -> tuple[Served, Any]:
        """Turn the mean of the replies into what is served; return new state too."""
        model = self.stepped(server, mean)
        return Served(send=model, score=model), state

    def aggregate(
        self, state: Any, server: Tensor, replies: Replies, context: Context
    ) -> tuple[Served, Any]:
        """Average, then serve."""
        return self.serve(state, server, self.mean(replies), context)

    def streams(self) -> Weighting | None:
        """Return the weighting, unless a subclass merges the single replies itself."""
        only_the_mean = type(self).aggregate is Averaging.aggregate
        return self.weighting if only_the_mean else None


@dataclass(frozen=True)
class Wrapped:
    """The state of a wrapper."""

    own: Any  # what the wrapper remembers
    inner: Any  # what the method inside it remembers


class Wrapper(Method):
    """A method around another: clients do what the inner one says, then `step` is added.

    Subclasses have a field ``inner``. What the inner method gives, ``fresh.send - server``, is
    the round's update.
    """

    inner: Method
    averages: ClassVar[bool] = False  # whether it serves an average of earlier models

    @property
    def base(self) -> Method:
        """The method at the bottom, which combines the replies."""
        return self.inner.base if isinstance(self.inner, Wrapper) else self.inner

    def begin(self, server: Tensor, context: Context) -> Any:
        """Return the wrapper's own state before the first round."""
        return ()

    def step(
        self, own: Any, server: Tensor, fresh: Served, replies: Replies, context: Context
    ) -> tuple[Served, Any]:
        """Turn the inner method's result of this round into this method's."""
        return fresh, own

    def init(self, server: Tensor, context: Context) -> Wrapped:
        """Begin, around the inner method's own state."""
        return Wrapped(self.begin(server, context), self.inner.init(server, context))

    def aggregate(
        self, state: Wrapped, server: Tensor, replies: Replies, context: Context
    ) -> tuple[Served, Wrapped]:
        """Merge with the inner method, then take the wrapper's step."""
        fresh, inner = self.inner.aggregate(state.inner, server, replies, context)
        served, own = self.step(state.own, server, fresh, replies, context)
        return served, Wrapped(own, inner)

    def rules(self) -> tuple[LocalRule, ...]:
        """Clients do what the inner method says."""
        return self.inner.rules()

    def broadcast(self, state: Wrapped, server: Tensor, context: Context) -> tuple[Any, ...]:
        """Send what the inner method sends."""
        return self.inner.broadcast(state.inner, server, context)

    def plan(self, schedule: Callable[[int], Plan], context: Context) -> Plan:
        """Train as the inner method says."""
        return self.inner.plan(schedule, context)

    def streams(self) -> Weighting | None:
        """Return what the inner method says; a `step` that looks at the replies must say None."""
        return self.inner.streams()

    def cautions(self, setting: Setting) -> Iterator[str]:
        """Pass the inner method's cautions on, and name statistics that an average makes stale."""
        yield from self.inner.cautions(setting)
        if self.averages and setting.statistics:
            yield (
                "an average of models does not fit the BatchNorm statistics of the last one; take "
                "norm='group' or sim.buffers='recalibrate'"
            )
