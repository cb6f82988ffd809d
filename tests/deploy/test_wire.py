"""What arrives is checked: arrays, models, trees and numbers."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

pytest.importorskip("flwr", reason="needs the extra fedbasin[flower]")

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedbasin.core.net import Net
from fedbasin.core.state import same
from fedbasin.core.tree import flatten
from fedbasin.deploy.wire import (
    SKELETON,
    Codec,
    Refused,
    add_scaled,
    check_values,
    number,
    read_array,
    read_tree,
    the_record,
    write_tree,
)


class Pair(NamedTuple):
    """A tree with every kind of leaf."""

    here: Tensor
    gone: Tensor | None = None
    count: int = 3
    inner: tuple = (torch.ones(2, dtype=torch.float64), "text", 0.5, True)


FORTRAN = Array(np.asfortranarray(np.ones((2, 3)))).data


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def record(module: nn.Module, **changed: np.ndarray) -> ArrayRecord:
    named = {n: t.numpy() for n, t in module.state_dict().items()} | changed
    return ArrayRecord({n: Array(a) for n, a in named.items()})


@settings(deadline=None)
@given(
    st.sampled_from([np.float32, np.float64, np.int64, np.uint8, np.bool_]),
    st.lists(st.integers(0, 4), max_size=3),
    st.sampled_from("CF"),
)
def test_arrays_read_back_as_numpy_reads_them(dtype, shape, order):
    values = np.arange(math.prod(shape)).reshape(shape).astype(dtype, order=order)
    found = read_array(Array(values))
    assert found.dtype == values.dtype and found.shape == values.shape
    assert np.array_equal(found, Array(values).numpy())
    assert values.size == 0 or not found.flags.writeable


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (Array("float32", (2,), "pickle", b"x"), "stored as 'pickle'"),
        (Array("float32", (2,), "numpy.ndarray", b"no header"), "cannot be read"),
        (Array("float32", (2,), "numpy.ndarray", Array(np.ones(9)).data[:-3]), "does not fill"),
        (Array("float32", (2,), "numpy.ndarray", Array(np.ones(9)).data + b"!"), "does not fill"),
        (Array(np.array(["a"])), "not accepted"),
        (Array(np.ones(2, dtype=">f4")), "not accepted"),
        (Array(np.ones(2, dtype=np.complex64)), "not accepted"),
        (Array("float64", (2, 3), "numpy.ndarray", FORTRAN[:-8]), "does not fill"),
        (Array("float64", (2, 3), "numpy.ndarray", FORTRAN + b"!"), "does not fill"),
        (Array("float64", (2, 3), "numpy.ndarray", FORTRAN.replace(b"(2, 3)", b"(-2,3)")), "below"),
        (
            Array("float64", (2, 3), "numpy.ndarray", FORTRAN.replace(b"<f8", b"|O8")),
            "not accepted",
        ),
    ],
)
def test_arrays_that_are_not_plain_are_refused(array, words):
    with pytest.raises(Refused, match=words):
        read_array(array)


def test_an_object_array_never_reaches_pickle():
    header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
    raw = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + b"cos\nsystem\n."
    with pytest.raises(Refused, match="not accepted"):
        read_array(Array("object", (1,), "numpy.ndarray", raw))


@pytest.mark.parametrize("with_net", [True, False])
def test_a_model_travels_by_name_and_integers_stay(with_net):
    module = network()
    net = Net(module)
    codec = Codec.of(record(module), net if with_net else None)
    vector, buffers = codec.read(record(module))
    if with_net:
        assert torch.equal(vector, net.initial()[0]) and torch.equal(buffers, net.initial()[1])
    assert vector.numel() == 12 + 4 + 8 + 8 + 2 and buffers.numel() == 8
    whole = codec.write(vector + 1, buffers + 2)
    assert list(whole) == list(module.state_dict())
    found = whole.to_torch_state_dict()
    assert torch.equal(found["0.weight"], module[0].weight + 1)
    assert torch.equal(found["1.running_var"], module[1].running_var + 2)
    assert found["1.num_batches_tracked"].dtype == torch.int64
    assert "1.num_batches_tracked" not in codec.write(vector, buffers, whole=False)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"0.bias": np.ones(5, np.float32)}, r"0.bias has shape \(5,\), expected \(4,\)"),
        ({"0.bias": np.ones(4, np.float64)}, "0.bias is float64, expected float32"),
        ({"0.bias": np.ones(4, np.int64)}, "0.bias is int64"),
        ({"0.bias": np.ones(4, np.int32)}, "0.bias is int32"),
        ({"2.weight": np.ones((4, 2), np.float32)}, r"2.weight has shape \(4, 2\)"),
        ({"2.weight": np.full((2, 4), np.nan, np.float32)}, "2.weight holds NaN or Inf"),
        ({"2.weight": np.array([[1] * 4, [1, 1, -np.inf, 1]], np.float32)}, "NaN or Inf"),
        ({"1.running_mean": np.full(4, np.inf, np.float32)}, "1.running_mean holds NaN"),
        ({"other": np.ones(1, np.float32)}, "other names: other"),
    ],
)
def test_models_that_do_not_fit_are_refused(changed, words):
    module = network()
    codec = Codec.of(record(module), Net(module))
    for read in (codec.read, codec.parts):
        with pytest.raises(Refused, match=words):
            read(record(module, **changed))


def test_a_model_that_lacks_a_part_is_refused():
    module = network()
    short = record(module)
    del short["2.bias"]
    with pytest.raises(Refused, match=r"lacks 2\.bias"):
        Codec.of(record(module)).parts(short)
    with pytest.raises(Refused, match=r"lack 2\.bias of the network"):
        Codec.of(short, Net(module))


def test_a_network_of_several_types_is_refused():
    with pytest.raises(Refused, match="float32 or float64 alone"):
        Codec.of(ArrayRecord({"a": Array(np.ones(2, np.float32)), "b": Array(np.ones(2))}))
    with pytest.raises(Refused, match="float32 or float64 alone"):
        Codec.of(ArrayRecord({"a": Array(np.ones(2, np.float16))}))


@settings(deadline=None)
@given(st.integers(0, 200), st.floats(-3, 3), st.sampled_from([np.float32, np.float64]))
def test_scaled_values_are_added_in_place(size, scale, dtype):
    values = np.linspace(-1, 1, size, dtype=dtype).reshape(-1, 1)
    values.flags.writeable = False
    around = np.ones(size + 6, dtype)
    add_scaled(around[3 : 3 + size], values, scale)
    expected = np.ones(size + 6)
    expected[3 : 3 + size] += scale * np.linspace(-1, 1, size)
    np.testing.assert_allclose(around, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 4, 9])
def test_one_bad_number_is_seen(bad, place):
    values = np.zeros(10, np.float32)
    check_values(values, "a")
    check_values(values[:0], "a")
    values[place] = bad
    with pytest.raises(Refused, match="a holds NaN or Inf"):
        check_values(values, "a")


@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_are_bounded_whatever_their_squares_add_up_to(sign):
    check_values(np.full((5, 20), sign * 9e14, np.float32), "a")
    check_values(np.full(10, sign * 6e4, np.float16), "a")
    for dtype, value in ((np.float32, 3e38), (np.float64, 1.1e15)):
        with pytest.raises(Refused, match=r"a holds values beyond 1e\+15"):
            check_values(np.full(100, sign * value, dtype), "a")


def test_trees_read_back_with_their_names():
    tree = (Pair(torch.arange(6.0).reshape(2, 3)), (), Pair(torch.tensor(0.25)))
    found = read_tree(*write_tree(tree))
    assert same(found, tree)
    assert found[0].here.shape == (2, 3) and found[0].gone is None and found[2].here.shape == ()
    assert [path for path, _ in flatten(found)] == [path for path, _ in flatten(tree)]


@pytest.mark.parametrize(
    ("skeleton", "words"),
    [
        ("[null", "not JSON"),
        ('[{"__class__": {"=": 1}}]', "a part called"),
        ('[{"a b": {"=": 1}}]', "a part called"),
        ("[null]", "lacks the array '0'"),
        ("[" * 20 + "]" * 20, "deeper than"),
        ("7", "damaged"),
        ('[{"=": [1]}]', "expected a number or text"),
        ("[]", "without a place: x"),
        (" " * 70_000, "too long"),
        (3, "no skeleton"),
    ],
)
def test_damaged_trees_are_refused(skeleton, words):
    arrays = ArrayRecord({"x": Array(np.ones(1))})
    with pytest.raises(Refused, match=words):
        read_tree(arrays, ConfigRecord({SKELETON: skeleton}))


def test_a_tree_that_is_not_finite_is_refused():
    with pytest.raises(Refused, match=r"0\.here holds NaN"):
        read_tree(*write_tree((Pair(torch.tensor([1.0, math.nan])),)))


@pytest.mark.parametrize("value", [math.nan, math.inf, "3", True, None, [1.0]])
def test_numbers_must_be_finite_numbers(value):
    with pytest.raises(Refused, match="expected a finite number"):
        number({"n": value}, "n")


def test_numbers_and_records_are_looked_up():
    assert number({"n": 3}, "n", least=0) == 3
    with pytest.raises(Refused, match="at least 0"):
        number({"n": -1}, "n", least=0)
    content = RecordDict({"a": MetricRecord({"x": 1}), "b": MetricRecord({"x": 2})})
    assert the_record(content, MetricRecord, "b")["x"] == 2
    with pytest.raises(Refused, match="exactly one MetricRecord"):
        the_record(content, MetricRecord)
    with pytest.raises(Refused, match="the ArrayRecord 'a'"):
        the_record(content, ArrayRecord, "a")
