"""Whatever one client sends ends as a refusal of that client; the federation goes on."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra fedbasin[flower]")

from deploy.grids import LocalGrid, app_for, strategy_for
from deploy.test_refusals import CULPRIT, FIRST, changed, run
from flwr.app import Array, ArrayRecord, ConfigRecord

from fedbasin.core.expressions import parse
from fedbasin.core.method import Context, Plan, ReplyError
from fedbasin.core.rng import root
from fedbasin.core.round import (
    Returned,
    RoundSetup,
    Scoring,
    Server,
    Traffic,
    begin_round,
    end_round,
)
from fedbasin.deploy.client_state import StatesOnClients
from fedbasin.deploy.merge import Lenient, gathered_of
from fedbasin.deploy.replies import Guard
from fedbasin.deploy.wire import (
    SKELETON,
    Codec,
    Refused,
    number,
    read_array,
    read_tree,
    write_tree,
)
from fedbasin.testing import replies_of, toy_federation


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
    assert all(why.startswith(f"client {CULPRIT}: ") for why in strategy.journal.refused)


def test_rows_beyond_what_can_be_summed_are_refused():
    assert number({"num-examples": 2**53}, "num-examples", least=0) == 2**53
    strategy = run(tamper=lambda c, r: [changed(r, num_examples=1.7e308) if c == CULPRIT else r])
    assert list(strategy.journal.refused) == [
        f"client {CULPRIT}: num-examples is 1.7e+308, expected at most 9.0072e+15"
    ]


def test_what_a_client_sends_does_not_fill_the_checkpoint(monkeypatch):
    monkeypatch.setattr("fedbasin.deploy.cohort._MOST_REASONS", 2)
    long = [[0.5] * 1000, [1.5] * 1000, [2.5] * 1000]

    def tamper(client, reply):
        return [changed(reply, num_examples=long.pop()) if client == CULPRIT else reply]

    refused = run(tamper=tamper, rounds=3).journal.refused
    assert len(refused) == 3 and refused[f"client {CULPRIT}"] == 1
    assert all(why.startswith(f"client {CULPRIT}") and len(why) < 400 for why in refused)


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


class Change(NamedTuple):
    """What scaffold's clients report, with another length."""

    control: torch.Tensor


def reporting(culprits, tree):
    def tamper(client, reply):
        if client in culprits:
            reply.content["report"], reply.content["report-shape"] = write_tree(tree)
        return [reply]

    return tamper


@pytest.mark.parametrize(
    "tree", [((torch.zeros(3),),), (Change(torch.zeros(3, dtype=torch.float64)),)]
)
def test_the_first_to_answer_does_not_decide_how_reports_are_shaped(tree):
    for culprit in range(6):  # one of them is the first
        strategy = run("scaffold", reporting({culprit}, tree), rounds=1)
        assert list(strategy.journal.refused) == [
            f"client {culprit}: its report is shaped unlike the other clients'"
        ]
        assert strategy.journal.records[0].replies == 5


def test_reports_that_are_all_wrong_end_a_run_that_has_merged_nothing(caplog):
    wrong = reporting(set(range(6)), ((torch.zeros(3),),))
    strategy = run("scaffold", wrong, fails="ReplyError: no client rule reports a Change")
    start = toy_federation(parse("fedavg", "method")).net.initial()[0]
    assert torch.equal(strategy._server.send, start) and strategy._server.round == 1
    assert [r.notes["merge_refused"] for r in strategy.journal.records] == [1]
    assert sum("keeps its model" in r.getMessage() for r in caplog.records) == 1


def test_reports_that_are_all_wrong_cost_a_later_round_and_no_more():
    answers = []

    def tamper(client, reply):
        answers.append(client)
        wrong = 6 < len(answers) <= 12  # round 2
        return reporting(set(range(6)) if wrong else set(), ((torch.zeros(3),),))(client, reply)

    strategy = run("scaffold", tamper, rounds=3)
    notes = [r.notes.get("merge_refused") for r in strategy.journal.records]
    assert notes == [None, 1.0, None] and not strategy.journal.refused


def merged(method, before, replies, context, guard=None):
    """The server and the record after a round whose replies are given, and who was far."""
    plan = Plan(0.1)
    scoring = Scoring(rounds=1, test=None)
    setup = RoundSetup(method, context, lambda _: plan, context.key, Lenient(), scoring)
    launch = begin_round(setup, before, replies.clients.numpy(), StatesOnClients())
    gathered, excess = gathered_of(replies, before.send, guard)
    after, record = end_round(setup, before, launch, Returned(gathered, Traffic()))
    return after, record, [client for client, _ in excess.far]


def test_a_state_that_is_not_finite_is_not_kept():
    """The model may be finite where a moment of it is not."""
    method = parse("fedadam", "method")
    codec = Codec.of(ArrayRecord({"a.weight": Array(np.zeros(4, np.float32))}))
    vector = torch.zeros(4)
    buffers = torch.zeros(0)
    context = Context(codec.layout, 10, 1, root(0))
    before = Server(0, vector, vector, buffers, method.init(vector, context))
    replies = replies_of(torch.tensor([[1e25] * 4, [1.0] * 4]))
    after, record, _ = merged(method, before, replies, context)
    assert after == replace(before, round=1) and record.notes == {"merge_refused": 1.0}


def test_one_of_two_that_reports_oddly_does_not_get_the_other_refused():
    def silent(client, reply):
        if client == CULPRIT:
            del reply.content["report"], reply.content["report-shape"]
        return [reply]

    federation = toy_federation(
        parse("scaffold", "method"), rounds=12, participation="count(clients=2)"
    )
    strategy = strategy_for(federation, federation.method)
    arrays = ArrayRecord(federation.net.state_dict(*federation.net.initial()))
    strategy.start(LocalGrid(app_for(federation), 6, silent), arrays, num_rounds=12, timeout=0.5)
    why = "its report is shaped unlike the other clients'"
    assert set(strategy.journal.refused) == {f"client {CULPRIT}: {why}"}
    assert all(r.replies >= 2 for r in strategy.journal.records)


def test_a_report_that_all_lack_ends_a_run_that_has_merged_nothing():
    def silent(client, reply):
        del reply.content["report"], reply.content["report-shape"]
        return [reply]

    strategy = run("scaffold", silent, rounds=1, fails="no client rule reports a Change")
    assert strategy.journal.records[0].notes == {"merge_refused": 1.0}


def test_a_merge_that_is_refused_leaves_the_models_that_the_old_state_needs(tmp_path, monkeypatch):
    """The merger dies after the method has put new models into the archive in place of old ones."""
    expression = "fedcda(warmup=0, memory=1, store='disk')"
    strategy = run(expression, rounds=2, folder=tmp_path)
    kind = type(strategy.method)
    seen = []
    whole = kind.aggregate

    def failing(self, state, server, replies, context):
        found = whole(self, state, server, replies, context)
        seen.append(context.round)
        if context.round == 2:
            raise ReplyError("no")
        return found

    monkeypatch.setattr(kind, "aggregate", failing)
    after = run(expression, rounds=5, folder=tmp_path)
    assert seen == [2] * 7 + [3, 4]  # whole, then without each of the six
    assert [r.notes.get("merge_refused") for r in after.journal.records[2:]] == [1.0, None, None]


@pytest.mark.parametrize("action", ["clip", "drop"])
def test_a_far_update_brings_no_statistics_and_no_loss(action):
    arrays = ArrayRecord(
        {
            "a.weight": Array(np.zeros(4, np.float32)),
            "b.running_mean": Array(np.zeros(2, np.float32)),
            "b.running_var": Array(np.ones(2, np.float32)),
        }
    )
    codec = Codec.of(arrays)
    vector, buffers = codec.read(arrays)
    replies = replace(
        replies_of(torch.tensor([[1.0] * 4, [1000.0] * 4, [1.0] * 4]), weights=[1, 5, 3]),
        clients=torch.tensor([4, 7, 9]),
    )
    sent = torch.tensor([[1.0, 1, 2, 2], [1e6, 1e6, 50, 50], [3.0, 3, 4, 4]])
    losses = torch.tensor([1.0, 9e9, 2.0], dtype=torch.float64)
    replies = replace(replies, train_loss=losses, buffers=sent)
    before = Server(0, vector, vector, buffers, ())
    context = Context(codec.layout, 10, 1, root(0))
    fedavg = parse("fedavg", "method")
    guard = Guard(5.0, action)
    after, record, named = merged(fedavg, before, replies, context, guard)
    assert named == [7]
    torch.testing.assert_close(after.buffers, torch.tensor([2.5, 2.5, 3.5, 3.5]))
    assert record.train_loss == pytest.approx(1.75)
