"""A user's own texts as a `Dataset` of tokens."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbasin.data.dataset import DataError, Dataset
from fedbasin.data.holdout import TestBy
from fedbasin.data.own_arrays import from_arrays
from fedbasin.data.targets import Classes

_WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class HashedWords:
    """Numbers words by a hash of their letters: the same everywhere, without a vocabulary to share.

    Words are lower case; a punctuation mark is a word. Token 0 is padding, words have
    1 .. size - 1. Two words may have one number: of 2,000 words that are used, with size 20,000,
    about a tenth share one.

    Args:
        size: how many tokens there are.
    """

    size: int = 20_000

    def __post_init__(self) -> None:
        """Check the size."""
        if self.size < 2:
            raise ValueError(f"size must be 2 or more, got {self.size}")

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        words = _WORD.findall(text.lower())
        return [1 + zlib.crc32(word.encode()) % (self.size - 1) for word in words]


def from_texts(
    texts: Sequence[str],
    labels: Any,
    *,
    tokenizer: Callable[..., Any] | None = None,
    length: int = 64,
    clients: Any = None,
    test: Any = 0.2,
    test_by: TestBy = "rows",
    time: Any = None,
    classes: Classes = None,
    name: str = "texts",
) -> Dataset:
    """Make a dataset of texts: int32 tokens [n, length], cut or padded at the end.

    Args:
        texts: one a row.
        labels: the targets, as `y` of `from_arrays`.
        tokenizer: a function from a text to a list of whole numbers from 0, or a tokenizer of
            Hugging Face, which is asked to cut and whose own padding is used; else padding is 0.
            None for `HashedWords()`.
        length: tokens a row.
        clients: as for `from_arrays`.
        test: a share, or a separate test set (texts, labels), with clients (texts, labels,
            clients).
        test_by: as for `from_arrays`.
        time: as for `from_arrays`.
        classes: as for `from_arrays`.
        name: what the dataset is called. A hash of the content is added.
    """
    if length < 1:
        raise DataError(f"length must be 1 or more, got {length}")
    chosen = HashedWords() if tokenizer is None else tokenizer
    apart = test
    if isinstance(test, tuple | list) and test:
        apart = (tokens_of(test[0], chosen, length), *test[1:])
    return from_arrays(
        tokens_of(texts, chosen, length),
        labels,
        clients,
        test=apart,
        test_by=test_by,
        time=time,
        classes=classes,
        kind="text",
        name=name,
    )


def tokens_of(
    texts: Sequence[str], tokenizer: Callable[..., Any], length: int
) -> NDArray[np.int32]:
    """Return the tokens of texts, [n, length]."""
    padding = getattr(tokenizer, "pad_token_id", None)
    result = np.full((len(texts), length), padding or 0, dtype=np.int32)
    for row, text in enumerate(texts):
        if not isinstance(text, str):
            where = f"texts, row {row} (counted from 0)"
            fault = "is no text: fill in one, or remove the row"
            raise DataError(f"{where}: {text!r:.40} {fault}", f"{where}: a value {fault}")
        if hasattr(tokenizer, "pad_token_id"):
            answer = tokenizer(text, truncation=True, max_length=length)
        else:
            answer = tokenizer(text)
        found = np.asarray(answer["input_ids"] if isinstance(answer, Mapping) else answer)
        if found.size and (found.ndim != 1 or found.dtype.kind not in "iu" or found.min() < 0):
            raise DataError(
                f"the tokenizer makes {answer!r:.60} of row {row}: it must give a list of whole "
                "numbers from 0"
            )
        cut = found[:length]
        result[row, : len(cut)] = cut
    return result
