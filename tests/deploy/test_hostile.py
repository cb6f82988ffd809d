"""Whatever one client sends ends as a refusal of that client; the federation goes on."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs the extra fedbasin[flower]")

from deploy.test_refusals import CULPRIT, FIRST, changed, run
from flwr.app import Array, ArrayRecord, ConfigRecord

from fedbasin.deploy.wire import SKELETON, Codec, Refused, number, read_array, read_tree


def stored(header: bytes, body: bytes = b"", version: int = 1) -> Array:
    """An array with a header of one's own making."""
    size = struct.pack("<H" if version == 1 else "<I", len(header) + 1)
    data = b"\x93NUMPY" + bytes([version, 0]) + size + header + b"\n" + body
    return Array(dtype="float32", shape=(1,), stype="numpy.ndarray", data=data)


def shaped(shape: str, body: bytes = b"") -> Array:
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}"
    return stored(header.encode(), body)


ARRAYS = {
    "negative axes": shaped("(-1, -1)", bytes(4)),
    "none of very many": shaped(f"(0, {1 << 62})"),
    "none of too many": shaped("(0, 99999999999999999999)"),
    "seventy axes": shaped("(" + "1," * 70 + ")", bytes(4)),
    "forty axes": shaped("(" + "1," * 40 + ")", bytes(4)),
    "open brace": stored(b"{'descr': "),
    "unhashable": stored(b"{[]: 1}"),
    "nested": stored(b"(" * 4000 + b")" * 4000),
    "not UTF-8": stored(b"\xff\xfe", version=2),
    "long double": Array(np.zeros(3, np.longdouble)),
}
TREES = {
    "keyword": '[{"class": {"=": 1}}]',
    "None": '[{"None": {"=": 1}}]',
    "two spellings": json.dumps([{"fi": {"=": 1}, "\ufb01": {"=": 2}}]),
    "lone surrogate": '[{"\\ud800": null}]',
    "NaN": '[{"a": {"=": NaN}}]',
    "Inf": '[{"a": {"=": 1e999}}]',
}


@pytest.mark.parametrize("case", ARRAYS)
def test_an_array_of_any_bytes_is_refused_and_nothing_else(case):
    with pytest.raises(Refused):
        read_array(ARRAYS[case])


@pytest.mark.parametrize("case", TREES)
def test_a_tree_of_any_names_is_refused_and_nothing_else(case):
    with pytest.raises(Refused):
        read_tree(ArrayRecord({}), ConfigRecord({SKELETON: TREES[case]}))


@pytest.mark.parametrize("stream", [False, True])
def test_one_broken_array_costs_one_client_its_round(stream):
    def tamper(client, reply):
        if client == CULPRIT:
            reply.content["arrays"][FIRST] = ARRAYS["negative axes"]
        return [reply]

    strategy = run(tamper=tamper, stream=stream)
    assert [r.replies for r in strategy.journal.records] == [5, 5]
    assert all(why.startswith(f"client {CULPRIT}: ") for why in strategy.tally.refused)


def test_rows_beyond_what_can_be_summed_are_refused():
    assert number({"num-examples": 2**53}, "num-examples", least=0) == 2**53
    strategy = run(tamper=lambda c, r: [changed(r, num_examples=1.7e308) if c == CULPRIT else r])
    assert list(strategy.tally.refused) == [
        f"client {CULPRIT}: num-examples is 1.7e+308, expected at most 9.0072e+15"
    ]


def test_a_negative_variance_is_refused():
    def arrays(least):
        return ArrayRecord(
            {
                "a.weight": Array(np.ones(2, np.float32)),
                "b.running_mean": Array(np.full(2, -1, np.float32)),
                "b.running_var": Array(np.array([1, least], np.float32)),
            }
        )

    codec = Codec.of(arrays(0))
    assert len(codec.parts(arrays(0))) == 3
    with pytest.raises(Refused, match=r"b.running_var is -0.5 at its least"):
        codec.parts(arrays(-0.5))
