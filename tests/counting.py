"""Counts of work and of memory. They are the same on every machine, however busy it is."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

from torch.profiler import ProfilerActivity, profile


class Clock:
    """Takes the place of the module `time`: its time passes only while somebody sleeps.

    Args:
        tick: seconds that pass with every look at the clock, so that a loop that only looks ends.
    """

    def __init__(self, tick: float = 0.0) -> None:
        self.now = 1000.0
        self.tick = tick

    def monotonic(self) -> float:
        self.now += self.tick
        return self.now

    perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def calls_in(work: Callable[[], object]) -> int:
    """Return how many functions are called, those written in C counted too."""
    count = 0

    def counted(frame, event, function):
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(counted)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


@dataclass
class Allocated:
    """Bytes that Python, NumPy and torch asked for on the CPU; files mapped into memory are none.

    Args:
        most: the most that was held at once, beyond what was there before.
    """

    most: int = 0


@contextmanager
def allocated() -> Iterator[Allocated]:
    """Count what this thread asks for until the end of the block."""
    counted = Allocated()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        tracemalloc.start()
        try:
            yield counted
            counted.most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    counted.most += max(accumulate(event.nbytes() for event in events), default=0)
