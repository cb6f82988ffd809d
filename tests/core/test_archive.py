import os
from pathlib import Path

import numpy as np
import pytest
import torch

from fedbasin.core.archive import Archive, ArchiveError


@pytest.fixture
def archive(tmp_path):
    return Archive(tmp_path / "run" / "archive")


def names(archive):
    return sorted(path.name for path in archive.folder.iterdir())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_models_come_back_bit_for_bit(archive, dtype):
    model = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=dtype)
    archive.put(3, 7, model)
    found = archive.get(3, 7)
    assert found.dtype == dtype and torch.equal(found, model)


def test_models_of_many_clients_and_rounds_are_kept_apart(archive):
    some = [(n, r) for n in (0, 1, 10, 101, 1_000_001) for r in (0, 1, 10, 101, 1_000_001)]
    for number, (client, round) in enumerate(some):
        archive.put(client, round, torch.tensor([float(number)]))
    assert [archive.get(client, round).item() for client, round in some] == list(range(25))


def test_nothing_is_made_before_the_first_model(archive):
    archive.sweep()
    archive.keep([(0, 0)])
    archive.sweep()
    assert not archive.folder.exists()


def test_a_model_is_whole_on_disk_before_it_has_its_name(archive, monkeypatch):
    held = []

    def look(file):
        (path,) = archive.folder.iterdir()
        if os.path.samestat(os.fstat(file), archive.folder.stat()):
            held.append(path.name)  # then the folder's list of names
            return
        assert path.stat().st_ino == os.fstat(file).st_ino and path.suffix == ".part"
        held.append(np.load(path).tolist())

    monkeypatch.setattr(os, "fsync", look)
    archive.put(3, 7, torch.arange(4.0))
    name = "client000003-round000007.npy"
    assert held == [[0, 1, 2, 3], name] and names(archive) == [name]


def test_a_mapped_model_is_neither_changed_by_a_new_one_nor_changes_the_file(archive):
    archive.put(0, 0, torch.zeros(10))
    mapped = archive.get(0, 0)
    archive.put(0, 0, torch.ones(10))
    assert torch.equal(mapped, torch.zeros(10))
    archive.get(0, 0).add_(5)
    assert torch.equal(archive.get(0, 0), torch.ones(10))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks at the process's maps")
def test_a_model_is_mapped_and_let_go_with_its_last_user(archive):
    def mapped():
        return "client000000-round000000.npy" in Path("/proc/self/maps").read_text()

    archive.put(0, 0, torch.zeros(10_000))
    model = archive.get(0, 0)
    assert mapped() and model.sum() == 0
    del model
    assert not mapped()


def test_sweep_removes_what_is_not_kept_and_what_a_crash_left(archive):
    for client, round in [(0, 0), (0, 1), (1, 0), (11, 10)]:
        archive.put(client, round, torch.zeros(2))
    (archive.folder / "client000001-round000009.npy.part").write_bytes(b"half")
    archive.sweep()
    assert len(names(archive)) == 5  # before the first keep nothing is known to be useless
    archive.keep([(0, 1), (11, 10), (5, 5)])
    assert len(names(archive)) == 5  # keep alone removes nothing
    archive.sweep()
    assert names(archive) == ["client000000-round000001.npy", "client000011-round000010.npy"]
    archive.keep([(11, 10)])
    archive.sweep()
    assert names(archive) == ["client000011-round000010.npy"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda p: p.unlink(),
        lambda p: p.write_bytes(b"x" * 9),
        lambda p: p.write_bytes(b""),
        lambda p: p.write_bytes(p.read_bytes()[:-1]),
    ],
    ids=["gone", "other", "empty", "short"],
)
def test_a_lost_model_is_named(archive, damage):
    archive.put(4, 2, torch.zeros(2))
    damage(archive.folder / names(archive)[0])
    with pytest.raises(
        ArchiveError, match=r"client000004-round000002.* client 4 .* round 3; start"
    ):
        archive.get(4, 2)
