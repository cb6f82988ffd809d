"""Randomness keyed by what it is for: (seed, purpose, round, client).

Nothing in fedbasin draws from a global generator. A `Key` is 64 bits derived from the seed
and a list of words, so that two methods with the same seed see the same initial model,
cohorts, batches and augmentation, and two seeds share nothing.

On the device, random numbers come from a counter-based hash of the key: element i of a
draw is `mix(i, key)`. That gives the same bits in a loop, under `vmap`, compiled, and on
CPU or GPU, which no stateful generator does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class Key:
    """A 64-bit name for a stream of random numbers."""

    bits: int

    def fold(self, *words: int | str) -> Key:
        """Derive the key for a narrower purpose, as in ``key.fold("cohort", round)``."""
        text = "\x1f".join([f"{self.bits:016x}", *(f"{type(w).__name__}:{w}" for w in words)])
        return Key(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little"))

    def numpy(self) -> np.random.Generator:
        """Return a NumPy generator of its own for this key."""
        return np.random.default_rng(self.bits)

    def tensor(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the two 32-bit words of the key as an int64 tensor [2], for the draws below."""
        return torch.tensor([self.bits & _WORD, self.bits >> 32], dtype=torch.int64, device=device)


def root(seed: int) -> Key:
    """Return the key from which a run with this seed derives all others."""
    return Key(0).fold("fedbasin", seed)


def keys_tensor(keys: list[Key], device: torch.device | str = "cpu") -> Tensor:
    """Stack the keys of a cohort into an int64 tensor [C, 2]."""
    words = [[key.bits & _WORD, key.bits >> 32] for key in keys]
    return torch.tensor(words, dtype=torch.int64, device=device).reshape(len(keys), 2)


@contextmanager
def torch_draws_from(key: Key) -> Iterator[None]:
    """Let code that only knows torch's global generator (weight initialisers) draw from a key."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key.bits & 0x7FFFFFFFFFFFFFFF)
        yield


def _mix(x: Tensor) -> Tensor:
    """Scramble 32-bit words held in int64; with multipliers below 2^31 nothing overflows.

    Works in the memory it is given, which stays in a CPU's cache: callers hand over new tensors.
    """
    x ^= x >> 16
    x *= 0x21F0AAAD
    x &= _WORD
    x ^= x >> 15
    x *= 0x735A2D97
    x &= _WORD
    x ^= x >> 15
    return x


def fold_in(key: Tensor, word: Tensor | int) -> Tensor:
    """Derive a key [..., 2] from a key [..., 2] and a number (a step, an epoch) on the device."""
    low, high = key[..., 0], key[..., 1]
    salt = _mix((low * 0 + word + 0x9E3779B9) & _WORD)
    return torch.stack([_mix((low ^ salt) & _WORD), _mix((high + salt) & _WORD)], dim=-1)


def bits(key: Tensor, counter: Tensor) -> Tensor:
    """Draw 32 random bits for every element of `counter` (int64, below 2^32); key is [..., 2].

    The leading axes of the key broadcast against the counter's leading axes.
    """
    low, high = key[..., 0], key[..., 1]
    extra = counter.dim() - low.dim()
    low, high = (part.reshape(part.shape + (1,) * max(extra, 0)) for part in (low, high))
    return _mix((_mix((counter + high) & _WORD) ^ low) & _WORD)


def uniform(key: Tensor, counter: Tensor) -> Tensor:
    """Draw float32 numbers in [0, 1), one for every element of `counter`."""
    return (bits(key, counter) >> 8).to(torch.float32) * (1.0 / (1 << 24))


def normal(key: Tensor, counter: Tensor) -> Tensor:
    """Draw float32 numbers from N(0, 1), one for every element of `counter` (below 2^31)."""
    # Box-Muller
    angle = uniform(key, 2 * counter)
    radius = 1 - uniform(key, 2 * counter + 1)
    return (-2 * radius.log()).sqrt() * torch.cos(2 * torch.pi * angle)
