"""What is agreed before clients mask anything: the user's settings, and one round's session."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import Any

from flwr.app import ConfigRecord

from fedbasin.core.vectors import Weighting
from fedbasin.deploy.wire import Refused, number

SECURE = "secure"  # the record of a session, in every message of the protocol
LEAST_THRESHOLD = 2  # below it the sum would be one client's update
_WORD = 32  # bits of a masked word
_VERSION = "fedbasin secure aggregation 1"


def levels_of(bits: int) -> int:
    """Return the largest number of so many bits, of which one is the sign."""
    return (1 << (bits - 1)) - 1


@dataclass(frozen=True)
class Secure:
    """Settings of secure aggregation: the server learns only the sum over a cohort.

    Args:
        clip: the largest change of a weight in a round. Larger changes are cut, and counted. The
            noise that clients add must not be cut: a clip that is too small for it is refused.
        rows: the most rows of a client, for methods that weigh clients by their rows. A client
            with more rows counts as one with so many.
        threshold: how many clients of the cohort must answer to the end: a whole number, or the
            share of the cohort that must be exceeded. It must be more than half.
        bits: of a quantised number.
        statistics: the largest change of a BatchNorm statistic, where these are averaged.
        neighbours: with how many others a client shares masks; 0 for all of the cohort. The
            threshold then counts among a client and its neighbours.
    """

    clip: float
    rows: int = 0
    threshold: int | float = 2 / 3
    bits: int = 24
    statistics: float = 0.0
    neighbours: int = 0

    def __post_init__(self) -> None:
        _check_clip("clip", self.clip)
        if self.statistics:
            _check_clip("statistics", self.statistics)
        if not 0 <= self.rows < 1 << 31:
            raise ValueError(f"rows must be 0 to 2**31 - 1, got {self.rows}")
        if not 2 <= self.bits <= _WORD - 1:
            raise ValueError(f"bits must be 2 to {_WORD - 1}, got {self.bits}")
        if self.neighbours < 0 or self.neighbours % 2:
            raise ValueError(f"neighbours must be an even number or 0, got {self.neighbours}")
        whole = isinstance(self.threshold, int)
        if whole and self.threshold < LEAST_THRESHOLD:
            raise ValueError(f"threshold must be at least {LEAST_THRESHOLD}, got {self.threshold}")
        if not whole and not 0.5 <= self.threshold < 1:
            raise ValueError(
                f"threshold must be a whole number or a share of 0.5 to 1, got {self.threshold}"
            )

    @property
    def step(self) -> float:
        """The distance of two quantised changes of a weight."""
        return self.clip / levels_of(self.bits)

    def holders(self, cohort: int) -> int:
        """Return among how many clients, itself included, a client shares its secrets."""
        return min(self.neighbours + 1, cohort) if self.neighbours else cohort

    def needed(self, cohort: int) -> int:
        """Return how many of a client's holders must answer to the end.

        It may be more than the cohort has: such a round is not begun.
        """
        holders = self.holders(cohort)
        if isinstance(self.threshold, int):
            needed = self.threshold
        else:
            needed = min(math.floor(self.threshold * holders + 1e-9) + 1, holders)
        if 2 * needed <= holders:
            raise ValueError(
                f"secure: threshold {needed} must be more than half of the {holders} clients that "
                "share secrets: give a higher one, or smaller cohorts"
            )
        return max(needed, LEAST_THRESHOLD)


@dataclass(frozen=True)
class Session:
    """What one round's parties agree on. It is the same in every message of the round."""

    run: str  # the federation's name
    round: int  # from 1
    attempt: int  # how often the run was started
    threshold: int
    clients: int  # the most clients whose words are added up
    bits: int
    clip: float
    rows: int
    statistics: float  # 0 where BatchNorm statistics are not sent
    weighting: Weighting

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[0-9a-f]{1,64}", self.run):
            raise Refused(f"the run is called {self.run[:64]!r}, expected hexadecimal digits")
        if self.weighting not in ("samples", "uniform"):
            raise Refused(f"weighting is {self.weighting!r}, expected 'samples' or 'uniform'")
        if not 2 <= self.bits <= _WORD - 1:
            raise Refused(f"bits is {self.bits}, expected 2 to {_WORD - 1}")
        if self.clients * self.levels >= 1 << (_WORD - 1):
            most = ((1 << (_WORD - 1)) - 1) // self.levels
            raise Refused(
                f"{self.clients} clients of {self.bits} bits overflow words of {_WORD} bits: "
                f"take at most {most} clients a round, or fewer bits"
            )
        if self.threshold < LEAST_THRESHOLD:
            raise Refused(f"threshold is {self.threshold}, expected at least {LEAST_THRESHOLD}")
        if self.weighting == "samples" and not self.rows:
            raise Refused("rows is 0, and clients are weighed by their rows")
        for name in ("clip", "statistics"):
            value = getattr(self, name)
            if not (math.isfinite(value) and 0 <= value <= 1e15) or (name == "clip" and not value):
                raise Refused(f"{name} is {value}, expected a number above 0, at most 1e15")

    @property
    def levels(self) -> int:
        """The largest quantised number; the smallest is its opposite."""
        return levels_of(self.bits)

    def info(self, purpose: str, *clients: int) -> bytes:
        """Return what keys and hashes of this session are bound to: all that was agreed on.

        Clients that were told different sessions cannot open each other's shares.
        """
        parts = (_VERSION, purpose, *asdict(self).values(), *clients)
        return "/".join(map(str, parts)).encode()

    def record(self) -> ConfigRecord:
        """Return the session as it travels."""
        return ConfigRecord(asdict(self))

    @classmethod
    def read(cls, record: ConfigRecord) -> Session:
        """Return the session that a message is about, or refuse it."""
        text: dict[str, Any] = {key: record.get(key) for key in ("run", "weighting")}
        for key, value in text.items():
            if not isinstance(value, str):
                raise Refused(f"{key} is {type(value).__name__}, expected text")
        return cls(
            run=text["run"],
            round=_whole(record, "round", 1),
            attempt=_whole(record, "attempt", 1),
            threshold=_whole(record, "threshold", 0),
            clients=_whole(record, "clients", 1),
            bits=_whole(record, "bits", 0),
            clip=float(number(record, "clip", least=0)),
            rows=_whole(record, "rows", 0),
            statistics=float(number(record, "statistics", least=0)),
            weighting=text["weighting"],
        )


def _whole(record: ConfigRecord, key: str, least: int) -> int:
    value = record.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 1 << 31:
        raise Refused(f"{key} is {str(value)[:64]}, expected a whole number of at least {least}")
    return value


def _check_clip(name: str, value: float) -> None:
    if not (math.isfinite(value) and 0 < value <= 1e15):
        raise ValueError(f"{name} must be above 0 and at most 1e15, got {value}")
