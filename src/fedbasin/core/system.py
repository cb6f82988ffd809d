"""What only some systems have, in one place. Tested on Linux.

Elsewhere the functions below do less, and say so. The rest of fedbasin uses what Python offers on
every system, and `filelock` for locks.

    what                             Linux   macOS   Windows
    names of a folder synced         yes     yes     no: it opens no folders
    peak memory of a process         yes     yes     no: None
    Ctrl-C held back during a start  yes     yes     no: a traceback may be printed
    processes found by a variable    yes     no      no: none are found
    processes killed at once         yes     yes     yes
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

_CAN_BLOCK = hasattr(signal, "pthread_sigmask")
_KILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # Windows ends a process at once by SIGTERM
_PROCESSES = Path("/proc")


def sync_folder(folder: Path) -> None:
    """Hand a folder's list of names to the disk."""
    if os.name != "posix":
        return
    with contextlib.suppress(OSError):  # some network file systems cannot
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def peak_memory() -> int | None:
    """Return the largest resident size of this process so far, in bytes."""
    if resource is None:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Delay Ctrl-C, also in processes that are started meanwhile."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if _CAN_BLOCK else None
    try:
        yield
    finally:
        if before is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unblock_interrupts() -> bool:
    """Take Ctrl-C again in a process that was started without; return whether one has come."""
    if not _CAN_BLOCK:
        return False
    if signal.SIGINT in signal.sigpending():
        return True
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    return False


def processes_with(variable: str) -> dict[int, dict[str, str]]:
    """Return the processes of this user whose environment has a variable, with all variables."""
    found = {}
    for place in _PROCESSES.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended, or is another user's
            pairs = (place / "environ").read_bytes().decode(errors="replace").split("\0")
            variables = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
            if variable in variables:
                found[int(place.name)] = variables
    return found


def family_of(parent: int, among: Iterator[int] | list[int]) -> list[int]:
    """Return a process and all below it, of those given."""
    parents = {}
    for process in among:
        with contextlib.suppress(OSError, ValueError):
            fields = (_PROCESSES / str(process) / "stat").read_text().rpartition(")")[2].split()
            parents[process] = int(fields[1])
    family = [parent]
    for process in family:  # it grows while it is read
        family += [child for child, above in parents.items() if above == process]
    return family


def kill(process: int) -> None:
    """End a process at once, as a power cut would."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, _KILL)


def ask_to_end(process: int) -> None:
    """Ask a process to end."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGTERM)
