"""Client-level privacy in a federation: who draws noise, who takes part, what is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra fedbasin[flower]")

from deploy.grids import LocalGrid, app_for, strategy_for
from deploy.test_secure import Normed, batches_of_the_simulator
from flwr.app import Array, ArrayRecord, Error, Message

from fedbasin.core.expressions import parse
from fedbasin.core.record import RunFolder
from fedbasin.deploy import Guard, Records, Secure, ServerSide
from fedbasin.deploy.clients import TooFewNodes
from fedbasin.testing import toy_federation

EVERYONE = "fraction(rate=1.0)"
UNIFORM = "fedavg(weighting='uniform')"


def run(expression, who=EVERYONE, rounds=2, grid=LocalGrid, **settings):
    """Run a federation of six clients; return the strategy and the grid."""
    method = parse(expression, "method")
    federation = toy_federation(method, rounds=rounds, participation=who)
    nodes = grid(app_for(federation), 6)
    strategy = strategy_for(federation, method, **settings)
    arrays = ArrayRecord(federation.net.state_dict(*federation.net.initial()))
    strategy.start(nodes, arrays, num_rounds=rounds, timeout=2)
    return strategy, nodes


def asked(grid):
    """Return how many clients were sent a model in each round."""
    rounds = [
        message.content["config"]["server-round"]
        for message in grid.sent
        if message.metadata.message_type == "train"
    ]
    return [rounds.count(number) for number in sorted(set(rounds))]


@pytest.mark.parametrize("noise_by", ["server", "clients"])
def test_without_noise_it_gives_the_simulators_model(noise_by):
    source = f"wima(dp({UNIFORM}, clip=0.2, noise=0.0, noise_by='{noise_by}'))"
    strategy, _ = run(source)
    federation = toy_federation(parse(source, "method"), rounds=2, participation=EVERYONE)
    *_, (simulated, record) = federation.rounds_from(*federation.begin())
    torch.testing.assert_close(strategy._server.send, simulated.send, rtol=1e-9, atol=1e-11)
    assert strategy._record.notes["clip"] == record.notes["clip"] == pytest.approx(0.2)


@pytest.mark.parametrize("noise_by", ["server", "clients"])
def test_noise_is_new_in_every_start_and_of_the_stated_size(noise_by):
    """Clip 1e-6 and noise 1e6: what the model moves by is the noise alone, of std 1 on the sum."""
    source = f"dp({UNIFORM}, clip=1e-6, noise=1e6, noise_by='{noise_by}')"
    moves = []
    for _ in range(5):
        strategy, _ = run(source, rounds=1)
        net = toy_federation(parse(UNIFORM, "method")).net
        moves.append((strategy._server.send - net.initial()[0]).numpy() * 6)
    moves = np.stack(moves)
    assert len(np.unique(moves[:, 0])) == 5
    assert moves.std() == pytest.approx(1, abs=4 / np.sqrt(2 * moves.size))
    assert abs(np.corrcoef(moves[0], moves[1])[0, 1]) < 0.8


def test_who_takes_part_is_drawn_anew_and_empty_cohorts_are_noised():
    sizes = []
    for _ in range(8):
        strategy, grid = run(f"dp({UNIFORM})", who="poisson(rate=0.15)", rounds=4)
        sizes.append(tuple(asked(grid)))
        assert strategy._server.round == 4
    assert len(set(sizes)) > 1
    assert any(len(each) < 4 for each in sizes)  # nobody was asked: not so once in 3 million tests
    assert strategy._context.sampling == ("poisson", pytest.approx(0.9), 6)


def test_a_run_in_which_nobody_was_drawn_is_finished(tmp_path):
    run(f"dp({UNIFORM})", who="poisson(rate=1e-9)", rounds=2, records=Records(tmp_path / "run"))
    folder = RunFolder(tmp_path / "run")
    assert folder.read_summary()["status"] == "finished"
    assert [record.replies for record in folder.read_rounds()] == [0, 0]


def test_of_other_draws_nothing_is_gained():
    strategy, _ = run(f"dp({UNIFORM})", who="count(clients=2)", rounds=1)
    assert strategy._context.sampling == ("other", 2.0, 6)


def test_the_summary_of_a_federation_names_the_accountant(tmp_path):
    pytest.importorskip("dp_accounting", reason="needs the extra fedbasin[dp]")
    source = f"ima(dp({UNIFORM}, accountant='pld', delta=0.001))"
    run(source, rounds=1, records=Records(tmp_path / "run"))
    summary = RunFolder(tmp_path / "run").read_summary()
    assert (summary["accountant"], summary["delta"]) == ("pld", 0.001)


class OneGone(LocalGrid):
    """Client 0 never trains."""

    def push_messages(self, messages):
        ids = super().push_messages(messages)
        for message in messages:
            node = message.metadata.dst_node_id
            if message.metadata.message_type == "train" and self.client(node) == 0:
                gone = Message(Error(3, "the node is gone"), reply_to=message)
                gone.metadata.__dict__["_src_node_id"] = node
                self._inbox[message.metadata.message_id] = [gone]
        return ids


def test_nobody_is_asked_in_place_of_a_client_that_does_not_answer():
    """They were not drawn, and accounting counts on the draw."""
    strategy, grid = run(
        f"dp({UNIFORM})", who="poisson(rate=0.5)", rounds=3, grid=OneGone, min_train_nodes=6
    )
    assert strategy._server.round == 3
    _, grid = run(f"dp({UNIFORM})", "count(clients=5)", 1, OneGone, min_train_nodes=5)
    assert asked(grid) == [5]
    # A plain run asks again, until it gives up.
    with pytest.raises(TooFewNodes):
        run(UNIFORM, EVERYONE, 1, OneGone, min_train_nodes=6, patience=0.1)


def test_a_guard_is_refused_because_it_compares_clients():
    with pytest.raises(ValueError, match="no accounting allows"):
        run(f"dp({UNIFORM})", guard=Guard())


def test_statistics_that_are_merged_plain_are_refused():
    federation = toy_federation(parse(UNIFORM, "method"), module=Normed())
    grid = LocalGrid(app_for(federation), 6)
    kept = replace(federation, buffers="keep")
    method = parse(f"dp({UNIFORM})", "method")
    strategy = strategy_for(kept, method, server=ServerSide.of(federation))
    arrays = ArrayRecord(federation.net.state_dict(*federation.net.initial()))
    with pytest.raises(ValueError, match="does not protect BatchNorm statistics"):
        strategy.start(grid, arrays, num_rounds=1, timeout=5)


def test_what_others_send_does_not_decide_about_a_reply():
    """A loss far beyond the cohort's costs a plain client its round, and a private one nothing."""

    def lie(client, reply):
        if client == 0:
            reply.content["metrics"]["last-loss"] = 1e9
        return [reply]

    counts = []
    for source in (f"dp({UNIFORM}, noise=0.0)", UNIFORM):
        method = parse(source, "method")
        federation = toy_federation(method, rounds=1, participation=EVERYONE)
        grid = LocalGrid(app_for(federation), 6, tamper=lie)
        strategy = strategy_for(federation, method)
        arrays = ArrayRecord(federation.net.state_dict(*federation.net.initial()))
        strategy.start(grid, arrays, num_rounds=1, timeout=5)
        counts.append(strategy._record.replies)
    assert counts == [6, 5]


@pytest.mark.parametrize("adaptive", [False, True])
def test_the_server_clips_what_a_client_did_not(adaptive):
    """One client sends an update of length 50: it moves the model no further than the clip."""
    clip = 0.05
    source = f"dp({UNIFORM}, clip={clip}, noise=0.0, adaptive={adaptive})"
    method = parse(source, "method")
    federation = toy_federation(method, rounds=1, participation=EVERYONE)
    first = federation.net.initial()[0]
    draws = np.random.default_rng(0)
    far = draws.normal(size=first.numel())
    far *= 50 / np.linalg.norm(far)
    sent = {}

    def forge(client, reply):
        record = reply.content["arrays"]
        names = list(record)
        if client == 0:
            place = 0
            for name in names:
                values = record[name].numpy()
                record[name] = Array(
                    values + far[place : place + values.size].reshape(values.shape)
                )
                place += values.size
        sent[client] = np.concatenate([record[name].numpy().ravel() for name in names])
        return [reply]

    grid = LocalGrid(app_for(federation), 6, tamper=forge)
    strategy = strategy_for(federation, method)
    strategy.start(
        grid, ArrayRecord(federation.net.state_dict(*federation.net.initial())), 1, timeout=5
    )
    updates = np.stack([sent[client] for client in range(6)]) - first.numpy()
    lengths = np.linalg.norm(updates, axis=1)
    assert lengths[0] > 40 and lengths[1:].max() < clip * (1 + 1e-9)
    expected = (updates * np.minimum(1, clip / lengths)[:, None]).sum(0) / 6
    moved = (strategy._server.send - first).numpy()
    np.testing.assert_allclose(moved, expected, rtol=1e-9, atol=1e-12)
    assert strategy._record.replies == 6


def test_local_noise_does_not_follow_from_the_seed():
    """The server knows the seed; two runs of it must not give one client's noise twice."""
    source = "fedavg(weighting='uniform', local=local_dp(clip=1e-6, noise=1e6))"
    first, again = (run(source, rounds=1)[0]._server.send for _ in range(2))
    assert not torch.allclose(first, again)


# Under secure aggregation.

SECURE = Secure(clip=30.0, bits=28)


def test_clients_noise_runs_under_secure_aggregation():
    """The server opens a sum that carries the noise already, and counts what came."""
    source = f"dp({UNIFORM}, clip=1e-6, noise=1e6, noise_by='clients')"
    strategy, _ = run(source, rounds=2, secure=SECURE)
    assert strategy._record.replies == 6
    assert strategy._server.state.own.released == 2
    assert strategy._server.state.own.shares == pytest.approx(2.0)
    net = toy_federation(parse(UNIFORM, "method")).net
    moved = (strategy._server.send - net.initial()[0]).numpy() * 6 / np.sqrt(2)
    assert 0.6 < moved.std() < 1.5


def test_under_secure_aggregation_it_gives_the_simulators_model(monkeypatch):
    batches_of_the_simulator(monkeypatch)
    source = f"fedavgm(dp({UNIFORM}, clip=0.2, noise=0.0, noise_by='clients'))"
    strategy, _ = run(source, secure=replace(SECURE, clip=1.0))
    federation = toy_federation(parse(source, "method"), rounds=2, participation=EVERYONE)
    *_, (simulated, _) = federation.rounds_from(*federation.begin())
    torch.testing.assert_close(strategy._server.send, simulated.send, rtol=0, atol=1e-6)


def test_the_servers_noise_cannot_hide_what_it_does_not_see():
    with pytest.raises(ValueError, match="noise_by='clients'"):
        run(f"dp({UNIFORM})", secure=SECURE)


@pytest.mark.parametrize(
    ("noise", "secure"),
    [(1.0, Secure(clip=5.0)), (1e6, Secure(clip=9.0, bits=8)), (1e6, Secure(clip=9.0, bits=28))],
)
def test_the_recorded_noise_is_that_of_the_opened_sums(noise, secure):
    """Clip times noise is 1. Updates of 1e-6, where noise is large, hide nothing of it."""
    source = f"dp({UNIFORM}, clip={1 / noise}, noise={noise}, noise_by='clients')"
    plain = f"dp({UNIFORM}, clip={1 / noise}, noise=0.0, noise_by='clients')"
    without, _ = run(plain, rounds=1, secure=secure)
    noises = []
    for _ in range(20):
        strategy, _ = run(source, rounds=1, secure=secure)
        noises.append((strategy._server.send - without._server.send).numpy())
    recorded = strategy._record.notes
    assert recorded["noise_std"] == pytest.approx(1 / 6) and recorded["secure_clipped"] == 0
    noises = np.stack(noises)
    noises -= noises.mean(0) if noise == 1.0 else 0  # batches differ from run to run
    assert noises.std() == pytest.approx(recorded["noise_std"], rel=5 / np.sqrt(2 * noises.size))


@pytest.mark.parametrize(
    ("secure", "why"),
    [
        (Secure(clip=0.005), r"Secure\(clip=0.005\) would cut the noise .* 0.204, .*clip=2.27"),
        (Secure(clip=2.2), "give Secure"),
        (Secure(clip=100.0, bits=8), r"multiples of 0.787, which swallows .* clip=2.27"),
    ],
)
def test_words_that_would_cut_or_swallow_the_noise_are_refused(secure, why):
    """The record would say more noise than there is. Six clients: each adds 0.5 / sqrt(6)."""
    for source in (
        f"wima(dp({UNIFORM}, clip=0.5, noise=1.0, noise_by='clients'))",
        f"fedavg(weighting='uniform', local=local_dp(clip=0.5, noise={1 / np.sqrt(6)}))",
    ):
        with pytest.raises(ValueError, match=why):
            run(source, secure=secure)
    run(f"dp({UNIFORM}, clip=0.5, noise=0.0, noise_by='clients')", rounds=1, secure=secure)


def test_the_words_that_are_asked_for_hold_the_largest_noise():
    """2.27 is 0.5 and the largest number that a client draws."""
    source = f"dp({UNIFORM}, clip=0.5, noise=1.0, noise_by='clients')"
    strategy, _ = run(source, rounds=1, secure=Secure(clip=2.27, bits=12))
    assert strategy._record.notes["secure_clipped"] == 0
