"""Processes of a pool, which go when the process that made them is gone, killed perhaps."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import parent_process
from multiprocessing.connection import wait

import torch

_at_a_run = threading.Event()


def join_pool() -> None:
    """Get a new process ready for runs, with one thread each."""
    import fedbasin.experiment  # noqa: F401  (fills the catalogue)

    torch.set_num_threads(1)
    threading.Thread(target=_follow, daemon=True).start()


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
