import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from data.making import images_file, pictures, usps

from fedbasin.data import DataError, arrays, catalogue, fetch, load
from fedbasin.data import cache as cache_module
from fedbasin.data.cache import cache_folder, entry_folder
from fedbasin.data.sources import SOURCES, Part

TRAIN = "flwrlabs/usps/data/train-00000-of-00001.parquet"


@pytest.fixture
def made(root, rng):
    return usps(root, rng)


@pytest.fixture
def again(root, cache):
    """Load once more and say whether it had to be decoded."""
    return lambda: fetch("usps", data_dir=root, cache_dir=cache).decoded


def folder(cache):
    (entry,) = cache.iterdir()
    return entry


def test_the_second_time_nothing_is_decoded_or_hashed(made, again, monkeypatch):
    assert again()
    monkeypatch.setattr(catalogue, "_BUILDERS", {})
    monkeypatch.setattr("fedbasin.data.mirror.sha256_of", None)
    assert not again()


def test_arrays_are_mapped_read_only_and_the_manifest_tells_all(made, open_, cache, root):
    data = open_("usps")
    for array in (data.train.inputs, data.train.labels, data.test.inputs):
        assert isinstance(array, np.memmap) and not array.flags.writeable
    manifest = json.loads((folder(cache) / "manifest.json").read_text())
    assert manifest["name"] == "usps" and manifest["classes"] == list("0123456789")
    assert [f["name"] for f in manifest["files"]] == [TRAIN, TRAIN.replace("train", "test")]
    assert manifest["files"][0]["size"] == (root / TRAIN).stat().st_size
    assert len(manifest["files"][0]["sha256"]) == 64
    assert manifest["arrays"]["train_inputs"]["shape"] == [20, 1, 6, 5]
    assert manifest["arrays"]["test_labels"]["dtype"] == "int64"


def test_a_changed_file_is_decoded_anew(made, again, open_, root, rng):
    again()
    fresh = pictures(rng, 20)
    images_file(root / TRAIN, fresh, [3] * 20)
    assert again()
    assert np.array_equal(open_("usps").train.inputs[:, 0], fresh)
    assert not again()


def test_a_file_that_was_only_touched_is_hashed_once_and_not_decoded(
    made, again, root, monkeypatch
):
    again()
    os.utime(root / TRAIN, ns=(1, 1))
    monkeypatch.setattr(catalogue, "_BUILDERS", {})
    assert not again()
    monkeypatch.setattr("fedbasin.data.mirror.sha256_of", None)
    assert not again()


def _cut(path):
    path.write_bytes(path.read_bytes()[:-5])


def _change_manifest(**changes):
    def change(path):
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


DAMAGE = {
    "array cut short": ("train_inputs.npy", _cut),
    "labels cut short": ("test_labels.npy", _cut),
    "array missing": ("train_labels.npy", Path.unlink),
    "array of another shape": (
        "test_inputs.npy",
        lambda p: np.save(p, np.zeros((10, 1, 5, 6), np.uint8)),
    ),
    "array with a tail": ("train_inputs.npy", lambda p: p.write_bytes(p.read_bytes() + b"0")),
    "objects in place of numbers": (
        "train_labels.npy",
        lambda p: np.save(p, np.array([{}] * 20, dtype=object), allow_pickle=True),
    ),
    "no manifest": ("manifest.json", Path.unlink),
    "manifest cut short": ("manifest.json", _cut),
    "manifest of another kind": ("manifest.json", lambda p: p.write_text("[1, 2]")),
    "manifest of another format": ("manifest.json", _change_manifest(format=0)),
    "manifest without arrays": ("manifest.json", _change_manifest(arrays={})),
    "manifest without classes": ("manifest.json", _change_manifest(classes=None)),
    "manifest with odd files": ("manifest.json", _change_manifest(files=[{"name": "x"}])),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_entry_is_built_again(made, again, open_, cache, name):
    again()
    file, damage = DAMAGE[name]
    damage(folder(cache) / file)
    assert again()
    assert not again()
    assert np.array_equal(open_("usps").train.inputs[:, 0], made["train"][0])
    assert len(list(cache.iterdir())) == 1


def test_two_mirrors_do_not_share_an_entry(made, root, cache, tmp_path, rng):
    other = tmp_path / "other"
    theirs = usps(other, rng)
    load("usps", data_dir=root, cache_dir=cache)
    data = load("usps", data_dir=other, cache_dir=cache)
    assert np.array_equal(data.train.inputs[:, 0], theirs["train"][0])
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"size": (7, 7)},
        {"channels": 1},
        {"holdout": None},
        {"classes": ("a", "b")},
        {"layout": "roles"},
        {"parts": (Part("flwrlabs/pacs", revision="f" * 40),)},
    ],
)
def test_what_changes_the_arrays_changes_the_entry(cache, change):
    (pacs,) = SOURCES["pacs"]
    changed = entry_folder(cache, replace(pacs, **change), "hub")
    assert changed != entry_folder(cache, pacs, "hub") == entry_folder(cache, pacs, "hub")
    assert entry_folder(cache, replace(pacs, paper="other"), "hub") == entry_folder(
        cache, pacs, "hub"
    )


def test_a_failed_build_leaves_nothing(made, open_, cache):
    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_("usps", progress=stop)
    assert list(cache.iterdir()) == []


def test_a_killed_build_leaves_no_entry_and_is_swept_after_a_day(made, again, root, cache):
    code = f"""
import os, signal
from pathlib import Path
from types import SimpleNamespace
from fedbasin.data import load
load("usps", data_dir=Path({str(root)!r}), cache_dir=Path({str(cache)!r}),
     progress=lambda *_: os.kill(os.getpid(), signal.SIGKILL))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    (left,) = cache.iterdir()
    assert left.name.startswith(".building-") and list(left.glob("*.npy"))
    assert again()
    assert left.exists()  # young: it might belong to a process that is still at work
    old = left.stat().st_mtime - 100_000
    os.utime(left, (old, old))
    shutil.rmtree(next(e for e in cache.iterdir() if e != left))
    assert again()
    assert not left.exists()


def test_processes_that_build_at_once_all_get_the_data(made, root, cache):
    code = f"""
import sys
from functools import cache
from pathlib import Path
from fedbasin.data import fetch

@cache
def meet():
    print("building", flush=True)
    sys.stdin.readline()

found = fetch("usps", data_dir=Path({str(root)!r}), cache_dir=Path({str(cache)!r}),
              progress=lambda *_: meet())
print(int(found.dataset.train.inputs.astype("int64").sum()), found.decoded)
"""
    command = [sys.executable, "-c", code]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    workers = [subprocess.Popen(command, **pipes) for _ in range(3)]
    for worker in workers:
        assert worker.stdout.readline() == "building\n"  # all of them at the same time
    said = [worker.communicate("go on\n")[0].split() for worker in workers]
    total = str(int(made["train"][0].astype(np.int64).sum()))
    assert said == [[total, "True"]] * 3
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("theirs_is_good", [True, False])
def test_an_entry_that_appears_meanwhile_is_kept_only_if_it_is_good(
    made, root, cache, again, open_, theirs_is_good
):
    again()
    kept = root.parent / "kept"
    folder(cache).rename(kept)
    (kept / "theirs").touch()

    def appear(*_):
        shutil.copytree(kept, cache / entry_name)
        if not theirs_is_good:
            _cut(cache / entry_name / "train_inputs.npy")

    entry_name = fetch("usps", data_dir=root, cache_dir=root.parent / "aside").entry.folder.name
    first = []
    open_("usps", progress=lambda *_: first.append(1) or (len(first) == 1 and appear()))
    assert not again()
    assert [e.name for e in cache.iterdir()] == [entry_name]
    assert (folder(cache) / "theirs").exists() == theirs_is_good


def test_a_full_disk_is_noticed_before_writing(made, open_, cache, monkeypatch):
    monkeypatch.setattr(arrays.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(DataError, match=r"lacks 0 MB of room; make room, or name another folder"):
        open_("usps")
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(made, root, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write to the cache folder .*file.*FEDBASIN_CACHE"):
        load("usps", data_dir=root, cache_dir=tmp_path / "file" / "cache")


def test_an_error_while_writing_is_told_in_one_sentence(made, open_, monkeypatch, cache):
    def broken(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache_module, "_sync", broken)
    with pytest.raises(DataError, match=r"cannot write the cache entry .*No space left on device"):
        open_("usps")
    assert list(cache.iterdir()) == []


def test_the_cache_lies_where_it_is_told_to(monkeypatch, tmp_path):
    assert cache_folder(tmp_path / "here") == tmp_path / "here"
    monkeypatch.setenv("FEDBASIN_CACHE", str(tmp_path / "there"))
    assert cache_folder(None) == tmp_path / "there"
    assert cache_folder(tmp_path / "here") == tmp_path / "here"
    monkeypatch.delenv("FEDBASIN_CACHE")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder(None) == tmp_path / "xdg" / "fedbasin" / "data"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder(None) == tmp_path / ".cache" / "fedbasin" / "data"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_folder(None) == tmp_path / "Library" / "Caches" / "fedbasin" / "data"
