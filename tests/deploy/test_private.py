"""Class counts gathered by messages: the sum is exact, and nobody's own are shown."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra fedbasin[flower]")
pytest.importorskip("tenseal", reason="needs the extra fedbasin[he]")

from dataclasses import replace

import torch
from deploy.grids import LocalGrid, app_for, strategy_for
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict

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
    encrypt_counts,
)
from fedbasin.methods import FedWCM
from fedbasin.testing import toy_federation


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


def test_a_missing_client_stops_the_gathering():
    _, grid, clients = setting(patience=0.5)
    gone = next(iter(grid.contexts))
    del grid.contexts[gone]
    with pytest.raises(TooFewNodes, match="5 clients are connected, 6 are needed"):
        gather(clients, root(0), 3)


def test_a_sum_of_fewer_than_three_clients_with_rows_is_not_asked_for(monkeypatch):
    _, grid, clients = setting()
    monkeypatch.setattr(clients, "examples", lambda client: client < 2)
    with pytest.raises(TooFewNodes, match="2 clients hold data"):
        gather(clients, root(0), 3)
    assert all(m.content["config"][ASK] == "who" for m in grid.sent)


@pytest.mark.parametrize("score", [50.0, -1.1])
def test_a_score_that_no_counts_give_is_refused(score, monkeypatch):
    _, _, clients = setting()
    monkeypatch.setattr(private, "gather", lambda *_: [1, 1])
    told = {c: ConfigRecord({"score": score if c == 4 else -1.0}) for c in range(6)}
    monkeypatch.setattr(private, "_ask", lambda *_: told)
    with pytest.raises(Refused, match=f"client 4 says that its score is {score}"):
        private.gather_private(clients, root(0), 2, FedWCM())
    told[4] = ConfigRecord({"score": 1.0})
    assert private.gather_private(clients, root(0), 2, FedWCM()).scores[4] == 1.0


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
