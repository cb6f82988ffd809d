"""How a peer is asked for work: one JSON object a line on its standard input and output.

    -> {"rounds": 5, "score": true}
    <- {"seconds": 4.1, "cpu_seconds": 4.0, "accuracy": 0.71}

`rounds` more rounds are run; with `score` the test rows are scored afterwards, inside the
measured time. The first line a peer writes is {"ready": true, ...facts}. What a library prints
on its own goes to standard error.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol


class Peer(Protocol):
    """What a peer script has to offer."""

    facts: dict[str, Any]  # versions and settings worth recording

    def rounds(self, count: int) -> None:
        """Run more rounds, to the end: nothing may be left running on a device."""

    def accuracy(self) -> float:
        """Score the test rows."""


def serve(make: Callable[[], Peer]) -> None:
    """Answer requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    peer = make()
    _say(answers, {"ready": True, "pid": os.getpid(), **peer.facts})
    for line in sys.stdin:
        request = json.loads(line)
        began, before = time.perf_counter(), cpu_seconds()
        peer.rounds(request["rounds"])
        accuracy = peer.accuracy() if request.get("score") else None
        answer = {"seconds": time.perf_counter() - began, "cpu_seconds": cpu_seconds() - before}
        _say(answers, {**answer, "accuracy": accuracy})


def _say(answers, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def cpu_seconds() -> float:
    """Return processor seconds of this process and of its living descendants."""
    me = resource.getrusage(resource.RUSAGE_SELF)
    total = me.ru_utime + me.ru_stime
    tick = os.sysconf("SC_CLK_TCK")
    family, parents = {os.getpid()}, {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        parents[int(entry.name)] = (int(fields[1]), (int(fields[11]) + int(fields[12])) / tick)
    grown = True
    while grown:
        more = {pid for pid, (parent, _) in parents.items() if parent in family} - family
        family |= more
        grown = bool(more)
    return total + sum(parents[pid][1] for pid in family if pid in parents and pid != os.getpid())
