"""Class counts gathered by messages: the sum is exact, and nobody's own are shown."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra fedbasin[flower]")
pytest.importorskip("tenseal", reason="needs the extra fedbasin[he]")

from dataclasses import replace

import torch
from deploy.grids import LocalGrid, app_for, strategy_for
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MessageType, RecordDict

from fedbasin.core.expressions import parse
from fedbasin.core.protocols import score_counts
from fedbasin.core.rng import root
from fedbasin.deploy import ClientSetup, ServerSide, app_of, place, private
from fedbasin.deploy.clients import ASK, Clients, TooFewNodes
from fedbasin.deploy.mail import Mailbox
from fedbasin.deploy.private import answer, gather
from fedbasin.deploy.wire import Refused
from fedbasin.local.private_counts import (
    PrivateCountsError,
    add_counts,
    decrypt_counts,
    draw_holders,
    encrypt_counts,
    make_keys,
)
from fedbasin.methods import FedWCM
from fedbasin.testing import toy_federation

CULPRIT = 2
SCORED = parse("fedwcm(momentum='scores')", "method")


def setting(patience=5.0):
    federation = toy_federation(parse("fedavg", "method"))
    grid = LocalGrid(app_for(federation), 6)
    clients = Clients(Mailbox(grid), patience=patience)
    clients.wait(6)
    return federation, grid, clients


def test_the_sum_is_exact_and_the_secret_stays_with_its_holder():
    federation, grid, clients = setting()
    counts = federation.context.class_counts
    assert gather(clients, root(3), 3) == counts.sum(0).tolist()
    for message in grid.sent:  # what the server sent
        for record in message.content.config_records.values():
            for key, value in record.items():
                assert key != "secret"
                assert not isinstance(value, bytes) or key in ("public", "sum")
    assert not any("fedbasin-secret" in c.state for c in grid.contexts.values())


def test_another_seed_draws_another_holder():
    holders = set()
    for seed in range(8):
        _, grid, clients = setting()
        gather(clients, root(seed), 3)
        (asked,) = [m for m in grid.sent if m.content["config"][ASK] == "keys"]
        holders.add(grid.client(asked.metadata.dst_node_id))
    assert len(holders) > 1


def asked(context, **question):
    reply = answer(ConfigRecord(question), [3, 4], context, FedWCM())
    return reply.config_records["config"]


def test_a_key_opens_one_sum_and_no_other():
    holder = Context(1, 1, {}, RecordDict(), {})
    public = asked(holder, **{ASK: "keys"})["public"]
    secret = holder.state["fedbasin-secret"]["secret"]
    assert secret not in (public,)
    sent = [asked(holder, **{ASK: "encrypt", "public": public})["counts"] for _ in range(3)]
    total = add_counts(public, sent, 2)
    question = {ASK: "decrypt", "sum": total, "classes": 2, "rows": 21}
    assert asked(holder, **question)["total"] == [9, 12]
    assert decrypt_counts(secret, total, 2, 21) == [9, 12]
    with pytest.raises(PrivateCountsError, match="opened its one sum already"):
        asked(holder, **question)


def test_a_sum_that_is_wrong_costs_the_key():
    holder = Context(1, 1, {}, RecordDict(), {})
    public = asked(holder, **{ASK: "keys"})["public"]
    one = encrypt_counts(public, [1, 1])
    with pytest.raises(PrivateCountsError, match="do not add up"):
        asked(holder, **{ASK: "decrypt", "sum": one, "classes": 2, "rows": 21})
    with pytest.raises(PrivateCountsError, match="holds no key"):
        asked(holder, **{ASK: "decrypt", "sum": one, "classes": 2, "rows": 2})


def test_questions_that_make_no_sense_are_refused():
    nobody = Context(1, 1, {}, RecordDict(), {})
    with pytest.raises(Refused, match="unknown question 'rows'; available: who, keys"):
        asked(nobody, **{ASK: "rows"})
    with pytest.raises(Refused, match="public is NoneType, expected bytes"):
        asked(nobody, **{ASK: "encrypt"})


def test_a_missing_client_counts_for_none():
    federation, grid, clients = setting(patience=0.5)
    gone = next(iter(grid.contexts))
    counts = federation.context.class_counts
    expected = counts.sum(0) - counts[grid.client(gone)]
    del grid.contexts[gone]
    assert gather(clients, root(0), 3) == expected.tolist()


def test_a_sum_of_fewer_than_three_clients_with_rows_is_not_asked_for(monkeypatch):
    _, grid, clients = setting()
    monkeypatch.setattr(clients, "examples", lambda client: client < 2)
    with pytest.raises(TooFewNodes, match="2 clients hold data"):
        gather(clients, root(0), 3)
    assert all(m.content["config"][ASK] == "who" for m in grid.sent)


def forging(stage, forge, culprits=(CULPRIT,), **settings):
    """A federation some of whose clients answer one question otherwise."""
    federation = toy_federation(SCORED, rounds=1)
    questions = {}

    def misstate(client, reply):
        config = reply.content.get("config")
        key = {"keys": "public", "encrypt": "counts", "decrypt": "total", "score": "score"}[stage]
        if client not in culprits or config is None or key not in config:
            return [reply]
        questions[client] = questions.get(client, 0) + 1
        return forge(config, key, reply)

    grid = LocalGrid(app_for(federation), 6, misstate=misstate)
    clients = Clients(Mailbox(grid), patience=0.3, **settings)
    clients.wait(6)
    return federation.context.class_counts, clients, questions


def says(value):
    def forge(config, key, reply):
        config[key] = value
        return [reply]

    return forge


def silent(config, key, reply):
    return []


def errs(config, key, reply):
    wrong = Message(Error(2, "no"), reply_to=reply)
    for name in ("_reply_to_message_id", "_src_node_id", "_dst_node_id"):
        wrong.metadata.__dict__[name] = reply.metadata.__dict__[name]
    return [wrong]


def only_culprit(clients, client=CULPRIT):
    return {refusal.client for refusal in clients.refusals()} == {client}


@pytest.mark.parametrize("forge", [says(b"x"), says(7), says(b"\xff" * 100_000), silent, errs])
def test_counts_that_cannot_be_read_count_for_none(forge):
    counts, clients, _ = forging("encrypt", forge)
    assert gather(clients, root(0), 3) == (counts.sum(0) - counts[CULPRIT]).tolist()
    assert only_culprit(clients)


def test_under_secure_aggregation_nobody_is_left_out_of_the_sum():
    """Clients agreed to a sum of six: the sum of five is not opened."""
    counts, clients, _ = forging("encrypt", says(b"x"), secure=True)
    assert gather(clients, root(0), 3) is None
    assert all(
        m.content["config"][ASK] != "decrypt" for m in clients.mail.grid.sent if m.has_content()
    )
    counts, clients, _ = forging("encrypt", says(b"x"), [], secure=True)
    assert gather(clients, root(0), 3) == counts.sum(0).tolist()


HOLDER = draw_holders(range(6), 1, root(0))[0]


@pytest.mark.parametrize(
    ("stage", "forge"),
    [
        ("keys", says(b"x")),
        ("keys", errs),
        ("decrypt", says([1, 1])),
        ("decrypt", says([0, 0, 0])),
        ("decrypt", says([-(2**60), 2**60, 33])),
        ("decrypt", says([1.5, 1.5, 30.0])),
        ("decrypt", says("all")),
        ("decrypt", silent),
    ],
)
def test_a_holder_that_does_not_open_the_sum_is_replaced(stage, forge):
    counts, clients, questions = forging(stage, forge, [HOLDER])
    assert gather(clients, root(0), 3) == counts.sum(0).tolist()
    assert questions == {HOLDER: 1}
    if not (stage == "decrypt" and forge is silent):  # that can be another's fault
        assert only_culprit(clients, HOLDER)


def test_a_secret_in_a_public_key_is_refused():
    counts, clients, _ = forging("keys", says(make_keys().secret), [HOLDER])
    assert gather(clients, root(0), 3) == counts.sum(0).tolist()
    assert only_culprit(clients, HOLDER)


def test_counts_that_spoil_the_sum_leave_balanced_classes(caplog):
    """Nobody can tell whose they are, so nobody is blamed, and the run goes on."""

    def forge(config, key, reply):
        asked = [m for m in grid.sent if m.content["config"][ASK] == "encrypt"]
        config[key] = encrypt_counts(asked[-1].content["config"]["public"], [9, 9, 500_000])
        return [reply]

    counts, clients, questions = forging("encrypt", forge)
    grid = clients.mail.grid
    with caplog.at_level("WARNING", "flwr"):
        found = private.gather_private(clients, root(0), 3, SCORED)
    assert questions == {CULPRIT: 3}
    assert not clients.refusals()
    assert "do not add up" in caplog.text and "as if they were balanced" in caplog.text
    assert found.total.tolist() == [1, 1, 1] and not found.scores.any()
    assert found.rows.tolist() == counts.sum(1).tolist()


@pytest.mark.parametrize("forge", [says(50.0), says(-1.1), says(float("nan")), says("1"), errs])
def test_a_score_that_no_counts_give_becomes_the_median(forge):
    _, clients, _ = forging("score", forge)
    honest = private.gather_private(forging("score", forge, [])[1], root(0), 3, SCORED)
    found = private.gather_private(clients, root(0), 3, SCORED)
    rest = [c for c in range(6) if c != CULPRIT]
    assert found.scores[rest].tolist() == honest.scores[rest].tolist()
    assert found.scores[CULPRIT] == honest.scores[rest].median()
    assert only_culprit(clients)


@pytest.mark.parametrize("score", [1.0, -1.0])
def test_the_largest_score_that_counts_give_is_taken(score):
    _, clients, _ = forging("score", says(score))
    assert private.gather_private(clients, root(0), 3, SCORED).scores[CULPRIT] == score


def test_counts_in_plain_need_the_clients_consent():
    federation = toy_federation(parse("fedavg", "method"))
    executor = federation.executor

    def setup(context):
        client, clients = place(context)
        return ClientSetup(
            "fedavg", executor.trainer, executor.population.shard(client), client, clients
        )

    grid = LocalGrid(app_of(setup), 6)
    (node, context), *_ = grid.contexts.items()
    config = ConfigRecord({ASK: "who", "class-counts": True})
    message = Message(RecordDict({"config": config}), node, MessageType.QUERY)
    message.metadata.__dict__["_message_id"] = "1"
    with pytest.raises(Refused, match="does not show its class counts in plain"):
        grid.app(message, context)
    open_app = app_of(lambda context: replace(setup(context), counts="plain"))
    reply = open_app(message, context)
    client = grid.client(node)
    expected = federation.context.class_counts[client].tolist()
    assert reply.content["metrics"]["class-counts"] == expected


def test_a_client_whose_targets_have_no_classes_says_who_it_is():
    executor = toy_federation(parse("fedavg", "method")).executor
    trainer = replace(executor.trainer, classes=0)

    def setup(context):
        client, clients = place(context)
        shard = executor.population.shard(client)
        return ClientSetup(
            "fedavg", trainer, shard._replace(labels=shard.labels / 3), client, clients
        )

    grid = LocalGrid(app_of(setup), 6)
    (node, context), *_ = grid.contexts.items()
    message = Message(RecordDict({"config": ConfigRecord({ASK: "who"})}), node, MessageType.QUERY)
    message.metadata.__dict__["_message_id"] = "1"
    facts = grid.app(message, context).content["metrics"]
    client = grid.client(node)
    assert facts["partition-id"] == client
    assert facts["num-examples"] == executor.population.sizes[client]


@pytest.mark.parametrize(
    "expression",
    [
        "fedwcm(momentum='scores')",
        "fedwcm(momentum='fixed', score='tv')",
        "ima(fedwcm(momentum='scores', unequal=True, score='inverse'))",
        "fedwcm(momentum='scores', local=logit_adjusted)",
        "fedavg(local=logit_adjusted)",
    ],
)
def test_private_counts_give_the_model_of_plain_ones(expression):
    federation = toy_federation(parse(expression, "method"), rounds=3)
    server, states = federation.begin()
    plain = list(federation.rounds_from(server, states))[-1][0]
    grid = LocalGrid(app_for(federation), 6)
    strategy = strategy_for(
        federation, federation.method, server=ServerSide.of(federation, counts="private")
    )
    arrays = ArrayRecord(federation.net.state_dict(*federation.net.initial()))
    strategy.start(grid, arrays, num_rounds=3, timeout=5)
    assert strategy._context.class_counts is None
    torch.testing.assert_close(strategy._server.send, plain.send, rtol=1e-9, atol=1e-11)
    for message in grid.sent:
        assert not any("class-counts" in r and r["class-counts"] for r in configs(message))


def configs(message):
    return message.content.config_records.values()


def test_what_cannot_be_private_says_so():
    federation = toy_federation(parse("fedwcm", "method"), rounds=1)
    strategy = strategy_for(
        federation, federation.method, server=ServerSide.of(federation, counts="private")
    )
    arrays = ArrayRecord(federation.net.state_dict(*federation.net.initial()))
    with pytest.raises(ValueError, match="write momentum='scores' or momentum='fixed'"):
        strategy.start(LocalGrid(app_for(federation), 6), arrays, num_rounds=1, timeout=5)
    with pytest.raises(NotImplementedError, match="fedavg needs the clients' class counts"):
        score_counts(parse("fedavg", "method"), torch.ones(3), torch.ones(3))
