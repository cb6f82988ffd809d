import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbasin.partition import Pool, client_dirichlet, evened, longtail

CIFAR10 = np.repeat(np.arange(10), 5000)


@pytest.mark.parametrize(
    ("imbalance", "total"),
    [(1, 50_000), (0.5, 36_223), (0.1, 20_431), (0.05, 17_023), (0.01, 12_406)],
)
def test_totals_of_cifar10(imbalance, total):
    kept = longtail(CIFAR10, 10, imbalance, np.random.default_rng(0))
    sizes = np.bincount(CIFAR10[kept], minlength=10)
    assert len(kept) == total
    assert sizes[0] == 5000 and sizes[9] == int(5000 * imbalance)
    assert (np.diff(sizes) <= 0).all()


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=6).filter(any),
    st.floats(0.001, 1),
    st.integers(0, 999),
)
def test_every_class_keeps_what_the_formula_says(sizes, imbalance, seed):
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    kept = longtail(labels, len(sizes), imbalance, rng)
    assert (np.diff(kept) > 0).all()
    for label, had in enumerate(sizes):
        fall = label / (len(sizes) - 1) if len(sizes) > 1 else 0
        wanted = max(int(max(sizes) * imbalance**fall + 1e-9), 1)
        assert (labels[kept] == label).sum() == min(wanted, had)


def test_the_rows_kept_are_random_and_seeded():
    a, again, b = (longtail(CIFAR10, 10, 0.1, np.random.default_rng(s)) for s in (0, 0, 1))
    assert np.array_equal(a, again) and not np.array_equal(a, b)
    assert np.corrcoef(CIFAR10[a] * 5000 + 2500, a)[0, 1] > 0.99  # not only the first of a class
    assert (a[CIFAR10[a] == 9] % 5000).max() > 4000


@pytest.mark.parametrize("imbalance", [0, -0.1, float("nan"), float("inf")])
def test_imbalance_outside_its_range_is_refused(imbalance):
    with pytest.raises(ValueError, match=r"imbalance is .*: give smallest over largest class"):
        longtail(CIFAR10, 10, imbalance, np.random.default_rng(0))


def test_a_factor_above_one_is_told_how_to_write_it():
    with pytest.raises(ValueError, match=r"a factor of 100 is written 0.01"):
        longtail(CIFAR10, 10, 100, np.random.default_rng(0))


def test_labels_out_of_range_are_refused():
    with pytest.raises(ValueError, match="labels holds 9, outside"):
        longtail(CIFAR10, 9, 0.1, np.random.default_rng(0))


def test_equal_sizes_after_thinning_keep_the_long_tail():
    kept = longtail(CIFAR10, 10, 0.01, np.random.default_rng(0))
    pool = Pool(CIFAR10, 10).only(kept)
    split = client_dirichlet(pool, 100, np.random.default_rng(0), alpha=0.1)
    assert split.sizes().tolist() == [124] * 100
    totals = split.counts(pool.labels, 10).sum(axis=0)
    assert totals[0] > 4900 and totals[9] <= 50 and totals.sum() == 12_400


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any), st.integers(0, 999))
def test_evened_classes_are_as_large_as_the_largest(sizes, seed):
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    rows = evened(labels, len(sizes))
    times = np.bincount(rows, minlength=len(labels))
    assert np.array_equal(rows, np.sort(rows)) and (times > 0).all()
    for label, size in enumerate(sizes):
        mine = times[labels == label]
        assert mine.sum() == (max(sizes) if size else 0)
        assert not size or mine.max() - mine.min() <= 1


def test_a_size_that_is_not_quite_whole_in_binary_is_whole():
    assert 50 * 0.58 < 29
    labels = np.repeat(np.arange(2), 50)
    kept = longtail(labels, 2, 0.58, np.random.default_rng(0))
    assert np.bincount(labels[kept]).tolist() == [50, 29]
