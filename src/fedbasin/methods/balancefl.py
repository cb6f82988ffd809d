r"""BalanceFL: clients train as if their classes were balanced and complete.

    rows:    drawn so that every owned class is equally likely (`balanced_rows`)
    client:  h~ = h + e with chance 1 - n_c / max_c n_c, else h,    e ~ N(0, Sigma)
             loss =   CE(z~_P, y)                                   z~ = head(h~)
                    + lambda CE(softmax(t_A / T), softmax(z_A / T)) z = head(h)
                    - mu sum_b H(softmax(z_P))
    server:  w+ = sum_i p_i y_i

P are the classes the client owns and A those it lacks: z_P are the logits of the owned classes
alone. t are the logits of the received model (the teacher). Sigma = sum_c n_c/n Cov_c is the mean
covariance of the features within a class under the received model. H is the entropy; its sum runs
over the batch, so mu acts more strongly in larger batches.

Departures from the paper: owned and absent classes are those of the client, as the text says (the
code: of the batch). Cov_c divides by n_c, not n_c - 1. The teacher runs in evaluation mode. Clients
train with the configured optimiser and head (the code: Adam 0.005, weight decay 1e-4, no bias).
The noise needs features; the rest does not.
Cost: one model down, one up; one more forward pass a step, and d x d numbers a client.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fedbasin.core.bounds import above, at_least
from fedbasin.core.catalogue import entry
from fedbasin.core.method import Averaging
from fedbasin.core.net import Net
from fedbasin.core.rng import fold_in, normal, uniform
from fedbasin.core.rule import LocalRule, LossInputs, Rules, Start, SurveyBatch
from fedbasin.core.space import Range
from fedbasin.core.vectors import Weighting
from fedbasin.local.losses import BalancedRows
from fedbasin.local.step import batch_mean, one_hot

# What a step's key is folded with.
_COIN = 1
_NOISE = 2


class Moments(NamedTuple):
    """Sums over a client's rows under the received model."""

    features: Tensor  # [classes, d] sum of the features of each class
    squares: Tensor  # [d, d] sum of h h^T


class Teaching(NamedTuple):
    """What a client carries through its steps."""

    vector: Tensor  # [P] the received model
    buffers: Tensor  # [Q] and its statistics
    owned: Tensor  # [classes] whether the client has the class
    chance: Tensor  # [classes] of noise on a sample of the class
    root: Tensor  # [d, d] the square root of Sigma; [0, 0] without noise


@dataclass(frozen=True)
class BalancedLearner(BalancedRows):
    """The client half."""

    owns: ClassVar[frozenset[Literal["loss", "rows"]]] = frozenset({"loss", "rows"})

    noise: bool
    distil: float
    temperature: float
    entropy: float

    @property
    def surveys(self) -> bool:  # type: ignore[override]
        """Noise needs the features' covariance."""
        return self.noise

    def survey(self, look: SurveyBatch) -> Moments:
        """Sum features and their products."""
        outputs = look.net(look.vector, look.batch.inputs, look.buffers)
        features = outputs.features
        if features is None:
            raise ValueError(
                "balancefl(noise=True) works on features: the network needs `features` and `head`"
            )
        weighted = features * look.batch.weight[:, None]
        member = one_hot(look.batch.labels, outputs.logits)
        return Moments(member.T @ weighted, weighted.T @ features)

    def begin(self, start: Start, net: Net) -> Teaching:
        """Form the noise and remember the teacher."""
        assert start.buffers is not None
        counts = start.class_counts
        root = start.vector.new_zeros(0, 0)
        if self.noise:
            means = start.survey.features / counts.clamp(min=1)[:, None]
            within = start.survey.squares - start.survey.features.T @ means
            root = symmetric_root(within / start.examples.clamp(min=1))
        chance = 1 - counts / counts.max().clamp(min=1)
        return Teaching(start.vector, start.buffers, counts > 0, chance, root)

    def loss(self, carry: Teaching, value: Tensor, view: LossInputs) -> tuple[Tensor, Teaching]:
        """Replace the cross-entropy by the three terms."""
        logits = view.outputs.logits
        batch = view.batch
        owned = logits.masked_fill(~carry.owned, -torch.inf)
        noisy = self._noisy(carry, view).masked_fill(~carry.owned, -torch.inf)
        total = batch_mean(F.cross_entropy(noisy, batch.labels, reduction="none"), batch)
        if self.distil:
            teacher = view.net(carry.vector, batch.inputs, carry.buffers).logits
            total = total + self.distil * batch_mean(
                self._distilled(carry.owned, logits, teacher), batch
            )
        if self.entropy:
            logs = F.log_softmax(owned, 1).masked_fill(~carry.owned, 0.0)
            each = -(logs.exp().masked_fill(~carry.owned, 0.0) * logs).sum(1)
            total = total - self.entropy * (each * batch.weight).sum()
        return total, carry

    def _noisy(self, carry: Teaching, view: LossInputs) -> Tensor:
        """Return the logits of features with noise."""
        features = view.outputs.features
        if not self.noise or features is None:
            return view.outputs.logits
        counter = torch.arange(features.numel(), device=features.device).view_as(features)
        drawn = normal(fold_in(view.key, _NOISE), counter).to(features.dtype)
        coin = uniform(fold_in(view.key, _COIN), counter[:, 0])
        hit = (coin < carry.chance[view.batch.labels]).to(features.dtype)
        return view.net.classify(view.vector, features + hit[:, None] * (drawn @ carry.root))

    def _distilled(self, owned: Tensor, logits: Tensor, teacher: Tensor) -> Tensor:
        """Return the cross-entropy [B] to the teacher over absent classes; 0 if there are none."""
        # Where no class is absent, all are kept in: the mask of everything would be 0 / 0.
        out = owned & ~owned.all()
        target = F.softmax((teacher / self.temperature).masked_fill(out, -torch.inf), 1)
        logs = F.log_softmax((logits / self.temperature).masked_fill(out, -torch.inf), 1)
        each = -(target * logs.masked_fill(out, 0.0)).sum(1)
        return torch.where(owned.all(), 0.0, each)


def symmetric_root(covariance: Tensor) -> Tensor:
    """Return the symmetric square root [d, d]; directions of no more than rounding are dropped.

    NaN where the covariance is not finite, as after steps that were too large: the run then ends
    as diverged.
    """
    finite = covariance.isfinite().all()
    values, vectors = eigen(torch.where(finite, covariance, 0.0))
    least = values.amax(-1) * len(covariance) * 10 * torch.finfo(covariance.dtype).eps
    sizes = torch.where(values > least, values, 0.0).sqrt()
    root: Tensor = (vectors * sizes) @ vectors.T
    return torch.where(finite, root, torch.nan)


def eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and eigenvectors; in float64 where float32 does not converge."""
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # torch's stubs leave it out
        largest = matrix.abs().amax().clamp(min=torch.finfo(matrix.dtype).tiny).double()
        values, vectors = torch.linalg.eigh(matrix.double() / largest)
        values = (values * largest).to(matrix.dtype)
        vectors = vectors.to(matrix.dtype)
    return values, vectors


@entry(
    "method",
    name="balancefl",
    paper="Shuai et al., IPSN 2022",
    url="https://github.com/sxontheway/BalanceFL",
    needs=("classes", "features"),
    is_fedavg_when="never: rows are drawn with replacement",
    tunable={"distil": Range(0.1, 10.0, "log"), "temperature": Range(1.0, 8.0, "log")},
)
@dataclass(frozen=True)
class BalanceFL(Averaging):
    """Balanced rows, noise on scarce classes, and distillation for classes a client lacks.

    Args:
        noise: whether features of scarce classes are varied.
        distil: lambda, weight of the distillation on absent classes.
        temperature: T of the distillation.
        entropy: mu, weight of the entropy that is kept up.
        weighting: p_i by ``"samples"`` or ``"uniform"``.
        local: further rules for the clients.
    """

    noise: bool = True
    distil: float = at_least(0, default=1.0)
    temperature: float = above(0, default=2.0)
    entropy: float = at_least(0, default=0.002)
    weighting: Weighting = "samples"
    local: Rules = ()

    @property
    def optional_needs(self) -> frozenset[str]:
        """Without noise it does not look at features."""
        return frozenset() if self.noise else frozenset({"features"})

    def own_rules(self) -> tuple[LocalRule, ...]:
        """Return the client half."""
        return (BalancedLearner(self.noise, self.distil, self.temperature, self.entropy),)
