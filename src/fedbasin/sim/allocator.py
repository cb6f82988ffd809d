"""Keep freed memory instead of returning it to the system after every step.

A training step allocates and frees the same few megabytes again and again. glibc gives large
blocks back at once and takes them anew, page by page and zeroed, which costs a convolutional
network on a CPU up to a third of its step.

This leaves gaps in the heap. torch asks for aligned blocks, and a gap between two used blocks is
too small for an aligned block of the size that was freed there. With models of some 10 MB beside
what methods remember, the heap grows from round to round. So a run returns the pages of its gaps
with every checkpoint.
"""

from __future__ import annotations

import ctypes
import os
import sys

# mallopt's names (malloc.h): trim threshold, padding when the heap grows, least size of a mapping.
_SETTINGS = ((-1, 1 << 30), (-2, 1 << 26), (-3, 1 << 30))
_CHOSEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "LD_PRELOAD")


def keep_freed_memory() -> bool:
    """Set glibc's allocator; return whether it was done.

    It is done on Linux alone, and not if the user has chosen settings or another allocator.
    """
    if sys.platform != "linux" or any(name in os.environ for name in _CHOSEN):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(*setting) for setting in _SETTINGS)


def hand_back_gaps() -> bool:
    """Return unused pages inside the heap to the system; say whether there were any."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    return trim is not None and bool(trim(0))
