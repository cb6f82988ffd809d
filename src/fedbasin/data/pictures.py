"""Pictures of a user, in files or in memory, as uint8 arrays [n, channels, height, width]."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedbasin.data.dataset import DataError

# Formats that are plain pixels; others are refused unopened.
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
_MAX_PIXELS = 32_000_000


def decoded(
    pictures: Iterable[tuple[str, Path | bytes]], count: int, size: tuple[int, int] | None
) -> NDArray[np.uint8]:
    """Decode pictures of one size; all are grey where the first one is, else they are RGB.

    Args:
        pictures: how errors call each, and its file or bytes.
        count: how many there are.
        size: (height, width) that all are resized to; None to refuse other sizes than the first's.
    """
    result: NDArray[np.uint8] | None = None
    mode = "L"
    for row, (place, picture) in enumerate(pictures):
        pixels, own_mode = _pixels(place, picture, size, None if result is None else mode)
        if result is None:
            mode = own_mode
            result = np.empty((count, *pixels.shape), dtype=np.uint8)
        if pixels.shape != result.shape[1:]:
            raise DataError(
                f"{place}: the picture has {pixels.shape[1]} x {pixels.shape[2]} pixels and the "
                f"first one {result.shape[2]} x {result.shape[3]}: give size=(height, width) to "
                "resize all"
            )
        result[row] = pixels
    if result is None:
        raise DataError("there are no pictures: give some")
    return result


def _pixels(
    place: str, picture: Path | bytes, size: tuple[int, int] | None, mode: str | None
) -> tuple[NDArray[np.uint8], str]:
    """Decode one picture to [channels, height, width], and say its mode, L or RGB."""
    from PIL import Image

    try:
        source = io.BytesIO(picture) if isinstance(picture, bytes) else picture
        with Image.open(source, formats=_FORMATS) as image:
            if image.width * image.height > _MAX_PIXELS:
                raise DataError(f"{place}: more than {_MAX_PIXELS:,} pixels are refused")
            if image.mode.startswith(("I", "F")):
                raise DataError(f"{place}: pixels of mode {image.mode} are not 8 bits deep")
            wanted = mode or ("L" if image.mode in ("1", "L", "LA") else "RGB")
            flat = image.convert(wanted)
            if size is not None and flat.size != (size[1], size[0]):
                flat = flat.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{place}: cannot be decoded ({reason}): write it again") from error
    pixels: NDArray[np.uint8] = np.asarray(flat)
    return (pixels[None] if wanted == "L" else pixels.transpose(2, 0, 1)), wanted
