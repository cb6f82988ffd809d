"""Normalisation and augmentation on the training device, for one client or a whole cohort.

The order is the papers' (torchvision on an image, then on a tensor): random crop of the image
padded by 4 black pixels, random horizontal flip, scale to [0, 1], normalise. The padding is black
before normalisation, so it ends up at -mean / std and not at 0. Text and tables are not images:
whole numbers of a text pass as int64, numbers of a table in the network's floating type.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedbasin.core.rng import bits
from fedbasin.data.dataset import KINDS, Dataset, Kind


@dataclass(frozen=True)
class Transform:
    """Turn stored rows into what a model takes; pure, so it runs under vmap and compiled.

    Of images, with pixel x in 0..255, mean m and deviation s of its channel: (x / 255 - m) / s.
    Augmentation draws, for every row, the crop's top and left from 0..2p (p = padding) and a fair
    coin for the flip.

    Args:
        mean: m, per channel.
        std: s, per channel.
        augment: whether rows are cropped and flipped when a key is given.
        kind: ``"image"``; ``"text"``, whose tokens pass as int64; or ``"table"``, whose numbers
            pass as they are.
        padding: p, black pixels added on each side before the crop.
    """

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    augment: bool = False
    kind: Kind = "image"
    padding: int = 4
    # vmap asks what it wraps for its name, and a dataclass's repr cannot be traced by compile.
    __name__ = "transform"

    def __post_init__(self) -> None:
        """Check the fields against each other."""
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}: available: {', '.join(KINDS)}")
        if self.kind != "image" and self.augment:
            raise ValueError(f"augment crops and flips images; it cannot be set for {self.kind}")
        if self.kind != "image" and (self.mean or self.std):
            raise ValueError(
                f"mean and std are of images' channels; leave them out for {self.kind} and scale "
                "the numbers beforehand"
            )
        if self.kind == "image" and (not self.mean or len(self.mean) != len(self.std)):
            raise ValueError(
                f"mean and std need one number per channel, got {self.mean} and {self.std}"
            )
        if any(s <= 0 for s in self.std):
            raise ValueError(f"std must be positive, got {self.std}")
        if self.padding < 0:
            raise ValueError(f"padding must be 0 or more, got {self.padding}")

    @classmethod
    def of(cls, dataset: Dataset, *, augment: bool = False) -> Transform:
        """Return the transform of a dataset, with or without augmentation."""
        return cls(dataset.mean, dataset.std, augment, dataset.kind)

    def __call__(
        self, raw: Tensor, key: Tensor | None = None, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Transform a batch of rows.

        Args:
            raw: images uint8 [B, C, H, W], tokens [B, length] or numbers [B, ...].
            key: int64 [2], which augmentation to draw; None for none, as in evaluation. Row i
                depends on the key and i alone, so rows added at the end change no other row.
            dtype: of the result, for images and tables.
        """
        if self.kind == "text":
            if raw.is_floating_point():
                raise ValueError(f"tokens must be whole numbers, got {raw.dtype}")
            return raw.to(torch.int64)
        if self.kind == "table":
            return raw.to(dtype)
        if raw.dtype != torch.uint8 or raw.dim() != 4 or raw.shape[1] != len(self.mean):
            raise ValueError(
                f"images must be uint8 [B, {len(self.mean)}, H, W], "
                f"got {raw.dtype} {list(raw.shape)}"
            )
        if self.augment and key is not None:
            raw = crop_and_flip(raw, key, self.padding)
        pixels = raw.to(torch.promote_types(dtype, torch.float32)) / 255
        if any(self.mean):
            pixels = pixels - _per_channel(self.mean, pixels)
        if any(s != 1 for s in self.std):
            pixels = pixels / _per_channel(self.std, pixels)
        return pixels.to(dtype)


def crop_and_flip(raw: Tensor, key: Tensor, padding: int) -> Tensor:
    """Shift every image by up to `padding` pixels, filling with 0, and mirror half of them.

    One 32-bit draw u of row i gives all three numbers, with n = 2 padding + 1:
    top = u mod n, left = (u div n) mod n, mirrored = (u div n^2) mod 2.

    Args:
        raw: [B, C, H, W].
        key: int64 [2].
        padding: the largest shift.
    """
    rows, channels, height, width = raw.shape
    draw = bits(key, torch.arange(rows, device=raw.device))
    n = 2 * padding + 1
    top = draw % n
    left = draw // n % n
    mirrored = draw // (n * n) % 2
    down, across = (torch.arange(size, device=raw.device) for size in (height, width))
    y = down + top[:, None]  # [B, H], the row of the padded image each pixel comes from
    x = torch.where(mirrored[:, None] == 1, across.flip(0), across) + left[:, None]  # [B, W]
    source = y[:, :, None] * (width + 2 * padding) + x[:, None, :]
    source = source.reshape(rows, 1, -1).expand(rows, channels, height * width)
    padded = torch.nn.functional.pad(raw, (padding,) * 4)
    return padded.reshape(rows, channels, -1).gather(2, source).reshape(raw.shape)


def _per_channel(values: tuple[float, ...], like: Tensor) -> Tensor | float:
    """Return the values [C, 1, 1], made on the device: a copy from the host cannot be captured."""
    if len(set(values)) == 1:
        return values[0]
    made = [torch.full((), value, dtype=like.dtype, device=like.device) for value in values]
    return torch.stack(made)[:, None, None]
