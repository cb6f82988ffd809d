"""Seeds as the command line takes them."""

from __future__ import annotations

import logging
import re

_RANGE = re.compile(r"(?P<first>\d{1,9})((?P<sign>\.\.|-)(?P<last>\d{1,9}))?")


def read_seeds(text: str) -> list[int]:
    """Read seeds and ranges of seeds: 0,1,2 or 0..9, both ends included.

    The former way to write a range, 0-9, is read with a warning.
    """
    seeds: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise ValueError(
                f"--seeds is {text!r}; write numbers with commas, as in 0,1,2, or a range, as in "
                "0..9"
            )
        first = int(match["first"])
        last = int(match["last"] or first)
        if last < first:
            raise ValueError(
                f"--seeds is {text!r}: {part.strip()} names no seed; write the smaller one first"
            )
        if match["sign"] == "-":
            logging.getLogger(__name__).warning(
                "--seeds %s is the former way to write a range, which a later version will not "
                "read: write %d..%d",
                part.strip(),
                first,
                last,
            )
        seeds += range(first, last + 1)
    return seeds
