"""Errors with two texts: a full one for whom the data belongs to, and a bare one for others.

A full text names the file, the column, the row, the value and what to do. A value is somebody's
data, so a client of a federation sends its server the bare text alone.
"""

from __future__ import annotations


class TwoTextError(Exception):
    """An error whose full text is its message, and whose bare text may leave the machine.

    Args:
        text: the full text.
        bare: the same without anything that was read from data. By default it is the class's name,
            so that an error whose author did not think of it gives nothing away.
    """

    def __init__(self, text: str, bare: str = "") -> None:
        super().__init__(text)
        self.bare = bare or type(self).__name__


def bare_text(error: BaseException) -> str:
    """Return what may leave the machine: of an error without a bare text, its class's name."""
    bare = error.bare if isinstance(error, TwoTextError) else type(error).__name__
    whole = isinstance(error, TwoTextError) and bare == str(error)
    return bare if whole else f"{bare} (the site's own log says more)"
