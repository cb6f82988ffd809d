"""A federation under secure aggregation gives the plain one's model, and shows no client's own."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("flwr", reason="needs the extra fedbasin[flower]")

from deploy.grids import LocalGrid, app_for, strategy_for
from deploy.parties import SESSION
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

import fedbasin.methods  # noqa: F401  (fills the catalogue)
from fedbasin.core.catalogue import cards, needs_of
from fedbasin.core.expressions import parse
from fedbasin.core.protocols import NeedsGradients
from fedbasin.core.rng import root
from fedbasin.core.tree import flatten
from fedbasin.deploy import (
    ClientSetup,
    FedbasinStrategy,
    Guard,
    Handling,
    Secure,
    ServerSide,
    app_of,
)
from fedbasin.deploy import client as client_side
from fedbasin.deploy.clients import ASK, TooFewNodes
from fedbasin.deploy.merge import NothingMerged
from fedbasin.deploy.secure.client import KEYS, SHARES, STAGES, UNMASK
from fedbasin.deploy.wire import Refused
from fedbasin.local.private_counts import make_keys
from fedbasin.methods import FedAvg
from fedbasin.testing import toy_federation

EVERYONE = "fraction(rate=1.0)"
SIZES = (16, 9, 7, 5, 3, 1)  # rows of the toy federation's clients
FINE = Secure(clip=1.0, rows=16, bits=28)


def streaming():
    """The catalogue's methods that merge by the mean, and some of them in one another."""
    names = []
    for card in cards("method"):
        method = parse(card.name, "method")
        if method.streams() is not None:
            names.append(card.name)
    names.remove("ima")
    return [
        *names,
        "fedavg(weighting='uniform')",
        "ima(fedprox, window=2, start=0.3)",
        "wima(fedadam, window=2)",
    ]


def stage_of(message):
    if message.metadata.message_type == "train":
        return "train"
    return message.content["config"].get(ASK, "")


class Losing(LocalGrid):
    """Nodes of which some do not answer in a stage: {(round, stage): clients}."""

    lost: Mapping[tuple[int, str], Collection[int]] = MappingProxyType({})
    silent = False
    spoil = staticmethod(lambda stage, client, reply: reply)

    def push_messages(self, messages):
        ids = super().push_messages(messages)
        for message in messages:
            stage = stage_of(message)
            client = self.client(message.metadata.dst_node_id)
            session = message.content.get("secure")
            round = session["round"] if session else message.content["config"].get("server-round")
            arrived = self._inbox[message.metadata.message_id]
            if client in self.lost.get((round, stage), ()):
                gone = Message(Error(3, "the node is gone"), reply_to=message)
                gone.metadata.__dict__["_src_node_id"] = message.metadata.dst_node_id
                arrived = [] if self.silent else [gone]
            else:
                arrived = [self.spoil(stage, client, reply) for reply in arrived]
            self._inbox[message.metadata.message_id] = arrived
        return ids


def batches_of_the_simulator(monkeypatch):
    """Let a run's first start train on the simulator's batches, so that models can be compared."""
    real = client_side._session_key

    def session_key(session, key, round, config):
        return key if session.attempt == 1 else real(session, key, round, config)

    monkeypatch.setattr(client_side, "_session_key", session_key)


@pytest.fixture(autouse=True)
def same_batches(monkeypatch):
    batches_of_the_simulator(monkeypatch)


def run(expression="fedavg", secure=None, rounds=1, who=EVERYONE, lost=None, **settings):
    module = settings.pop("module", None)
    silent = settings.pop("silent", False)
    spoil = settings.pop("spoil", None)
    timeout = settings.pop("timeout", 5)
    fails = settings.pop("fails", "")  # what a run says that merges nothing
    method = parse(expression, "method") if isinstance(expression, str) else expression
    buffers = settings.pop("buffers", "mean")
    federation = toy_federation(method, rounds=rounds, participation=who, module=module)
    federation = replace(federation, buffers=buffers)
    eligible = settings.pop("eligible", range(6))
    grid = Losing(app_for(federation), 6)
    grid.contexts = {n: c for n, c in grid.contexts.items() if grid.client(n) in eligible}
    grid.lost = lost or {}
    grid.silent = silent
    if spoil is not None:
        grid.spoil = spoil
    strategy = strategy_for(federation, method, **({"secure": secure} | settings))
    arrays = ArrayRecord(federation.net.state_dict(*federation.net.initial()))
    with pytest.raises(NothingMerged, match=fails) if fails else nullcontext():
        strategy.start(grid, arrays, num_rounds=rounds, timeout=timeout)
    return strategy, grid


def simulated(expression, rounds=1, who=EVERYONE):
    federation = toy_federation(parse(expression, "method"), rounds=rounds, participation=who)
    server, states = federation.begin()
    return list(federation.rounds_from(server, states))


@pytest.mark.parametrize("expression", streaming())
def test_every_method_that_merges_by_the_mean_gives_the_simulators_model(expression):
    rounds = simulated(expression, rounds=2, who="count(clients=3)")
    strategy, _ = run(expression, replace(FINE, clip=20.0), rounds=2, who="count(clients=3)")
    expected = dict(flatten(rounds[-1][0]))
    found = dict(flatten(strategy._server))
    assert found.keys() == expected.keys()
    worst = max(r.notes["secure_rounding"] for r in strategy.journal.records)
    assert worst < 1e-5 and all(r.notes["secure_clipped"] == 0 for r in strategy.journal.records)
    for path, leaf in expected.items():
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            # Server optimisers divide by a root of the update, which makes rounding larger.
            torch.testing.assert_close(found[path], leaf, rtol=1e-4, atol=2e-5, msg=path)
    for (_, sim), record in zip(rounds, strategy.journal.records, strict=True):
        assert (record.replies, record.dropped) == (3, 0)
        assert record.train_loss == pytest.approx(sim.train_loss, rel=1e-5)


@pytest.mark.parametrize("bits", [8, 16, 24])
def test_the_mean_is_within_the_stated_rounding(bits):
    plain = simulated("fedavg")[-1][0].send
    strategy, _ = run("fedavg", Secure(clip=0.5, rows=16, bits=bits))
    record = strategy.journal.records[0]
    levels = 2 ** (bits - 1) - 1
    stated = 6 / 2 * 0.5 / levels * 16 / sum(SIZES)
    assert record.notes["secure_rounding"] == pytest.approx(stated)
    error = float((strategy._server.send - plain).abs().max())
    assert stated / 50 < error <= stated
    assert record.notes["secure_clipped"] == 0


STAGE_LOSSES = {
    "keys": ({(1, KEYS): [2]}, {2}),
    "shares": ({(1, SHARES): [2]}, {2}),
    "train": ({(1, "train"): [2]}, {2}),
    "unmask": ({(1, UNMASK): [2]}, set()),
    "two stages": ({(1, SHARES): [1], (1, "train"): [2]}, {1, 2}),
    "train and unmask": ({(1, "train"): [4], (1, UNMASK): [0]}, {4}),
}


@pytest.mark.parametrize("case", STAGE_LOSSES)
def test_clients_may_be_lost_in_any_stage(case):
    lost, missing = STAGE_LOSSES[case]
    strategy, _ = run("fedavg", replace(FINE, threshold=4), lost=lost)
    plain, _ = run("fedavg", lost={(1, "train"): missing}, stream=True)
    torch.testing.assert_close(strategy._server.send, plain._server.send, rtol=0, atol=1e-7)
    record = strategy.journal.records[0]
    assert (record.replies, record.dropped) == (6 - len(missing), len(missing))
    assert {c for c in range(6) if strategy.journal.merged[c]} == set(range(6)) - missing
    assert record.notes["secure_over_rows"] == 0
    assert not strategy.journal.refused  # a node that is gone has done nothing wrong


def test_a_silent_client_is_lost_like_one_that_answers_with_an_error():
    lost = {(1, "train"): [2]}
    strategy, _ = run(
        "fedavg", replace(FINE, threshold=4), lost=lost, silent=True, timeout=1.0, patience=1.0
    )
    plain, _ = run("fedavg", lost=lost, stream=True)
    torch.testing.assert_close(strategy._server.send, plain._server.send, rtol=0, atol=1e-7)


@pytest.mark.parametrize("stage", [SHARES, "train", UNMASK])
def test_too_few_survivors_end_the_round_and_nothing_is_unmasked(stage, caplog):
    lost = {(1, stage): [0, 1, 2]}
    strategy, grid = run("fedavg", replace(FINE, threshold=4), rounds=2, lost=lost)
    failed, good = strategy.journal.records
    assert failed.notes == {"secure_failed": 1.0} and failed.update_norm is None
    assert "secure_failed" not in good.notes and good.replies == 6
    asked = [m for m in grid.sent if stage_of(m) == UNMASK and m.content["secure"]["round"] == 1]
    assert bool(asked) == (stage == UNMASK)
    assert any("nothing is unmasked" in r.getMessage() for r in caplog.records)
    assert not any("fedbasin-secure" in c.state for c in grid.contexts.values())


def test_without_enough_keys_the_run_stops_with_a_message():
    with pytest.raises(TooFewNodes, match="3 clients sent keys, 4 are needed"):
        run("fedavg", replace(FINE, threshold=4), lost={(1, KEYS): [0, 1, 2]}, patience=0.1)


@pytest.mark.parametrize("silent", [False, True])
def test_others_are_asked_for_keys_in_place_of_lost_clients(silent):
    who = "count(clients=3)"
    cohort = sorted(run("fedavg", FINE, who=who)[0]._cohort.asked)
    lost = {(1, KEYS): cohort[:1]}
    strategy, _ = run("fedavg", FINE, who=who, lost=lost, silent=silent, timeout=1.0)
    assert strategy.journal.records[0].replies == 3
    assert cohort[0] not in strategy._cohort.collector.clients


def test_cohorts_below_the_threshold_are_not_asked():
    with pytest.raises(ValueError, match="cohorts of 3 clients are below the threshold of 4"):
        run("fedavg", replace(FINE, threshold=4), who="count(clients=3)")
    fails = "no round of 1 merged a reply: 2 clients were drawn, 4 are needed"
    few = dict(who="fraction(rate=0.4)", fails=fails)
    strategy, grid = run("fedavg", replace(FINE, threshold=4), **few)
    assert strategy.journal.records[0].notes == {"secure_failed": 1.0}
    assert not [m for m in grid.sent if stage_of(m) in (*STAGES, "train")]


def test_a_wrong_share_is_refused_and_its_sender_named():
    def spoil(stage, client, reply):
        if stage == UNMASK and client == 3 and not reply.has_error():
            config = reply.content["config"]
            shares = list(config["seed-shares"])
            shares[0] = shares[0][:-1] + bytes([shares[0][-1] ^ 1])
            config["seed-shares"] = shares
        return reply

    strategy, _ = run("fedavg", FINE, spoil=spoil)
    honest, _ = run("fedavg", FINE)
    torch.testing.assert_close(strategy._server.send, honest._server.send, rtol=0, atol=1e-6)
    (why,) = strategy.journal.refused
    assert why == "client 3: secure-unmask: client 3 sent a wrong share of the seed of client 0"


BROKEN = {
    "short": lambda r: r.content["secure"].__setitem__("words", Array(np.zeros(3, np.uint32))),
    "float": lambda r: r.content["secure"].__setitem__("words", Array(np.zeros(3))),
    "no numbers": lambda r: r.content["secure"].pop("numbers"),
    "in plain": lambda r: r.content.__setitem__("arrays", r.content.pop("secure")),
    "another round": lambda r: r.content["metrics"].__setitem__("server-round", 7),
    "too large": lambda r: r.content.__setitem__("x", ArrayRecord({"x": Array(np.zeros(1 << 14))})),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_masked_reply_that_cannot_be_used_costs_one_client_its_round(case):
    def spoil(stage, client, reply):
        if stage == "train" and client == 2:
            BROKEN[case](reply)
        return reply

    strategy, _ = run("fedavg", replace(FINE, threshold=4), spoil=spoil)
    plain, _ = run("fedavg", lost={(1, "train"): [2]}, stream=True)
    torch.testing.assert_close(strategy._server.send, plain._server.send, rtol=0, atol=1e-7)
    assert [why.startswith("client 2: ") for why in strategy.journal.refused] == [True]


def test_random_words_of_one_client_make_no_model(caplog):
    def spoil(stage, client, reply):
        if stage == "train" and client == 2:
            old = reply.content["secure"]["words"].numpy()
            words = np.random.default_rng(0).integers(0, 1 << 32, old.size, dtype=np.uint32)
            reply.content["secure"]["words"] = Array(words)
        return reply

    fails = "no round of 1 merged a reply: the sum of 6 updates is beyond"
    strategy, _ = run("fedavg", Secure(clip=1.0, rows=16), spoil=spoil, fails=fails)
    assert strategy.journal.records[0].notes == {"secure_failed": 1.0}
    assert any("beyond what they can add up to" in r.getMessage() for r in caplog.records)


class Normed(nn.Sequential):
    """Four inputs, three classes, statistics on the way."""

    def __init__(self):
        super().__init__(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


@pytest.mark.parametrize("expression", ["fedavg", "fedavg(weighting='uniform')"])
def test_batchnorm_statistics_have_a_clip_of_their_own(expression):
    # Others have a last batch of one row, which BatchNorm refuses.
    module = Normed()

    def who():
        return dict(eligible=(0, 2), module=copy.deepcopy(module))

    secure = replace(FINE, statistics=2.0)
    strategy, _ = run(expression, secure, rounds=2, **who())
    plain, _ = run(expression, rounds=2, stream=True, **who())
    for name in ("send", "buffers"):
        torch.testing.assert_close(
            getattr(strategy._server, name), getattr(plain._server, name), rtol=0, atol=1e-6
        )
    notes = strategy.journal.records[0].notes
    assert notes["secure_clipped_statistics"] == 0
    tight, _ = run(expression, replace(FINE, statistics=0.01), **who())
    assert tight.journal.records[0].notes["secure_clipped_statistics"] > 0.3
    kept, _ = run(expression, FINE, buffers="keep", **who())
    assert torch.equal(kept._server.buffers, torch.tensor([0.0] * 5 + [1.0] * 5).double())
    with pytest.raises(ValueError, match=r"BatchNorm statistics: give Secure\(statistics"):
        run(expression, FINE, **who())


def test_clipped_entries_and_large_clients_are_counted():
    strategy, _ = run("fedavg", Secure(clip=1e-3, rows=5))
    notes = strategy.journal.records[0].notes
    assert notes["secure_clipped"] > 0.2
    assert notes["secure_over_rows"] == 3  # clients of 16, 9 and 7 rows
    moved = strategy.journal.records[0].update_norm
    assert 0 < moved <= 1e-3 * strategy._codec.layout.size**0.5


def texts_of(record):
    return [value for values in record.values() for value in np.ravel(values).tolist()]


def test_no_single_clients_rows_or_losses_reach_the_server():
    """Count what the server gets: addresses, keys, shares and masked words, and nothing else."""
    seen = []

    def spoil(stage, client, reply):
        seen.append((stage, client, reply))
        return reply

    strategy, _ = run("fedavg", FINE, rounds=2, spoil=spoil)
    kinds = set()
    for stage, client, reply in seen:
        kinds.add(stage)
        for name, record in reply.content.items():
            if isinstance(record, MetricRecord):
                told = dict(record)
                if stage == "who":
                    assert told == {
                        "partition-id": client,
                        "num-partitions": 6,
                        "num-examples": 1,
                    }
                else:
                    assert set(told) == {"server-round", "partition-id"}
            elif isinstance(record, ArrayRecord):
                assert (stage, name, set(record)) == ("train", "secure", {"words", "numbers"})
            else:
                assert all(isinstance(v, bytes) for v in texts_of(record)), (stage, name)
    assert kinds == {"who", *STAGES, "train"}
    assert strategy._clients.mean_examples() == 0
    assert strategy._context.examples == 0


def test_class_counts_reach_the_server_as_their_sum():
    """No method that streams needs counts itself; the rule `logit_adjusted` around one does."""
    assert not any("class_counts" in needs_of(parse(name, "method")) for name in streaming())
    pytest.importorskip("tenseal", reason="needs the extra fedbasin[he]")
    source = "fedavgm(fedavg(local=logit_adjusted(tau=1.5)))"
    *_, (simulated_server, _) = simulated(source, rounds=2)
    strategy, grid, arrays = careful_grid({}, source=source, secure=FINE, counts="private")
    answers = []

    def spoil(stage, client, reply):
        answers.append((stage, client, reply.content))
        return reply

    grid.spoil = spoil
    strategy.start(grid, arrays, num_rounds=2, timeout=5)
    torch.testing.assert_close(strategy._server.send, simulated_server.send, rtol=1e-4, atol=2e-5)
    assert strategy._context.class_counts is None
    assert strategy._context.private_counts.scores.numel() == 0
    told = {stage for stage, *_ in answers}
    assert told == {"who", "keys", "encrypt", "decrypt", "train", *STAGES}
    (total,) = [c["config"]["total"] for stage, _, c in answers if stage == "decrypt"]
    federation = toy_federation(parse("fedavg", "method"))
    assert total == federation.context.class_counts.sum(0).tolist()
    for stage, client, content in answers:
        if stage == "who":
            assert dict(content["metrics"]) == {
                "partition-id": client,
                "num-partitions": 6,
                "num-examples": 1,
            }
        if stage == "encrypt":
            assert [type(value) for value in content["config"].values()] == [bytes]


def test_masked_replies_are_new_in_every_run():
    def once():
        sent = {}

        def spoil(stage, client, reply):
            if stage == "train":
                sent[client] = reply.content["secure"]["words"].numpy()
            return reply

        strategy, _ = run("fedavg", FINE, spoil=spoil)
        return sent, strategy._server.send

    first, model = once()
    second, again = once()
    assert torch.equal(model, again)
    assert all((first[c] == second[c]).mean() < 0.1 for c in range(6))


def test_runs_of_one_seed_train_on_other_batches(monkeypatch):
    """Or sums over the same clients but one would differ by that client's update."""
    *_, (alike, _) = simulated("fedavg")
    monkeypatch.undo()
    models = [run("fedavg", FINE)[0]._server.send for _ in range(2)] + [alike.send]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert (models[a] - models[b]).abs().max() > 1e-5


def test_batches_differ_by_run_and_start(monkeypatch):
    monkeypatch.undo()

    def key(**changes):
        session = replace(SESSION, **changes)
        config = ConfigRecord({"fedbasin-name": session.run})
        return client_side._session_key(session, root(0), session.round - 1, config)

    assert key() == key()
    assert len({key(), root(0), key(attempt=2), key(run="ab13")}) == 4
    with pytest.raises(Refused, match="not the one that keys were made for"):
        client_side._session_key(SESSION, root(0), 7, ConfigRecord({"fedbasin-name": SESSION.run}))


def test_a_resumed_run_starts_a_new_attempt_with_new_batches(tmp_path):
    federation = toy_federation(parse("fedavg", "method"), rounds=3, participation=EVERYONE)
    arrays = ArrayRecord(federation.net.state_dict(*federation.net.initial()))
    grid = Losing(app_for(federation), 6)

    class Killed(Exception):
        pass

    def dies_in_round_2(stage, client, reply):
        if stage == UNMASK and grid.sent[-1].content["secure"]["round"] == 2:
            raise Killed
        return reply

    settings = dict(secure=FINE, folder=tmp_path)
    grid.spoil = dies_in_round_2
    with pytest.raises(Killed):
        strategy_for(federation, federation.method, **settings).start(
            grid, arrays, num_rounds=3, timeout=5
        )
    grid.spoil = Losing.spoil
    before = len(grid.sent)
    strategy = strategy_for(federation, federation.method, **settings)
    strategy.start(grid, arrays, num_rounds=3, timeout=5)
    assert [r.round for r in strategy.journal.records] == [1, 2, 3]
    assert all(r.replies == 6 for r in strategy.journal.records)
    sessions = [m.content["secure"] for m in grid.sent[before:] if "secure" in m.content]
    assert {s["attempt"] for s in sessions} == {2}
    assert json.loads((tmp_path / "secure.json").read_text()) == {"starts": 2}
    rounds = simulated("fedavg", rounds=3)
    difference = (strategy._server.send - rounds[-1][0].send).abs().max()
    assert difference > 1e-5  # other batches than those whose sum may have been opened


@dataclass(frozen=True)
class Leaning(NeedsGradients, FedAvg):
    """FedAvg that asks for gradients."""


REFUSED = [
    ("scaffold", {}, "looks at single replies or at what clients report"),
    ("fedlaw", {}, "looks at single replies"),
    ("ima(fedexp(fedavg))", {}, "looks at single replies"),
    (Leaning(), {}, "asks every client for its gradient"),
    ("fedavg", dict(handling=Handling(guard=Guard())), "a guard compares the lengths"),
    ("fedavg", dict(handling=Handling(stream=False)), "leave stream out"),
    ("fedavg", dict(fraction_evaluate=0.5), "clients that evaluate would show"),
    ("fedavg", dict(secure=Secure(clip=1.0)), "give Secure"),
    ("fedavg(local=logit_adjusted)", {}, "needs the clients' class counts: give server="),
    ("fedwcm", dict(server=ServerSide(counts="private")), "looks at single replies"),
    ("dp(fedavg(weighting='uniform'))", {}, "noise_by='clients'"),
]


@pytest.mark.parametrize(("method", "settings", "why"), REFUSED, ids=lambda v: str(v)[:30])
def test_what_would_show_a_single_client_is_refused(method, settings, why):
    given = dict(fraction_evaluate=0, secure=FINE) | settings
    with pytest.raises(ValueError, match=f"^secure: .*{why}"):
        FedbasinStrategy(method, **given)


def test_too_many_clients_for_the_words_are_refused():
    with pytest.raises(ValueError, match="6 clients of 31 bits overflow words of 32 bits"):
        run("fedavg", replace(FINE, bits=31))


def careful_grid(secure_strategy, source="fedavg", counts="plain", **more):
    """Clients that send nothing in plain."""
    federation = toy_federation(parse(source, "method"), rounds=2, participation=EVERYONE)
    app = app_of(lambda context: ClientSetup.of(federation, context, secure=4))
    grid = Losing(app, 6)
    server = ServerSide.of(federation, counts=counts)
    strategy = strategy_for(federation, federation.method, server=server, **secure_strategy, **more)
    arrays = ArrayRecord(federation.net.state_dict(*federation.net.initial()))
    return strategy, grid, arrays


def test_a_client_may_insist_on_secure_aggregation(caplog):
    strategy, grid, arrays = careful_grid(dict(secure=FINE))
    strategy.start(grid, arrays, num_rounds=1, timeout=5)
    assert strategy.journal.records[0].replies == 6
    strategy, grid, arrays = careful_grid(dict(patience=0.1, fraction_evaluate=1.0))
    with pytest.raises(TooFewNodes):
        strategy.start(grid, arrays, num_rounds=1, timeout=0.1)
    assert all(identity.examples == 1 for identity in strategy._clients._identities.values())
    assert any("sends no model" in r.getMessage() for r in caplog.records)
    node = next(iter(grid.contexts))
    for kind, config, what in (
        ("evaluate", {}, "scores"),
        ("query", {ASK: "gradient"}, "gradient"),
        ("query", {ASK: "who", "class-counts": True}, "class counts"),
        ("query", {ASK: "score", "total": [9, 9, 9]}, "score of its class counts"),
    ):
        content = {"arrays": arrays, "config": ConfigRecord(config)}
        message = Message(RecordDict(content), node, kind)
        grid.push_messages([message])
        (reply,) = grid.pull_messages([message.metadata.message_id])
        assert reply.has_error() and f"sends no {what}" in reply.error.reason


@pytest.mark.parametrize(
    ("clients", "why"),
    [({}, "clients is None, expected a finite number"), ({"clients": 3}, "over 3 clients")],
)
def test_a_client_may_insist_on_the_sum_of_many_class_counts(clients, why):
    pytest.importorskip("tenseal", reason="needs the extra fedbasin[he]")
    _, grid, _ = careful_grid(dict(secure=FINE))
    node = next(iter(grid.contexts))
    config = {ASK: "encrypt", "public": make_keys().public}

    def asked(**more):
        content = RecordDict({"config": ConfigRecord(config | more)})
        message = Message(content, node, "query")
        grid.push_messages([message])
        (reply,) = grid.pull_messages([message.metadata.message_id])
        return reply

    assert why in asked(**clients).error.reason
    assert not asked(clients=4).has_error()


def test_a_node_insists_by_its_own_configuration():
    federation = toy_federation(parse("fedavg", "method"), rounds=1, participation=EVERYONE)
    grid = Losing(app_for(federation), 6, node_config={"secure-threshold": 6})
    strategy = strategy_for(federation, federation.method, secure=FINE, patience=0.1)
    arrays = ArrayRecord(federation.net.state_dict(*federation.net.initial()))
    with pytest.raises(TooFewNodes, match="0 clients sent keys"):
        strategy.start(grid, arrays, num_rounds=1, timeout=5)
    strategy = strategy_for(federation, federation.method, secure=replace(FINE, threshold=6))
    strategy.start(grid, arrays, num_rounds=1, timeout=5)
    assert strategy.journal.records[0].replies == 6
