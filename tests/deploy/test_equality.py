"""A federation on Flower gives the simulator's model, for methods that use every hook."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("flwr", reason="needs the extra fedbasin[flower]")

from deploy.grids import LocalGrid, app_for, strategy_for
from flwr.app import ArrayRecord

import fedbasin.methods  # noqa: F401  (fills the catalogue)
from fedbasin.core.catalogue import cards
from fedbasin.core.expressions import parse
from fedbasin.core.method import Served
from fedbasin.core.protocols import NeedsGradients
from fedbasin.core.tree import flatten
from fedbasin.deploy.clients import ASK
from fedbasin.methods import FedAvg
from fedbasin.testing import toy_federation

METHODS = [
    "fedavg",
    "fedprox(mu=0.1)",
    "scaffold",
    "fedcm",
    "fedcm(counted='rows')",
    "fedadam",
    "fedlaw",
    "wima(window=2)",
    "ima(window=2, start=0.3)",
    "fedcda(warmup=1)",
    "fedwcm",
    "fedwcm(unequal=True)",
    "ima(scaffold, window=2, start=0.3)",
    "scaffold(local=prox(mu=0.1))",
]


def simulated(expression: str, **settings):
    federation = toy_federation(parse(expression, "method"), rounds=3, **settings)
    server, states = federation.begin()
    return federation, list(federation.rounds_from(server, states))


def deployed(federation, **settings):
    strategy = strategy_for(federation, federation.method, **settings)
    grid = LocalGrid(app_for(federation), 6)
    arrays = ArrayRecord(federation.net.state_dict(*federation.net.initial()))
    result = strategy.start(grid, arrays, num_rounds=3, timeout=5)
    return strategy, grid, result


EVERYONE = "fraction(rate=1.0)"
SOME = "count(clients=3)"
CASES = [(method, who) for method in METHODS for who in (EVERYONE, SOME)]
CASES += [(card.name, SOME) for card in cards("method") if card.name not in [*METHODS, "dp"]]
# Real clients' cohorts and noise are drawn in secret (test_dp.py): only without both is dp equal.
CASES += [("dp(fedavg(weighting='uniform'), clip=0.2, noise=0.0, adaptive=True)", EVERYONE)]


@pytest.mark.parametrize(("expression", "participation"), CASES)
def test_three_rounds_equal_the_simulators(expression, participation):
    federation, rounds = simulated(expression, participation=participation)
    strategy, _, _ = deployed(federation)
    server, record = rounds[-1]
    ours = dict(flatten(strategy._server))
    theirs = dict(flatten(server))
    assert ours.keys() == theirs.keys()
    for path, leaf in theirs.items():
        if isinstance(leaf, torch.Tensor):
            torch.testing.assert_close(ours[path], leaf, rtol=1e-9, atol=1e-11, msg=path)
        else:
            assert ours[path] == leaf, path
    for (_, sim), flower in zip(rounds, strategy.journal.records, strict=True):
        assert (flower.round, flower.replies, flower.dropped) == (sim.round, sim.replies, 0)
        for name in ("train_loss", "lr", "update_norm"):
            expected = getattr(sim, name)
            assert getattr(flower, name) == (expected and pytest.approx(expected, rel=1e-6)), name
        assert list(flower.metrics) == list(sim.metrics)
        for name in ("accuracy", "loss", "accuracy_send"):
            expected = sim.metric(name)
            assert flower.metric(name) == (expected and pytest.approx(expected, rel=1e-6)), name
        assert flower.notes.keys() == sim.notes.keys()
        for name, note in sim.notes.items():
            assert flower.notes[name] == pytest.approx(note, rel=1e-6, abs=1e-9), name
    assert (
        strategy.journal.records[-1].metrics["accuracy_per_class"]
        == record.metrics["accuracy_per_class"]
    )
    for name in ("clients", "rounds", "batch", "examples", "effective_steps", "layout"):
        assert getattr(strategy._context, name) == getattr(federation.context, name), name


def test_a_users_dropout_has_the_simulators_masks():
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    federation, rounds = simulated(
        "scaffold",
        module=nn.Sequential(
            nn.Unflatten(1, (4, 1)), nn.Linear(1, 4), layer, nn.Flatten(), nn.Linear(16, 3)
        ),
    )
    strategy, _, _ = deployed(federation)
    torch.testing.assert_close(strategy._server.send, rounds[-1][0].send, rtol=1e-9, atol=1e-11)


class Normed(nn.Sequential):
    """Four inputs, three classes, statistics on the way."""

    def __init__(self):
        super().__init__(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


@pytest.mark.parametrize("policy", ["mean", "keep"])
def test_statistics_follow_their_policy(policy):
    federation = toy_federation(
        parse("fedavg", "method"), rounds=2, module=Normed(), participation="count(clients=2)"
    )
    federation = replace(federation, buffers=policy, eligible=np.array([0, 2]))  # no batch of one
    server, states = federation.begin()
    server, _ = list(federation.rounds_from(server, states))[-1]
    sent_back = []

    def seen(client, reply):
        sent_back.append(set(reply.content["arrays"]))
        return [reply]

    grid = LocalGrid(app_for(federation), 6, seen)
    grid.contexts = {n: c for n, c in grid.contexts.items() if grid.client(n) in (0, 2)}
    strategy = strategy_for(federation, federation.method)
    arrays = ArrayRecord(federation.net.state_dict(*federation.net.initial()))
    result = strategy.start(grid, arrays, num_rounds=2, timeout=5)
    torch.testing.assert_close(strategy._server.send, server.send, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(strategy._server.buffers, server.buffers, rtol=1e-9, atol=1e-11)
    shipped = result.arrays.to_torch_state_dict()
    assert int(shipped["1.num_batches_tracked"]) == 0  # integers never travel back
    assert all("1.num_batches_tracked" not in names for names in sent_back) and sent_back
    Normed().double().load_state_dict(shipped)


STREAMED = """fedavg; fedavg(weighting='uniform'); fedprox(mu=0.1); wima(window=2)
fedsam; fedasam; fedlesam; adabest; fedacg"""


@pytest.mark.parametrize("expression", STREAMED.replace("\n", "; ").split("; "))
def test_averaging_as_replies_arrive_equals_the_matrix(expression):
    federation, rounds = simulated(expression, participation="count(clients=4)")
    strategy, _, _ = deployed(federation, stream=True)
    assert strategy._cohort.collector.stream is not None
    assert (strategy.journal.merged == 3).sum() == 4  # all of the cohort, not its mean alone
    torch.testing.assert_close(strategy._server.send, rounds[-1][0].send, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(strategy._server.score, rounds[-1][0].score, rtol=1e-9, atol=1e-11)


def test_a_method_that_looks_at_each_reply_is_never_streamed():
    federation, rounds = simulated("scaffold")
    strategy, _, _ = deployed(federation, stream=True)
    assert strategy._cohort.collector.stream is None
    torch.testing.assert_close(strategy._server.send, rounds[-1][0].send)


def test_node_ids_do_not_matter():
    federation, _ = simulated("scaffold")
    arrays = ArrayRecord(federation.net.state_dict(*federation.net.initial()))
    ends = []
    for seed in (1, 2):
        grid = LocalGrid(app_for(federation), 6, shuffle=seed)
        strategy = strategy_for(federation, federation.method)
        strategy.start(grid, arrays, num_rounds=2, timeout=5)
        ends.append((list(grid.contexts), strategy._server.send))
    assert ends[0][0] != ends[1][0]
    assert torch.equal(ends[0][1], ends[1][1])


@pytest.mark.parametrize("expression", ["fedavg", "scaffold", "fedcm"])
def test_bytes_are_what_the_simulator_predicts(expression):
    """Arrays carry a header of 128 bytes each, a tree its skeleton, a message some numbers."""
    federation, rounds = simulated(expression)
    strategy, grid, _ = deployed(federation)
    parts = len(federation.net.layout.names)
    for (_, sim), flower in zip(rounds, strategy.journal.records, strict=True):
        for way in ("bytes_down", "bytes_up"):
            extra = getattr(flower, way) - getattr(sim, way)
            assert 0 < extra < sim.replies * (128 * (parts + 2) + 600), (way, extra)
    trained = [m for m in grid.sent if m.metadata.message_type == "train"]
    assert len(trained) == sum(record.replies for _, record in rounds)


@dataclass(frozen=True)
class Leaning(NeedsGradients, FedAvg):
    """FedAvg that also steps along the cohort's gradients at the model it was sent."""

    def aggregate(self, state, server, replies, context):
        served, state = super().aggregate(state, server, replies, context)
        share = context.probe.weights / context.probe.weights.sum()
        lean = served.send - 0.1 * share @ context.probe.gradients
        steps = torch.arange(1.0, len(replies.clients) + 1, dtype=lean.dtype)
        lean = lean + 1e-3 * steps @ context.probe.gradients  # the order of clients matters here
        return Served(lean, lean), state


def test_gradients_before_training_are_gathered_by_a_query():
    federation = toy_federation(Leaning(), rounds=3)
    server, states = federation.begin()
    expected = list(federation.rounds_from(server, states))[-1][0]
    strategy, grid, _ = deployed(federation)
    torch.testing.assert_close(strategy._server.send, expected.send, rtol=1e-9, atol=1e-11)
    asked = [m for m in grid.sent if m.content["config"].get(ASK) == "gradient"]
    assert len(asked) == 9


def test_a_client_without_a_gradient_sits_the_round_out(caplog):
    federation = toy_federation(Leaning(), rounds=1, participation="fraction(rate=1.0)")
    grid = LocalGrid(app_for(federation), 6)
    app = grid.app

    def failing(message, context):
        asked = message.content["config"].get(ASK) == "gradient"
        if asked and context.node_config["partition-id"] == 2:
            raise ValueError("no gradient today")
        return app(message, context)

    grid.app = failing
    strategy = strategy_for(federation, federation.method)
    arrays = ArrayRecord(federation.net.state_dict(*federation.net.initial()))
    strategy.start(grid, arrays, num_rounds=1, timeout=5)
    assert strategy._cohort.collector.clients == {0, 1, 3, 4, 5}
    assert any("client 2 sends no gradient" in r.getMessage() for r in caplog.records)
