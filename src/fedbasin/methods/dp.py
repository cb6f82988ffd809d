r"""Client-level differential privacy: clip every update, add noise to their sum.

    u_i = d_i min(1, S / |d_i|),   d_i = y_i - w              (on the client, over all parameters)
    w'  = w + 1/M (sum_{i in S_t} u_i + N(0, z^2 S^2 I))      (M: the EXPECTED cohort, a constant)
    w+  = inner(w, one reply w')                              (post-processing is free)

with S = clip and z = noise. With `adaptive` the clip follows a quantile of the lengths:

    b  = (sum_i (1[|d_i| <= S] - 1/2) + N(0, s_b^2) + M/2) / M,   s_b = M / 20
    S+ = S exp(-0.2 (b - quantile))

and updates get the noise z_D = (z^-2 - (2 s_b)^-2)^(-1/2), so that both together cost z. A client
that joins moves the sum of b by 1/2, which z_D counts on. So M/2 must be that of the expected
cohort: with the real one the sum would be that of 1[|d_i| <= S], which a client moves by 1.

Epsilon after each round is in the record, for clients joining or leaving, at `delta`; it needs
`pip install 'fedbasin[dp]'`. Cohorts should be drawn by `sim.participation = "poisson(rate=q)"`.
Cohorts of fixed size are accounted for replacing a client, which costs much more. Of other draws
nothing is gained: epsilon is for a client of the cohort that sends its update or one of zero. An
empty cohort still gets its noise. By Renyi divergences (`accountant="rdp"`) epsilon is a bound for
every draw. By privacy loss distributions ("pld") it is usually 10 to 20 % smaller and takes
0.04 to 0.1 s a round; nothing is proven so for cohorts of fixed size, which are refused.

With `noise_by="clients"` each client adds N(0, z^2 S^2 / M) itself, and w' is the mean over the m
clients that answer. Under secure aggregation nobody sees less noise than that of the sum. Who
answers is known to the server, so no draw hides anyone, and the m shares of noise are counted as
they came: epsilon is that of one Gaussian with z / sqrt(sum over rounds of M / m).

The inner method must make its model of the uniform mean of the updates alone (it says `streams()`
"uniform"); methods that look at single replies, at reports or at sample counts are refused, and so
are wrappers around `dp` that look at replies.
Noise is keyed by seed and round, so a resumed run repeats it and releases nothing new. On Flower,
where clients know the seed, noise comes from the operating system's generator, new in every start:
a round that was stopped after its noisy sum went out and is repeated costs once more.

Departures from the paper: none known. Not protected: losses, norms and metrics in the record. Not
counted: that noise has 24 bits, and is rounded with the model (Mironov, CCS 2012).
What to watch: delta must be below 1/N. In runs of 100 clients no epsilon means much.
Cost: one model down, one up. Server: C x P numbers, one number of memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedbasin.core.catalogue import entry
from fedbasin.core.method import Context, Method, Replies, Sampling, Served, Wrapped, Wrapper
from fedbasin.core.protocols import Private
from fedbasin.core.rng import normal
from fedbasin.core.rule import LocalRule, Setting
from fedbasin.core.space import Range
from fedbasin.core.vectors import Weighting
from fedbasin.local.privacy import ClipAndNoise, PrivateUpload, secret_normal
from fedbasin.methods.fedavg import FedAvg
from fedbasin.methods.parts.accounting import Accountant, check_accountant, epsilon, installed

_CLIP_LR = 0.2  # eta_c
_AT_BOUND = 1 - 1e-4  # a length above this share of the clip has been clipped


@dataclass(frozen=True)
class DPState:
    """What the server remembers."""

    clip: Tensor  # 0-d float64, S
    released: int  # noisy sums so far
    shares: float  # sum over them of M / m, where clients add the noise


class DPNotes(NamedTuple):
    """What a round leaves in the record."""

    clip: Tensor  # S, with which the cohort was clipped
    noise_std: float  # of the noise on each parameter of the mean


class EpsilonNotes(NamedTuple):
    """What the rounds so far cost."""

    epsilon: float


@entry(
    "method",
    name="dp",
    paper="McMahan et al., ICLR 2018; Andrew et al., NeurIPS 2021",
    url="https://arxiv.org/abs/1710.06963",
    is_fedavg_when={"clip": float("inf"), "noise": 0.0},
    tunable={"clip": Range(0.1, 10.0, "log")},
)
@dataclass(frozen=True)
class DP(Private, Wrapper):
    """Clip the clients' updates and add noise, before a method of their uniform mean.

    Args:
        inner: a method of the uniform mean, such as ``fedavg(weighting='uniform')``.
        clip: S, the largest length of an update; with `adaptive` the first one.
        noise: z, standard deviation of the noise on the sum over S.
        adaptive: whether S follows a quantile of the lengths.
        quantile: the share of updates that shall be no longer than S.
        noise_by: whether the ``"server"`` adds the noise, or each of the ``"clients"`` 1 / sqrt(M)
            of it, under secure aggregation (`Secure`), which shows no single update.
        delta: the chance that the guarantee fails, for epsilon in the record.
        accountant: what computes epsilon: ``"rdp"``, or the tighter ``"pld"``, which does not know
            cohorts of fixed size.
    """

    inner: Method = field(default_factory=lambda: FedAvg(weighting="uniform"))
    clip: float = 1.0
    noise: float = 1.0
    adaptive: bool = False
    quantile: float = 0.5
    noise_by: Literal["server", "clients"] = "server"
    delta: float = 1e-5
    accountant: Accountant = "rdp"

    def __post_init__(self) -> None:
        if not self.clip > 0:
            raise ValueError(f"clip must be above 0, got {self.clip}")
        if not self.noise >= 0:
            raise ValueError(f"noise must be at least 0, got {self.noise}")
        if not 0 < self.quantile < 1:
            raise ValueError(f"quantile must be in (0, 1), got {self.quantile}")
        if not 0 < self.delta < 1:
            raise ValueError(f"delta must be in (0, 1), got {self.delta}")
        if self.accountant not in ("rdp", "pld"):
            raise ValueError(f"accountant is {self.accountant!r}: write 'rdp' or 'pld'")
        if self.adaptive and self.noise_by == "clients":
            raise ValueError(
                "adaptive=True needs the lengths of single updates, which noise_by='clients' "
                "hides: give a fixed clip, or noise_by='server'"
            )
        if math.isinf(self.clip) and (self.noise or self.adaptive):
            raise ValueError("an infinite clip bounds nothing: give a finite one, or noise=0")
        _refuse_what_is_no_mean(self.inner)

    def begin(self, server: Tensor, context: Context) -> DPState:
        """Start with the given clip, where the accountant knows how cohorts are drawn."""
        if context.sampling is not None:
            check_accountant(self.accountant, self._seen(context))
        clip = torch.tensor(self.clip, dtype=torch.float64, device=server.device)
        return DPState(clip, 0, 0.0)

    def rules(self) -> tuple[LocalRule, ...]:
        """Clients clip what they send, after all that the inner method's rules do."""
        return (*self.inner.rules(), PrivateUpload(self.noise_by == "clients"))

    def broadcast(self, state: Wrapped, server: Tensor, context: Context) -> tuple[Any, ...]:
        """Send the clip and the clients' share of the noise."""
        clip = state.own.clip
        std = clip * 0
        if self.noise_by == "clients" and self.noise:
            cohort = _sampling(context).expected
            std = self.noise * clip / math.sqrt(cohort)
        sent = ClipAndNoise(clip.to(server.dtype), std.to(server.dtype))
        return (*self.inner.broadcast(state.inner, server, context), sent)

    def aggregate(
        self, state: Wrapped, server: Tensor, replies: Replies, context: Context
    ) -> tuple[Served, Wrapped]:
        """Sum the clipped updates, add noise, and hand the mean to the inner method."""
        own: DPState = state.own
        cohort = _sampling(context).expected
        updates = replies.models[replies.weights > 0] - server
        if self.noise_by == "clients":
            return self._of_clients(state, server, updates, cohort, context)
        lengths = updates.norm(dim=1).double()
        far = lengths > own.clip
        scale = torch.where(far, own.clip / lengths, torch.ones_like(lengths))
        total = scale.to(updates.dtype) @ updates
        std = 0.0
        if self.noise:
            std = self._update_noise(cohort) * float(own.clip)
            total = total + std * _draw(context, "updates", server)
        served, inner = self._inside(state.inner, server, server + total / cohort, context)
        served = served.noted(DPNotes(own.clip, std / cohort))
        after = DPState(self._next_clip(own, lengths, cohort, context), own.released + 1, 0.0)
        if self.noise and installed():
            spent = epsilon(
                self.noise, after.released, self.delta, self._seen(context), self.accountant
            )
            served = served.noted(EpsilonNotes(spent))
        return served, Wrapped(after, inner)

    def _of_clients(
        self, state: Wrapped, server: Tensor, updates: Tensor, cohort: float, context: Context
    ) -> tuple[Served, Wrapped]:
        """Average updates that clients have clipped and made noisy; a sum of them is one row."""
        own: DPState = state.own
        if not len(updates):  # nothing was released
            served, inner = self._inside(state.inner, server, server, context)
            return served, Wrapped(own, inner)
        answered = context.answered or cohort
        served, inner = self._inside(state.inner, server, server + updates.mean(0), context)
        std = self.noise * float(own.clip) / math.sqrt(cohort * answered) if self.noise else 0.0
        served = served.noted(DPNotes(own.clip, std))
        after = DPState(own.clip, own.released + 1, own.shares + cohort / answered)
        if self.noise and installed():
            once = round(self.noise / math.sqrt(after.shares), 12)
            spent = epsilon(once, 1, self.delta, self._seen(context), self.accountant)
            served = served.noted(EpsilonNotes(spent))
        return served, Wrapped(after, inner)

    def seen(self, drawn: Sampling) -> Sampling:
        """Return how cohorts are drawn as far as those who see the noisy sums do not know it."""
        return drawn if self.noise_by == "server" else drawn._replace(kind="other")

    def guarantee(self) -> dict[str, Any]:
        """Name the accountant, where epsilon is recorded."""
        if not self.noise or not installed():
            return {}
        return {"delta": self.delta, "accountant": self.accountant}

    def _seen(self, context: Context) -> Sampling:
        return self.seen(_sampling(context))

    def _inside(
        self, state: Any, server: Tensor, mean: Tensor, context: Context
    ) -> tuple[Served, Any]:
        return self.inner.aggregate(state, server, _one_reply(mean), context)

    def streams(self) -> Weighting | None:
        """Clip single replies, unless clients do that."""
        return "uniform" if self.noise_by == "clients" else None

    def cautions(self, setting: Setting) -> Iterator[str]:
        """Say where epsilon means little or is not known."""
        yield from super().cautions(setting)
        if not self.noise:
            yield "noise = 0 clips alone: nothing is private"
            return
        if not installed():
            yield "epsilon is not recorded: pip install 'fedbasin[dp]'"
        if setting.clients and self.delta >= 1 / setting.clients:
            yield (
                f"delta = {self.delta:g} is not below 1 / N = 1 / {setting.clients}: giving one "
                "client's data away would satisfy it, so epsilon means nothing; lower delta"
            )
        if 0 < setting.clients < 1000:
            yield (
                f"with {setting.clients} clients no epsilon that lets a model learn says much; "
                "papers have 1,000 to millions"
            )

    def _update_noise(self, cohort: float) -> float:
        """Return z for the updates: more than `noise` where a part is spent on the clip."""
        if not self.adaptive:
            return self.noise
        spread = 2 * cohort / 20
        if not self.noise < spread:
            raise ValueError(
                f"dp(adaptive=True, noise={self.noise:g}): the noise must be below a tenth of the "
                f"expected cohort, {cohort:g}: raise the participation or lower the noise"
            )
        return float((self.noise**-2 - spread**-2) ** -0.5)

    def _next_clip(self, own: DPState, lengths: Tensor, cohort: float, context: Context) -> Tensor:
        """Move the clip towards the quantile of the lengths, which is seen through noise too."""
        if not self.adaptive:
            return own.clip
        short = (lengths < _AT_BOUND * own.clip).double()
        count = (short - 0.5).sum() + cohort / 2
        if self.noise:
            count = count + cohort / 20 * _draw(context, "bits", own.clip[None])[0]
        return own.clip * torch.exp(-_CLIP_LR * (count / cohort - self.quantile))


def _refuse_what_is_no_mean(inner: Method) -> None:
    weighting = inner.streams()
    if weighting == "uniform":
        return
    if weighting == "samples":
        why = "weighs updates by sample counts, so a clip does not bound one client's share"
        how = "give its base weighting='uniform'"
    else:
        why = (
            "looks at single replies, reports or server data, not at the mean of the updates alone"
        )
        how = "take fedavg(weighting='uniform'), or a server optimiser or averager around it"
    raise ValueError(f"dp({inner}): {inner} {why}; {how}")


def _sampling(context: Context) -> Sampling:
    if context.sampling is None:
        raise ValueError("dp needs to know how cohorts are drawn: give Context(sampling=...)")
    return context.sampling


def _draw(context: Context, what: str, like: Tensor) -> Tensor:
    """Draw standard normal noise, once for each round and purpose."""
    if context.real:
        return secret_normal(like.numel()).to(like)
    key = context.key.fold("dp", what).tensor(like.device)
    counter = torch.arange(like.numel(), device=like.device)
    return normal(key, counter).to(like.dtype)


def _one_reply(model: Tensor) -> Replies:
    """Return a cohort of one client that sends a model; nothing of the real one shows."""
    one = torch.ones(1, dtype=torch.float64, device=model.device)
    return Replies(
        models=model[None],
        weights=one,
        clients=torch.zeros(1, dtype=torch.int64, device=model.device),
        steps=one,
        lr_sum=one,
        effective_steps=one,
        last_loss=model.new_zeros(1),
        train_loss=model.new_zeros(1),
        buffers=model.new_zeros(1, 0),
    )
