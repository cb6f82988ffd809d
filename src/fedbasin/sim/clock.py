"""A run's own clock. It is paused while other runs of a batch work."""

from __future__ import annotations

import time


class Clock:
    """Seconds that a run has taken, from an arbitrary start."""

    def __init__(self) -> None:
        self._before = 0.0  # seconds up to the last pause
        self._since: float | None = time.perf_counter()  # None while it stands still

    def __call__(self) -> float:
        """Return the seconds."""
        running = 0.0 if self._since is None else time.perf_counter() - self._since
        return self._before + running

    def pause(self) -> None:
        """Pause."""
        self._before = self()
        self._since = None

    def go_on(self, charged: float) -> None:
        """Run again; the pause has taken so many seconds of the run's own."""
        self._before = self() + charged
        self._since = time.perf_counter()
