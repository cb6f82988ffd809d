"""A ServerApp that was stopped goes on from its checkpoint; clients keep what is theirs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas
import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("flwr", reason="needs the extra fedbasin[flower]")

from deploy.grids import LocalGrid, app_for, strategy_for
from deploy.test_identities import foreign, telling
from flwr.app import Array, ArrayRecord, Context, RecordDict

from fedbasin.core.expressions import parse
from fedbasin.core.lock import Busy, alone_in
from fedbasin.core.method import ReplyError
from fedbasin.core.record import RecordError, RunFolder
from fedbasin.core.sink import Sink, SinkError
from fedbasin.core.state import same, save
from fedbasin.deploy import FedbasinStrategy, Guard, Records, ServerSide
from fedbasin.deploy.client_state import ClientStateStore
from fedbasin.deploy.wire import Refused
from fedbasin.testing import toy_federation

STOPS = [  # after so many replies, three of which make a round
    ("fedavg", 7),
    ("scaffold", 3),
    ("scaffold", 5),
    ("wima(window=2)", 5),
    ("fedcda(warmup=1, store='disk')", 7),
]


class Stopped(RuntimeError):
    """What a kill looks like from inside."""


def federation_of(expression):
    return toy_federation(parse(expression, "method"), rounds=4, participation="count(clients=3)")


def start(federation, grid, folder, rounds=4, **settings):
    strategy = strategy_for(federation, federation.method, folder=folder, **settings)
    arrays = ArrayRecord(federation.net.state_dict(*federation.net.initial()))
    result = strategy.start(grid, arrays, num_rounds=rounds, timeout=0.5)
    return strategy, result


def stopping_grid(federation, after, **settings):
    """A grid whose server dies after so many replies."""
    seen = []

    def tamper(client, reply):
        seen.append(client)
        if len(seen) > after:
            raise Stopped
        return [reply]

    return LocalGrid(app_for(federation), 6, tamper, **settings)


def test_records_reach_the_disk_before_each_checkpoint_and_the_summary(tmp_path, monkeypatch):
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
    federation = federation_of("fedavg")
    start(federation, LocalGrid(app_for(federation), 6), tmp_path / "a")
    expected = [(what, n) for n in range(1, 5) for what in ("synced", "saved")]
    assert [event for event in events if event[1]] == [*expected, ("synced", 4), ("summary", 4)]


@pytest.mark.parametrize(("expression", "after"), STOPS)
def test_a_stopped_run_ends_as_if_it_never_had_been(expression, after, tmp_path):
    """Stopped between rounds or inside one, clients with and without a state of their own."""
    federation = federation_of(expression)
    config = {"state-dir": str(tmp_path / "whole")}
    grid = LocalGrid(app_for(federation), 6, node_config=config)
    whole, result = start(federation, grid, tmp_path / "a")
    config = {"state-dir": str(tmp_path / "nodes")}
    with pytest.raises(Stopped):
        start(federation, stopping_grid(federation, after, node_config=config), tmp_path / "b")
    again = LocalGrid(app_for(federation), 6, shuffle=99, node_config=config)  # all nodes are new
    strategy, resumed = start(federation, again, tmp_path / "b")
    assert same(strategy._server, whole._server)
    trained = [m for m in again.sent if m.metadata.message_type == "train"]
    assert len(trained) == 12 - 3 * (after // 3)
    ours, theirs = (pandas.read_json(RunFolder(tmp_path / run).rounds, lines=True) for run in "ba")
    columns = [c for c in ours if not c.startswith("seconds")]
    pandas.testing.assert_frame_equal(ours[columns], theirs[columns])
    shipped = load_file(RunFolder(tmp_path / "b").model)
    for name, tensor in result.arrays.to_torch_state_dict().items():
        assert torch.equal(shipped[name], tensor)
    for name, tensor in resumed.arrays.to_torch_state_dict().items():
        assert torch.equal(shipped[name], tensor)


def test_a_finished_run_is_not_trained_again(tmp_path):
    federation = federation_of("fedavg")
    first, result = start(federation, LocalGrid(app_for(federation), 6), tmp_path)
    grid = LocalGrid(app_for(federation), 6)
    again, same_result = start(federation, grid, tmp_path)
    assert not [m for m in grid.sent if m.metadata.message_type == "train"]
    for name, array in result.arrays.items():
        assert array.data == same_result.arrays[name].data
    summary = RunFolder(tmp_path).read_summary()
    assert summary["rounds"] == 4 and summary["executor"] == "flower" and summary["seed"] == 0
    assert summary["method"] == "fedavg" and summary["refused"] == {}
    assert first.journal.name == again.journal.name


def test_a_longer_run_goes_on_where_the_shorter_one_ended(tmp_path):
    federation = federation_of("scaffold")
    grid = LocalGrid(app_for(federation), 6)
    start(federation, grid, tmp_path / "a", rounds=2)
    longer, _ = start(federation, grid, tmp_path / "a")
    whole, _ = start(federation, LocalGrid(app_for(federation), 6), tmp_path / "b")
    assert same(longer._server, whole._server)


def test_the_folder_of_another_method_is_refused(tmp_path):
    federation = federation_of("fedavg")
    start(federation, LocalGrid(app_for(federation), 6), tmp_path, rounds=1)
    other = federation_of("wima(window=2)")
    with pytest.raises(RecordError, match="whose method is fedavg, here it is wima"):
        start(other, LocalGrid(app_for(other), 6), tmp_path)


def test_the_folder_of_another_seed_is_refused(tmp_path):
    federation = federation_of("fedavg")
    start(federation, LocalGrid(app_for(federation), 6), tmp_path, rounds=1)
    other = FedbasinStrategy(
        "fedavg", seed=7, records=Records(tmp_path), server=ServerSide(net=federation.net)
    )
    arrays = ArrayRecord(federation.net.state_dict(*federation.net.initial()))
    with pytest.raises(RecordError, match="seed is 0, here it is 7; give the same seed or choose"):
        other.start(LocalGrid(app_for(federation), 6), arrays, num_rounds=2, timeout=0.5)


def test_the_folder_of_another_number_of_clients_is_refused(tmp_path):
    federation = federation_of("fedavg")
    start(federation, LocalGrid(app_for(federation), 6), tmp_path, rounds=1)
    other = FedbasinStrategy(
        "fedavg", records=Records(tmp_path), server=ServerSide(net=federation.net)
    )
    arrays = ArrayRecord(federation.net.state_dict(*federation.net.initial()))
    seven = LocalGrid(telling(), 6, node_config={"num-partitions": 7})
    told = "number of clients is 6, here it is 7; give the same number of clients or choose another"
    with pytest.raises(RecordError, match=told):
        other.start(seven, arrays, num_rounds=2, timeout=0.5)


def test_nodes_without_a_name_keep_to_the_number_of_clients_of_their_run(tmp_path):
    """Fewer may be there when a run goes on than when it began."""
    federation = federation_of("fedavg")
    start(federation, LocalGrid(app_for(federation), 6), tmp_path, rounds=1)
    strategy, _ = start(federation, LocalGrid(foreign(), 3), tmp_path, rounds=1)
    assert strategy._clients.anonymous and sorted(strategy._clients.online()) == [0, 1, 2]
    assert strategy._context.clients == 6


def test_refusals_add_up_over_restarts(tmp_path):
    federation = federation_of("fedavg")

    def broken(client, reply):
        reply.content["metrics"]["num-examples"] = -client
        return [reply]

    def begin(tamper, folder, rounds):
        grid = LocalGrid(app_for(federation), 6, tamper)
        return start(federation, grid, folder, rounds, participation="fraction(rate=1.0)")

    begin(lambda c, r: broken(c, r) if c == 2 else [r], tmp_path / "a", 2)
    begin(lambda c, r: broken(c, r) if c in (2, 3) else [r], tmp_path / "a", 3)
    told = {
        f"client {c}: num-examples is -{c}, expected at least 0": n for c, n in [(2, 3), (3, 1)]
    }
    assert RunFolder(tmp_path / "a").read_summary()["refused"] == told
    strategy, _ = begin(lambda c, r: [r], tmp_path / "a", 4)
    assert RunFolder(tmp_path / "a").read_summary()["refused"] == told
    assert [r.refused for r in strategy.journal.records] == [1, 1, 2, 0]


FAULTS = ["lost", "refused", "dropped", "weightless", "no merge"]  # its reply, or the round's


def simulated(left_out):
    """Three rounds of everyone, but of others or of nobody in the second."""
    federation = toy_federation(
        parse("scaffold", "method"), rounds=3, participation="fraction(rate=1.0)"
    )
    server, states = federation.begin()
    for now in range(3):
        there = [c for c in range(6) if now != 1 or c not in left_out]
        if there:
            part = replace(federation, rounds=now + 1, eligible=np.array(there))
            ((server, _),) = part.rounds_from(server, states)
        server = replace(server, round=now + 1)
    return federation, server


@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_client_goes_back_where_its_round_was_not_merged(fault, in_file, tmp_path, monkeypatch):
    """And does so after the server was stopped and started again, too."""
    everyone = fault == "no merge"
    federation, expected = simulated(range(6) if everyone else {2})
    kind = type(federation.method)
    whole = kind.aggregate
    seen = []

    def merging(self, state, server, replies, context):
        if everyone and context.round == 1 and seen:
            raise ReplyError("no")
        return whole(self, state, server, replies, context)

    def tamper(client, reply):
        seen.append(client)
        if client != 2 or not 6 < len(seen) <= 12:
            return [reply]
        name, values = next(iter(reply.content["arrays"].items()))
        factor = {"dropped": 1e6, "refused": np.nan}.get(fault, 1.0)
        reply.content["arrays"][name] = Array(values.numpy() * factor)
        if fault == "weightless":
            reply.content["metrics"]["num-examples"] = 0
        return [] if fault == "lost" else [reply]

    monkeypatch.setattr(kind, "aggregate", merging)
    config = {"state-dir": str(tmp_path / "states")} if in_file else {}
    grid = LocalGrid(app_for(federation), 6, tamper, node_config=config)
    guard = Guard(50.0, "drop", weight=None)  # the simulator lets every row count
    for rounds in (2, 3):
        strategy, _ = start(federation, grid, tmp_path / "run", rounds, guard=guard)
    assert len(seen) == 18
    assert ("merge_refused" in strategy.journal.records[1].notes) == everyone
    torch.testing.assert_close(strategy._server.send, expected.send, rtol=1e-9, atol=1e-11)
    ours = strategy._server.state.control
    theirs = expected.state.control
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_checkpoints_come_every_k_rounds(tmp_path):
    federation = federation_of("fedavg")
    with pytest.raises(Stopped):
        start(federation, stopping_grid(federation, 10), tmp_path, checkpoint_every=2)
    assert len(RunFolder(tmp_path).read_rounds()) == 3
    grid = LocalGrid(app_for(federation), 6)
    start(federation, grid, tmp_path, checkpoint_every=2)
    trained = [m for m in grid.sent if m.metadata.message_type == "train"]
    assert len(trained) == 6  # rounds 3 and 4
    assert [r.round for r in RunFolder(tmp_path).read_rounds()] == [1, 2, 3, 4]


def context(**node_config):
    return Context(1, 5, node_config, RecordDict(), {})


ZERO = (torch.zeros(3), ())


@pytest.mark.parametrize("in_file", [False, True])
def test_own_state_remembers_the_round_and_the_one_before(in_file, tmp_path):
    where = context(**({"state-dir": str(tmp_path)} if in_file else {}))

    def own():
        return ClientStateStore(where, "ab12", 3, ZERO)

    one = (torch.ones(3), ())
    two = (torch.ones(3) * 2, ())
    assert same(own().at(0, 0), ZERO)
    own().write(0, ZERO, one)
    assert same(own().at(0, 0), ZERO)  # the round is asked for again
    assert same(own().at(1, 1), one)
    assert same(own().at(3, 0), ZERO)  # the round was not merged
    own().write(4, one, two)
    assert same(own().at(4, 1), one) and same(own().at(9, 5), two) and same(own().at(9, 4), one)
    assert same(own().at(2, 0), one)  # the best it can do
    assert len(where.state) == (0 if in_file else 2)
    another = ClientStateStore(where, "cd34", 3, ZERO)
    assert same(another.at(1, 1), ZERO)  # another federation
    neighbour = ClientStateStore(replace(where, state=RecordDict()), "ab12", 4, ZERO)
    assert same(neighbour.at(1, 1), ZERO)


def test_a_client_without_a_state_writes_nothing(tmp_path):
    where = context(**{"state-dir": str(tmp_path)})
    ClientStateStore(where, "ab12", 3, ((),)).write(0, ((),), ((),))
    assert not list(tmp_path.iterdir()) and not where.state


@pytest.mark.parametrize("name", ["../etc", "", "AB", "a/b", "x" * 3, "a" * 65])
def test_a_federation_cannot_choose_another_folder(name, tmp_path):
    with pytest.raises(Refused, match="hexadecimal"):
        ClientStateStore(context(**{"state-dir": str(tmp_path)}), name, 0, ZERO)


def test_two_servers_do_not_share_a_folder(tmp_path):
    federation = federation_of("fedavg")
    with alone_in(tmp_path), pytest.raises(Busy):
        start(federation, LocalGrid(app_for(federation), 6), tmp_path)
    strategy, _ = start(federation, LocalGrid(app_for(federation), 6), tmp_path)
    assert len(strategy.journal.records) == 4 and not (tmp_path / "run.lock").exists()


def test_a_strategy_that_is_started_twice_begins_twice():
    federation = federation_of("scaffold")
    strategy = strategy_for(federation, federation.method)
    arrays = ArrayRecord(federation.net.state_dict(*federation.net.initial()))
    grid = LocalGrid(app_for(federation), 6)
    found = []
    for _ in range(2):
        strategy.start(grid, arrays, num_rounds=2, timeout=0.5)
        found.append((strategy._server.send, len(strategy.journal.records)))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1] == 2


def test_a_sink_gets_every_round_once_and_one_that_fails_loses_nothing(tmp_path):
    """As in a simulated run."""
    federation = federation_of("scaffold")
    config = {"state-dir": str(tmp_path / "nodes")}
    grid = LocalGrid(app_for(federation), 6, node_config=config)
    told = []

    class Notebook(Sink):
        def open(self, run):
            told.append([record.round for record in run.records])

        def record(self, record):
            told.append(record.round)

        def finish(self, summary):
            told.append(summary["status"])

        def close(self):
            told.append("closed")

    def fails(record):
        if record.round == 3:
            raise OSError("no space left")

    log = [Notebook(), fails]
    with pytest.raises(SinkError, match=r"fails failed at round 3: OSError: no space left"):
        start(federation, grid, tmp_path / "a", checkpoint_every=2, log=log)
    assert told == [[], 1, 2, 3, "closed"]
    told.clear()
    strategy, _ = start(federation, grid, tmp_path / "a", checkpoint_every=2, log=[Notebook()])
    assert told == [[1, 2, 3], 4, "finished", "closed"]
    other = LocalGrid(app_for(federation), 6)
    whole, _ = start(federation, other, tmp_path / "b", checkpoint_every=2)
    assert same(strategy._server, whole._server)


def test_a_sink_needs_a_folder():
    with pytest.raises(ValueError, match="log needs a folder"):
        Records(log=[print])
