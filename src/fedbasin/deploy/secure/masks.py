"""Masks: streams of AES-256-CTR that are added to words and cancel in the sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

_PIECE = 1 << 20  # bytes of a stream in memory at once


class Mask(NamedTuple):
    """One stream, and whether it is added or subtracted."""

    key: bytes  # 32 bytes, used for one session
    add: bool

    @property
    def opposite(self) -> Mask:
        """The mask that cancels this one."""
        return Mask(self.key, not self.add)


def add_masks(arrays: Sequence[np.ndarray], masks: Sequence[Mask]) -> None:
    """Add masks to arrays of unsigned words in place; sums wrap around.

    Args:
        arrays: of a message. Each has a stream of its own, by its place.
        masks: what is added.
    """
    zeros = memoryview(bytes(_PIECE))
    stream = bytearray(_PIECE)
    for place, words in enumerate(arrays):
        assert words.dtype.kind == "u" and words.ndim == 1
        start = place.to_bytes(8, "big") + bytes(8)  # the second half counts blocks
        ciphers = [Cipher(algorithms.AES256(m.key), modes.CTR(start)).encryptor() for m in masks]
        step = _PIECE // words.itemsize
        for begin in range(0, len(words), step):
            piece = words[begin : begin + step]
            mask_words = np.frombuffer(stream, words.dtype, len(piece))
            for mask, cipher in zip(masks, ciphers, strict=True):
                cipher.update_into(zeros[: piece.nbytes], stream)
                if mask.add:
                    np.add(piece, mask_words, out=piece)
                else:
                    np.subtract(piece, mask_words, out=piece)
