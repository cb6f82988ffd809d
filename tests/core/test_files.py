"""Files in a folder that somebody sent, on a full disk, and after a power cut."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

import pytest
import torch

from fedbasin.core.archive import Archive, ArchiveError
from fedbasin.core.expressions import ExpressionError, no_imports, parse
from fedbasin.core.files import FileError, explained, read_toml
from fedbasin.core.holdings import Holdings
from fedbasin.core.record import RecordError, RoundRecord, RunFolder, write_atomically
from fedbasin.core.state import StateError, load, read, save


@dataclass(frozen=True)
class Kept:
    values: torch.Tensor
    count: int
    name: str


KEPT = Kept(torch.arange(3.0), 3, "a")


@pytest.mark.parametrize(
    "write",
    [
        lambda path: write_atomically(path, "new"),
        lambda path: save(path, KEPT),
        lambda path: Archive(path.parent).put(0, 0, torch.zeros(2)),
    ],
    ids=["text", "state", "archive"],
)
def test_a_link_under_the_temporary_name_is_not_followed(tmp_path, write):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("file", "client000000-round000000.npy"):
        (folder / f"{name}.part").symlink_to(victim)
    write(folder / "file")
    assert victim.read_text() == "precious"
    assert not any(path.is_symlink() for path in folder.iterdir() if path.suffix != ".part")


def test_a_folder_under_the_temporary_name_is_one_line(tmp_path):
    (tmp_path / "file.part").mkdir()
    for write in (lambda path: write_atomically(path, "new"), lambda path: save(path, KEPT)):
        with pytest.raises(FileError, match=r"file\.part is a folder; remove it"):
            write(tmp_path / "file")


def test_an_archive_that_is_a_link_is_not_swept(tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "letter").touch()
    (tmp_path / "archive").symlink_to(precious)
    archive = Archive(tmp_path / "archive")
    archive.keep([])
    with pytest.raises(ArchiveError, match="is a link"):
        archive.sweep()
    assert (precious / "letter").exists()


def test_a_full_disk_is_one_line_and_the_old_file_stays(tmp_path, monkeypatch):
    save(tmp_path / "state", KEPT)
    before = (tmp_path / "state").read_bytes()

    def full(*_, **__):
        from safetensors import SafetensorError

        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("fedbasin.core.state.save_file", full)
    with pytest.raises(FileError, match=r"cannot be written.*No space left.*make room"):
        save(tmp_path / "state", KEPT)

    def no_room(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_room)
    with pytest.raises(FileError, match="No space left on device"):
        write_atomically(tmp_path / "text", "new")
    assert (tmp_path / "state").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_a_full_disk_at_the_end_of_a_round_is_one_line(tmp_path, monkeypatch):
    def no_room(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    why = r"rounds\.jsonl cannot be written \(No space.*resume"
    monkeypatch.setattr(os, "fsync", no_room)
    RunFolder(tmp_path).append(RoundRecord(1))
    with pytest.raises(FileError, match=why):
        RunFolder(tmp_path).sync_rounds()
    monkeypatch.setattr(RoundRecord, "line", no_room)
    with pytest.raises(FileError, match=why):
        RunFolder(tmp_path).append(RoundRecord(2))


@pytest.mark.parametrize(
    ("number", "hint"),
    [
        (errno.EROFS, "out: Read-only file system; nothing can be written there: give another"),
        (errno.EISDIR, "out: Is a directory; it is a folder: name a file"),
        (errno.ELOOP, "out: Too many levels of symbolic links"),
    ],
)
def test_what_the_system_refuses_is_named_with_what_to_do(number, hint):
    said = explained(OSError(number, os.strerror(number), "out"))
    assert said.startswith(hint)
    assert explained(OSError("no number")) == "no number"


def test_lines_and_folders_reach_the_disk(tmp_path, monkeypatch):
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(handle), real(handle)))
    RunFolder(tmp_path).append(RoundRecord(1))
    assert not synced
    RunFolder(tmp_path).sync_rounds()
    assert len(synced) == 1
    write_atomically(tmp_path / "text", "new")
    assert len(synced) == 3  # the file, then its folder


def test_the_checksum_covers_numbers_beside_tensors(tmp_path):
    path = tmp_path / "state"
    save(path, KEPT)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'count\\": 3', b'count\\": 4'))
    assert path.read_bytes() != whole
    with pytest.raises(StateError, match="not those that were written"):
        read(path)


@pytest.mark.parametrize("other", [Kept(torch.zeros(3), "3", "a"), Kept(4.0, 3, "a")])
def test_a_leaf_of_another_type_is_one_line(tmp_path, other):
    save(tmp_path / "state", other)
    with pytest.raises(StateError, match=r"state at '(count|values)' is a"):
        load(tmp_path / "state", KEPT)


def rounds(folder, count):
    for round in range(1, count + 1):
        folder.append(RoundRecord(round, lr=0.1 * round))


@pytest.mark.parametrize("cut", [b"", b"\0" * 40, b"\0" * 40 + b"\n", b'{"rou'])
def test_rounds_that_a_power_cut_took_do_not_block_resuming(tmp_path, cut):
    folder = RunFolder(tmp_path)
    rounds(folder, 4)
    lines = folder.rounds.read_bytes().splitlines(keepends=True)
    folder.rounds.write_bytes(b"".join(lines[:2]) + cut)
    kept = folder.keep_rounds(4)
    assert [record.round for record in kept] == [1, 2, 3, 4]
    assert [bool(record.notes.get("lost")) for record in kept] == [False, False, True, True]
    assert folder.read_rounds() == kept
    folder.rounds.write_bytes(b"")
    assert len(folder.keep_rounds(3)) == 3


def test_a_line_that_was_edited_is_not_taken_for_a_power_cut(tmp_path):
    folder = RunFolder(tmp_path)
    rounds(folder, 3)
    lines = folder.rounds.read_text().splitlines()
    folder.rounds.write_text("\n".join([lines[0], "edited", lines[2], ""]))
    with pytest.raises(RecordError, match="line 2 is damaged"):
        folder.keep_rounds(3)


@pytest.mark.parametrize(
    "text",
    [
        "wima(window=9223372036854775808)",
        "fedgrab(most_classes=9223372036854775808)",
        ".".join(["a"] * 1500),
        "fedavg" + "()" * 900,
        "wima(" * 300 + "fedavg" + ")" * 300,
    ],
    ids=lambda text: text[:12],
)
def test_an_expression_beyond_all_bounds_is_one_line(text):
    import fedbasin.methods  # noqa: F401

    with pytest.raises(ExpressionError):
        parse(text, "method")


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f"a = {DEEP}", "nested too deeply"),
        (".".join(["a"] * 50_000) + " = 1", "more than 64 parts"),
        ("[" + " . ".join(['"a"'] * 50_000) + "]", "more than 64 parts"),
        ("b = {" + ".".join(["a"] * 50_000) + " = 1}", "more than 64 parts"),
        ("a = 1\na = 2", "overwrite"),
    ],
    ids=lambda value: value[:16],
)
def test_toml_beyond_all_bounds_is_refused_at_once(tmp_path, text, why):
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=why):
        read_toml(path)
    path.write_text("a.b.c = 1.5\nwords = 'one. two. three'")
    assert read_toml(path) == {"a": {"b": {"c": 1.5}}, "words": "one. two. three"}


def test_json_beyond_all_depths_is_named(tmp_path):
    folder = RunFolder(tmp_path)
    rounds(folder, 3)
    folder.rounds.write_text(folder.rounds.read_text() + '{"round": 4, "a": ' + DEEP + "}\n")
    with pytest.raises(RecordError, match=r"rounds\.jsonl, line 4: it is nested too deeply"):
        folder.read_rounds()
    assert len(folder.keep_rounds(3)) == 3
    folder.summary.write_text(DEEP)
    with pytest.raises(RecordError, match=r"summary\.json is not JSON: it is nested too deeply"):
        folder.read_summary()


def test_modules_of_a_folder_that_somebody_sent_are_not_imported(tmp_path, monkeypatch):
    (tmp_path / "evil_module.py").write_text("raise SystemExit('it ran')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with no_imports("give --trust"), pytest.raises(ExpressionError, match="give --trust"):
        parse("evil_module.median", "method")
    with pytest.raises(SystemExit, match="it ran"):
        parse("evil_module.median", "method")


def test_class_names_are_no_formulas(tmp_path):
    import numpy as np

    names = ("=1+1", "+1", "-1", "@x", "'quoted", "plain")
    held = Holdings(names, np.ones((2, 6), dtype=np.int64))
    (tmp_path / "partition.csv").write_text(held.to_csv())
    header = held.to_csv().splitlines()[0].split(",")
    assert not any(cell[0] in "=+-@" for cell in header)
    assert Holdings.read(tmp_path / "partition.csv").classes == names
