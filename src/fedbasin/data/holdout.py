"""Which rows of a user's own data are test rows, and which clients train.

by rows      floor(share x n) rows of each class (without classes: of each client, else of all),
             drawn with the fixed seed of `held_out`; a client whose rows were all drawn gets
             its first row back
by clients   round(share x K) of the K clients, at least one and at most K - 1, drawn with the
             same seed
by time      the latest rows, at most a share of all; rows of one moment stay together
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fedbasin.data.coding import Coded, Place
from fedbasin.data.dataset import DataError
from fedbasin.data.split import HOLDOUT_SEED, held_out
from fedbasin.data.targets import Labels, only_trained

TestBy = Literal["rows", "clients", "time"]


@dataclass(frozen=True, eq=False)
class Holdout:
    """How test rows are chosen.

    Args:
        share: of rows or clients, in (0, 1); None where `given` says it.
        by: ``"rows"``, ``"clients"`` or ``"time"``.
        time: a number for each row that grows with time; only read by time.
        given: bool [n], the test rows of a separate test set.
    """

    share: float | None
    by: TestBy = "rows"
    time: NDArray[Any] | None = None
    given: NDArray[np.bool_] | None = None


@dataclass(frozen=True, eq=False)
class Plan:
    """What is known of all rows but their inputs.

    Args:
        labels: the targets.
        clients: the client of each row, those with training rows first; None without clients.
        is_test: bool [n], which rows are test rows.
    """

    labels: Labels
    clients: Coded | None
    is_test: NDArray[np.bool_]


def check_share(test: Any, test_by: str, has_clients: bool, has_time: bool) -> float | None:
    """Return the share of a held-out test set; None where a separate one is given."""
    if test_by not in get_args(TestBy):
        raise DataError(f"test_by is {test_by!r}: available: {', '.join(get_args(TestBy))}")
    if isinstance(test, bool) or not isinstance(test, int | float):
        return None
    if not 0 < test < 1:
        raise DataError(f"test is {test}: give a share between 0 and 1, or a separate test set")
    if test_by == "clients" and not has_clients:
        raise DataError("test_by is 'clients' and no clients are given: name them")
    if test_by == "time" and not has_time:
        raise DataError("test_by is 'time' and no time is given: name it with time=")
    return float(test)


def plan(labels: Labels, clients: Coded | None, holdout: Holdout, what: str, place: Place) -> Plan:
    """Choose the test rows and check that what remains can be trained on.

    Args:
        labels: the targets of all rows.
        clients: the client of each row, if known.
        holdout: how to choose.
        what: how errors call the target.
        place: says where a row stands.
    """
    is_test = _test_rows(labels, clients, holdout)
    for name, rows in (("training", ~is_test), ("test", is_test)):
        if not rows.any():
            fault = f"none is left for the {name} set: give more rows, or another share"
            raise DataError(f"of {len(rows)} rows {fault}", f"of the rows {fault}")
    if clients is not None:
        _check_clients(clients, is_test, holdout)
        clients = clients.first(~is_test)
    return Plan(only_trained(labels, is_test, what, place), clients, is_test)


def _test_rows(labels: Labels, clients: Coded | None, holdout: Holdout) -> NDArray[np.bool_]:
    if holdout.given is not None:
        return holdout.given
    assert holdout.share is not None
    if holdout.by == "time":
        assert holdout.time is not None
        return _latest(holdout.time, holdout.share)
    if holdout.by == "clients":
        assert clients is not None
        return _whole_clients(clients, holdout.share)
    if labels.classes:
        is_test = held_out(labels.values, holdout.share)
    elif clients is not None:
        is_test = held_out(clients.codes, holdout.share)
    else:
        is_test = held_out(np.zeros(len(labels.values), dtype=np.int64), holdout.share)
    if clients is not None:
        # Rows were drawn by class: one of a client that lost all its rows goes back.
        left = np.bincount(clients.codes[~is_test], minlength=len(clients.names))
        names, rows = np.unique(clients.codes, return_index=True)
        is_test[rows[left[names] == 0]] = False
    return is_test


def _latest(time: NDArray[Any], share: float) -> NDArray[np.bool_]:
    """Mark the rows that are later than all but a share of the rows."""
    count = int(share * len(time) + 1e-9)
    last_trained = np.sort(time)[len(time) - count - 1]
    later: NDArray[np.bool_] = time > last_trained
    if not later.any():
        fix = "give a larger share, or test_by='rows'"
        raise DataError(
            f"the latest {count:,} rows have one time, {last_trained}, that training rows have "
            f"too: {fix}",
            f"the latest rows have one time, that training rows have too: {fix}",
        )
    return later


def _whole_clients(clients: Coded, share: float) -> NDArray[np.bool_]:
    """Mark all rows of some clients."""
    count = len(clients.names)
    chosen = min(max(1, round(share * count)), count - 1)
    drawn = np.random.default_rng(HOLDOUT_SEED).permutation(count)[:chosen]
    return np.isin(clients.codes, drawn)


def _check_clients(clients: Coded, is_test: NDArray[np.bool_], holdout: Holdout) -> None:
    """Refuse a federation of one, and clients that time leaves without training rows."""
    train = np.bincount(clients.codes[~is_test], minlength=len(clients.names))
    all_rows = np.bincount(clients.codes, minlength=len(clients.names))
    idle = [clients.names[at] for at in np.flatnonzero((train == 0) & (all_rows > 0))]
    if holdout.given is None and holdout.by == "time" and idle:
        raise DataError(
            f"client {idle[0]!r:.40} has no training rows ({len(idle)} such clients): all its rows "
            "are among the latest; remove it, or use test_by='rows'"
        )
    known = np.flatnonzero(train)
    if len(known) < 2:
        names = ", ".join(repr(clients.names[at]) for at in known)
        held = f" and {len(idle)} only for testing" if idle else ""
        raise DataError(
            f"there is one client to train on ({names:.60}){held}: a federation needs two; name "
            "another client column, or none to deal the rows by a partition"
        )
