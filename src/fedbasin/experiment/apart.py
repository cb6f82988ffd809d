"""Runs apart: processes that go when the one that made them is gone, and what is said but once."""

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

_HOLDS = hasattr(signal, "pthread_sigmask")  # Windows has none
_at_a_run = threading.Event()
_teller = logging.getLogger(__package__)  # of all this room


def join_pool(folder: Path) -> None:
    """Get a new process ready for runs, with one thread each; `folder` is of `said_once`."""
    import fedbasin.experiment  # noqa: F401  (fills the catalogue)

    torch.set_num_threads(1)
    _teller.addFilter(_Once(folder))
    threading.Thread(target=_follow, daemon=True).start()
    if _HOLDS:
        if signal.SIGINT in signal.sigpending():
            os._exit(130)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Let Ctrl-C wait: a process begun meanwhile would show a traceback out of its imports."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if _HOLDS else None
    try:
        yield
    finally:
        if before is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Once(logging.Filter):
    """Lets a text pass once among all processes that share a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage().encode()
        mark = self._folder / hashlib.blake2b(text, digest_size=16).hexdigest()
        try:
            mark.touch(exist_ok=False)
        except OSError:
            return not mark.exists()  # the folder may be gone, with the process that made it
        return True


@contextmanager
def said_once() -> Iterator[Path]:
    """Say what several runs caution against once, and not for every seed of a method."""
    with TemporaryDirectory(prefix="fedbasin-") as name:
        once = _Once(Path(name))
        _teller.addFilter(once)
        try:
            yield Path(name)
        finally:
            _teller.removeFilter(once)


@contextmanager
def at_a_run() -> Iterator[None]:
    """Say that this process is at a run, which finishes its round and saves before it goes."""
    _at_a_run.set()
    try:
        yield
    finally:
        _at_a_run.clear()
        if _left_alone(0):
            os._exit(130)  # there is nobody to tell


def _follow() -> None:
    _left_alone(None)
    if not _at_a_run.is_set():
        os._exit(130)
    os.kill(os.getpid(), signal.SIGINT)


def _left_alone(patience: float | None) -> bool:
    """Whether the process that made this one is gone, or goes within so many seconds."""
    parent = parent_process()
    return parent is not None and bool(wait([parent.sentinel], patience))
