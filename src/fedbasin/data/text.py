"""Shakespeare as next-character prediction: 80 characters in, the one that follows as label."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbasin.data.arrays import Contents, Progress, Writer
from fedbasin.data.dataset import DataError
from fedbasin.data.layout import SourceFile
from fedbasin.data.parquet import batches, check_text_columns, read_column, read_groups
from fedbasin.data.sources import Source

WINDOW = 80
_TEST_SHARE = 5  # one row in five
_CHUNK = 16_384


def tokens(text: str, characters: tuple[str, ...]) -> NDArray[np.uint8]:
    """Number every character of a text; the last class stands for any unknown one.

    Args:
        text: what to number.
        characters: the class names; all but the last are single characters.
    """
    table = np.full(129, len(characters) - 1, dtype=np.uint8)
    for number, character in enumerate(characters[:-1]):
        table[ord(character)] = number
    codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    return table[np.minimum(codes, 128)]


def last_share(groups: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mark the last fifth (rounded down) of each group's rows, in the order they come."""
    order = np.argsort(groups, kind="stable")
    sizes = np.bincount(groups)
    starts = np.cumsum(sizes) - sizes
    rank = np.empty(len(groups), dtype=np.int64)
    rank[order] = np.arange(len(groups)) - np.repeat(starts, sizes)
    return rank >= (sizes - sizes // _TEST_SHARE)[groups]


def build_roles(
    source: Source, files: list[SourceFile], folder: Path, progress: Progress
) -> Contents:
    """Cut each role's text into windows of 80 characters that do not overlap.

    Window k of a text holds characters 80k .. 80k + 79, its label is character 80k + 80; a text of
    length n gives floor((n - 1) / 80) windows. Roles too short for one are left out.
    """
    inputs = []
    labels = []
    counts = []
    names = []
    for file in files:
        check_text_columns(file, ("play", "role", "text"))
        plays, roles, texts = (read_column(file, name) for name in ("play", "role", "text"))
        for play, role, text in zip(plays, roles, texts, strict=True):
            numbers = tokens(text, source.classes)
            count = (len(numbers) - 1) // WINDOW
            if count > 0:
                inputs.append(numbers[: count * WINDOW].reshape(count, WINDOW))
                labels.append(numbers[WINDOW : count * WINDOW + 1 : WINDOW])
                counts.append(count)
                names.append(f"{play}: {role}")
    groups = np.repeat(np.arange(len(names)), counts)
    if not names:
        raise DataError(f"{files[0].path} has no text of more than {WINDOW} characters")
    following = np.concatenate(labels).astype(np.int64)
    writer = Writer(folder, following, groups, last_share(groups), (WINDOW,))
    writer.put(0, np.concatenate(inputs))
    progress(f"reading {source.name}", len(groups), len(groups))
    return Contents(source.classes, tuple(names))


def build_windows(
    source: Source, files: list[SourceFile], folder: Path, progress: Progress
) -> Contents:
    """Read windows that were cut beforehand: 80 characters, the next one, and the role."""
    part = source.parts[0]
    inputs = part.inputs or "x"
    label = part.label or "y"
    group = part.group or "character_id"
    for file in files:
        check_text_columns(file, (inputs, label, group))
    labels = tokens("".join(_next_characters(f, label) for f in files), source.classes)
    groups, group_names = read_groups([(file, group) for file in files])
    writer = Writer(folder, labels.astype(np.int64), groups, last_share(groups), (WINDOW,))
    done = 0
    for file in files:
        for first, values in batches(file, inputs, _CHUNK):
            block = tokens(_joined(file, first, values), source.classes).reshape(-1, WINDOW)
            writer.put(done, block)
            done += len(block)
            progress(f"reading {source.name}", done, len(labels))
    return Contents(source.classes, group_names)


def _next_characters(file: SourceFile, name: str) -> str:
    """Join a column of single characters."""
    values = read_column(file, name)
    bad = next((row for row, value in enumerate(values) if len(value) != 1), None)
    if bad is not None:
        raise DataError(
            f"{file.path} row {bad}: {name!r} is {values[bad][:20]!r}, expected one character"
        )
    return "".join(values)


def _joined(file: SourceFile, first: int, values: list[Any]) -> str:
    """Join a batch of windows after checking that each has the right length."""
    for row, value in enumerate(values, first):
        if value is None or len(value) != WINDOW:
            length = "empty" if value is None else f"{len(value)} characters long"
            raise DataError(f"{file.path} row {row}: the text is {length}, expected {WINDOW}")
    return "".join(values)
