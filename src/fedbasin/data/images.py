"""Parquet files of images, decoded once into uint8 arrays on disk."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbasin.data.arrays import Contents, Progress, Writer
from fedbasin.data.dataset import DataError
from fedbasin.data.layout import SourceFile
from fedbasin.data.parquet import Columns, batches, find_columns, read_groups, read_labels
from fedbasin.data.pictures import decode, is_grey, opened
from fedbasin.data.sources import Source
from fedbasin.data.split import held_out

_CHUNK = 256
_CHUNK_BYTES = 32_000_000
# Below this size Pillow spends its time in Python, where threads only get in each other's way.
_PIXELS_WORTH_A_THREAD = 80 * 80


@dataclass(frozen=True)
class Frame:
    """What every image of a dataset is brought to.

    Args:
        channels: 1 or 3.
        height: in pixels.
        width: in pixels.
        resize: whether images of another size are resized rather than refused.
        workers: threads that decode.
    """

    channels: int
    height: int
    width: int
    resize: bool
    workers: int


def build(source: Source, files: list[SourceFile], folder: Path, progress: Progress) -> Contents:
    """Decode a source's files into the arrays of a cache entry.

    Labels and groups are read and checked first, so that a file that does not fit is refused
    before the long part; images then go straight to their place, a chunk at a time.
    """
    columns = [find_columns(file, source.parts[file.part]) for file in files]
    classes = _class_names(source, files, columns)
    pairs = list(zip(files, columns, strict=True))
    per_file = [read_labels(f, c.label, len(classes) or None) for f, c in pairs]
    labels = np.concatenate(per_file)
    classes = classes or tuple(map(str, range(int(labels.max(initial=0)) + 1)))
    groups, group_names = _groups(source, pairs, [len(part) for part in per_file])
    is_test = _test_rows(source, files, per_file, labels, groups)
    frame = _frame(source, pairs)
    shape = (frame.channels, frame.height, frame.width)
    writer = Writer(folder, labels, groups, is_test, shape)
    for first, block in _decoded(pairs, frame):
        writer.put(first, block)
        progress(f"decoding {source.name}", first + len(block), len(labels))
    return Contents(classes, group_names)


def _class_names(
    source: Source, files: list[SourceFile], columns: list[Columns]
) -> tuple[str, ...]:
    """Return the class names; what the files state must agree with what is expected."""
    expected = source.classes or columns[0].class_names
    for file, of_file in zip(files, columns, strict=True):
        # A stated list names the classes in its own words; only their number can be compared.
        names = of_file.class_names
        fits = len(names) == len(expected) if source.classes else names == expected
        if names and not fits:
            raise DataError(
                f"{file.path} has other classes ({len(names)}) than expected "
                f"({len(expected)}); it is not this dataset, or another version of it"
            )
    return expected


def _groups(
    source: Source, pairs: list[tuple[SourceFile, Columns]], lengths: list[int]
) -> tuple[NDArray[np.int64] | None, tuple[str, ...]]:
    """Return the group of every row and the group names; None where the data has no groups."""
    if all(part.group_name for part in source.parts):
        parts = [file.part for file, _ in pairs]
        names = tuple(part.group_name or "" for part in source.parts)
        return np.repeat(np.array(parts, dtype=np.int64), lengths), names
    if any(columns.group is None for _, columns in pairs):
        return None, ()
    return read_groups([(file, columns.group or "") for file, columns in pairs])


def _test_rows(
    source: Source,
    files: list[SourceFile],
    per_file: list[NDArray[np.int64]],
    labels: NDArray[np.int64],
    groups: NDArray[np.int64] | None,
) -> NDArray[np.bool_]:
    """Mark the rows of the test split: as published, or held out where none is published."""
    if source.holdout is None or any(file.split == "test" for file in files):
        is_test = [file.split == "test" for file in files]
        return np.repeat(np.array(is_test, dtype=np.bool_), [len(part) for part in per_file])
    strata = np.zeros_like(labels)
    for by in source.holdout.by:
        keys = labels if by == "label" else groups
        if keys is not None:
            strata = strata * (int(keys.max(initial=0)) + 1) + keys
    return held_out(strata, source.holdout.share)


def _frame(source: Source, pairs: list[tuple[SourceFile, Columns]]) -> Frame:
    """Take the common shape from the source, or else from the first image."""
    file, columns = pairs[0]
    first = next(batches(file, columns.inputs, 1), None)
    if first is None:
        raise DataError(f"{file.path} has no rows; fetch or copy it again")
    with _opened(file, 0, first[1][0]) as image:
        width, height = image.size
        channels = source.channels or (1 if is_grey(image) else 3)
    big = width * height >= _PIXELS_WORTH_A_THREAD
    workers = min(8, os.cpu_count() or 1) if big else 1
    height, width = source.size or (height, width)
    return Frame(channels, height, width, source.size is not None, workers)


def _decoded(
    pairs: list[tuple[SourceFile, Columns]], frame: Frame
) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Yield (first row over all files, pixels [k, C, H, W]) in order, decoding ahead in threads."""
    waiting: deque[tuple[int, Future[NDArray[np.uint8]]]] = deque()
    chunk = max(1, min(_CHUNK, _CHUNK_BYTES // (3 * frame.height * frame.width)))
    before = 0
    with ThreadPoolExecutor(frame.workers) as pool:
        for file, columns in pairs:
            rows = 0
            for first, values in batches(file, columns.inputs, chunk):
                rows = first + len(values)
                waiting.append((before + first, pool.submit(_decode, file, first, values, frame)))
                while len(waiting) > 2 * frame.workers:
                    at, future = waiting.popleft()
                    yield at, future.result()
            before += rows
        while waiting:
            at, future = waiting.popleft()
            yield at, future.result()


def _decode(file: SourceFile, first: int, values: list[Any], frame: Frame) -> NDArray[np.uint8]:
    """Decode a chunk of images, via RGB, to uint8 [k, channels, height, width]."""
    block = np.empty((len(values), frame.height, frame.width, 3), dtype=np.uint8)
    for index, value in enumerate(values):
        with _opened(file, first + index, value) as image:
            block[index] = _pixels(file, first + index, image, frame)
    if frame.channels == 3:
        return np.ascontiguousarray(block.transpose(0, 3, 1, 2))
    grey = (block[..., :1] == block).all(axis=(1, 2, 3))
    if not grey.all():
        raise DataError(
            f"{file.path} row {first + int(grey.argmin())}: a colour image in a grey dataset; "
            "it is not this dataset, or name it as hf:...?mode=RGB"
        )
    return np.ascontiguousarray(block[:, None, :, :, 0])


def _opened(file: SourceFile, row: int, value: Any) -> Any:
    """Open the image of one cell without decoding it yet."""
    data = value.get("bytes") if isinstance(value, dict) else None
    if not data:
        raise DataError(
            f"{file.path} row {row}: the image is empty or stored outside the file; "
            "fedbasin reads images that lie in the parquet file itself"
        )
    return opened(f"{file.path} row {row}", data)


def _pixels(file: SourceFile, row: int, image: Any, frame: Frame) -> NDArray[np.uint8]:
    """Decode one opened image to [H, W, 3] (or [H, W, 1], which spreads over the channels)."""
    if not frame.resize and image.size != (frame.width, frame.height):
        raise DataError(
            f"{file.path} row {row}: the image is {image.width}x{image.height}, the first one is "
            f"{frame.width}x{frame.height}; name the dataset as hf:...?size=PIXELS to resize all"
        )
    mode = "L" if image.mode == "L" else "RGB"
    pixels = decode(f"{file.path} row {row}", image, mode, (frame.height, frame.width))
    return pixels[..., None] if pixels.ndim == 2 else pixels
