"""What clients keep is the same in memory and on disk, survives a crash, and fits."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import torch
from counting import allocated
from torch import Tensor

from fedbasin import Experiment, SimConfig, resume, run
from fedbasin.core.archive import Archive, ArchiveError
from fedbasin.core.expressions import parse
from fedbasin.core.rule import LocalRule
from fedbasin.core.state import load, same, save
from fedbasin.experiment import LocalConfig, PartitionConfig
from fedbasin.methods import Scaffold
from fedbasin.sim import Interrupted
from fedbasin.sim.clients import ClientStates, home
from fedbasin.sim.cohort import CohortExecutor
from fedbasin.testing import toy_federation


class Mixed(NamedTuple):
    flag: Tensor
    count: Tensor
    vector: Tensor
    inner: tuple


@dataclass(frozen=True)
class Hoarder(LocalRule):
    """Keeps leaves of many types and of sizes that do not align."""

    def client_state(self, vector):
        return Mixed(
            torch.zeros(3, dtype=torch.bool),
            torch.zeros((), dtype=torch.int64),
            torch.zeros_like(vector),
            (torch.zeros(2, 3, dtype=torch.float16),),
        )


def filled(seed, size=5):
    draw = torch.Generator().manual_seed(seed)
    return (
        Mixed(
            torch.rand(3, generator=draw) > 0.5,
            torch.tensor(2**53 + seed),
            torch.randn(size, generator=draw),
            (torch.randn(2, 3, generator=draw).half(),),
        ),
    )


def kept_by(rules, vector):
    return tuple(rule.client_state(vector) for rule in rules)


def on_disk(folder):
    vector = torch.zeros(5)
    zero = kept_by((Hoarder(),), vector)
    return ClientStates(zero, vector, clients=9, limit=0, archive=Archive(folder))


def test_states_come_back_from_disk_bit_for_bit(tmp_path):
    states = on_disk(tmp_path / "clients")
    assert states.where == "disk"
    states.put([4, 1], [filled(4), filled(1)], 0)
    states.put([4], [filled(40)], 1)
    assert same(states.get(4), filled(40)) and same(states.get(1), filled(1))
    assert same(states.get(2), kept_by((Hoarder(),), torch.zeros(5)))
    got = states.get(1)
    got[0].vector.zero_()  # what a client does to its copy changes no file
    assert same(states.get(1), filled(1))


def test_states_go_to_disk_only_where_they_do_not_fit(tmp_path):
    rules = Scaffold().rules()
    vector = torch.zeros(10)  # 40 bytes a client

    def where(limit, archive=True, rules=rules):
        files = Archive(tmp_path / "x") if archive else None
        zero = kept_by(rules, vector)
        return ClientStates(zero, vector, clients=5, limit=limit, archive=files).where

    assert [where(199), where(200), where(0, archive=False)] == ["disk", "memory", "memory"]
    assert where(0, rules=()) == "none"
    nothing = ClientStates((), vector, clients=5, limit=0, archive=Archive(tmp_path / "x"))
    nothing.put([1], [()], 0)
    assert not (tmp_path / "x").exists()


def test_a_gpu_keeps_states_only_while_they_are_a_small_part_of_its_memory(monkeypatch):
    class Properties(NamedTuple):
        total_memory: int = 1600

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties())
    gpu = torch.device("cuda")
    cpu = torch.device("cpu")
    assert [home(gpu, 100), home(gpu, 101), home(cpu, 1)] == [gpu, cpu, cpu]


def test_a_state_in_memory_holds_on_to_no_cohort():
    states = ClientStates(kept_by(Scaffold().rules(), torch.zeros(3)), torch.zeros(3))
    cohort = torch.ones(100, 3)
    states.put([0], [(type(states.get(0)[0])(cohort[7]),)], 0)
    cohort.zero_()
    kept = states.get(0)[0].control
    assert kept.tolist() == [1, 1, 1]
    assert kept.untyped_storage().nbytes() == 12


def spilled(method, folder, executor="loop", **settings):
    federation = toy_federation(method, **settings)
    one = federation.executor
    if executor == "cohort":
        one = CohortExecutor(one.trainer, one.population, one.key, compiled=False)
    return replace(
        federation, executor=one, client_memory=0, client_archive=Archive(folder / "clients")
    )


@pytest.mark.parametrize("executor", ["loop", "cohort"])
@pytest.mark.parametrize("source", ["adabest", "fedsmoo", "feddyn(local=lesam)"])
def test_results_are_the_same_in_memory_and_on_disk(source, executor, tmp_path):
    method = parse(source, "method")
    disk = spilled(method, tmp_path, executor)
    memory = replace(disk, client_archive=None)
    a, b = (list(f.rounds_from(*f.begin())) for f in (disk, memory))
    for (ours, _), (theirs, _) in zip(a, b, strict=True):
        assert same(ours, theirs)
    assert list((tmp_path / "clients").iterdir())


def test_crashes_between_checkpoints_resume_to_the_same_bits(tmp_path):
    """Once after three rounds without a checkpoint, and once more on the way back there."""
    method = parse("fedsmoo", "method")
    straight = spilled(method, tmp_path / "a", rounds=7)
    whole = [after for after, _ in straight.rounds_from(*straight.begin())]
    federation = spilled(method, tmp_path / "b", rounds=7)
    server, states = federation.begin()
    path = tmp_path / "checkpoint"
    for after, _ in federation.rounds_from(server, states):
        if after.round == 3:
            save(path, (after, states.kept()))
            states.mark_saved()
        if after.round == 6:
            break
    for until in (5, 7):
        fresh, states = federation.begin()
        server, kept = load(path, (fresh, states.kept()))
        states.restore(kept)
        assert server.round == 3
        for after, _ in federation.rounds_from(server, states):
            assert same(after, whole[after.round - 1])
            if after.round == until:
                break
    assert after.round == 7


def test_a_client_has_one_file_or_two(tmp_path):
    states = on_disk(tmp_path)

    def rounds_of(client):
        return [int(p.stem[-6:]) for p in sorted(tmp_path.glob(f"client{client:06d}*"))]

    states.put([0, 1], [filled(0), filled(1)], 0)
    states.mark_saved()
    for t in (1, 2, 3):
        states.put([0], [filled(t)], t)
        assert rounds_of(0) == [0, t] and rounds_of(1) == [0]
    states.mark_saved()
    assert rounds_of(0) == [3] and rounds_of(1) == [0]


def test_a_checkpoint_of_states_on_disk_is_small_and_says_what_is_missing(tmp_path):
    states = on_disk(tmp_path)
    states.put([0, 3], [filled(0), filled(3)], 5)
    kept = states.kept()
    assert kept.ids.tolist() == [0, 3] and kept.rounds.tolist() == [5, 5] and kept.rows == ()
    states.restore(kept)
    (tmp_path / "client000003-round000005.npy").unlink()
    with pytest.raises(ArchiveError, match=r"client000003-round000005"):
        states.get(3)


@pytest.mark.parametrize(("limit", "held"), [(0, 0), (1e12, 80)], ids=["disk", "memory"])
def test_main_memory_is_bounded_on_disk(tmp_path, limit, held):
    """80 states leave main memory alone, but for the one at work."""
    vector = torch.zeros(2**16)
    with allocated() as memory:
        states = ClientStates(
            kept_by(Scaffold().rules(), vector),
            vector,
            clients=80,
            limit=limit,
            archive=Archive(tmp_path),
        )
        kind = type(states.get(0)[0])
        for client in range(80):
            states.put([client], [(kind(vector + client),)], 0)
        for client in range(80):
            assert states.get(client)[0].control[-1] == client
    assert held <= memory.most / vector.nbytes < held + 6


SMALL = Experiment(
    method="scaffold",
    rounds=6,
    partition=PartitionConfig(clients=8),
    local=LocalConfig(batch=64),
    sim=SimConfig(participation="count(clients=3)", checkpoint_every=2, executor="loop"),
)


def test_a_run_spills_by_its_setting_and_resumes(tmp_path):
    spilling = replace(SMALL, sim=replace(SMALL.sim, client_memory=0.0))
    memory = run(SMALL, tmp_path / "memory")
    assert memory["client_states"] == "memory" and not (tmp_path / "memory" / "clients").exists()

    def stop(record):
        if record.round == 3:
            raise Interrupted

    with pytest.raises(Interrupted):
        run(spilling, tmp_path / "disk", on_round=stop)
    disk = resume(tmp_path / "disk")
    assert disk["client_states"] == "disk"
    a, b = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("memory", "disk"))
    assert a == b
    files = list((tmp_path / "disk" / "clients").iterdir())
    assert 3 <= len(files) <= 8
    assert run(replace(SMALL, method="fedavg"), tmp_path / "plain")["client_states"] == "none"


def test_a_negative_limit_is_refused():
    with pytest.raises(ValueError, match=r"sim.client_memory must be at least 0, got -1"):
        Experiment(sim=SimConfig(client_memory=-1.0))
