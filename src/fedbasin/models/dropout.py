"""Dropout whose mask is a pure function of a key, for use under `vmap` and `torch.compile`.

`torch.nn.Dropout` draws from a global generator: its mask depends on everything drawn before,
so a cohort trained together and a loop over its clients would see different masks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fedbasin.core.rng import bits


class Dropout(nn.Module):
    """Zero each element with probability p, from a key that is handed in from outside.

    In training ``y_i = x_i / (1 - p)`` if ``u_i >= p`` and 0 otherwise, in evaluation ``y = x``.
    The u_i are the bytes of ``bits(key, 2^24 site + j)`` over 2^8, or their 16-bit halves over 2^16
    where p is no multiple of 1/256 (it is then rounded to one of 1/65536). j counts row by row, and
    a row takes the lowest bytes of all its words first. So one hash serves four elements, or two,
    and rows added at the end of a batch change no earlier row.

    The caller replaces the buffer `key` at every step through ``torch.func.functional_call``
    (`key_names` says where it stands); left alone, every step repeats one mask. The buffer is
    not part of the state dict.

    Args:
        p: probability of dropping an element, at least 0 and below 1.
    """

    key: Tensor  # [2] int64

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"the dropout probability p must be in [0, 1), got {p}")
        self.p = float(p)
        self.site = 0
        self.register_buffer("key", torch.zeros(2, dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return x with elements dropped in training, or x itself in evaluation."""
        if not self.training or self.p == 0:
            return x
        rows, size = len(x), math.prod(x.shape[1:])
        wide = 8 if (self.p * 256).is_integer() else 16
        places, first = range(0, 32, wide), self.site << 24
        each = -(-size // len(places))  # words of a row
        words = bits(self.key, torch.arange(first, first + rows * each, device=x.device))
        least = min(round(self.p * (1 << wide)), (1 << wide) - 1)
        lanes, kept = words.view(rows, each), 1 - least / (1 << wide)
        keep = [lanes & (((1 << wide) - 1) << at) >= least << at for at in places]
        mask = torch.cat(keep, 1)[:, :size].reshape(x.shape)
        # by way of bytes, which torch turns to floats several times faster than truth values
        return x * (mask.to(torch.uint8).to(x.dtype) / kept)

    def extra_repr(self) -> str:
        """Show the probability and the site when printed."""
        return f"p={self.p}, site={self.site}"


def number_sites(module: nn.Module) -> None:
    """Give every `Dropout` inside a module its own site 0, 1, ..., so that no two share a mask."""
    dropouts = (part for part in module.modules() if isinstance(part, Dropout))
    for site, dropout in enumerate(dropouts):
        dropout.site = site


def key_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the key buffers to replace at every step, empty without dropout."""
    return tuple(
        f"{name}.key" if name else "key"
        for name, part in module.named_modules()
        if isinstance(part, Dropout)
    )
