import logging
import shutil
from collections import namedtuple
from dataclasses import replace

import pytest
import torch

from fedbasin import (
    Experiment,
    LocalConfig,
    PartitionConfig,
    SimConfig,
    SnapshotConfig,
    resume,
    run,
)
from fedbasin.core.snapshot import Snapshot, Snapshots
from fedbasin.core.state import StateError, read, same, save
from fedbasin.core.vectors import shares, weighted_mean
from fedbasin.experiment import ConfigError, build, from_mapping
from fedbasin.experiment.config import override, read_config

SMALL = Experiment(
    model="mlp(widths=(8,))",
    rounds=7,
    partition=PartitionConfig(how="dirichlet(alpha=0.5, minimum=2)", clients=10),
    local=LocalConfig(lr=0.2, batch=16),
    sim=SimConfig(participation="fraction(rate=0.5)", dropout=0.3, checkpoint_every=3),
    snapshots=SnapshotConfig(rounds=(1, 2, 5), every=3, clients=True),
)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    out = tmp_path_factory.mktemp("kept") / "run"
    with pytest.MonkeyPatch.context() as patch:
        said = []
        patch.setattr(
            logging.getLogger("fedbasin.experiment"), "warning", lambda *a: said.append(a)
        )
        run(SMALL, out)
    return out, said


def test_the_chosen_rounds_are_kept_and_fit_together(kept):
    out, _ = kept
    found = Snapshots(out / "snapshots")
    assert found.stored() == [1, 2, 3, 5, 6]
    for number in found.stored():
        shot = found.get(number)
        assert shot.round == number and shot.send is None
        assert len(shot.clients) == len(shot.models)
        # FedAvg: the scored model is the mean of what is kept, weighted by what is kept.
        torch.testing.assert_close(weighted_mean(shot.models, shares(shot.weights)), shot.score)
    assert torch.equal(found.get(2).start, found.get(1).sent)
    assert torch.equal(found.get(3).start, found.get(2).sent)
    assert not torch.equal(found.get(3).score, found.get(2).score)


def test_the_size_is_said_before_the_run_and_bounds_it(kept):
    out, said = kept
    ((text, count, size, folder),) = said
    assert count == 5 and "up to" in text and folder == out / "snapshots"
    shots = [Snapshots(out / "snapshots").get(r) for r in (1, 2, 3, 5, 6)]
    # One vector a round more than FedAvg needs: what it sends is what it scores.
    wanted = sum(4 * len(s.score) * (len(s.models) + 3) for s in shots)
    federation = replace(
        build(SMALL), snapshots=Snapshots(out / "snapshots", frozenset((1, 2, 3, 5, 6)), True)
    )
    assert federation.snapshot_bytes() == wanted
    assert size == f"{wanted / 1e6:,.1f}"


def test_a_run_that_died_writes_the_same_snapshots_when_resumed(kept, tmp_path):
    out, _ = kept

    class Died(BaseException):
        pass

    def die(record):
        if record.round == 5:
            raise Died

    folder = tmp_path / "run"
    with pytest.raises(Died):
        run(SMALL, folder, on_round=die)
    torn = folder / "snapshots" / "round000005.safetensors"
    torn.write_bytes(b"half")  # a round after the checkpoint: it is run again
    resume(folder)
    whole = {p.name: p.read_bytes() for p in (out / "snapshots").iterdir()}
    assert {p.name: p.read_bytes() for p in (folder / "snapshots").iterdir()} == whole


def test_an_averaging_method_keeps_what_it_sends_beside_what_it_scores(tmp_path):
    settings = replace(
        SMALL, method="wima(fedavg, window=3)", rounds=3, snapshots=SnapshotConfig(rounds=(2, 3))
    )
    run(settings, tmp_path / "run")
    found = Snapshots(tmp_path / "run" / "snapshots")
    two, three = found.get(2), found.get(3)
    assert not torch.equal(three.sent, three.score)
    assert three.models is None and three.start is None
    assert not torch.equal(two.sent, three.sent)


def test_no_snapshots_by_default(tmp_path):
    run(replace(SMALL, rounds=1, snapshots=SnapshotConfig()), tmp_path / "run")
    assert not (tmp_path / "run" / "snapshots").exists()


def test_settings_go_through_toml_and_the_command_line(kept):
    out, _ = kept
    assert from_mapping(read_config(out / "config.toml")) == SMALL.resolved()
    settings = override({}, ["rounds=20", "snapshots={rounds=[4, 2], clients=true}"])
    settings = override(settings, ["snapshots.every=10"])
    assert from_mapping(settings).snapshots.chosen(20) == {2, 4, 10, 20}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rounds": [8]}, "1 to 7.*got 8"),
        ({"rounds": [0]}, "got 0"),
        ({"rounds": ["a"]}, "snapshots.rounds"),
        ({"rounds": 3}, "snapshots.rounds"),
        ({"every": -1}, "snapshots.every"),
        ({"clients": 1}, "snapshots.clients"),
        ({"round": [1]}, "rounds"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        from_mapping({"rounds": 7, "snapshots": settings})


def test_a_disk_that_is_too_small_is_said_before_the_run(tmp_path, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1000))
    with pytest.raises(ConfigError, match=r"snapshots\.clients = false"):
        run(SMALL, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_files_that_are_no_snapshots_are_refused(kept, tmp_path):
    out, _ = kept
    found = Snapshots(tmp_path)
    with pytest.raises(StateError, match="does not exist"):
        found.get(1)
    good = Snapshots(out / "snapshots").get(1)
    for bad in (
        replace(good, round=2),
        replace(good, start=good.start[1:]),
        replace(good, start=None),
        replace(good, models=good.models[:, 1:]),
        replace(good, weights=good.weights[1:]),
        replace(good, clients=None),
    ):
        found.put(replace(bad, round=1))
        if bad.round == 2:
            shutil.move(found._path(1), found._path(2))
            with pytest.raises(StateError, match="snapshot of round 2"):
                found.get(2)
        else:
            with pytest.raises(StateError, match="snapshot of round 1"):
                found.get(1)
    save(found._path(3), Snapshot(3, good.score, None, good.buffers).score)
    with pytest.raises(StateError, match="snapshot of round 3"):
        found.get(3)
    found.put(good)
    assert same(found.get(1), good) and "score" in read(found._path(1))
