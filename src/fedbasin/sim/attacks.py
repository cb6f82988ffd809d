"""Hostile clients of a simulation: what they train on, and what they send.

An attack either poisons the rows of hostile clients (`poison`), before the run, or forges what they
send (`forge`), in every round. A forger knows all that the cohort sends: the worst case.

Forging works on rows of differences from what the server sent, d_i = y_i - x. Reports (SCAFFOLD's
variates) and BatchNorm statistics are forged by the same formula. H are the honest rows of the
cohort, mu and sd their mean and standard deviation by coordinate, n the cohort and f the hostile in
it. Where all are hostile, their own rows stand for H.
"""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedbasin.core.bounds import Bounded, within
from fedbasin.core.catalogue import entry
from fedbasin.core.method import Replies
from fedbasin.core.rng import Key, normal
from fedbasin.core.round import Sent
from fedbasin.core.tree import mapped

_NEEDS_CLASSES = "changes labels, and the targets have no classes: take an attack on updates"


class Attack(Bounded, ABC):
    """What hostile clients do. Subclasses are frozen dataclasses entered in the catalogue."""

    def poison(
        self, inputs: np.ndarray, labels: np.ndarray, classes: int, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return what one hostile client trains on in place of its rows."""
        return inputs, labels

    def forge(self, rows: Tensor, hostile: Tensor, key: Key) -> Tensor:
        """Return what the cohort sends [n, P], with the rows of hostile clients forged.

        Args:
            rows: what it would send, as differences from what it was sent [n, P].
            hostile: bool [n].
            key: randomness of this round and of what is forged.
        """
        return rows

    def claimed(self, weights: Tensor, hostile: Tensor) -> Tensor:
        """Return the sample counts that the cohort claims [n]."""
        return weights

    def triggered(self, inputs: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, int] | None:
        """Return test rows that the attack wants to be of a class, and the class; None for none."""
        return None


def _replaced(rows: Tensor, hostile: Tensor, forged: Tensor) -> Tensor:
    """Return rows with one vector [P], or one for each row [n, P], sent by all hostile clients."""
    return torch.where(hostile[:, None], forged, rows)


def _honest(rows: Tensor, hostile: Tensor) -> Tensor:
    return rows if bool(hostile.all()) else rows[~hostile]


def _spread(rows: Tensor) -> Tensor:
    """Return the standard deviation of each column; torch's own `std(0)` takes much longer."""
    return (rows - rows.mean(0)).square().mean(0).sqrt()


@entry("attack", name="sign_flip")
@dataclass(frozen=True)
class SignFlip(Attack):
    """Send the update backwards: b_i = -scale d_i.

    Args:
        scale: how long it is.
    """

    scale: float = 1.0

    def forge(self, rows: Tensor, hostile: Tensor, key: Key) -> Tensor:
        """Flip the own update."""
        return _replaced(rows, hostile, -self.scale * rows)


@entry("attack", paper="Bagdasaryan et al., AISTATS 2020", url="https://arxiv.org/abs/1807.00459")
@dataclass(frozen=True)
class Scaled(Attack):
    """Send a longer update, and claim more samples: b_i = kappa d_i.

    Args:
        kappa: how many times as long; 0 takes n / f, which the plain mean cannot stand.
        claims: how many times its samples a hostile client says it has.
    """

    kappa: float = 0.0
    claims: float = 1.0

    def forge(self, rows: Tensor, hostile: Tensor, key: Key) -> Tensor:
        """Lengthen the own update."""
        kappa = self.kappa or len(rows) / int(hostile.sum())
        return _replaced(rows, hostile, kappa * rows)

    def claimed(self, weights: Tensor, hostile: Tensor) -> Tensor:
        """Claim more samples."""
        return torch.where(hostile, self.claims * weights, weights)


@entry("attack")
@dataclass(frozen=True)
class Gaussian(Attack):
    """Send noise: b_i ~ N(mean, std^2), drawn for each hostile client.

    Args:
        mean: of every coordinate.
        std: of every coordinate.
    """

    mean: float = 0.1
    std: float = 0.1

    def forge(self, rows: Tensor, hostile: Tensor, key: Key) -> Tensor:
        """Draw noise in place of the update."""
        counter = torch.arange(rows.numel(), device=rows.device).view(rows.shape)
        noise = normal(key.tensor(rows.device), counter).to(rows.dtype)
        return _replaced(rows, hostile, self.mean + self.std * noise)


@entry("attack", name="label_flip")
@dataclass(frozen=True)
class LabelFlip(Attack):
    """Train on wrong labels: y -> C - 1 - y, or the next class.

    Args:
        to: ``"mirror"`` (C - 1 - y) or ``"next"`` (y + 1, of the last class the first).
    """

    to: Literal["mirror", "next"] = "mirror"

    def poison(
        self, inputs: np.ndarray, labels: np.ndarray, classes: int, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Change all labels."""
        if not classes:
            raise ValueError(f"label_flip {_NEEDS_CLASSES}")
        wrong = classes - 1 - labels if self.to == "mirror" else (labels + 1) % classes
        return inputs, wrong


@entry("attack", paper="Baruch et al., NeurIPS 2019", url="https://arxiv.org/abs/1902.06156")
@dataclass(frozen=True)
class ALIE(Attack):
    """A little is enough: all hostile clients send mu - z sd, inside the honest cloud.

    The paper's z is PhiInv((n - f - s) / (n - f)) with s = floor(n/2 + 1) - f: 0.25 for 5 of 25,
    and 0 for 2 of 10, where it does nothing. For small cohorts give 1 to 1.5.

    Args:
        z: how many standard deviations; 0 takes the paper's.
    """

    z: float = 0.0

    def forge(self, rows: Tensor, hostile: Tensor, key: Key) -> Tensor:
        """Shift the mean of the honest by their spread."""
        honest = _honest(rows, hostile)
        z = self.z or largest_z(len(rows), int(hostile.sum()))
        forged = honest.mean(0) - z * _spread(honest)
        return _replaced(rows, hostile, forged)


def largest_z(count: int, bad: int) -> float:
    """Return the paper's z for n clients of which f are hostile."""
    honest = count - bad
    supporters = count // 2 + 1 - bad
    share = (honest - supporters) / honest if honest else 1.0
    if not 0 < share < 1:  # no honest client is needed, or all of them
        return 1.5
    return NormalDist().inv_cdf(share)


@entry("attack", paper="Xie et al., UAI 2019", url="https://arxiv.org/abs/1903.03936")
@dataclass(frozen=True)
class IPM(Attack):
    """Inner product manipulation: all hostile clients send -eps mu.

    Args:
        eps: 0.1 hides near the honest; (n - f) / f or more turns the plain mean around.
    """

    eps: float = 0.1

    def forge(self, rows: Tensor, hostile: Tensor, key: Key) -> Tensor:
        """Send the mean of the honest backwards."""
        return _replaced(rows, hostile, -self.eps * _honest(rows, hostile).mean(0))


@entry(
    "attack",
    name="min_max",
    paper="Shejwalkar and Houmansadr, NDSS 2021",
    url="https://www.ndss-symposium.org/ndss-paper/manipulating-the-byzantine/",
)
@dataclass(frozen=True)
class MinMax(Attack):
    """The longest shift of mu that stays as near to all honest rows as these are to each other.

    b = mu + g dev, with the largest g for which max_h |b - h| <= max_{h,h'} |h - h'|.

    Args:
        dev: along ``"unit"`` (-mu / |mu|), ``"sign"`` (-sign mu) or ``"std"`` (-sd).
    """

    dev: Literal["unit", "sign", "std"] = "std"

    def forge(self, rows: Tensor, hostile: Tensor, key: Key) -> Tensor:
        """Shift the mean of the honest as far as it is not noticed."""
        honest = _honest(rows, hostile).double()
        mean = honest.mean(0)
        if self.dev == "unit":
            away = -mean / mean.norm().clamp(min=1e-12)
        elif self.dev == "sign":
            away = -mean.sign()
        else:
            away = -_spread(honest)
        length = away.square().sum()
        if not bool(length > 0):
            return _replaced(rows, hostile, mean.to(rows.dtype))
        apart = mean - honest
        inner = apart @ away
        radius = torch.cdist(honest, honest).max().square()
        under = inner.square() - length * (apart.square().sum(1) - radius)
        far = ((under.clamp(min=0).sqrt() - inner) / length).min()
        return _replaced(rows, hostile, (mean + far * away).to(rows.dtype))


@entry("attack", paper="Gu et al., 2017", url="https://arxiv.org/abs/1708.06733")
@dataclass(frozen=True)
class Backdoor(Attack):
    """Teach the model to call every image with a bright square in a corner one class.

    The share of other classes' test images with the square that the model calls so is in the
    record, `attack_success`.

    Args:
        target: the class.
        square: side of the square in the bottom right corner, in pixels.
        share: of a hostile client's rows that carry it.
        kappa: how many times as long the update is that it sends.
    """

    target: int = 0
    square: int = 3
    share: float = within("(0, 1]", default=0.5)
    kappa: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.square < 1 or self.target < 0:
            raise ValueError(f"square must be at least 1 and target at least 0, got {self}")

    def poison(
        self, inputs: np.ndarray, labels: np.ndarray, classes: int, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Stamp some rows and call them the target."""
        if not self.target < classes:
            raise ValueError(f"backdoor(target={self.target}): there are {classes} classes")
        chosen = rng.random(len(labels)) < self.share
        stamped = np.array(inputs)
        stamped[chosen] = self._stamped(inputs[chosen])
        return stamped, np.where(chosen, self.target, labels)

    def forge(self, rows: Tensor, hostile: Tensor, key: Key) -> Tensor:
        """Lengthen the update."""
        return rows if self.kappa == 1 else _replaced(rows, hostile, self.kappa * rows)

    def triggered(self, inputs: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, int]:
        """Return the test rows of other classes with the square."""
        return self._stamped(inputs[labels != self.target]), self.target

    def _stamped(self, images: np.ndarray) -> np.ndarray:
        if images.ndim != 4 or images.dtype != np.uint8:
            raise ValueError("backdoor stamps pixels, and the inputs are no images")
        stamped = np.array(images)
        stamped[:, :, -self.square :, -self.square :] = 255
        return stamped


@dataclass(frozen=True)
class Hostility:
    """The hostile clients of a run.

    Args:
        attack: what they do.
        clients: who they are.
    """

    attack: Attack
    clients: frozenset[int]

    def among(self, clients: Tensor) -> Tensor:
        """Return which clients of a cohort [n] are hostile, bool [n]."""
        known = torch.tensor(sorted(self.clients), dtype=clients.dtype, device=clients.device)
        return torch.isin(clients, known)

    def forged(self, replies: Replies, sent: Sent, key: Key) -> Replies:
        """Return what a cohort sends after its hostile members have forged their part.

        Args:
            replies: what it would send.
            sent: what it was sent.
            key: the run's randomness.
        """
        hostile = self.among(replies.clients)
        if not bool(hostile.any()):
            return replies
        keys = _numbered(key.fold("attack", sent.round))

        def forge(rows: Tensor) -> Tensor:
            if not rows.is_floating_point() or not rows.numel():
                return rows
            flat = rows.reshape(len(rows), -1)
            return self.attack.forge(flat, hostile, next(keys)).reshape(rows.shape)

        models = sent.vector + forge(replies.models - sent.vector)
        honest_stay = torch.where(hostile[:, None], models, replies.models)
        buffers = sent.buffers + forge(replies.buffers - sent.buffers)
        return replace(
            replies,
            models=honest_stay,
            weights=self.attack.claimed(replies.weights, hostile),
            buffers=torch.where(hostile[:, None], buffers, replies.buffers),
            reports=mapped(forge, replies.reports),
        )


def _numbered(key: Key) -> Iterator[Key]:
    """Yield a key of its own for each thing that is forged in a round."""
    number = 0
    while True:
        yield key.fold(number)
        number += 1


def draw_hostile(share: float, eligible: np.ndarray, key: Key) -> frozenset[int]:
    """Draw floor(share N) hostile clients of those that hold data."""
    count = math.floor(share * len(eligible) + 1e-9)
    drawn = key.fold("hostile").numpy().choice(eligible, size=count, replace=False)
    return frozenset(drawn.tolist())
