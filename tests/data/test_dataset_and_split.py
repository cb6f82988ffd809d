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
        ({"labels": np.zeros(3, np.int64)}, "inputs has 2 rows and labels has 3: give as many"),
        ({"inputs": np.zeros((2, 4), bool)}, "inputs is bool: give whole numbers, float16"),
        ({"inputs": np.zeros((2, 4), "U3")}, "inputs is str.*: give whole numbers, float16"),
        ({"inputs": np.zeros((2, 4), "m8[s]")}, "inputs is timedelta64.*: give whole numbers"),
        ({"inputs": np.full((2, 4), 2**63, np.uint64)}, "beyond int64"),
        ({"inputs": np.zeros(2, np.float32)}, r"inputs has shape \[2\]: .*inputs\[:, None\]"),
        ({"labels": np.zeros(2, np.int32)}, "labels is int32: give int64 for classes"),
        ({"labels": np.zeros(2, np.float64)}, "labels is float64: .*float32 for other targets"),
        ({"labels": np.zeros((2, 1, 1), np.int64)}, r"labels has shape \[2, 1, 1\]: give \[n\]"),
        ({"labels": np.zeros((2, 0), np.float32)}, r"labels has shape \[2, 0\]: give \[n\]"),
        ({"groups": np.zeros(1, np.int64)}, "groups has 1 rows and labels has 2: give as many"),
        ({"groups": np.zeros(2, np.int32)}, r"groups must be int64 \[n\], got int32"),
    ],
)
def test_rows_that_do_not_fit_together_are_refused(changed, message):
    good = {"inputs": np.zeros((2, 4), np.uint8), "labels": np.zeros(2, np.int64), "groups": None}
    with pytest.raises(ValueError, match=message):
        Rows(**(good | changed))


INPUTS = (np.uint8, np.int8, np.uint16, np.int32, np.uint64, np.float16, np.float32, np.float64)


@pytest.mark.parametrize("dtype", INPUTS)
@pytest.mark.parametrize(
    "labels",
    [
        np.arange(6),
        np.arange(6, dtype=np.float32),
        np.ones((6, 2), np.float32),
        np.ones((6, 3), np.int64),
    ],
    ids=["classes", "numbers", "time and event", "several"],
)
def test_numbers_of_any_type_are_taken_as_they_are(dtype, labels):
    inputs = np.arange(24).reshape(6, 4).astype(dtype)
    taken = Rows(inputs, labels).take([4, 1])
    assert taken.inputs.dtype == dtype and taken.inputs.tolist() == inputs[[4, 1]].tolist()
    assert taken.labels.dtype == labels.dtype and taken.labels.tolist() == labels[[4, 1]].tolist()


@given(
    rows=st.integers(1, 40),
    bad=st.sets(st.integers(0, 39), min_size=1, max_size=3),
    value=st.sampled_from([np.nan, np.inf, -np.inf]),
    where=st.sampled_from(["inputs", "labels"]),
    dtype=st.sampled_from([np.float16, np.float32, np.float64]),
    at_once=st.sampled_from([1, 7, 1 << 22]),
)
@settings(max_examples=60, deadline=None)
def test_the_first_row_with_nan_or_infinity_is_named(rows, bad, value, where, dtype, at_once):
    arrays = {"inputs": np.zeros((rows, 2, 3), dtype), "labels": np.zeros((rows, 2), np.float32)}
    bad = sorted(row % rows for row in bad)
    for row in bad:
        arrays[where][row].flat[-1] = value
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedbasin.data.dataset._CHECKED_AT_ONCE", at_once)
        with pytest.raises(ValueError, match=f"^{where} holds {value} in row {bad[0]}: fill in"):
            Rows(**arrays)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "sound"}, "kind is 'sound': available: image, text, table"),
        ({"kind": "text"}, "inputs of kind 'text' must be whole numbers, got float32"),
        ({"kind": "image"}, r"must be uint8 \[n, channels, height, width\], got float32 \[2, 4\]"),
        (
            {"inputs": np.zeros((2, 5), np.float32)},
            r"float32 \[4\] in train and float32 \[5\] in t",
        ),
        ({"inputs": np.zeros((2, 4))}, r"float32 \[4\] in train and float64 \[4\] in test"),
        ({"labels": np.zeros(2, np.float32)}, r"int64 \[\] in train and float32 \[\] in test"),
        ({"labels": np.array([0, 2])}, r"labels holds 2, outside \[0, 2\): number the classes"),
        ({"labels": np.array([0, -1])}, r"labels holds -1, outside \[0, 2\)"),
    ],
)
def test_datasets_that_do_not_fit_together_are_refused(changes, message):
    train = Rows(np.zeros((2, 4), np.float32), np.array([0, 1]))
    test = {"inputs": train.inputs, "labels": train.labels}
    test |= {k: v for k, v in changes.items() if k in test}
    with pytest.raises(ValueError, match=message):
        Dataset("toy", changes.get("kind", "table"), train, Rows(**test), ("a", "b"))


def test_a_split_without_rows_is_refused():
    some = Rows(np.zeros((2, 4), np.float32), np.array([0, 1]))
    for splits, name in (((some, some.take([])), "test"), ((some.take([]), some), "train")):
        with pytest.raises(ValueError, match=f"{name} of toy has no rows: give some"):
            Dataset("toy", "table", *splits, ("a", "b"))


@pytest.mark.parametrize("labels", [np.zeros(2, np.float32), np.zeros((2, 2), np.int64)])
def test_names_of_classes_need_one_whole_number_a_row(labels):
    some = Rows(np.zeros((2, 4), np.float32), labels)
    assert Dataset("toy", "table", some, some, ()).classes == ()
    with pytest.raises(ValueError, match=r"2 classes: give int64 \[n\], or classes=\(\)"):
        Dataset("toy", "table", some, some, ("a", "b"))


def regression(count, start=0):
    number = np.arange(start, start + count)
    return Rows(number[:, None].astype(np.float32), number.astype(np.float32) / 7)


@given(
    count=st.integers(2, 50),
    share=st.floats(0, 1, exclude_max=True),
    source=st.sampled_from(["train", "test"]),
    classes=st.booleans(),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=40)
def test_the_servers_rows_without_regard_to_class(count, share, source, classes, seed):
    data = Dataset("toy", "table", regression(count), regression(count, 1000), ())
    if classes:
        data = dataset([0] * count, [1] * count)
    wanted = max(1, int(share * count))
    parts = split(data, proxy_rows=wanted, proxy_from=source, rng=np.random.default_rng(seed))
    whole = data.train if source == "train" else data.test
    left, untouched = (parts.train, parts.test) if source == "train" else (parts.test, parts.train)
    assert len(parts.proxy) == wanted
    together = [row.tobytes() for part in (parts.proxy, left) for row in part.inputs]
    assert sorted(together) == sorted(row.tobytes() for row in whole.inputs)
    assert untouched is (data.test if source == "train" else data.train)


def test_every_row_is_as_likely_to_be_the_servers():
    data = Dataset("toy", "table", regression(20), regression(20), ())
    draws = [
        split(data, proxy_rows=5, rng=np.random.default_rng(seed)).proxy.inputs[:, 0].astype(int)
        for seed in range(800)
    ]
    counts = np.bincount(np.concatenate(draws), minlength=20)
    assert np.abs(counts / 800 - 0.25).max() < 0.06  # four deviations


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
        (
            {"proxy_rows": 5},
            DataError,
            "proxy_rows=5, but toy has only 5 train rows; ask for fewer",
        ),
        ({"proxy_rows": -1}, ValueError, "proxy_rows must be 0 or more, got -1"),
        ({"proxy_rows": 1, "proxy_per_class": 2}, ValueError, "is 2 and proxy_rows is 1: set one"),
        ({"proxy_per_class": -1}, ValueError, "proxy_per_class must be 0 or more, got -1"),
        ({"proxy_per_class": 1, "proxy_from": "all"}, ValueError, "'train' or 'test', got 'all'"),
    ],
)
def test_an_impossible_proxy_set_is_refused(arguments, error, message):
    data = dataset([0, 0, 1, 1, 2], [0, 1, 2])
    with pytest.raises(error, match=message):
        split(data, **arguments, rng=np.random.default_rng(0))


def test_rows_of_each_class_need_classes():
    data = Dataset("toy", "table", regression(9), regression(9), ())
    with pytest.raises(DataError, match=r"targets of toy have no classes; set proxy_rows \(data"):
        split(data, proxy_per_class=2, rng=np.random.default_rng(0))


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
