"""Pictures in files or in memory: opened with bounds, decoded to uint8."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbasin.data.dataset import DataError

# Formats that are plain pixels; others (SVG-like, scripts, exotic codecs) are refused unopened.
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
_MAX_PIXELS = 32_000_000
_GREY = ("1", "L", "LA")


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
    grey = True
    for row, (place, picture) in enumerate(pictures):
        with opened(place, picture) as image:
            if result is None:
                grey = is_grey(image)
            pixels = decode(place, image, "L" if grey else "RGB", size)
        pixels = pixels[None] if grey else pixels.transpose(2, 0, 1)
        if result is None:
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


def opened(place: str, picture: Path | bytes) -> Any:
    """Open one image without decoding it yet; refuse what is no image or far too large."""
    from PIL import Image

    source = io.BytesIO(picture) if isinstance(picture, bytes) else picture
    try:
        image = Image.open(source, formats=_FORMATS)
    except (OSError, ValueError, SyntaxError) as error:
        raise _undecodable(place, error) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_large(place) from error
    if image.width * image.height > _MAX_PIXELS:
        raise _too_large(place)
    return image


def is_grey(image: Any) -> bool:
    """Whether an opened image has no colours."""
    return image.mode in _GREY


def decode(place: str, image: Any, mode: str, size: tuple[int, int] | None) -> NDArray[np.uint8]:
    """Decode an opened image to [H, W] (mode L) or [H, W, 3] (RGB).

    Args:
        place: how errors call it.
        image: what `opened` gives.
        mode: what it is brought to.
        size: (height, width) that it is resized to; None to leave it as it is.
    """
    from PIL import Image

    if image.mode.startswith(("I", "F")):
        raise DataError(f"{place}: pixels of mode {image.mode} are not 8 bits deep")
    try:
        if image.mode != mode:
            image = image.convert(mode)
        if size is not None and image.size != (size[1], size[0]):
            image = image.resize((size[1], size[0]), Image.Resampling.BILINEAR)
        pixels: NDArray[np.uint8] = np.asarray(image)
    except (OSError, ValueError, SyntaxError) as error:
        raise _undecodable(place, error) from error
    return pixels


def _undecodable(place: str, error: Exception) -> DataError:
    return DataError(
        f"{place}: the image cannot be decoded ({str(error).splitlines()[0]}); "
        "fetch or copy the file again"
    )


def _too_large(place: str) -> DataError:
    return DataError(f"{place}: the image has more than {_MAX_PIXELS:,} pixels and is refused")
