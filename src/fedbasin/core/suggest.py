"""What an error about an unknown name tells the user to write instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, available: Iterable[str], *, section: str = "") -> str:
    """Return the similar names as a question, or all names where none is similar.

    Args:
        name: what the user wrote.
        available: what is known there, in the order to list it.
        section: what is written before each of them, such as ``"local."``.

    >>> nearest("fedavgg", ["fedavg", "scaffold"])
    'did you mean fedavg?'
    >>> nearest("zzz", ["fedavg", "scaffold"])
    'available: fedavg, scaffold'
    """
    names = list(available)
    close = difflib.get_close_matches(name, names)
    if close:
        return did_you_mean(section + similar for similar in close)
    return f"available: {', '.join(section + known for known in names)}"


def did_you_mean(names: Iterable[str]) -> str:
    """Return the question that an error ends with.

    >>> did_you_mean(["local.lr", "server.lr"])
    'did you mean local.lr or server.lr?'
    """
    return f"did you mean {' or '.join(names)}?"
