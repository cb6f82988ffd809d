"""Bounded and noisy uploads: what a client does so that the server learns little of it alone.

In a simulation noise is keyed like everything else, so that runs can be repeated. A real client
must draw noise that nobody can draw again: it trains by `without_noise` and adds `secret_noise`.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedbasin.core.bounds import above, at_least
from fedbasin.core.catalogue import entry
from fedbasin.core.net import Net
from fedbasin.core.rng import fold_in, normal
from fedbasin.core.rule import Finish, LocalRule, LossInputs, Start

_NOISE = 0x6E6F69  # what the step's randomness is folded with
LARGEST_NORMAL = math.sqrt(-2 * math.log(2.0**-54))  # that `secret_normal` draws: 8.65


class NoiseCarry(NamedTuple):
    """What a rule that adds noise carries through the steps."""

    key: Tensor  # int64 [2], the last step's randomness


def clipped(vector: Tensor, start: Tensor, bound: Tensor | float) -> Tensor:
    """Return the model no farther than the bound from where the client started."""
    update = vector - start
    length = update.norm()
    scale = torch.where(length > bound, bound / length, torch.ones_like(length))
    return start + update * scale.to(update.dtype)


def noisy(vector: Tensor, key: Tensor, std: Tensor | float) -> Tensor:
    """Return the model with Gaussian noise on every parameter."""
    counter = torch.arange(vector.numel(), device=vector.device)
    noise = normal(fold_in(key, _NOISE), counter).to(vector.dtype)
    return vector + std * noise


class AddsNoise(LocalRule, ABC):
    """A rule that adds Gaussian noise to the upload, as the last thing that happens to it."""

    @abstractmethod
    def noise_std(self, shared: Any) -> float:
        """Return the noise's standard deviation, from what the server sent to the rule."""

    @abstractmethod
    def bound(self, shared: Any) -> float:
        """Return the largest length of the update that gets the noise."""

    @abstractmethod
    def silenced(self) -> LocalRule:
        """Return the rule without its noise."""


def without_noise(rules: Sequence[LocalRule]) -> tuple[LocalRule, ...]:
    """Return rules that do the same without noise."""
    return tuple(rule.silenced() if isinstance(rule, AddsNoise) else rule for rule in rules)


def secret_noise(vector: Tensor, rules: Sequence[LocalRule], shared: Sequence[Any]) -> Tensor:
    """Return what was left out of `without_noise`, from the operating system's randomness."""
    total = torch.zeros_like(vector)
    for rule, sent in zip(rules, shared, strict=True):
        if isinstance(rule, AddsNoise) and (std := rule.noise_std(sent)):
            total = total + std * secret_normal(vector.numel()).to(vector)
    return total


def secret_normal(count: int) -> Tensor:
    """Draw numbers from N(0, 1) that nobody can draw again, float64 [count]."""
    pairs = (count + 1) // 2
    words = np.frombuffer(os.urandom(16 * pairs), dtype=np.uint64)
    units = ((words >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53  # in (0, 1)
    radius = np.sqrt(-2 * np.log(units[:pairs]))  # Box-Muller
    angle = 2 * np.pi * units[pairs:]
    drawn = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    return torch.from_numpy(drawn[:count])


@entry("rule", name="clip_update")
@dataclass(frozen=True)
class ClipUpdate(LocalRule):
    """Send an update no longer than a bound: d_i min(1, bound / |d_i|), over all parameters.

    Args:
        bound: the largest length.
    """

    bound: float = above(0, default=1.0)

    def upload(self, carry: tuple[()], start: Start, finish: Finish) -> Tensor:
        """Shorten the update."""
        return clipped(finish.vector, start.vector, self.bound)


@entry("rule", name="local_dp", paper="Truex et al., EdgeSys 2020")
@dataclass(frozen=True)
class LocalDP(AddsNoise):
    """Clip the update and add noise on the client itself, so that nobody else sees it plain.

    Each client adds N(0, (noise clip)^2) to every parameter. A client that took part t times has
    the epsilon of a Gaussian mechanism composed t times: no cohort hides it. The noise of the mean
    is sqrt(M) times that of `dp` at the same noise. What a method's own rules report beside the
    model (SCAFFOLD's variates) stays plain: with such a method nothing is private.

    Args:
        clip: the largest length of an update, S.
        noise: standard deviation of the noise over S, z.
    """

    clip: float = above(0, default=1.0)
    noise: float = at_least(0, default=1.0)

    def begin(self, start: Start, net: Net) -> NoiseCarry:
        """Wait for the first step's randomness."""
        return NoiseCarry(torch.zeros(2, dtype=torch.int64, device=start.vector.device))

    def loss(self, carry: NoiseCarry, value: Tensor, view: LossInputs) -> tuple[Tensor, NoiseCarry]:
        """Keep this step's randomness."""
        return value, NoiseCarry(view.key)

    def upload(self, carry: NoiseCarry, start: Start, finish: Finish) -> Tensor:
        """Shorten the update and add noise."""
        short = clipped(finish.vector, start.vector, self.clip)
        return noisy(short, carry.key, self.noise * self.clip) if self.noise else short

    def noise_std(self, shared: Any) -> float:
        """Return z S."""
        return self.noise * self.clip

    def bound(self, shared: Any) -> float:
        """Return S."""
        return self.clip

    def silenced(self) -> LocalRule:
        """Clip alone."""
        return replace(self, noise=0.0)


class ClipAndNoise(NamedTuple):
    """What the server of `dp` sends to its clients."""

    bound: Tensor  # S
    std: Tensor  # of the noise that each client adds; 0 where the server adds it


@dataclass(frozen=True)
class PrivateUpload(AddsNoise):
    """The client half of `dp`: clip to the server's bound, and add a share of the noise if asked.

    Args:
        adds_noise: whether clients add the noise.
    """

    adds_noise: bool = False

    def begin(self, start: Start, net: Net) -> NoiseCarry:
        """Wait for the first step's randomness."""
        return NoiseCarry(torch.zeros(2, dtype=torch.int64, device=start.vector.device))

    def loss(self, carry: NoiseCarry, value: Tensor, view: LossInputs) -> tuple[Tensor, NoiseCarry]:
        """Keep this step's randomness."""
        return value, NoiseCarry(view.key)

    def upload(self, carry: NoiseCarry, start: Start, finish: Finish) -> Tensor:
        """Shorten the update, and add noise where clients do."""
        sent: ClipAndNoise = start.shared
        short = clipped(finish.vector, start.vector, sent.bound)
        return noisy(short, carry.key, sent.std) if self.adds_noise else short

    def noise_std(self, shared: ClipAndNoise) -> float:
        """Return the client's share, as the server says."""
        return float(shared.std) if self.adds_noise else 0.0

    def bound(self, shared: ClipAndNoise) -> float:
        """Return S, as the server says."""
        return float(shared.bound)

    def silenced(self) -> LocalRule:
        """Clip alone."""
        return PrivateUpload()
