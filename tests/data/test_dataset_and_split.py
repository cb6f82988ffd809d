from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbasin.data import DataError, Dataset, Rows, split
from fedbasin.data.split import held_out


def rows(labels, start=0, groups=False):
    """Rows whose inputs say which row they are."""
    number = np.arange(start, start + len(labels), dtype=np.uint32)
    inputs = number.view(np.uint8).reshape(len(labels), 4)
    labels = np.asarray(labels, dtype=np.int64)
    return Rows(inputs, labels, number.astype(np.int64) if groups else None)


def numbers(some):
    return np.ascontiguousarray(some.inputs).view(np.uint32)[:, 0].tolist()


def dataset(train, test, classes=3):
    names = tuple(f"class {c}" for c in range(classes))
    return Dataset("toy", "text", rows(train), rows(test, start=1000), names)


def test_rows_take_keeps_order_and_groups_and_cannot_be_written():
    some = rows([0, 1, 2, 1], groups=True)
    for index in ([2, 0], np.array([False, True, True, False]), slice(1, 3)):
        taken = some.take(index)
        wanted = np.arange(4)[index].tolist()
        assert numbers(taken) == wanted == taken.groups.tolist()
        assert taken.labels.tolist() == some.labels[wanted].tolist()
        assert len(taken) == len(wanted)
        for array in (taken.inputs, taken.labels, taken.groups):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1
    assert rows([0, 1]).take([1]).groups is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"labels": np.zeros(3, np.int64)}, "inputs must hold 3 rows of uint8, got 2 of uint8"),
        (
            {"inputs": np.zeros((2, 4), np.float32)},
            "inputs must hold 2 rows of uint8, got 2 of float32",
        ),
        ({"labels": np.zeros(2, np.int32)}, "labels must hold 2 rows of int64, got 2 of int32"),
        ({"groups": np.zeros(1, np.int64)}, "groups must hold 2 rows of int64, got 1 of int64"),
    ],
)
def test_rows_that_do_not_fit_together_are_refused(changed, message):
    good = {"inputs": np.zeros((2, 4), np.uint8), "labels": np.zeros(2, np.int64), "groups": None}
    with pytest.raises(ValueError, match=message):
        Rows(**(good | changed))


@given(
    extra=st.lists(st.integers(0, 2), max_size=30),
    per_class=st.integers(1, 4),
    source=st.sampled_from(["train", "test"]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=30)
def test_the_proxy_set_is_balanced_and_disjoint(extra, per_class, source, seed):
    pool = [0, 1, 2] * per_class + [*extra, 1]
    data = dataset(pool, pool)
    parts = split(
        data, proxy_per_class=per_class, proxy_from=source, rng=np.random.default_rng(seed)
    )
    assert Counter(parts.proxy.labels.tolist()) == {c: per_class for c in range(3)}
    left, untouched = (parts.train, parts.test) if source == "train" else (parts.test, parts.train)
    whole = data.train if source == "train" else data.test
    assert not set(numbers(parts.proxy)) & set(numbers(left))
    assert sorted(numbers(parts.proxy) + numbers(left)) == numbers(whole)
    assert numbers(left) == sorted(numbers(left))
    assert untouched is (data.test if source == "train" else data.train)
    for part in (parts.proxy, left):
        assert part.labels.tolist() == [pool[n % 1000] for n in numbers(part)]


def test_the_proxy_set_follows_the_generator_and_only_it():
    data = dataset([0, 1, 2] * 40, [0, 1, 2])
    draws = [split(data, proxy_per_class=5, rng=np.random.default_rng(s)) for s in (1, 1, 2)]
    first, again, other = (numbers(parts.proxy) for parts in draws)
    assert first == again != other


def test_no_proxy_set_means_the_very_same_rows():
    data = dataset([0, 1], [2])
    parts = split(data, rng=np.random.default_rng(0))
    assert parts.train is data.train and parts.test is data.test and parts.proxy is None


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"proxy_per_class": 2}, DataError, "class 'class 2' of toy has only 1 train rows"),
        ({"proxy_per_class": 1, "proxy_from": "test"}, DataError, "takes every test row of toy"),
        ({"proxy_per_class": -1}, ValueError, "proxy_per_class must be 0 or more, got -1"),
        ({"proxy_per_class": 1, "proxy_from": "all"}, ValueError, "'train' or 'test', got 'all'"),
    ],
)
def test_an_impossible_proxy_set_is_refused(arguments, error, message):
    data = dataset([0, 0, 1, 1, 2], [0, 1, 2])
    with pytest.raises(error, match=message):
        split(data, **arguments, rng=np.random.default_rng(0))


@given(st.lists(st.integers(-3, 3), max_size=60), st.sampled_from([0.1, 0.2, 0.5]))
@settings(max_examples=40)
def test_held_out_takes_the_share_of_every_stratum(strata, share):
    strata = np.array(strata, dtype=np.int64)
    mask = held_out(strata, share)
    for stratum, count in Counter(strata.tolist()).items():
        assert mask[strata == stratum].sum() == int(count * share + 1e-9)
    assert (mask == held_out(strata, share)).all()


def test_held_out_draws_at_random_within_a_stratum():
    mask = held_out(np.zeros(1000, dtype=np.int64), 0.3)
    assert mask.sum() == 300
    assert 60 < mask[:300].sum() < 120  # neither the first rows nor none of them
