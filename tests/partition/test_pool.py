import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import entropy

from fedbasin.partition import Partition, Pool, iid
from fedbasin.partition.measures import (
    classes_held,
    distance_from_global,
    effective_classes,
    mean_targets,
)
from fedbasin.partition.pool import cut, even


def test_order_offsets_sizes_and_counts_agree_with_the_clients():
    clients = (np.array([1, 4]), np.array([], dtype=np.int64), np.array([0, 2, 5]))
    split = Partition(clients, rows=7)
    assert split.order.tolist() == [1, 4, 0, 2, 5]
    assert split.offsets.tolist() == [0, 2, 2, 5]
    assert split.sizes().tolist() == [2, 0, 3]
    assert split.order.dtype == split.offsets.dtype == np.int64
    labels = np.array([2, 0, 2, 1, 0, 1, 1])
    assert split.counts(labels, 4).tolist() == [[2, 0, 0, 0], [0, 0, 0, 0], [0, 1, 2, 0]]


def test_partition_without_a_row_is_allowed():
    split = Partition((np.array([], dtype=np.int64),) * 2, rows=3)
    assert split.sizes().tolist() == [0, 0]
    assert split.counts(np.zeros(3, np.int64), 2).tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        (([0, 3], [1]), "outside \\[0, 3\\)"),
        (([-1, 2],), "outside \\[0, 3\\)"),
        (([0, 1], [1, 2]), "row 1 more than once"),
        (([0], [2, 1]), "unsorted"),
    ],
)
def test_impossible_partitions_are_refused(clients, message):
    with pytest.raises(ValueError, match=message):
        Partition(tuple(np.array(c) for c in clients), rows=3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0, 3], 3), r"labels holds 3, outside \[0, 3\).*classes=4"),
        (([0, -1], 3), r"labels holds -1, outside \[0, 3\)"),
        (([], 3), "labels is empty"),
        (([0.5, 1.0], 3), "labels has shape .* float64: give one integer"),
        (([[0, 1]], 3), "labels has shape"),
        (([0, 1], -1), "classes is -1: give a whole number, at least 0"),
        ((["a", "b"], 0), "labels has shape .* give one number a row"),
        (([[[0.5]]], 0), r"labels has shape \(1, 1, 1\)"),
        (([0.5, np.nan], 0), "labels holds NaN or infinity: remove such rows"),
        (([], 0), "labels is empty"),
        (([0.5, 1.5], 0, [1]), "groups has 1 entries for 2 rows"),
        (([0, 1], 2, [1]), "groups has 1 entries for 2 rows"),
        (([0, 1], 2, [0.1, 0.2]), "groups has shape"),
    ],
)
def test_impossible_pools_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Pool(*(np.array(a) if isinstance(a, list) else a for a in arguments))


def test_labels_of_any_integer_type_become_int64():
    assert Pool(np.array([0, 1], dtype=np.uint8), 2).labels.dtype == np.int64


def test_targets_without_classes_are_kept_as_they_are():
    targets = np.array([[0.5, 1], [-3, 0], [2, 1]], np.float32)
    pool = Pool(targets, groups=np.array([4, 5, 4]))
    assert pool.classes == 0 and pool.rows == 3 and pool.labels is targets
    some = pool.only(np.array([2, 0]))
    assert some.labels.tolist() == [[2, 1], [0.5, 1]] and some.groups.tolist() == [4, 4]
    with pytest.raises(ValueError, match=r"groups is None: natural .*use size_dirichlet\(alpha"):
        Pool(targets).needed_groups("natural")


def test_only_keeps_labels_and_groups_of_the_rows_named():
    pool = Pool(np.array([0, 2, 1, 2]), 3, np.array([7, 8, 9, 7])).only(np.array([1, 3]))
    assert pool.labels.tolist() == [2, 2] and pool.groups.tolist() == [8, 7] and pool.classes == 3
    assert Pool(np.array([0, 1]), 2).only(np.array([1])).groups is None


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.integers(0, 5), st.integers(0, 99))
def test_cut_gives_each_client_its_stretch_of_the_list_sorted(sizes, dropped, seed):
    rows = sum(sizes) + dropped
    order = np.random.default_rng(seed).permutation(rows)[: sum(sizes)]
    split = cut(order, np.array(sizes), rows)
    expected, start = [], 0
    for size in sizes:
        expected.append(sorted(order[start : start + size].tolist()))
        start += size
    assert [client.tolist() for client in split.clients] == expected


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.sampled_from([0.1, 0.3, 0.95]))
def test_hold_out_leaves_every_client_the_rest_of_its_own_rows(sizes, share):
    split = cut(np.random.default_rng(1).permutation(sum(sizes)), np.array(sizes), sum(sizes))
    kept, held = split.hold_out(share, np.random.default_rng(2))
    hundredths = round(100 * share)
    counts = [min(max(size * hundredths // 100, 1), size - 1) if size else 0 for size in sizes]
    assert held.sizes().tolist() == counts
    assert kept.rows == split.rows
    for mine, out, before in zip(kept.clients, held.clients, split.clients, strict=True):
        assert sorted([*mine, *out]) == before.tolist()


def test_rows_are_drawn_as_they_always_were():
    """Published results were made with these draws."""
    split = cut(np.arange(20), np.array([12, 8]), 20)
    kept, _ = split.hold_out(0.3, np.random.default_rng(3))
    draws = np.random.default_rng(3)
    assert kept.clients[0].tolist() == sorted(draws.permutation(np.arange(12))[3:])
    assert kept.clients[1].tolist() == sorted(draws.permutation(np.arange(12, 20))[2:])


def test_a_share_that_is_a_whole_number_of_rows_is_held_out_whole():
    split = cut(np.arange(100), np.array([100]), 100)
    for hundredths in range(1, 100):
        kept, _ = split.hold_out(hundredths / 100, np.random.default_rng(0))
        assert kept.sizes().tolist() == [100 - hundredths]


def test_what_is_held_out_is_drawn():
    split = cut(np.arange(1000), np.array([1000]), 1000)
    (kept,) = split.hold_out(0.3, np.random.default_rng(0))[0].clients
    (again,) = split.hold_out(0.3, np.random.default_rng(0))[0].clients
    (other,) = split.hold_out(0.3, np.random.default_rng(1))[0].clients
    assert np.array_equal(kept, again) and not np.array_equal(kept, other)
    assert 300 < (kept < 500).sum() < 400  # of either half alike


@given(st.integers(0, 1000), st.integers(1, 50))
def test_even_sizes_are_those_of_array_split(total, parts):
    assert even(total, parts).tolist() == [len(p) for p in np.array_split(np.arange(total), parts)]


def test_clients_of_a_large_split_are_views_of_one_array():
    pool = Pool(np.zeros(1000, np.int64), 1)
    clients = iid(pool, 100, np.random.default_rng(0)).clients
    assert clients[0].base is not None and clients[0].base is clients[-1].base


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 999))
def test_measures_against_scipy_and_a_loop(clients, classes, seed):
    counts = np.random.default_rng(seed).integers(0, 4, (clients, classes))
    total = counts.sum(axis=0)
    for k, row in enumerate(counts):
        assert classes_held(counts)[k] == sum(1 for x in row if x)
        if not row.sum():
            assert np.isnan(effective_classes(counts)[k])
            assert np.isnan(distance_from_global(counts)[k])
            continue
        assert effective_classes(counts)[k] == pytest.approx(np.exp(entropy(row)))
        gap = sum(abs(row[c] / row.sum() - total[c] / total.sum()) for c in range(classes)) / 2
        assert distance_from_global(counts)[k] == pytest.approx(gap)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.integers(0, 3), st.integers(0, 999))
def test_mean_targets_against_a_loop(clients, columns, seed):
    rng = np.random.default_rng(seed)
    targets = rng.normal(size=(20, columns) if columns else 20).astype(np.float32)
    sizes = rng.multinomial(15, np.ones(clients) / clients)
    split = cut(rng.permutation(20)[:15], sizes, 20)
    found = mean_targets(Pool(targets), split)
    assert found.shape == (clients, max(columns, 1))
    for row, mine in zip(found, split.clients, strict=True):
        if len(mine):
            assert row == pytest.approx(np.atleast_1d(targets[mine].astype(float).mean(axis=0)))
        else:
            assert np.isnan(row).all()


def test_a_split_that_holds_nothing_has_no_measures():
    nothing = np.zeros((2, 3), np.int64)
    assert classes_held(nothing).tolist() == [0, 0]
    assert np.isnan(effective_classes(nothing)).all()
    assert np.isnan(distance_from_global(nothing)).all()


def test_every_class_gives_its_share_of_the_rows_held_out():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 5, 400)
    parts = iid(Pool(labels, 5), 7, rng)
    trained, held = parts.hold_out(0.3, rng, labels)
    for before, mine, out in zip(parts.clients, trained.clients, held.clients, strict=True):
        assert sorted([*mine, *out]) == before.tolist()
        assert len(out) == int(0.3 * len(before))
        for label in range(5):
            share = len(out) * (labels[before] == label).mean()
            assert abs((labels[out] == label).sum() - share) < 1
    assert all((np.diff(part) > 0).all() for part in held.clients)


@pytest.mark.parametrize("labels", [None, np.zeros(6, np.int64)])
@pytest.mark.parametrize(("share", "counts"), [(0.1, [0, 1, 1]), (0.99, [0, 1, 2])])
def test_a_client_holds_out_a_row_and_keeps_a_row(share, counts, labels):
    parts = Partition(tuple(map(np.array, ([0], [1, 2], [3, 4, 5]))), 6)
    trained, held = parts.hold_out(share, np.random.default_rng(0), labels)
    assert held.sizes().tolist() == counts
    assert (trained.sizes() + held.sizes()).tolist() == [1, 2, 3]


def test_a_row_that_is_dealt_again_and_held_out_is_trained_on_by_nobody():
    shared = np.arange(20)
    parts = Partition((shared, shared), 20, again=True)
    trained, held = parts.hold_out(0.4, np.random.default_rng(0))
    assert held.sizes().tolist() == [8, 8]
    assert not np.isin(trained.order, held.order).any()
    with pytest.raises(ValueError, match="client 0 is left without rows"):
        parts.hold_out(0.9, np.random.default_rng(0))
