"""A journal killed at any moment goes on from its last checkpoint, with each record once."""

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch

from fedbasin.core import journal as module
from fedbasin.core.journal import Journal
from fedbasin.core.record import Headline, RoundRecord, RunFolder
from fedbasin.core.round import Server
from fedbasin.core.sink import FunctionSink, Log, SinkError
from fedbasin.core.state import read, same, save

ROUNDS = 7
EVERY = 3


class Killed(BaseException):
    """What a kill looks like from inside."""


@dataclass(frozen=True)
class Content:
    """A checkpoint that holds a number beside the server."""

    server: Server
    seconds: float
    total: int


class Toy(Journal):
    """A journal that keeps the sum of the rounds."""

    total = 0

    @property
    def headline(self):
        return Headline("loss", False, "")

    def content(self, server):
        return Content(server, self.seconds(), self.total)

    def restore(self, content):
        self.total = content.total

    def facts_at_end(self):
        return {"total": self.total}


def toy(path=None, sinks=(), clock=lambda: 0.0):
    folder = None if path is None else RunFolder(path)
    return Toy(folder, Log(sinks, path, path, {}), {"method": "toy"}, EVERY, clock)


def fresh():
    vector = torch.ones(3)
    return Server(0, vector, vector, torch.zeros(0), ())


def played(journal, rounds=ROUNDS):
    """Run to the end; return the last server and the summary."""
    server = journal.open(fresh())
    while server.round < rounds:
        vector = server.send * 1.5 + server.round
        server = replace(server, round=server.round + 1, send=vector, score=vector)
        journal.total += server.round
        journal.append(RoundRecord(server.round, {"loss": float(vector.sum())}))
        journal.checkpoint(server, last=server.round == rounds)
    return server, journal.finish({"vector": server.score})


def calls(monkeypatch, after):
    """Note what reaches the disk, in order; kill after so many steps."""
    steps = []

    def watch(owner, name, round_of):
        plain = getattr(owner, name)

        def watched(*arguments):
            if len(steps) == after:
                steps.append(None)
                raise Killed
            plain(*arguments)
            steps.append((name, round_of(*arguments)))

        monkeypatch.setattr(owner, name, watched)

    watch(RunFolder, "append", lambda folder, record: record.round)
    watch(RunFolder, "sync_rounds", lambda folder: len(folder.read_rounds()))
    watch(module, "save", lambda path, content: content.server.round)
    watch(RunFolder, "write_summary", lambda folder, summary: summary["rounds"])
    watch(module, "write", lambda path, tensors: ROUNDS)
    return steps


def test_each_checkpoint_and_the_summary_come_after_the_records_that_they_know(
    tmp_path, monkeypatch
):
    steps = calls(monkeypatch, after=None)
    played(toy(tmp_path))
    saved = [n for name, n in steps if name == "save"]
    assert saved == [3, 6, 7]
    for before, (name, n) in pairwise(steps):
        if name in ("save", "write_summary"):
            assert before == ("sync_rounds", n)


@pytest.mark.parametrize("after", range(16))
def test_a_run_killed_at_any_moment_ends_as_if_it_never_had_been(after, tmp_path, monkeypatch):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for path in (whole, killed):
        path.mkdir()
    server, summary = played(toy(whole))
    with monkeypatch.context() as patched, pytest.raises(Killed):
        calls(patched, after)
        played(toy(killed))
    again = toy(killed)
    resumed, told = played(again)
    assert same(resumed, server) and told == summary
    for name in ("rounds.jsonl", "summary.json", "checkpoint.safetensors", "model.safetensors"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes(), name


def test_a_resumed_run_begins_after_the_checkpoint_with_one_model(tmp_path):
    journal = toy(tmp_path)
    server = replace(fresh(), round=1)
    journal.open(fresh())
    journal.append(RoundRecord(1))
    journal.checkpoint(server, last=True)
    journal.append(RoundRecord(2))  # no checkpoint knows it
    again = toy(tmp_path)
    resumed = again.open(fresh())
    assert resumed.round == 1 and resumed.send is resumed.score
    assert [record.round for record in again.records] == [1]


def test_a_round_is_saved_once(tmp_path, monkeypatch):
    journal = toy(tmp_path)
    server = replace(journal.open(fresh()), round=EVERY)
    for n in range(1, EVERY + 1):
        journal.append(RoundRecord(n))
    journal.checkpoint(server, last=False)
    steps = calls(monkeypatch, after=None)
    journal.checkpoint(server, last=True)
    again = toy(tmp_path)
    again.checkpoint(again.open(fresh()), last=True)
    assert not steps


def test_seconds_are_those_of_all_starts(tmp_path):
    now = [0.0]
    journal = toy(tmp_path, clock=lambda: now[0])
    journal.open(fresh())
    now[0] = 5.0
    journal.append(RoundRecord(1))
    journal.checkpoint(replace(fresh(), round=1), last=True)
    now[0] = 100.0
    again = toy(tmp_path, clock=lambda: now[0])
    again.open(fresh())
    now[0] = 102.0
    assert again.seconds() == 7.0


def test_a_sink_that_fails_ends_the_run_after_a_checkpoint(tmp_path):
    def fail(record):
        raise OSError("no luck")

    with pytest.raises(SinkError, match="no luck"):
        played(toy(tmp_path, [FunctionSink(fail)]))
    assert read(RunFolder(tmp_path).checkpoint)["server.round"] == 1


def test_without_a_folder_records_are_in_memory_and_each_start_is_a_new_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    journal = toy()
    for _ in range(2):
        _, summary = played(journal)
        assert [record.round for record in journal.records] == list(range(1, ROUNDS + 1))
        assert summary["rounds"] == ROUNDS and summary["status"] == "finished"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("status", ["failed", "diverged", "stopped", "paused"])
def test_a_run_that_did_not_finish_leaves_no_model(status, tmp_path):
    journal = toy(tmp_path)
    server = journal.open(fresh())
    summary = journal.finish({"vector": server.score}, status, "why")
    folder = RunFolder(tmp_path)
    assert folder.read_summary() == summary
    assert list(summary)[:3] == ["method", "status", "reason"] and list(summary)[-1] == "total"
    assert not folder.model.exists()


def test_a_checkpoint_is_the_tree_of_its_content(tmp_path):
    journal = toy(tmp_path)
    server = replace(journal.open(fresh()), round=1)
    journal.append(RoundRecord(1))
    journal.save(server)
    save(tmp_path / "other.safetensors", Content(server, 0.0, 0))
    other = (tmp_path / "other.safetensors").read_bytes()
    assert RunFolder(tmp_path).checkpoint.read_bytes() == other
