"""Updates and numbers of a client as unsigned words, and their sum back as means.

A change d of a weight is cut to [-clip, clip], scaled by the client's share of the weight that a
client can have at most, s = n / rows (1 for uniform weights), and rounded to a whole number

    q = round(s d / clip * levels),    levels = 2^(bits - 1) - 1,

which is stored modulo 2^32. Sums of at most `clients` such words do not overflow. The mean is
sum(q) clip / levels / sum(s). Rounding moves it by at most

    (clients in the sum) / 2 * clip / levels / sum(s).

Numbers beside the update (rows, steps, losses) are whole numbers or have a fixed point, modulo
2^64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np

from fedbasin.deploy.secure.settings import Session
from fedbasin.deploy.wire import Refused

_PIECE = 1 << 18  # entries that are worked on at once
_SUM_BITS = 62  # that a sum of numbers may take


def quantise(
    update: np.ndarray, out: np.ndarray, clip: float, share: float, session: Session
) -> int:
    """Write an update as words uint32 into `out`; return how many entries were cut."""
    scale = share * session.levels / clip
    clipped = 0
    for begin in range(0, len(update), _PIECE):
        piece = update[begin : begin + _PIECE].astype(np.float64)
        if not np.isfinite(piece).all():
            raise Refused("this client's training gave NaN or Inf")
        clipped += int((np.abs(piece) > clip).sum())
        np.clip(piece, -clip, clip, out=piece)
        piece *= scale
        np.rint(piece, out=piece)
        out[begin : begin + _PIECE] = piece.astype(np.int64).astype(np.uint32)
    return clipped


def restore(
    words: np.ndarray,
    out: np.ndarray,
    clip: float,
    shares: float,
    sums: Sums,
    session: Session,
) -> None:
    """Add the mean update that a sum of words stands for to the vector `out`, in place.

    A sum that the clients' updates cannot give is refused. It leaves `out` undefined.
    """
    most = session.levels * shares + sums.replies / 2
    scale = clip / session.levels / shares
    for begin in range(0, len(words), _PIECE):
        piece = words[begin : begin + _PIECE].view(np.int32).astype(np.float64)
        if np.abs(piece).max(initial=0.0) > most:
            raise Refused(f"the sum of {sums.replies} updates is beyond what they can add up to")
        piece *= scale
        out[begin : begin + _PIECE] += piece


def rounding(clip: float, sums: Sums, session: Session) -> float:
    """Return by how much quantisation moves an entry of the mean at most."""
    return sums.replies / 2 * clip / session.levels / sums.shares


@dataclass(frozen=True)
class Numbers:
    """What a client tells beside its update; masked, so that only the sum over clients shows.

    Those without a unit of their own are counts. The others are multiplied by the client's weight
    (by its rows for `mean_loss`), and rounded to 1 / unit.
    """

    examples: int  # rows
    weight: int  # rows, or 1 for uniform weights
    clipped: int  # entries of the update that were cut
    clipped_statistics: int
    over: int  # 1 where the client has more rows than it may weigh
    steps: float
    lr_sum: float
    length: float
    last_loss: float
    mean_loss: float

    def words(self, session: Session) -> np.ndarray:
        """Return the numbers as words uint64."""
        limit = (1 << _SUM_BITS) // session.clients
        words = []
        for name in _NAMES:
            value = float(getattr(self, name))
            if not math.isfinite(value):
                raise Refused(f"this client's {name} is {value}")
            scaled = value * _UNITS.get(name, 1) * self._weight(name)
            words.append(round(min(max(scaled, -limit), limit)) % (1 << 64))
        return np.array(words, dtype=np.uint64)

    def _weight(self, name: str) -> int:
        if name not in _UNITS:
            return 1
        return self.examples if name == "mean_loss" else self.weight


_NAMES = tuple(field.name for field in fields(Numbers))
NUMBERS = len(_NAMES)  # how many words they take
_UNITS = {"steps": 1, "lr_sum": 1 << 28, "length": 1 << 16, "last_loss": 1 << 24}
_UNITS["mean_loss"] = 1 << 24


@dataclass(frozen=True)
class Sums:
    """The numbers of all clients in a sum."""

    replies: int
    shares: float  # of the weight that a client can have at most
    examples: int
    weight: int
    clipped: int
    clipped_statistics: int
    over: int
    steps: float  # this and what follows are weighted means
    lr_sum: float
    length: float
    last_loss: float
    mean_loss: float

    @classmethod
    def of(cls, words: np.ndarray, replies: int, session: Session) -> Sums | None:
        """Read a sum of numbers; None where no client has a row."""
        totals = dict(zip(_NAMES, words.view(np.int64).tolist(), strict=True))
        most_weight = session.rows if session.weighting == "samples" else 1
        most_rows = session.rows or 1 << 31
        bounds = {"examples": most_rows, "weight": most_weight, "over": 1, "steps": 1 << 62}
        for name in ("examples", "weight", "over", "clipped", "clipped_statistics", "steps"):
            if not 0 <= totals[name] <= replies * bounds.get(name, 1 << 53):
                raise Refused(f"the sum of {name} over {replies} clients is {totals[name]}")
        if not totals["weight"] or not totals["examples"]:
            return None
        for name, unit in _UNITS.items():
            by = totals["examples" if name == "mean_loss" else "weight"]
            totals[name] = totals[name] / unit / by
        return cls(replies=replies, shares=totals["weight"] / most_weight, **totals)
