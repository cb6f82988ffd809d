"""Bad replies are refused, counted and named, and the run goes on with the rest."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("flwr", reason="needs the extra fedbasin[flower]")

from deploy.grids import LocalGrid, app_for, over_the_wire, strategy_for
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from fedbasin.core.evaluator import Evaluator
from fedbasin.core.expressions import parse
from fedbasin.core.net import Net
from fedbasin.core.task import Classification
from fedbasin.deploy import FedbasinStrategy, Guard, Handling, ServerSide, client_app
from fedbasin.deploy.clients import Clients, TooFewNodes
from fedbasin.deploy.evaluation import evaluations, mean_of
from fedbasin.deploy.mail import Mailbox
from fedbasin.deploy.merge import NothingMerged
from fedbasin.deploy.replies import guarded
from fedbasin.deploy.wire import Refused, write_tree
from fedbasin.local.train import Shard
from fedbasin.testing import replies_of, toy_federation, trajectory

CULPRIT = 2
FIRST = "hidden.weight"


def changed(reply: Message, **numbers) -> Message:
    reply.content["metrics"].update({k.replace("_", "-"): v for k, v in numbers.items()})
    return reply


def with_part(reply: Message, values: np.ndarray) -> Message:
    reply.content["arrays"][FIRST] = Array(values)
    return reply


def part(reply: Message) -> np.ndarray:
    return reply.content["arrays"][FIRST].numpy()


def bad_value(value):
    def tampered(reply):
        values = part(reply)
        values[1, 2] = value
        return [with_part(reply, values)]

    return tampered


def without(reply: Message, key: str) -> list[Message]:
    del reply.content[key]
    return [reply]


def elsewhere(reply: Message) -> list[Message]:
    reply.metadata.__dict__["_src_node_id"] = 424242
    return [reply]


FAULTS = {
    "NaN": (bad_value(np.nan), "hidden.weight holds NaN or Inf"),
    "Inf": (bad_value(np.inf), "hidden.weight holds NaN or Inf"),
    "wrong length": (lambda r: [with_part(r, np.ones((5, 3)))], "has shape"),
    "wrong dtype": (lambda r: [with_part(r, part(r).astype(np.float32))], "is float32"),
    "wrong round": (lambda r: [changed(r, server_round=7)], "it is for server-round 7"),
    "wrong client": (lambda r: [changed(r, partition_id=5)], "it is for partition-id 5"),
    "NaN weight": (lambda r: [changed(r, num_examples=float("nan"))], "num-examples is nan"),
    "negative weight": (lambda r: [changed(r, num_examples=-1)], "num-examples is -1"),
    "NaN loss": (lambda r: [changed(r, last_loss=float("nan"))], "last-loss is nan"),
    "no metrics": (lambda r: without(r, "metrics"), "0 of MetricRecord"),
    "no model": (lambda r: without(r, "arrays"), "0 of ArrayRecord"),
    "huge": (bad_value(-1e16), "hidden.weight holds values beyond 1e+15"),
    "length that divides": (lambda r: [changed(r, length=1e-300)], "length is 1e-300"),
}


def run(
    expression="fedavg",
    tamper=lambda c, r: [r],
    rounds=2,
    prepare=None,
    dtype=torch.float64,
    fails="",
    **settings,
):
    """Run a federation; with `fails` it is one that merges nothing, and says so in these words."""
    method = parse(expression, "method")
    federation = toy_federation(
        method, rounds=rounds, participation="fraction(rate=1.0)", dtype=dtype
    )
    strategy = strategy_for(federation, federation.method, **settings)
    grid = LocalGrid(app_for(federation), 6, tamper)
    if prepare is not None:
        prepare(grid)
    arrays = ArrayRecord(federation.net.state_dict(*federation.net.initial()))
    with pytest.raises(NothingMerged, match=fails) if fails else nullcontext():
        strategy.start(grid, arrays, num_rounds=rounds, timeout=0.5)
    return strategy


def without_culprit(expression="fedavg", rounds=2):
    federation = toy_federation(
        parse(expression, "method"), rounds=rounds, participation="fraction(rate=1.0)"
    )
    rest = np.array([c for c in range(6) if c != CULPRIT])
    federation = replace(federation, eligible=rest)
    server, states = federation.begin()
    return list(federation.rounds_from(server, states))[-1][0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_reply_is_refused_named_and_counted(fault, stream, caplog):
    tamper, words = FAULTS[fault]
    with caplog.at_level(logging.WARNING, "flwr"):
        strategy = run(
            tamper=lambda client, r: tamper(r) if client == CULPRIT else [r], stream=stream
        )
    expected = without_culprit()
    torch.testing.assert_close(strategy._server.send, expected.send, rtol=1e-9, atol=1e-11)
    assert [r.replies for r in strategy.journal.records] == [5, 5]
    assert [r.dropped for r in strategy.journal.records] == [1, 1]
    assert [r.refused for r in strategy.journal.records] == [1, 1]
    reason = next(iter(strategy.journal.refused))
    assert strategy.journal.refused.total() == 2
    who = f"client {CULPRIT}"
    assert words in reason and reason.startswith(who)
    assert any(words in r.getMessage() and who in r.getMessage() for r in caplog.records)


def another_ones(reply: Message) -> list[Message]:
    reply.metadata.__dict__["_reply_to_message_id"] = "made-up"
    return [reply]


def odd_name(reply: Message) -> list[Message]:
    record = reply.content["arrays"]
    record["\x1b[2J\u202egood\nINFO: client 4 is refused"] = record["hidden.weight"]
    return [reply]


def odd_error(reply: Message) -> list[Message]:
    wrong = Message(Error(2, "Error\n\x1b]0;\u202egood\x07" + "!" * 10_000), reply_to=reply)
    for name in ("_reply_to_message_id", "_src_node_id", "_dst_node_id"):
        wrong.metadata.__dict__[name] = reply.metadata.__dict__[name]
    return [wrong]


@pytest.mark.parametrize("forge", [odd_name, odd_error])
def test_what_a_client_writes_cannot_draw_on_a_terminal(forge, caplog):
    with caplog.at_level("WARNING", "flwr"):
        strategy = run(tamper=lambda c, r: forge(r) if c == CULPRIT else [r])
    assert [r.replies for r in strategy.journal.records] == [5, 5]
    said = [record.getMessage() for record in caplog.records]
    assert any("good" in line for line in said)
    assert all(line.isprintable() and len(line) < 700 for line in map(str.strip, said))


@pytest.mark.parametrize("forge", [elsewhere, another_ones])
def test_a_reply_that_bears_another_address_counts_for_nobody(forge, caplog):
    with caplog.at_level(logging.WARNING, "flwr"):
        strategy = run(tamper=lambda client, r: forge(r) if client == CULPRIT else [r])
    expected = without_culprit()
    torch.testing.assert_close(strategy._server.send, expected.send, rtol=1e-9, atol=1e-11)
    assert [r.replies for r in strategy.journal.records] == [5, 5]
    assert [r.dropped for r in strategy.journal.records] == [1, 1]
    assert [r.refused for r in strategy.journal.records] == [1, 1]
    words = f"reply of client {CULPRIT}", "its reply bears the address of another"
    assert any(all(w in r.getMessage() for w in words) for r in caplog.records)


def test_a_reply_that_cannot_be_read_costs_one_client_its_round(caplog):
    class Unreadable(LocalGrid):
        """Flower cannot put a reply of the culprit together."""

        def pull_messages(self, message_ids):
            found = super().pull_messages(message_ids)
            for reply in found:
                trained = "arrays" in reply.content.array_records
                if trained and self.client(reply.metadata.src_node_id) == CULPRIT:
                    raise AttributeError("'MetricRecord' object has no attribute 'metadata'")
            return found

    federation = toy_federation(
        parse("fedavg", "method"), rounds=2, participation="fraction(rate=1.0)"
    )
    strategy = strategy_for(federation, federation.method)
    arrays = ArrayRecord(federation.net.state_dict(*federation.net.initial()))
    with caplog.at_level(logging.WARNING, "flwr"):
        strategy.start(Unreadable(app_for(federation), 6), arrays, num_rounds=2, timeout=0.5)
    assert [r.replies for r in strategy.journal.records] == [5, 5]
    assert any("its reply cannot be read" in r.getMessage() for r in caplog.records)


def test_a_loss_beyond_the_models_type_is_refused():
    def tamper(client, reply):
        return [changed(reply, last_loss=1e300) if client == CULPRIT else reply]

    strategy = run("fedcda(warmup=0)", tamper, dtype=torch.float32)
    (reason,) = strategy.journal.refused
    assert reason == f"client {CULPRIT}: last-loss is 1e+300, beyond torch.float32"
    assert all("merge_refused" not in r.notes for r in strategy.journal.records)


@pytest.mark.parametrize(
    ("loss", "told"), [(float("nan"), "nan, expected a finite"), (1e300, "1e+300, beyond torch.fl")]
)
def test_a_loss_of_any_flower_client_that_is_no_loss_is_refused(loss, told):
    """FedCDA picks by losses: one that is NaN would stop every merge."""

    def tamper(client, reply):
        if client == CULPRIT:
            del reply.content["metrics"]["steps"]
            reply.content["metrics"]["train_loss"] = loss
        return [reply]

    strategy = run("fedcda(warmup=0)", tamper, dtype=torch.float32)
    (reason,) = strategy.journal.refused
    assert reason.startswith(f"client {CULPRIT}: train_loss is {told}")
    assert all("merge_refused" not in r.notes for r in strategy.journal.records)


def test_any_flower_client_may_keep_its_loss_to_itself():
    def tamper(client, reply):
        for key in ("steps", "train_loss"):
            del reply.content["metrics"][key]
        return [reply]

    strategy = run(tamper=tamper)
    assert not strategy.journal.refused and [r.replies for r in strategy.journal.records] == [6, 6]
    assert all(np.isnan(r.train_loss) for r in strategy.journal.records)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_without_a_loss_does_not_hide_the_others(streamed):
    told = []

    def tamper(client, reply):
        metrics = reply.content["metrics"]
        if client == CULPRIT:
            del metrics["train_loss"]
        elif metrics["server-round"] == 1:
            told.append((metrics["num-examples"], metrics["train_loss"]))
        return [reply]

    records = run(tamper=tamper, stream=streamed).journal.records
    rows, losses = np.array(told).T
    assert records[0].train_loss == pytest.approx(rows @ losses / rows.sum(), rel=1e-9)
    assert [r.replies for r in records] == [6, 6]


def test_empty_text_in_a_reply_is_no_reason_to_stop():
    def noted(client, reply):
        if client == CULPRIT:
            reply.content["more"] = ConfigRecord({"note": "", "bytes": b"", "list": [""]})
        return [reply]

    strategy = run(tamper=noted)
    assert len(strategy.journal.records) == 2


def test_a_second_reply_in_a_round_is_refused():
    strategy = run(tamper=lambda c, r: [r, r] if c == CULPRIT else [r])
    whole = trajectory(parse("fedavg", "method"), rounds=2, participation="fraction(rate=1.0)")
    torch.testing.assert_close(strategy._server.send, whole[-1].send, rtol=1e-9, atol=1e-11)
    assert strategy.journal.refused == {f"client {CULPRIT}: it answers twice in one round": 2}
    assert [r.replies for r in strategy.journal.records] == [6, 6]


def test_a_late_reply_is_refused_in_the_next_round():
    held = []

    def tamper(client, reply):
        if client != CULPRIT or held:
            return [reply]
        held.append(reply)
        return []

    class Slow(LocalGrid):
        """Hands the held reply over once its round is over."""

        def pull_messages(self, message_ids):
            ids = list(message_ids)
            if held and len(self.sent) > 12 and held[0].metadata.reply_to_message_id in ids:
                return [over_the_wire(held[0])]
            return super().pull_messages(ids)

    federation = toy_federation(
        parse("fedavg", "method"), rounds=3, participation="fraction(rate=1.0)"
    )
    strategy = strategy_for(federation, federation.method)
    grid = Slow(app_for(federation), 6, tamper)
    arrays = ArrayRecord(federation.net.state_dict(*federation.net.initial()))
    strategy.start(grid, arrays, num_rounds=3, timeout=0.3)
    assert [r.replies for r in strategy.journal.records] == [5, 6, 6]
    assert strategy.journal.refused == {f"client {CULPRIT}: it came too late": 1}
    assert sum(r.refused for r in strategy.journal.records) == 1


def test_a_round_whose_replies_weigh_nothing_changes_nothing():
    strategy = run(
        tamper=lambda c, r: [changed(r, num_examples=0)], fails="no round of 2 merged a reply"
    )
    start = toy_federation(parse("fedavg", "method")).net.initial()[0]
    assert torch.equal(strategy._server.send, start)
    assert [r.replies for r in strategy.journal.records] == [6, 6]


def test_an_app_that_raises_costs_its_client_the_round(caplog):
    def tamper(client, reply):
        if client == CULPRIT:
            error = Error(2, "Traceback ...\nValueError: no data today")
            broken = Message(error, reply_to=reply)
            broken.metadata.__dict__.update(reply.metadata.__dict__)
            return [broken]
        return [reply]

    with caplog.at_level(logging.WARNING, "flwr"):
        strategy = run(tamper=tamper)
    assert [r.replies for r in strategy.journal.records] == [5, 5]
    assert not strategy.journal.refused
    assert any("client 2): ValueError: no data today" in r.getMessage() for r in caplog.records)


def test_a_node_that_flower_answers_for_is_named_and_counts_as_silent(caplog):
    def tamper(client, reply):
        if client != CULPRIT:
            return [reply]
        gone = Message(Error(5, "Error: Node Unavailable"), reply_to=reply)
        gone.metadata.__dict__.update(reply.metadata.__dict__, _src_node_id=1)  # the SuperLink's
        return [gone]

    with caplog.at_level(logging.WARNING, "flwr"):
        strategy = run(tamper=tamper, rounds=1)
    node = strategy._cohort.asked[CULPRIT]
    told = f"no reply from client {CULPRIT} (node {node}): Error: Node Unavailable"
    assert any(told in r.getMessage() for r in caplog.records)
    assert strategy._clients._silent == {node} and strategy.journal.records[0].replies == 5


def test_a_report_of_another_shape_is_refused():
    def tamper(client, reply):
        if client == CULPRIT:
            reply.content["report"], reply.content["report-shape"] = write_tree((torch.ones(3),))
        return [reply]

    strategy = run("scaffold", tamper)
    (reason,) = strategy.journal.refused
    assert "client 2" in reason and "shaped unlike" in reason
    strategy = run("scaffold", lambda c, r: without(r, "report") if c == CULPRIT else [r])
    assert list(strategy.journal.refused) == [
        "client 2: its report is shaped unlike the other clients'"
    ]


def test_clients_that_cannot_follow_the_rules_are_refused():
    def foreign(client, reply):
        if client == CULPRIT:
            for key in ("steps", "server-round"):
                del reply.content["metrics"][key]
        return [reply]

    strategy = run("fedprox(mu=0.1)", foreign)
    (reason,) = strategy.journal.refused
    assert "only fedbasin's ClientApp follows" in reason


def test_a_round_waits_for_its_minimum_and_asks_again():
    """Two of six answer at first; the round needs four, and asks those that kept silent."""
    silent = {1, 2, 3, 4}
    asked = []

    def tamper(client, reply):
        asked.append(client)
        if client in silent:
            silent.discard(client)
            return []
        return [reply]

    strategy = run(tamper=tamper, rounds=1, min_train_nodes=4)
    assert strategy.journal.records[0].replies == 4
    assert sorted(asked) == [0, 1, 1, 2, 2, 3, 4, 5]
    assert strategy._cohort.collector.clients == {0, 1, 2, 5}


def test_a_round_that_cannot_have_its_minimum_says_so():
    asked = []

    def tamper(client, reply):
        asked.append(client)
        return [reply] if client == 0 else bad_value(np.nan)(reply)

    with pytest.raises(TooFewNodes, match="round 1: 1 of 3 replies"):
        run(tamper=tamper, rounds=1, min_train_nodes=3, patience=1.0)
    assert sorted(asked) == [0, 1, 2, 3, 4, 5]  # who was refused is not asked again in the round


def test_too_few_nodes_are_not_waited_for_for_ever():
    with pytest.raises(TooFewNodes, match="6 clients are connected, 9 are needed"):
        run(min_available_nodes=9, patience=0.5)


def scaled(times):
    def tamper(client, reply):
        return [with_part(reply, part(reply) * times)] if client == CULPRIT else [reply]

    return tamper


def test_an_update_far_from_the_cohort_is_dropped():
    strategy = run(tamper=scaled(1e6), guard=Guard(5.0, "drop", weight=None))
    expected = without_culprit()
    torch.testing.assert_close(strategy._server.send, expected.send, rtol=1e-9, atol=1e-11)
    assert [r.refused for r in strategy.journal.records] == [1, 1]
    assert all(r.startswith("client 2: its update is") for r in strategy.journal.refused)


@pytest.mark.parametrize("action", ["clip", "drop"])
def test_far_updates_are_found_by_their_norm(action):
    """Against plain NumPy, on made-up replies."""
    draws = np.random.default_rng(0)
    start = draws.normal(size=9)
    moves = draws.normal(size=(6, 9))
    moves[CULPRIT] *= 100
    moves[4] *= 40
    replies = replies_of(torch.from_numpy(start + moves), weights=[1, 2, 3, 4, 5, 6])
    found, (named, _, _) = guarded(replies, torch.from_numpy(start), Guard(3.0, action))
    norms = np.linalg.norm(moves, axis=1)
    limit = 3.0 * np.sort(norms)[2]  # the lower median of six
    far = norms > limit
    assert [client for client, _ in named] == np.flatnonzero(far).tolist() == [2, 4]
    if action == "drop":
        assert found.clients.tolist() == [0, 1, 3, 5] and found.weights.tolist() == [1, 2, 4, 6]
        return
    scale = np.where(far, limit / norms, 1.0)
    np.testing.assert_allclose(found.models.numpy(), start + moves * scale[:, None], rtol=1e-12)
    assert found.weights.tolist() == [1, 2, 3, 4, 5, 6]


def test_two_replies_have_no_majority():
    replies = replies_of(torch.tensor([[1.0], [1000.0]]))
    assert guarded(replies, torch.zeros(1), Guard(2.0, "drop")) == (replies, ([], [], set()))


def test_a_clipped_update_is_named_and_the_run_goes_on():
    strategy = run(tamper=scaled(1e6), guard=Guard(5.0, "clip"))
    assert [r.refused for r in strategy.journal.records] == [1, 1]
    assert all("client 2" in why and "clipped" in why for why in strategy.journal.refused)
    whole = trajectory(parse("fedavg", "method"), rounds=2, participation="fraction(rate=1.0)")
    assert float((strategy._server.send - whole[-1].send).norm()) < 10


def test_a_guard_that_finds_nothing_changes_nothing():
    whole = trajectory(parse("fedavg", "method"), rounds=2, participation="fraction(rate=1.0)")
    strategy = run(guard=Guard(1e9, weight=1e9))
    torch.testing.assert_close(strategy._server.send, whole[-1].send, rtol=1e-9, atol=1e-11)
    assert not strategy.journal.refused
    with pytest.raises(ValueError, match="times must be at least 1"):
        Guard(0.5)
    with pytest.raises(ValueError, match="'clip' or 'drop'"):
        Guard(2.0, "ban")


def test_nodes_that_claim_the_impossible_are_left_out(caplog):
    def prepare(grid):
        grid.add(9, 7777)  # partition 9 of 6
        grid.contexts[8888] = replace(grid.contexts[7777], node_id=8888)
        grid.contexts[8888].node_config = {"partition-id": 0, "num-partitions": 99}

    with caplog.at_level(logging.WARNING, "flwr"):
        strategy = run(prepare=prepare)
    assert [r.replies for r in strategy.journal.records] == [6, 6]
    said = [r.getMessage() for r in caplog.records]
    assert any("node 7777" in s and "not below num-partitions 6" in s for s in said)
    assert any("node 8888" in s and "counts 99 clients" in s for s in said)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"partition-id": 6}, "partition-id 6 is not below num-partitions 6"),
        ({"partition-id": -1}, "at least 0"),
        ({"num-partitions": 7}, "it counts 7 clients, the others 6"),
        ({"num-examples": float("nan")}, "finite number"),
        ({"class-counts": [1, -2]}, "whole numbers"),
        ({"class-counts": 3}, "whole numbers"),
    ],
)
def test_what_a_node_says_of_itself_is_checked(facts, words):
    clients = Clients(Mailbox(None), total=6)
    good = {"partition-id": 2, "num-partitions": 6, "num-examples": 10}
    assert clients._identity(good).client == 2
    with pytest.raises(Refused, match=words):
        clients._identity(good | facts)


def test_a_late_error_is_no_late_reply():
    """Flower answers for a node that is gone; that is not the client's fault."""
    message = Message(RecordDict({}), 5, "train")
    grid = LocalGrid(None, 0)
    grid._inbox["m"] = [Message(Error(5, "node is gone"), reply_to=message)]
    assert list(Mailbox(grid, late={"m": 5}).stragglers()) == []


def test_a_client_that_comes_back_under_a_new_node_goes_on():
    """The old node is still listed for a while; the new one speaks for the client."""
    returned = []

    def tamper(client, reply):
        if client == CULPRIT and not returned:
            returned.append(True)
            grid.add(CULPRIT, 9999)
            return []
        return [reply]

    federation = toy_federation(
        parse("scaffold", "method"), rounds=2, participation="fraction(rate=1.0)"
    )
    strategy = strategy_for(federation, federation.method)
    grid = LocalGrid(app_for(federation), 6, tamper)
    arrays = ArrayRecord(federation.net.state_dict(*federation.net.initial()))
    strategy.start(grid, arrays, num_rounds=2, timeout=0.3)
    assert [r.replies for r in strategy.journal.records] == [5, 6]
    assert strategy._cohort.asked[CULPRIT] == 9999


def test_another_method_on_the_client_is_an_error_that_names_both(caplog):
    federation = toy_federation(parse("fedavg", "method"), participation="fraction(rate=1.0)")
    strategy = strategy_for(federation, parse("wima(window=2)", "method"), patience=0.5)
    arrays = ArrayRecord(federation.net.state_dict(*federation.net.initial()))
    with caplog.at_level(logging.WARNING, "flwr"), pytest.raises(TooFewNodes):
        strategy.start(LocalGrid(app_for(federation), 6), arrays, num_rounds=1, timeout=0.3)
    assert any(
        "server runs 'wima(window=2)', this client was made for 'fedavg'" in r.getMessage()
        for r in caplog.records
    )


def test_a_metric_is_averaged_over_the_clients_that_have_it():
    replies = []
    for facts in (
        {"num-examples": 10, "accuracy": 0.8, "loss": 1.5},
        {"num-examples": 30, "loss": 0.5},
    ):
        asked = Message(RecordDict(), 7, "evaluate")
        asked.metadata.__dict__["_message_id"] = "1"
        replies.append(Message(RecordDict({"metrics": MetricRecord(facts)}), reply_to=asked))
    found = mean_of(evaluations(replies, "num-examples"))
    assert dict(found) == pytest.approx({"accuracy": 0.8, "loss": 0.75})


def test_evaluation_on_clients_is_a_weighted_mean():
    strategy = run(fraction_evaluate=1.0, rounds=1)
    federation = toy_federation(
        parse("fedavg", "method"), rounds=1, participation="fraction(rate=1.0)"
    )
    model = strategy._server.score
    total = 0.0
    for client in range(6):
        rows = federation.population.shard(client)
        here = federation.evaluator
        test = Evaluator(federation.net, *rows, here.transform, Classification())
        total += test.score(model)["loss"] * len(rows.labels)
    assert strategy.journal.records[0].notes["clients_loss"] == pytest.approx(total / 41)
    assert set(strategy.journal.records[0].notes) == {"clients_loss", "clients_accuracy"}


def test_settings_that_cannot_work_are_refused_at_once():
    federation = toy_federation(parse("fedlaw", "method"))
    arrays = ArrayRecord(federation.net.state_dict(*federation.net.initial()))
    with pytest.raises(ValueError, match=r"give server=ServerSide\(proxy="):
        bare = replace(ServerSide.of(federation), context=None)
        strategy = strategy_for(federation, federation.method, server=bare)
        strategy.start(LocalGrid(app_for(federation), 6), arrays)
    with pytest.raises(ValueError, match="needs recalibrate="):
        strategy_for(replace(federation, buffers="recalibrate"), federation.method)
    with pytest.raises(ValueError, match="checkpoint_every"):
        strategy_for(federation, federation.method, checkpoint_every=0)


class Frozen(nn.Module):
    """A body that does not learn."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 5).requires_grad_(False)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def seeded():
    torch.manual_seed(5)
    return Frozen()


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_parts_that_do_not_learn_must_be_the_servers(scale, caplog):
    rows = Shard(torch.arange(48.0).reshape(12, 4) / 48, torch.arange(12) % 3)
    app = client_app(seeded, lambda client, clients: rows, "fedavg", classes=3)
    server = seeded()
    with torch.no_grad():
        server.body.weight *= scale
    strategy = FedbasinStrategy(
        "fedavg",
        fraction_evaluate=0,
        server=ServerSide(net=Net(server)),
        handling=Handling(patience=0.5),
    )
    arrays = ArrayRecord(server.state_dict())
    grid = LocalGrid(app, 3)
    config = ConfigRecord({"lr": 0.1})
    if scale == 1:
        strategy.start(grid, arrays, num_rounds=1, timeout=0.5, train_config=config)
        assert strategy.journal.records[0].replies == 3
    else:
        with pytest.raises(TooFewNodes), caplog.at_level(logging.WARNING, "flwr"):
            strategy.start(grid, arrays, num_rounds=1, timeout=0.5, train_config=config)
        assert any("body.weight is frozen" in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize("lost", [1, 9])
def test_gradients_that_are_lost_are_asked_for_again(lost):
    class Lossy(LocalGrid):
        """The first few questions for gradients get no answer."""

        questions = 0

        def push_messages(self, messages):
            ids = super().push_messages(messages)
            kinds = {m.metadata.message_type for m in messages if "arrays" in m.content}
            if kinds == {"query"}:
                self.questions += 1
                if self.questions <= lost:
                    self._inbox.update({message_id: [] for message_id in ids})
            return ids

    federation = toy_federation(parse("mime", "method"), rounds=1)
    strategy = strategy_for(federation, federation.method, patience=0.5)
    arrays = ArrayRecord(federation.net.state_dict(*federation.net.initial()))
    grid = Lossy(app_for(federation), 6)
    if lost == 1:
        strategy.start(grid, arrays, num_rounds=1, timeout=0.3)
        assert strategy.journal.records[0].replies >= 2
    else:
        with pytest.raises(TooFewNodes, match="0 of 2 clients sent a gradient"):
            strategy.start(grid, arrays, num_rounds=1, timeout=0.3)
