"""Dropout whose mask is a pure function of a key, for use under `vmap` and `torch.compile`.

`torch.nn.Dropout` draws from a global generator: its mask depends on everything drawn before,
so a cohort trained together and a loop over its clients would see different masks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedbasin.core.randomness import draw_kept


class Dropout(nn.Module):
    """Zero each element with probability p, from a key that is handed in from outside.

    In training ``y_i = x_i / (1 - p)`` if ``u_i >= p`` and 0 otherwise, in evaluation ``y = x``.
    `draw_kept` draws the u_i, from the number 2^24 site on: rows added at the end of a batch change
    no earlier row.

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
        kept, share = draw_kept(self.key, tuple(x.shape), self.p, x.device, self.site << 24)
        return x * (kept.to(x.dtype) / share)

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
