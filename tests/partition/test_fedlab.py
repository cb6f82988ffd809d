"""Splits with FedLab's draws, against what FedLab 1.3.0 itself returned for these labels."""

import hashlib

import numpy as np
import pytest

from fedbasin.partition import Pool, fedlab_dirichlet, fedlab_shards

LABELS = np.arange(50_000) % 10
POOL = Pool(LABELS, 10)
RNG = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("seed", "alpha", "minimum", "first", "rows"),
    [
        (1, 0.1, 10, [171, 52, 457, 56, 156, 479, 538, 110], "01bc3e6aab7bc9a7"),
        (3, 0.5, 10, [528, 396, 467, 371, 540, 497, 265, 524], "d768992d0a71851b"),
        (2023, 0.05, 1, [542, 650, 117, 177, 13, 362, 601, 1811], "528debe6817708d1"),
    ],
)
def test_rows_are_those_of_hetero_dir_partition(seed, alpha, minimum, first, rows):
    """`np.random.seed(seed); hetero_dir_partition(LABELS, 100, 10, alpha, minimum)`."""
    split = fedlab_dirichlet(POOL, 100, RNG, alpha=alpha, seed=seed, minimum=minimum)
    assert split.sizes()[:8].tolist() == first
    order = np.concatenate(split.clients).astype("<i8")  # each client's rows sorted
    assert hashlib.blake2b(order.tobytes(), digest_size=8).hexdigest() == rows


def hetero_dir_partition(labels, clients, classes, alpha, seed):
    """FedLab's rule for one draw, in plain loops: each client's rows."""
    draws, held = np.random.RandomState(seed), [[] for _ in range(clients)]
    for label in range(classes):
        rows = np.flatnonzero(labels == label)
        draws.shuffle(rows)
        shares = draws.dirichlet(np.repeat(alpha, clients))
        fair = len(labels) / clients
        shares = [q * (len(mine) < fair) for q, mine in zip(shares, held, strict=True)]
        if len(rows):
            ends = (np.cumsum(np.array(shares) / sum(shares)) * len(rows)).astype(int)[:-1]
            for mine, more in zip(held, np.split(rows, ends), strict=True):
                mine.extend(more.tolist())
    return [sorted(mine) for mine in held]


def test_a_class_without_rows_is_drawn_for_all_the_same():
    labels = np.repeat([0, 2, 5], 40)
    for seed in range(5):
        split = fedlab_dirichlet(Pool(labels, 7), 4, RNG, alpha=1.0, seed=seed, minimum=0)
        theirs = hetero_dir_partition(labels, 4, 7, 1.0, seed)
        assert [mine.tolist() for mine in split.clients] == theirs


def test_a_last_class_without_rows_asks_nobody_for_room():
    split = fedlab_dirichlet(Pool(np.array([0, 1]), 3), 2, RNG, alpha=1.0, seed=0, minimum=1)
    assert split.sizes().tolist() == [1, 1]


def test_what_is_left_out_is_as_in_fedlab():
    small = Pool(LABELS[:400], 10)
    for how, given, default in (
        (fedlab_dirichlet, {"alpha": 0.1}, {"minimum": 10}),
        (fedlab_shards, {}, {"per_client": 2}),
    ):
        left_out = how(small, 10, RNG, seed=1, **given)
        written = how(small, 10, RNG, seed=1, **given, **default)
        assert [c.tolist() for c in left_out.clients] == [c.tolist() for c in written.clients]


def test_classes_are_those_of_shards_partition():
    """`np.random.seed(7); shards_partition(LABELS, 10, 40)`."""
    split = fedlab_shards(POOL, 10, RNG, seed=7, per_client=4)
    held = [np.repeat(np.arange(10), row // 1250).tolist() for row in split.counts(LABELS, 10)]
    assert held[:4] == [[4, 4, 8, 9], [0, 0, 5, 8], [2, 5, 7, 9], [1, 3, 3, 6]]
    assert held[4:8] == [[0, 2, 5, 6], [3, 4, 7, 9], [1, 1, 6, 7], [2, 2, 8, 9]]


def test_the_runs_seed_has_no_say():
    for make in (
        lambda rng: fedlab_dirichlet(POOL, 20, rng, alpha=0.3, seed=5),
        lambda rng: fedlab_shards(POOL, 20, rng, seed=5),
    ):
        one, other = (make(np.random.default_rng(seed)) for seed in (0, 1))
        assert np.array_equal(one.order, other.order)


def test_a_minimum_out_of_reach_is_an_error_with_the_way_out():
    one_class = Pool(np.zeros(1000, np.int64), 1)
    with pytest.raises(ValueError, match=r"minimum is 150: 1000 draws from seed 1 .* larger alpha"):
        fedlab_dirichlet(one_class, 5, RNG, alpha=0.01, seed=1, minimum=150)


@pytest.mark.parametrize("seed", [-1, 1 << 32, 1.5, True])
def test_seeds_that_numpy_does_not_take_are_refused(seed):
    with pytest.raises(ValueError, match=f"seed is {seed}"):
        fedlab_shards(POOL, 10, RNG, seed=seed)
