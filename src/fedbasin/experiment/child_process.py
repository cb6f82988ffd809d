"""Worker processes that exit with their parent, and warnings printed once."""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import parent_process
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from fedbasin.core.system import unblock_interrupts

_run_in_progress = threading.Event()
_logger = logging.getLogger(__package__)  # shared by all modules of this package


def prepare_worker(folder: Path) -> None:
    """Prepare a new process for runs with one thread; `folder` is the one of `warn_once`."""
    import fedbasin.experiment  # noqa: F401  (fills the catalogue)

    torch.set_num_threads(1)
    _logger.addFilter(_OnceFilter(folder))
    threading.Thread(target=_watch_parent, daemon=True).start()
    if unblock_interrupts():
        os._exit(130)


class _OnceFilter(logging.Filter):
    """Lets each message pass once among all processes that share a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage().encode()
        mark = self._folder / hashlib.blake2b(text, digest_size=16).hexdigest()
        try:
            mark.touch(exist_ok=False)
        except OSError:
            return not mark.exists()  # the parent may have exited and removed the folder
        return True


@contextmanager
def warn_once() -> Iterator[Path]:
    """Print each warning of several runs once, not once per seed."""
    with TemporaryDirectory(prefix="fedbasin-") as name:
        once = _OnceFilter(Path(name))
        _logger.addFilter(once)
        try:
            yield Path(name)
        finally:
            _logger.removeFilter(once)


@contextmanager
def run_in_progress() -> Iterator[None]:
    """Mark that a run is in progress: if the parent exits, it ends its round and saves first."""
    _run_in_progress.set()
    try:
        yield
    finally:
        _run_in_progress.clear()
        if _parent_exited(0):
            os._exit(130)  # no parent is left to report to


def _watch_parent() -> None:
    _parent_exited(None)
    if not _run_in_progress.is_set():
        os._exit(130)
    os.kill(os.getpid(), signal.SIGINT)


def _parent_exited(timeout: float | None) -> bool:
    """Whether the parent process has exited, or exits within `timeout` seconds."""
    parent = parent_process()
    return parent is not None and bool(wait([parent.sentinel], timeout))
