"""One process at a time: locks that the operating system lets go when their holder dies."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedbasin.core.record import RecordError

try:
    import fcntl
except ImportError:  # Windows: nothing is held there
    fcntl = None  # type: ignore[assignment]


class Busy(RecordError):
    """A run folder that another process is running."""


def take(handle: int, *, patient: bool) -> None:
    """Lock an open file until it is closed; a taken one is waited for or `BlockingIOError`."""
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if patient else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError:  # the file system knows no locks: without, then
        return


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep a run folder from other processes; its lock file is gone when the run is not at work."""
    path = folder / "run.lock"
    handle = _taken(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def _taken(path: Path) -> int:
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            take(handle, patient=False)
            if os.path.samestat(path.stat(), os.fstat(handle)):
                return handle
        except BlockingIOError as error:
            os.close(handle)
            raise Busy(
                f"another process is running {path.parent}; wait until it is over or stop it, or "
                "choose another folder"
            ) from error
        except FileNotFoundError:
            pass
        os.close(handle)  # its holder took the file away before it let go: there may be a new one
