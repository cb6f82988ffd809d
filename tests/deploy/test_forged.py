"""A number that a client forges is refused by what the server knows, and the client is named."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra fedbasin[flower]")

from deploy.grids import LocalGrid, app_for, strategy_for
from deploy.test_refusals import CULPRIT, changed, run
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict

from fedbasin.core.expressions import parse
from fedbasin.core.method import Plan
from fedbasin.core.tree import tensors
from fedbasin.deploy import Guard
from fedbasin.deploy.bounds import Bounds
from fedbasin.deploy.clients import Clients
from fedbasin.deploy.evaluation import evaluations, mean_of
from fedbasin.deploy.mail import Mailbox
from fedbasin.deploy.replies import Collector, ReplyMetadata, guarded
from fedbasin.deploy.seats import Seats
from fedbasin.deploy.wire import Refused
from fedbasin.testing import replies_of, toy_federation

NUMBERS = {
    "steps": 1e15,
    "lr_sum": 1e-11,
    "length": 1e-11,
    "num_examples": 10**6,
    "last_loss": 1e15,
}


def only_culprit_named(strategy) -> bool:
    return all(why.startswith(f"client {CULPRIT}: ") for why in strategy.journal.refused)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("method", ["fedcm", "fednova"])
def test_a_forged_number_costs_its_client_the_round(method, number):
    forged = {number: NUMBERS[number]}
    strategy = run(method, lambda c, r: [changed(r, **forged) if c == CULPRIT else r])
    assert [r.replies for r in strategy.journal.records] == [5, 5]
    assert strategy.journal.refused.total() == 2 and only_culprit_named(strategy)
    assert not any("merge_refused" in r.notes for r in strategy.journal.records)


def test_a_report_far_beyond_the_others_is_refused():
    def tamper(client, reply):
        if client == CULPRIT:
            report = reply.content["report"]
            for name in list(report):
                report[name] = Array(np.full_like(report[name].numpy(), 9e14))
        return [reply]

    strategy = run("scaffold", tamper)
    assert strategy.journal.refused.total() == 2 and only_culprit_named(strategy)
    largest = max(float(leaf.abs().max()) for leaf in tensors(strategy._server.state))
    assert largest < 1e3


@pytest.mark.parametrize(("times", "refused"), [(10, False), (1000, True)])
def test_a_report_is_compared_with_the_cohorts_median(times, refused):
    """The bound is 100 medians; the client's own report is between 0.1 and 10 of them."""

    def tamper(client, reply):
        if client == CULPRIT:
            report = reply.content["report"]
            for name in list(report):
                report[name] = Array(times * report[name].numpy())
        return [reply]

    strategy = run("scaffold", tamper, rounds=1)
    assert bool(strategy.journal.refused) == refused and only_culprit_named(strategy)
    assert strategy.journal.records[0].replies == (5 if refused else 6)


def outlying(losses, lengths):
    """Whose loss or report is refused, of clients with these losses and lengths of reports."""
    metadata = [ReplyMetadata(i, 5.0, 1.0, 0.1, 1.0, loss, loss) for i, loss in enumerate(losses)]
    model = torch.zeros(2)
    models = [(model, model[:0], ((torch.tensor([length]),),)) for length in lengths]
    collector = Collector(None, 0, Bounds(Plan(0.1)), _metadata=metadata, _models=models)
    return [client for client, _ in collector.outlying()]


@pytest.mark.parametrize(
    ("losses", "refused"),
    [
        ([1.0, 2.0, 299.0], []),  # 100 times (1 + 2), the median
        ([1.0, 2.0, 301.0], [2]),
        ([1.0, 1.0, 2.0, 201.0], [3]),  # of four the lower of the two in the middle
        ([0.0, 0.0, 99.0], []),
        ([math.nan, math.nan, 1.0, 2.0, 301.0], [4]),
        ([math.nan, 1.0, 201.0], [2]),
        ([1.0, 1e9], []),  # two have no majority
    ],
)
def test_a_loss_is_compared_with_the_cohorts_median(losses, refused):
    assert outlying(losses, [1.0] * len(losses)) == refused


@pytest.mark.parametrize(
    ("lengths", "refused"),
    [
        ([1.0, 2.0, 199.0], []),
        ([1.0, 2.0, 201.0], [2]),
        ([0.0, 0.0, 1.0, 101.0], [3]),  # a report of zeros counts for no median
        ([0.0, 0.0, 1.0], []),
        ([1.0, 1e9], []),
    ],
)
def test_the_length_of_a_report_is_compared_with_the_cohorts_median(lengths, refused):
    assert outlying([1.0] * len(lengths), lengths) == refused


@pytest.mark.parametrize(("moves", "far"), [([0, 0, 1, 1000], []), ([0, 1, 1, 1000], [3])])
def test_the_guard_needs_three_updates_that_move(moves, far):
    replies = replies_of(torch.tensor(moves, dtype=torch.float64)[:, None])
    _, excess = guarded(replies, torch.zeros(1, dtype=torch.float64), Guard(3.0))
    assert [client for client, _ in excess.far] == far


@pytest.mark.parametrize("streamed", [False, True])
def test_a_forged_loss_does_not_reach_the_record(streamed):
    def tamper(client, reply):
        return [changed(reply, last_loss=1e12, train_loss=1e12) if client == CULPRIT else reply]

    strategy = run(tamper=tamper, stream=streamed)
    assert all(r.train_loss < 10 for r in strategy.journal.records)
    assert only_culprit_named(strategy) and strategy.journal.refused


@pytest.mark.parametrize("guard", [None, Guard()])
def test_one_client_does_not_own_the_mean_of_evaluations(guard, tmp_path):
    """With a guard, rows that are claimed for an evaluation count up to three medians."""
    seen = {}

    def misstate(client, reply):
        metrics = reply.content["metrics"]
        if "accuracy" in metrics:
            if client == CULPRIT:
                metrics.update({"num-examples": 10**7, "accuracy": 1.0})
            seen[client] = (metrics["num-examples"], metrics["accuracy"])
        return [reply]

    federation = toy_federation(
        parse("fedavg", "method"), rounds=1, participation="fraction(rate=1.0)"
    )
    grid = LocalGrid(app_for(federation), 6, misstate=misstate)
    strategy = strategy_for(
        federation, federation.method, fraction_evaluate=1.0, guard=guard, folder=tmp_path
    )
    first = ArrayRecord(federation.net.state_dict(*federation.net.initial()))
    strategy.start(grid, first, num_rounds=1, timeout=1)
    rows, scores = np.array([seen[client] for client in range(6)]).T
    if guard is not None:
        rows = rows.clip(max=3 * np.median(rows))
    mean = strategy.journal.records[0].metrics["clients_accuracy_mean_by_rows"]
    assert mean == pytest.approx(rows @ scores / rows.sum(), rel=1e-9)
    bounded = json.loads((tmp_path / "merged.jsonl").read_text())["bounded"]
    named = [each["client"] for each in bounded if "evaluation" in each["reason"]]
    assert named == ([] if guard is None else [CULPRIT])


@pytest.mark.parametrize(
    ("plan", "batch", "steps", "fits"),
    [
        (Plan(0.1, 2), 4, 6, True),
        (Plan(0.1, 2), 4, 5, False),
        (Plan(0.1, 2), 0, 2, True),
        (Plan(0.1, 2), 0, 20, True),
        (Plan(0.1, 2), 0, 21, False),
        (Plan(0.1, 2), 0, 1, False),
        (Plan(0.1, None, 7), 0, 7, True),
        (Plan(0.1, None, 7), 0, 8, False),
        (Plan(0.1, 2), 4, float("nan"), False),
        (Plan(0.1, 2), 0, 2.5, False),
    ],
)
def test_steps_follow_from_the_plan_and_ten_rows(plan, batch, steps, fits):
    bounds = Bounds(plan, batch)
    if fits:
        assert bounds.steps({"steps": steps}, 10) == steps
    else:
        with pytest.raises(Refused, match="steps is"):
            bounds.steps({"steps": steps}, 10)


@pytest.mark.parametrize("stated", [1, 19, 21, 40])
def test_the_rows_are_those_that_the_client_stated(stated):
    bounds = Bounds(Plan(0.1, 1))
    with pytest.raises(Refused, match=f"num-examples is {stated}, it said 20"):
        bounds.rows({"num-examples": stated}, "num-examples", 20)
    assert bounds.rows({"num-examples": 20}, "num-examples", 20) == 20
    assert bounds.rows({"num-examples": 0}, "num-examples", 20) == 0


def test_the_length_follows_from_the_steps():
    known = Bounds(Plan(0.1), 4, parse("sgd(momentum=0.9)", "optimiser").effective_steps)
    exact = parse("sgd(momentum=0.9)", "optimiser").effective_steps(5)
    assert known.effective_steps({"length": exact}, 5) == exact
    unknown = Bounds(Plan(0.1))
    assert unknown.effective_steps({"length": 15.0}, 5) == 15
    for bounds, length in ((known, 5.0), (unknown, 4.9), (unknown, 15.1)):
        with pytest.raises(Refused, match="length is"):
            bounds.effective_steps({"length": length}, 5)


def test_a_reply_larger_than_the_model_can_need_is_refused_before_it_is_read():
    def tamper(client, reply):
        if client == CULPRIT:
            reply.content["metrics"]["more"] = [0.5] * (1 << 18)
        return [reply]

    strategy = run(tamper=tamper, rounds=1)
    assert strategy.journal.refused.total() == 1 and only_culprit_named(strategy)
    assert "bytes, expected at most" in next(iter(strategy.journal.refused))


def test_a_merge_that_one_reply_spoils_goes_on_without_it(monkeypatch):
    kind = type(parse("fedavg", "method"))
    whole = kind.aggregate

    def failing(self, state, server, replies, context):
        served, state = whole(self, state, server, replies, context)
        if CULPRIT in replies.clients.tolist():
            served = replace(served, send=served.send * 1e20)
        return served, state

    monkeypatch.setattr(kind, "aggregate", failing)
    strategy = run(stream=False)
    assert [r.refused for r in strategy.journal.records] == [1, 1]
    assert only_culprit_named(strategy)
    assert strategy.journal.merged.tolist() == [2, 2, 0, 2, 2, 2]
    assert float(strategy._server.send.abs().max()) < 10


def test_a_merge_that_fails_for_any_cohort_names_nobody(monkeypatch):
    """Too many combinations, say: any client's absence mends it."""
    kind = type(parse("fedavg", "method"))
    whole = kind.aggregate

    def failing(self, state, server, replies, context):
        if len(replies.clients) == 6:
            raise ValueError("too many")
        return whole(self, state, server, replies, context)

    monkeypatch.setattr(kind, "aggregate", failing)
    strategy = run(stream=False, fails="for no single client's fault: ValueError: too many")
    assert not strategy.journal.refused
    assert [r.notes["merge_refused"] for r in strategy.journal.records] == [1]


def test_the_guard_bounds_samples_against_numpy():
    draws = np.random.default_rng(0)
    start = draws.normal(size=9)
    moves = draws.normal(size=(6, 9))
    replies = replies_of(torch.from_numpy(start + moves), weights=[10, 20, 30, 10**6, 40, 50])
    found, excess = guarded(replies, torch.from_numpy(start), Guard(5.0, weight=3.0))
    assert found.weights.tolist() == [10, 20, 30, 90, 40, 50]
    part = 90 / 10**6
    np.testing.assert_allclose(found.models[3].numpy(), start + part * moves[3])
    np.testing.assert_allclose(found.models[1].numpy(), start + moves[1])
    for name, before in (("steps", 1.0), ("lr_sum", 0.1), ("effective_steps", 1.0)):
        expected = np.full(6, before)
        expected[3] *= part
        np.testing.assert_allclose(getattr(found, name).numpy(), expected)
    assert excess.heavy == [(3, "it states 1e+06 rows and counts for 90")]


def test_the_guard_bounds_reports():
    reports = ((torch.ones(5, 3) * torch.tensor([1.0, 1, 1, 1, 80])[:, None],),)
    replies = replace(replies_of(torch.ones(5, 2) * 1.0), reports=reports)
    found, excess = guarded(replies, torch.zeros(2), Guard(4.0))
    assert [client for client, _ in excess.far] == [4] and "report" in excess.far[0][1]
    torch.testing.assert_close(found.reports[0][0][4], torch.full((3,), 4.0))
    found, excess = guarded(replies, torch.zeros(2), Guard(4.0, "drop"))
    assert found.clients.tolist() == [*range(4)] and excess.dropped == {4}


class Stating(LocalGrid):
    """Some nodes say other things of themselves than they should."""

    lies: dict = {}  # noqa: RUF012  (by client)

    def push_messages(self, messages):
        ids = super().push_messages(messages)
        for message in messages:
            lie = self.lies.get(self.client(message.metadata.dst_node_id))
            for reply in self._inbox[message.metadata.message_id]:
                if lie and message.metadata.message_type == "query" and not reply.has_error():
                    reply.content["metrics"].update(lie)
        return ids


def stating(lies, method="fedavg", clients=6):
    federation = toy_federation(parse(method, "method"), participation="fraction(rate=1.0)")
    grid = Stating(app_for(federation), clients)
    grid.lies = lies
    return federation, grid


@pytest.mark.parametrize("first", [7, 2**53, 5])
def test_one_node_does_not_fix_the_number_of_clients_for_all(first):
    _, grid = stating({client: {"num-partitions": first} for client in (0,)})
    clients = Clients(Mailbox(grid), patience=1.0)
    assert sorted(clients.wait(5)) == [1, 2, 3, 4, 5] and clients.total == 6


@pytest.mark.parametrize("number", ["num-examples", "partition-id", "num-partitions"])
def test_a_node_states_whole_numbers(number):
    """1e-300 rows were taken for none, without a word."""
    _, grid = stating({CULPRIT: {number: 1e-300 if number == "num-examples" else 2.5}})
    clients = Clients(Mailbox(grid), patience=1.0, total=6)
    assert sorted(clients.wait(5)) == [0, 1, 3, 4, 5]
    (refused,) = clients.refusals()
    assert number in refused.reason and grid.client(refused.node) == CULPRIT


@pytest.mark.parametrize("lie", [[1, 2], [2**50, 0, 0], [1] * 10000])
def test_class_counts_that_cannot_be_cost_their_client_and_no_more(lie):
    rows = {"class-counts": lie, "num-examples": sum(lie)}
    federation, grid = stating({CULPRIT: rows}, "fedwcm")
    strategy = strategy_for(federation, federation.method)
    arrays = ArrayRecord(federation.net.state_dict(*federation.net.initial()))
    strategy.start(grid, arrays, num_rounds=1, timeout=0.5)
    counts = strategy._context.class_counts
    assert counts.shape == (6, 3) and counts[CULPRIT].tolist() == [0, 0, 0]
    assert strategy.journal.records[0].replies == 5


def test_class_counts_are_capped_by_the_guards_weight():
    _, grid = stating({CULPRIT: {"class-counts": [9000, 0, 0], "num-examples": 9000}})
    clients = Clients(Mailbox(grid), counts=True, patience=1.0, total=6, classes=3)
    median = sorted([16, 9, 9000, 5, 3, 1])[2]
    assert clients.class_counts(2.0)[CULPRIT].tolist() == [2 * median, 0, 0]


class Keyed(LocalGrid):
    """Nodes whose keys outlive their ids."""

    keys: dict = {}  # noqa: RUF012

    def key(self, node):
        return self.keys.get(node, super().key(node))


def test_a_seat_belongs_to_the_key_that_took_it_first(tmp_path, caplog):
    federation = toy_federation(parse("fedavg", "method"))
    file = tmp_path / "seats.toml"

    def connected(grid):
        clients = Clients(Mailbox(grid), patience=0.2, seats=Seats(file))
        return clients.online()

    grid = Keyed(app_for(federation), 6)
    first = connected(grid)
    keys = {client: grid.key(node) for client, node in first.items()}
    assert len(first) == 6 and file.read_text().count("=") == 6
    after = Keyed(app_for(federation), 6, shuffle=3)  # a restart: new ids, the same keys
    after.keys = {node: keys[after.client(node)] for node in after.contexts}
    thief = next(n for n in after.contexts if after.client(n) == CULPRIT)
    after.keys[thief] = keys[4]  # a registered node that claims another's number
    with caplog.at_level(logging.WARNING, "flwr"):
        assert sorted(connected(after)) == [0, 1, 3, 4, 5]
    assert any(f"node {thief}" in r.getMessage() for r in caplog.records)
    assert "bound to client 4" in caplog.text
    after.keys[thief] = b"a key that was never seen"  # while the number's own key is not there
    with caplog.at_level(logging.WARNING, "flwr"):
        assert sorted(connected(after)) == [0, 1, 3, 4, 5]
    assert f"client {CULPRIT} is bound to another key" in caplog.text


@pytest.mark.parametrize(
    "facts",
    [
        {"num-examples": 1e15, "accuracy": 0.5},
        {"num-examples": 10, "accuracy": 1e308},
        {"num-examples": 10, "accuracy": 1.5},
        {"num-examples": 10, "accuracy": float("nan")},
        {"num-examples": 10, "loss": -1e300},
        {"num-examples": 10, "\x1b[2Jloss": 1.0},
        {"num-examples": 10, "a" * 65: 1.0},
        {"num-examples": 10} | {f"metric{i}": 1.0 for i in range(256)},
    ],
    ids=lambda facts: f"{[*facts][-1]!r:.20}",
)
def test_an_evaluation_that_cannot_be_is_left_out(facts):
    replies = []
    for node, said in enumerate(({"num-examples": 10, "accuracy": 0.8, "loss": 1.0}, facts)):
        asked = Message(RecordDict(), node, "evaluate")
        asked.metadata.__dict__["_message_id"] = "1"
        replies.append(Message(RecordDict({"metrics": MetricRecord(said)}), reply_to=asked))
    found = mean_of(evaluations(replies, "num-examples", ratios=["accuracy"]))
    assert dict(found) == {"accuracy": 0.8, "loss": 1.0}


@pytest.mark.parametrize(("code", "blamed"), [(2, [7]), (3, [])])
def test_a_node_that_is_gone_is_not_blamed_for_its_evaluation(code, blamed):
    """Flower answers for it; code 2 says that its own app has failed."""
    asked = Message(RecordDict(), 7, "evaluate")
    asked.metadata.__dict__["_message_id"] = "1"
    reply = Message(Error(code, "no"), reply_to=asked)
    refused = []
    found = evaluations([reply], "num-examples", refuse=lambda node, reason: refused.append(node))
    assert not found and refused == blamed


@pytest.mark.parametrize(
    ("times", "guard", "replies"), [(1e14, None, 5), (50.0, None, 6), (50.0, Guard(), 6)]
)
def test_a_gradient_far_longer_than_the_others_is_refused_or_clipped(
    times, guard, replies, monkeypatch
):
    """A gradient of 9e14 took MIME's model to chance for good, with the guard, too."""

    def tamper(client, reply):
        if client == CULPRIT and "shape" in reply.content:
            for name, array in reply.content["arrays"].items():
                reply.content["arrays"][name] = Array(array.numpy() * times)
        return [reply]

    seen = []
    kind = type(parse("mime", "method"))

    whole = kind.aggregate

    def seeing(self, state, server, replies, context):
        seen.append(context.probe)
        return whole(self, state, server, replies, context)

    monkeypatch.setattr(kind, "aggregate", seeing)
    federation, grid = stating({}, "mime")
    grid.misstate = tamper
    strategy = strategy_for(federation, federation.method, guard=guard)
    arrays = ArrayRecord(federation.net.state_dict(*federation.net.initial()))
    strategy.start(grid, arrays, num_rounds=1, timeout=0.5)
    assert strategy.journal.records[0].replies == replies
    norms = seen[0].gradients.norm(dim=1)
    if times > 100:
        assert float(norms.max()) < 100 * float(norms.median())
    elif guard is None:
        assert float(norms.max()) > 10 * float(norms.median())
    else:
        others = torch.cat([norms[:CULPRIT], norms[CULPRIT + 1 :], norms[CULPRIT : CULPRIT + 1]])
        assert float(norms[CULPRIT]) <= 3.01 * float(others.max())
        assert float(seen[0].weights.max()) == 3 * 5  # of 16, 9, 7, 5, 3 and 1 rows


def test_a_gradient_that_claims_more_rows_is_left_out():
    federation, grid = stating({}, "mime")
    strategy = strategy_for(federation, federation.method, min_train_nodes=3)
    plain = grid.push_messages

    def forged(messages):
        ids = plain(messages)
        for message in messages:
            gradient = message.content.config_records["config"].get("fedbasin-ask") == "gradient"
            if gradient and grid.client(message.metadata.dst_node_id) == CULPRIT:
                for reply in grid._inbox[message.metadata.message_id]:
                    reply.content["metrics"]["num-examples"] = 10**6
        return ids

    grid.push_messages = forged
    arrays = ArrayRecord(federation.net.state_dict(*federation.net.initial()))
    strategy.start(grid, arrays, num_rounds=1, timeout=0.5)
    assert strategy.journal.records[0].replies == 5
