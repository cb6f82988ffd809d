"""One process at a time, by `filelock`: the system releases a lock when its holder dies."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from fedbasin.core.record import RecordError

_FOREVER = -1.0  # filelock's word for it


class Busy(RecordError):
    """A run folder that another process is running."""


@contextmanager
def waiting_for(path: Path) -> Iterator[None]:
    """Wait for a lock file and hold it; it is removed afterwards."""
    with _held(path, _FOREVER):
        yield


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Lock a run folder for this process. The lock file is removed when the run ends."""
    path = folder / "run.lock"
    try:
        with _held(path, 0.0):
            yield
    except Timeout:
        raise Busy(
            f"another process{_holder(path)} is running {folder}; wait until it is over or stop "
            "it, or choose another folder"
        ) from None


@contextmanager
def _held(path: Path, timeout: float) -> Iterator[None]:
    lock = FileLock(path, timeout=timeout)
    try:
        lock.acquire()
    except Timeout:
        raise
    except OSError:  # the file system knows no locks: without, then
        yield
        return
    try:
        with contextlib.suppress(OSError):
            path.write_text(f"{os.getpid()}\n", encoding="utf-8")
        yield
    finally:
        with contextlib.suppress(OSError):  # Windows does not remove a file that is open
            path.unlink()
        lock.release()


def _holder(path: Path) -> str:
    """Name the process that holds a lock, where the file says it."""
    try:
        return f" (id {int(path.read_text(encoding='utf-8'))})"
    except (OSError, ValueError):
        return ""
