"""The mean of the last W models of a trajectory, in O(P) work a round and without drift.

The window keeps each model as its difference from a common anchor, and a float64 sum of
them. A new model adds itself and takes out the oldest; once in W rounds the sum is formed
anew, so rounding never piles up. Slots are separate tensors: replacing one copies no other.

bfloat16 keeps three digits of a difference, so differences must not grow with the trajectory: once
in W rounds the next model is the new anchor. The slots of the last W rounds keep the one before
until they are replaced, so nothing is rounded twice.

Memory: W x P numbers of the storage type, and 12 P bytes for the sum and the anchor (16 P where
anchors move).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Storage = Literal["same", "bfloat16"]


@dataclass(frozen=True)
class Window:
    """The last W models."""

    slots: tuple[Tensor, ...]  # W tensors [P], or [0] while empty
    total: Tensor  # [P] float64 sum of the filled slots
    anchor: Tensor  # [P] slots hold differences from it
    # The anchor [P] of those that are not yet replaced since it moved; nothing where it never does.
    before: tuple[Tensor, ...]
    pushed: int  # models seen so far

    @property
    def filled(self) -> int:
        """How many models the window holds, min(W, pushed)."""
        return min(self.pushed, len(self.slots))


def empty(width: int, like: Tensor, storage: Storage = "same", *, on_cpu: bool = False) -> Window:
    """Return a window of W slots that holds nothing.

    Args:
        width: W.
        like: a model, for size, type and device.
        storage: ``"bfloat16"`` keeps differences in half the space, to 3 digits.
        on_cpu: keep the slots in main memory.
    """
    dtype = torch.bfloat16 if storage == "bfloat16" else like.dtype
    slot = torch.empty(0, dtype=dtype, device="cpu" if on_cpu else like.device)
    total = torch.zeros_like(like, dtype=torch.float64)
    anchor = torch.zeros_like(like)
    before = (anchor.clone(),) if dtype != like.dtype else ()
    return Window((slot,) * width, total, anchor, before, 0)


def push(window: Window, model: Tensor) -> Window:
    """Add a model and forget the oldest if the window is full."""
    place = window.pushed % len(window.slots)
    anchor = window.anchor
    before = window.before
    if window.pushed == 0 or (place == 0 and before):
        before = (anchor,) if before else ()
        anchor = model
    oldest = window.slots[place]
    newest = (model - anchor).to(dtype=oldest.dtype, device=oldest.device)
    slots = (*window.slots[:place], newest, *window.slots[place + 1 :])
    if place == 0:
        total = torch.zeros_like(window.total)
        for slot in slots:
            total = total + slot.to(total) if slot.numel() else total
    else:
        total = window.total + newest.to(window.total)
        if oldest.numel():
            total = total - oldest.to(total)
    return Window(slots, total, anchor, before, window.pushed + 1)


def mean(window: Window) -> Tensor:
    """Return the mean [P] of the models the window holds; it must hold one."""
    if window.filled == 0:
        raise ValueError("the window holds no model yet")
    total = window.total
    since = (window.pushed - 1) % len(window.slots) + 1  # slots that hold from this anchor
    if window.before and since < window.filled:
        moved = window.before[0].to(total) - window.anchor.to(total)
        total = total + (window.filled - since) * moved
    return (window.anchor + total / window.filled).to(window.anchor.dtype)


@dataclass(frozen=True)
class RunningMean:
    """The mean of all models so far."""

    total: Tensor  # [P] float64
    count: int

    def push(self, model: Tensor) -> RunningMean:
        """Add a model."""
        return replace(self, total=self.total + model.to(self.total), count=self.count + 1)

    def mean(self, like: Tensor) -> Tensor:
        """Return the mean in the type of a model."""
        return (self.total / self.count).to(like.dtype)
