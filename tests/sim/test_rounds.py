import re
import signal
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch
from counting import Clock
from torch import nn

from fedbasin.core.expressions import parse
from fedbasin.core.method import Plan, Served
from fedbasin.core.protocols import shared_prefix
from fedbasin.core.record import RunFolder
from fedbasin.core.rng import root
from fedbasin.core.sink import Sink, SinkError
from fedbasin.core.state import read, save
from fedbasin.local import Prox
from fedbasin.methods import FedAvg, FedProx, Mime, Scaffold
from fedbasin.sim import Interrupted, Run, drive
from fedbasin.sim.cohort import CohortExecutor
from fedbasin.sim.rounds import Simulation
from fedbasin.sim.runner import RunOptions, start_from_prefix, stop_after_round
from fedbasin.testing import toy_federation


class Crash(Exception):
    pass


def run(federation, folder, facts, **options):
    return drive(Run.open(federation, folder, RunOptions(facts, **options)))


def records(federation):
    server, states = federation.begin()
    return [record for _, record in federation.rounds_from(server, states)]


def models(federation):
    server, states = federation.begin()
    return [after.send for after, _ in federation.rounds_from(server, states)]


def test_methods_see_the_same_start_cohorts_and_batches():
    a = toy_federation(FedAvg())
    b = toy_federation(FedAvg(local=Prox(0.0)))
    assert torch.equal(a.begin()[0].send, b.begin()[0].send)
    for x, y in zip(models(a), models(b), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=0)


def test_seeds_share_neither_model_nor_cohorts():
    a, b = (toy_federation(FedAvg(), seed=s) for s in (0, 1))
    assert not torch.isclose(a.begin()[0].send, b.begin()[0].send).any()


@pytest.mark.parametrize("method", [FedAvg(), Scaffold(), Mime()], ids=str)
@pytest.mark.parametrize("matrix", [False, True], ids=["loop", "cohort"])
def test_rounds_of_several_runs_may_be_trained_together(method, matrix):
    """Each launch has its own model, rate, client states and randomness."""
    first = toy_federation(method)
    other = replace(first, key=root(5), schedule=lambda round: Plan(0.05, 1))
    runs = [first, other]
    executor = first.executor
    if matrix:
        executor = CohortExecutor(first.trainer, first.population, first.key, compiled=False)
    alone = [models(run) for run in runs]
    simulations = [Simulation(run, *run.begin()) for run in runs]
    for round in range(3):
        launches = [simulation.launch() for simulation in simulations]
        for n, gathered in enumerate(executor.train(launches)):
            simulations[n].merge(gathered)
            sent = simulations[n].server.send
            torch.testing.assert_close(sent, alone[n][round], rtol=1e-9, atol=1e-12)
    assert not torch.allclose(alone[0][0], alone[1][0])


def test_bytes_are_what_a_federation_would_move():
    size = toy_federation(FedAvg()).begin()[0].send.numel() * 8
    for method, down, up in ((FedAvg(), 1, 1), (FedProx(), 1, 1), (Scaffold(), 2, 2)):
        for record in records(toy_federation(method)):
            assert record.bytes_down == 3 * down * size
            assert record.bytes_up == 3 * (up * size + 24)
    for record in records(toy_federation(Mime())):  # a gradient and its weight before, too
        assert record.bytes_up == 3 * (2 * size + 8 + 24)


def test_records_say_what_happened():
    federation = replace(toy_federation(FedAvg(), rounds=9), evaluate_every=4, evaluate_last=2)
    found = records(federation)
    assert [r.round for r in found] == list(range(1, 10))
    assert [r.round for r in found if r.metric("accuracy") is not None] == [4, 8, 9]
    assert (
        found[-1].metrics["accuracy_per_class"] is not None
        and found[-2].metrics["accuracy_per_class"] is None
    )
    assert found[3].lr == pytest.approx(0.3 * 0.9**3) and found[0].replies == 3
    sent = [federation.begin()[0].send, *models(federation)]
    for before, after, record in zip(sent, sent[1:], found, strict=False):
        assert record.update_norm == pytest.approx(float((after - before).norm()))
        assert record.model_norm == pytest.approx(float(after.norm()))
    assert found[-1].train_loss < found[0].train_loss


def test_drop_outs_are_counted_and_a_round_without_replies_keeps_the_model():
    federation = replace(toy_federation(FedAvg(), rounds=30), dropout=0.8)
    found = records(federation)
    sent = [federation.begin()[0].send, *models(federation)]
    assert all(r.replies + r.dropped == 3 for r in found)
    empty = [r.round for r in found if r.replies == 0]
    assert empty and len(empty) < 30
    for number in empty:
        assert torch.equal(sent[number], sent[number - 1])
        assert found[number - 1].bytes_down > 0 and found[number - 1].bytes_up == 0


class Notes(NamedTuple):
    gamma: float
    shares: torch.Tensor


@dataclass(frozen=True)
class Apart(FedAvg):
    """Sends one model and scores another."""

    def aggregate(self, state, server, replies, context):
        served, state = super().aggregate(state, server, replies, context)
        return Served(served.send, served.send * 0, Notes(0.5, torch.ones(2))), state


def test_what_is_scored_and_what_is_sent_are_kept_apart():
    found = records(toy_federation(Apart()))
    plain = records(toy_federation(FedAvg()))
    assert found[-1].model_norm == 0
    assert [r.metric("accuracy_send") for r in found] == [r.metric("accuracy") for r in plain]
    assert all(r.metric("accuracy_send") is None for r in plain)
    assert found[0].notes == {"gamma": 0.5, "shares": [1.0, 1.0]}


def test_the_update_is_of_what_is_sent():
    found = records(toy_federation(Apart()))
    plain = records(toy_federation(FedAvg()))
    assert [r.update_norm for r in found] == [r.update_norm for r in plain]


def test_the_last_ten_rounds_are_scored_unless_told_otherwise():
    found = records(replace(toy_federation(FedAvg(), rounds=14), evaluate_every=100))
    assert [r.round for r in found if r.metric("accuracy") is not None] == list(range(5, 15))


def listening(heard):
    """FedAvg that keeps the context of every broadcast and every merge."""

    class Listening(FedAvg):
        def broadcast(self, state, server, context):
            heard.append(context)
            return super().broadcast(state, server, context)

        def aggregate(self, state, server, replies, context):
            heard.append(context)
            return super().aggregate(state, server, replies, context)

    return Listening()


def test_a_method_is_told_the_round_and_its_plan():
    heard = []
    federation = toy_federation(listening(heard))
    records(federation)
    plans = [federation.schedule(round) for round in range(4)]
    assert [context.round for context in heard] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [context.plan for context in heard] == [plan for plan in plans for _ in range(2)]
    assert [context.lr for context in heard[::2]] == [plan.lr for plan in plans]


def test_a_method_may_change_the_plan():
    class Halving(FedAvg):
        def plan(self, schedule, context):
            plan = schedule(context.round)
            return replace(plan, lr=plan.lr / 2)

    federation = toy_federation(Halving())
    found = [record.lr for record in records(federation)]
    assert found == [federation.schedule(round).lr / 2 for round in range(4)]


class Batchy(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.norm(x))


def statistics(policy, recalibrate=None, method=None):
    federation = toy_federation(
        method or FedAvg(), module=Batchy(), rounds=1, participation="count(clients=2)"
    )
    # BatchNorm cannot train on a batch of one row: take the clients that have none.
    federation = replace(
        federation, eligible=np.array([0, 2]), buffers=policy, recalibrate=recalibrate
    )
    server, states = federation.begin()
    after, _ = next(iter(federation.rounds_from(server, states)))
    return federation, server.buffers, after


def test_statistics_follow_their_policy():
    _, before, after = statistics("keep")
    assert torch.equal(before, after.buffers)
    federation, before, after = statistics("mean")
    assert not torch.equal(before, after.buffers)
    from fedbasin.core.round import Launch, Sent
    from fedbasin.sim.participation import draw_cohort

    cohort = draw_cohort(federation.participation, federation.eligible, federation.key, 0)
    server, states = federation.begin()
    gathered = federation.executor.train(
        [Launch(cohort, Sent(server.send, server.buffers, (), 0), federation.schedule(0), states)]
    )[0]
    replies = gathered.replies
    expected = np.average(replies.buffers.numpy(), axis=0, weights=replies.weights.numpy())
    np.testing.assert_allclose(after.buffers.numpy(), expected)
    _, _, after = statistics("recalibrate", lambda score, mean: mean * 0 + 7)
    assert after.buffers.tolist() == [7.0] * 8


def test_statistics_are_renewed_for_the_model_that_is_scored():
    seen = []
    _, _, after = statistics("recalibrate", lambda *given: seen.append(given) or given[1], Apart())
    ((scored, merged),) = seen
    assert torch.equal(scored, after.score) and not torch.equal(scored, after.send)
    assert torch.equal(merged, statistics("mean")[2].buffers)


def test_statistics_travel_with_every_model():
    federation = statistics("mean")[0]
    (record,) = records(federation)
    size = 8 * sum(part.numel() for part in federation.net.initial())
    assert (record.bytes_down, record.bytes_up) == (2 * size, 2 * (size + 24))


@pytest.mark.parametrize("policy", ["keep", "mean"])
def test_the_servers_rows_are_seen_with_the_statistics_of_the_merged_model(policy):
    heard = []
    _, _, after = statistics(policy, method=listening(heard))
    assert torch.equal(heard[-1].proxy.buffers, after.buffers)


def test_a_batch_of_one_row_under_batchnorm_is_explained():
    federation = toy_federation(FedAvg(), module=Batchy(), participation="count(clients=6)")
    with pytest.raises(ValueError, match=r"client 1: BatchNorm .* norm='group'"):
        records(federation)


def test_divergence_names_round_and_client_and_keeps_the_records(tmp_path):
    federation = toy_federation(FedAvg(), rounds=5)
    exploding = replace(
        federation, schedule=lambda t: replace(federation.schedule(t), lr=1e308 if t == 2 else 0.1)
    )
    folder = RunFolder(tmp_path)
    summary = run(exploding, folder, {"method": "fedavg"})
    assert [r.round for r in folder.read_rounds()] == [1, 2]
    assert folder.read_summary() == summary
    assert summary["status"] == "diverged"
    assert re.match(r"round 3: client \d+ sent .*NaN", summary["reason"])
    assert not folder.model.exists()


def test_resuming_into_a_round_without_replies_still_knows_one_model_from_two(tmp_path):
    """A checkpoint holds send and score apart; where they are one model, they must be one again."""
    federation = replace(toy_federation(FedAvg(), rounds=8), dropout=0.8)
    lost = [r.round for r in records(federation) if r.replies == 0]
    after = next(n for n in range(1, 8) if n + 1 in lost)
    folder = RunFolder(tmp_path)

    def crash(record):
        if record.round == after + 1:
            raise Crash

    with pytest.raises(Crash):
        run(federation, folder, {}, checkpoint_every=1, on_round=crash)
    run(federation, folder, {}, checkpoint_every=1)
    assert all(r.metric("accuracy_send") is None for r in folder.read_rounds())


def test_records_reach_the_disk_before_each_checkpoint_and_the_summary(tmp_path, monkeypatch):
    """After a power cut the file of records holds every round that the checkpoint knows."""
    events = []
    sync = RunFolder.sync_rounds
    write = RunFolder.write_summary

    def synced(folder):
        sync(folder)
        events.append(("synced", len(folder.read_rounds())))

    def saved(path, checkpoint):
        events.append(("saved", checkpoint.server.round))
        save(path, checkpoint)

    def wrote(folder, summary):
        events.append(("summary", summary["rounds"]))
        write(folder, summary)

    monkeypatch.setattr(RunFolder, "sync_rounds", synced)
    monkeypatch.setattr(RunFolder, "write_summary", wrote)
    monkeypatch.setattr("fedbasin.core.journal.save", saved)
    monkeypatch.setattr("fedbasin.sim.runner.save", saved)
    federation = toy_federation(FedAvg(), rounds=5)
    run(federation, RunFolder(tmp_path), {}, checkpoint_every=2, branching=[3])
    assert [(what, n) for what, n in events if what != "synced"] == [
        ("saved", 2),
        ("saved", 3),
        ("saved", 4),
        ("saved", 5),
        ("summary", 5),
    ]
    before = pairwise(events)
    assert all(first == ("synced", n) for first, (what, n) in before if what != "synced")


def test_a_run_writes_its_folder(tmp_path):
    federation = toy_federation(Scaffold(), rounds=12)
    folder = RunFolder(tmp_path)
    seen = []
    summary = run(
        federation, folder, {"method": "scaffold"}, checkpoint_every=5, on_round=seen.append
    )
    assert [r.round for r in seen] == list(range(1, 13))
    assert folder.read_summary() == summary
    found = folder.read_rounds()
    assert summary["accuracy_mean_last10"] == pytest.approx(
        np.mean([r.metric("accuracy") for r in found[-10:]])
    )
    assert (
        summary["accuracy_last"] == found[-1].metric("accuracy") and summary["status"] == "finished"
    )
    assert summary["peak_memory_bytes"] > 1e6
    for way in ("bytes_up", "bytes_down"):
        assert summary[way] == sum(getattr(r, way) for r in found)
    assert summary["loss_last"] == found[-1].metric("loss")
    last = models(federation)[-1]
    shipped = read(folder.model)
    flat = torch.cat([shipped[n].reshape(-1) for n in federation.net.layout.names])
    assert torch.equal(flat, last)


@pytest.mark.parametrize("method", [FedAvg(), Scaffold(), Apart()], ids=str)
@pytest.mark.parametrize("stop", [1, 4, 5, 7])
def test_resuming_ends_in_the_same_bits_and_records(tmp_path, method, stop):
    def timeless(folder):
        return [
            replace(r, seconds=0, seconds_train=0, seconds_merge=0, seconds_evaluate=0)
            for r in folder.read_rounds()
        ]

    whole = RunFolder(tmp_path / "whole")
    parts = RunFolder(tmp_path / "parts")
    for folder in (whole, parts):
        folder.path.mkdir()
    federation = replace(toy_federation(method, rounds=8), dropout=0.5)
    run(federation, whole, {}, checkpoint_every=3)

    def crash(record):
        if record.round == stop:
            raise Crash

    with pytest.raises(Crash):
        run(federation, parts, {}, checkpoint_every=3, on_round=crash)
    with parts.rounds.open("a") as file:
        file.write('{"round": ')  # as a process killed while writing leaves it
    run(replace(toy_federation(method, rounds=8), dropout=0.5), parts, {}, checkpoint_every=3)
    assert parts.model.read_bytes() == whole.model.read_bytes()
    assert timeless(parts) == timeless(whole)


def test_a_run_goes_on_after_its_last_checkpoint_and_counts_the_seconds_before(
    tmp_path, monkeypatch
):
    clock = Clock()
    monkeypatch.setattr("fedbasin.sim.clock.time", clock)
    federation = toy_federation(FedAvg(), rounds=8)
    folder = RunFolder(tmp_path)

    def slow(record):
        clock.sleep(10)
        if record.round == 5:
            raise Crash

    with pytest.raises(Crash):
        run(federation, folder, {}, checkpoint_every=3, on_round=slow)
    seen = []
    summary = run(federation, folder, {}, checkpoint_every=3, on_round=seen.append)
    assert [record.round for record in seen] == [4, 5, 6, 7, 8]
    assert summary["seconds"] == 3 * 10


def signal_in(round):
    def ask(record):
        if record.round == round:
            signal.raise_signal(signal.SIGINT)

    return ask


def test_a_run_that_is_asked_to_stop_says_at_once_that_it_finishes_the_round(tmp_path, caplog):
    told = []

    def ask(record):
        signal.raise_signal(signal.SIGINT)
        told.append(list(caplog.messages))

    with pytest.raises(Interrupted):
        run(toy_federation(FedAvg(), rounds=8), RunFolder(tmp_path), {}, on_round=ask)
    assert told == [["finishing the round, then saving; Ctrl-C again stops at once"]]


def test_a_run_that_is_asked_to_stop_saves_its_round_first(tmp_path):
    federation = toy_federation(FedAvg(), rounds=8)
    folder = RunFolder(tmp_path)
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(Interrupted, match="stopped by the user after round 4"):
        run(federation, folder, {}, on_round=signal_in(4))
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before
    assert folder.read_summary()["status"] == "stopped" and not folder.model.exists()
    seen = []
    run(federation, folder, {}, on_round=seen.append)
    assert [record.round for record in seen] == [5, 6, 7, 8]


def test_a_run_that_is_asked_to_stop_in_its_last_round_is_finished(tmp_path):
    federation = toy_federation(FedAvg(), rounds=4)
    folder = RunFolder(tmp_path)
    assert run(federation, folder, {}, on_round=signal_in(4))["status"] == "finished"
    assert folder.model.exists()


def test_a_run_that_is_asked_twice_stops_at_once(tmp_path):
    def twice(record):
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(toy_federation(FedAvg()), RunFolder(tmp_path), {}, on_round=twice)


def test_the_model_that_is_scored_is_the_one_that_ships(tmp_path):
    folder = RunFolder(tmp_path)
    run(toy_federation(Apart()), folder, {})
    assert all(not part.any() for part in read(folder.model).values())


def test_a_branch_goes_on_with_what_its_trunk_had_learnt(tmp_path):
    plain, late = (parse(e, "method") for e in ("fedavgm", "ima(fedavgm, window=2, start=0.5)"))
    prefix, branch, whole = (RunFolder(tmp_path / name) for name in ("prefix", "branch", "whole"))
    for folder in (prefix, branch, whole):
        folder.path.mkdir()
    method, common = shared_prefix(late, 8)
    assert method == plain and 1 < common < 8
    run(toy_federation(plain, rounds=8), prefix, {}, branching=(common,))
    start_from_prefix(toy_federation(late, rounds=8), branch, prefix, common)
    for folder in (branch, whole):
        run(toy_federation(late, rounds=8), folder, {})
    for name, part in read(whole.model).items():
        torch.testing.assert_close(read(branch.model)[name], part, rtol=1e-9, atol=0)


def test_one_stop_of_each_kind_is_one_stop_and_the_same_twice_stops_at_once():
    with stop_after_round() as asked:
        assert not asked()
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)  # as where the process that began this one is ended, too
        assert asked()
        for number in (signal.SIGTERM, signal.SIGINT):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)


def test_the_halves_of_a_run_called_by_hand_are_the_driven_run(tmp_path):
    federation = toy_federation(Mime(), rounds=3)
    for name in ("hand", "driven"):
        (tmp_path / name).mkdir()
    by_hand = Run.open(federation, RunFolder(tmp_path / "hand"))
    while by_hand.goes_on():
        by_hand.merge(federation.train_cohort(by_hand.launch()))
    by_hand.finish()
    by_hand.close()
    run(federation, RunFolder(tmp_path / "driven"), {})
    ours, theirs = (RunFolder(tmp_path / name).model.read_bytes() for name in ("hand", "driven"))
    assert ours == theirs


def test_a_round_ends_once_and_lets_go_of_its_launch():
    federation = toy_federation(Mime(), rounds=3)
    simulation = Simulation(federation, *federation.begin())
    gathered = federation.train_cohort(simulation.launch())
    simulation.merge(gathered)
    with pytest.raises(RuntimeError, match="no round is under way"):
        simulation.merge(gathered)


class FailingSink(Sink):
    def __init__(self, when):
        self.when = when
        self.closed = 0

    def open(self, run):
        if self.when == "open":
            raise OSError("no luck")

    def record(self, record):
        if self.when == "record":
            raise OSError("no luck")

    def close(self):
        self.closed += 1


def failing(self, launches):
    raise Crash


@pytest.mark.parametrize("when", ["open", "record", "train", "never"])
def test_what_a_run_holds_is_let_go_of_however_it_ends(when, tmp_path, monkeypatch):
    sink = FailingSink(when)
    closed = []
    resources = ExitStack()
    resources.callback(closed.append, "lock")
    federation = toy_federation(FedAvg(), rounds=2)
    if when == "train":
        monkeypatch.setattr(type(federation.executor), "train", failing)
    options = RunOptions(sinks=[FailingSink("never"), sink])
    ended = nullcontext() if when == "never" else pytest.raises((SinkError, Crash))
    with ended:
        drive(Run.open(federation, RunFolder(tmp_path), options, resources))
    assert closed == ["lock"]
    assert [each.closed for each in options.sinks] == [1, 0 if when == "open" else 1]
