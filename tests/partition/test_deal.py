import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbasin.partition.deal import deal, deal_again, fill_up, listed, missing, take


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 9999))
def test_deal_gives_what_the_table_says(clients, classes, seed):
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 4, (clients, classes))
    spare = rng.integers(0, 3, classes)
    labels = rng.permutation(np.repeat(np.arange(classes), counts.sum(axis=0) + spare))
    if not labels.size:
        return
    rows = listed(labels, counts, rng)
    wanted = [c for row in counts for c in np.repeat(np.arange(classes), row)]
    assert labels[rows].tolist() == wanted  # client by client, class by class
    assert len(set(rows.tolist())) == len(rows)
    assert deal(labels, counts, rng).counts(labels, classes).tolist() == counts.tolist()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 9999))
def test_dealt_again_every_row_of_a_class_goes_round_before_one_comes_back(clients, classes, seed):
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 9, (clients, classes)) + np.eye(clients, classes, dtype=np.int64)
    labels = rng.permutation(np.repeat(np.arange(classes), rng.integers(1, 4, classes)))
    split = deal_again(labels, counts, rng)
    assert split.counts(labels, classes).tolist() == counts.tolist()
    assert all((np.diff(part) >= 0).all() for part in split.clients)
    times = np.bincount(split.order, minlength=len(labels))
    for label in range(classes):
        used = times[labels == label]
        assert used.max() - used.min() <= 1


def test_every_row_of_a_class_is_equally_likely():
    labels = np.array([0, 1, 0, 0, 1, 0])
    counts = np.array([[1, 0], [1, 1]])
    rng = np.random.default_rng(0)
    hits = np.zeros((2, 6))
    for _ in range(3000):
        for client, rows in enumerate(deal(labels, counts, rng).clients):
            hits[client, rows] += 1
    expected = np.array([[1, 0, 1, 1, 0, 1], [1, 2, 1, 1, 2, 1]]) * 750
    assert np.abs(hits - expected).max() < 5 * np.sqrt(750)


def test_every_row_is_equally_likely_to_be_dealt_again_first():
    labels, counts, rng = np.zeros(5, np.int64), np.array([[1], [1]]), np.random.default_rng(0)
    hits = np.zeros(5)
    for _ in range(2000):
        hits += np.bincount(deal_again(labels, counts, rng).order, minlength=5)
    assert np.abs(hits - 800).max() < 5 * np.sqrt(2000 * 0.4 * 0.6)


def test_fill_up_by_hand():
    counts = np.array([[9, 0, 0], [1, 0, 2], [0, 0, 0], [5, 8, 0], [0, 0, 4]])
    # Client 1 holds most of class 2: it takes from client 4, the only other holder, which is at
    # the minimum, so it turns to the largest client, 3, and its largest class, 1.
    # Client 2 holds nothing: client 3 (12 rows) gives four of its largest class.
    expected = [[9, 0, 0], [1, 1, 2], [0, 4, 0], [5, 3, 0], [0, 0, 4]]
    assert fill_up(counts, 4).tolist() == expected


def test_fill_up_prefers_the_class_the_small_client_knows():
    counts = np.array([[20, 1], [0, 9], [0, 1]])
    # Of the clients that hold class 1 the largest gives its one row first, then the other.
    assert fill_up(counts, 3).tolist() == [[20, 0], [0, 8], [0, 3]]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(1, 5), st.integers(0, 10**6))
def test_fill_up_reaches_the_minimum_and_moves_no_more_than_is_missing(clients, classes, seed):
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 12, (clients, classes)) * (rng.random((clients, classes)) < 0.4)
    before = counts.copy()
    minimum = int(rng.integers(0, counts.sum() // clients + 1))
    filled = fill_up(counts, minimum)
    assert np.array_equal(counts, before)
    assert filled.min() >= 0 and filled.sum(axis=1).min() >= minimum
    assert np.array_equal(filled.sum(axis=0), counts.sum(axis=0))
    assert np.abs(filled - counts).sum() == 2 * missing(counts, minimum)
    small = counts.sum(axis=1) < minimum
    assert (filled[small].sum(axis=1) == minimum).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 10**6))
def test_take_meets_every_need_within_the_stock(clients, classes, seed):
    rng = np.random.default_rng(seed)
    left = rng.integers(0, 30, classes)
    need = rng.multinomial(int(left.sum()), np.full(clients, 1 / clients))  # all of it
    prior = rng.dirichlet(np.full(classes, 0.05), size=clients)
    kept = need.copy(), left.copy(), prior.copy()
    taken = take(need, prior, left, rng)
    assert taken.min() >= 0
    assert np.array_equal(taken.sum(axis=1), need) and np.array_equal(taken.sum(axis=0), left)
    assert all(np.array_equal(a, b) for a, b in zip(kept, (need, left, prior), strict=True))


def test_take_falls_back_on_what_is_left_when_the_prior_has_no_mass_there():
    rng = np.random.default_rng(0)
    prior = np.array([[1.0, 0.0, 0.0]])
    taken = np.array(
        [take(np.array([90]), prior, np.array([30, 100, 300]), rng)[0] for _ in range(400)]
    )
    assert (taken[:, 0] == 30).all()  # all it wanted while it lasted
    share = taken[:, 1] / 60
    assert share.mean() == pytest.approx(0.25, abs=5 * np.sqrt(0.25 * 0.75 / 60 / 400))


def test_take_gives_a_scarce_class_to_a_random_subset():
    rng = np.random.default_rng(0)
    prior = np.array([[1.0, 0.0]] * 3)
    need, left = np.array([10, 10, 20]), np.array([20, 20])
    first = np.array([take(need, prior, left, rng)[:, 0] for _ in range(2000)])
    assert (first.sum(axis=1) == 20).all()
    assert first.mean(axis=0) == pytest.approx([5, 5, 10], abs=0.2)


def test_take_is_sampling_row_by_row():
    """One client, drawn one row at a time from the renormalised prior, has the same law."""
    prior, left, need = np.array([0.6, 0.3, 0.1]), np.array([5, 6, 30]), 20

    def one_by_one(rng):
        stock, got = left.copy(), np.zeros(3)
        for _ in range(need):
            open_prior = prior * (stock > 0)
            kind = rng.choice(3, p=open_prior / open_prior.sum())
            stock[kind] -= 1
            got[kind] += 1
        return got

    rng = np.random.default_rng(1)
    slow = np.array([one_by_one(rng) for _ in range(1500)])
    fast = np.array([take(np.array([need]), prior[None], left, rng)[0] for _ in range(1500)])
    error = np.sqrt((slow.var(axis=0) + fast.var(axis=0)) / 1500)
    assert (np.abs(slow.mean(axis=0) - fast.mean(axis=0)) <= 5 * error).all()
    assert np.allclose(slow.var(axis=0), fast.var(axis=0), rtol=0.3, atol=0.02)
