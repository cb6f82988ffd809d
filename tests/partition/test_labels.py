from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbasin.partition import Partition, Pool, client_dirichlet, exchange_labels

LABELS = np.tile(np.arange(4), 30)
PARTS = Partition(tuple(np.arange(12 * i, 12 * i + 12) for i in range(10)), 120)


def changed(before, after, parts):
    """The clients with other labels than before."""
    return [i for i, mine in enumerate(parts.clients) if (before[mine] != after[mine]).any()]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=8),
    st.integers(2, 5),
    st.floats(0, 1),
    st.integers(0, 999),
)
def test_some_clients_have_two_labels_exchanged_and_the_others_none(sizes, classes, share, seed):
    rng = np.random.default_rng(seed)
    ends = np.cumsum([0, *sizes])
    parts = Partition(tuple(np.arange(*pair) for pair in pairwise(ends)), 80)
    labels = rng.integers(classes, size=80)
    before = labels.copy()
    after = exchange_labels(labels, parts, classes, share, rng)
    assert np.array_equal(labels, before) and after.dtype == labels.dtype
    found = changed(labels, after, parts)
    holders = sum(size > 0 for size in sizes)
    assert len(found) == min(int(share * len(sizes) + 1e-9), holders)
    for client in found:
        mine = parts.clients[client]
        moved = {(a, b) for a, b in zip(labels[mine], after[mine], strict=True) if a != b}
        one, other = sorted(next(iter(moved)))
        expected = [{one: other, other: one}.get(label, label) for label in labels[mine].tolist()]
        assert after[mine].tolist() == expected and 0 <= one < other < classes
    nobodys = np.arange(ends[-1], 80)
    assert np.array_equal(after[nobodys], labels[nobodys])


def test_clients_and_labels_are_drawn_anew_by_the_seed():
    a, again, b = (
        exchange_labels(LABELS, PARTS, 4, 0.5, np.random.default_rng(s)) for s in (0, 0, 1)
    )
    assert np.array_equal(a, again) and not np.array_equal(a, b)
    everybody = exchange_labels(LABELS, PARTS, 4, 1.0, np.random.default_rng(0))
    pairs = {tuple(np.unique(LABELS[m][LABELS[m] != everybody[m]])) for m in PARTS.clients}
    assert len(pairs) > 2


@pytest.mark.parametrize(("share", "count"), [(0.25, 2), (0.3, 3), (0.7, 7), (0.0, 0)])
def test_a_share_is_rounded_down(share, count):
    after = exchange_labels(LABELS, PARTS, 4, share, np.random.default_rng(0))
    assert len(changed(LABELS, after, PARTS)) == count


def test_a_share_that_is_not_quite_whole_in_binary_is_whole():
    parts = Partition(tuple(np.arange(i, i + 1) for i in range(100)), 120)
    assert 0.29 * 100 < 29
    after = exchange_labels(LABELS, parts, 4, 0.29, np.random.default_rng(0))
    assert len(changed(LABELS, after, parts)) == 29


def test_rows_that_several_hold_are_refused():
    pool = Pool(LABELS, 4)
    parts = client_dirichlet(pool, 10, np.random.default_rng(0), alpha=0.1, refill=True)
    with pytest.raises(ValueError, match="others hold the same rows; use one without refill"):
        exchange_labels(LABELS, parts, 4, 0.5, np.random.default_rng(0))


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_outside_its_range_is_refused(share):
    with pytest.raises(ValueError, match=r"share is .*: give a share of the clients"):
        exchange_labels(LABELS, PARTS, 4, share, np.random.default_rng(0))


def test_one_class_has_nothing_to_exchange():
    with pytest.raises(ValueError, match="classes is 1: there are no two labels"):
        exchange_labels(np.zeros(120, np.int64), PARTS, 1, 0.5, np.random.default_rng(0))
