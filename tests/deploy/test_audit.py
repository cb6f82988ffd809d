"""The audit trail says who was merged and who was refused, and shows a later edit."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("flwr", reason="needs the extra fedbasin[flower]")

from deploy.grids import LocalGrid, app_for, strategy_for
from deploy.test_refusals import CULPRIT, bad_value, changed, run
from flwr.app import ArrayRecord

from fedbasin.cli.app import app as command
from fedbasin.core.expressions import parse
from fedbasin.deploy import Guard
from fedbasin.deploy.audit import FIRST, AuditedRound, AuditTrail, MergedReply, check
from fedbasin.testing import toy_federation


def lines_of(folder):
    return [json.loads(line) for line in (folder / "merged.jsonl").read_text().splitlines()]


def nan_of_culprit(client, reply):
    return bad_value(np.nan)(reply) if client == CULPRIT else [reply]


def test_a_round_says_who_was_merged_with_what_and_who_was_not(tmp_path):
    starts, models = [], []

    def seen(client, reply):
        if client != CULPRIT:
            models.append(torch.cat([a.ravel() for a in map(torch.from_numpy, arrays(reply))]))
        return nan_of_culprit(client, reply)

    def arrays(reply):
        return [array.numpy().copy() for array in reply.content["arrays"].values()]

    strategy = run(tamper=seen, rounds=1, folder=tmp_path, stream=False)
    federation = toy_federation(parse("fedavg", "method"))
    starts.append(federation.begin()[0].send)
    (line,) = lines_of(tmp_path)
    assert line["round"] == 1 and line["asked"] == [*range(6)]
    assert [m["client"] for m in line["merged"]] == [0, 1, 3, 4, 5]
    assert [m["weight"] for m in line["merged"]] == [16, 9, 5, 3, 1]
    for merged, model in zip(line["merged"], models, strict=False):
        assert merged["norm"] > 0 and len(model) == len(starts[0])
    (refused,) = line["refused"]
    assert refused["client"] == CULPRIT and "NaN" in refused["reason"] and not line["bounded"]
    node = strategy._cohort.asked[CULPRIT]
    key = hashlib.sha256(f"key of node {node}".encode()).hexdigest()[:32]
    assert (refused["node"], refused["key"]) == (node, key)
    assert line["previous"] == FIRST


@pytest.mark.parametrize("streamed", [False, True])
def test_norms_are_those_of_the_updates(tmp_path, streamed):
    sent = {}

    def seen(client, reply):
        sent[client] = {n: a.numpy().copy() for n, a in reply.content["arrays"].items()}
        return [reply]

    run(tamper=seen, rounds=1, folder=tmp_path, stream=streamed)
    net = toy_federation(parse("fedavg", "method")).net
    start = net.state_dict(*net.initial())
    for merged in lines_of(tmp_path)[0]["merged"]:
        moves = [values - start[n].numpy() for n, values in sent[merged["client"]].items()]
        expected = np.sqrt(sum(float((move**2).sum()) for move in moves))
        assert merged["norm"] == (None if streamed else pytest.approx(expected))
        assert merged["weight"] == [16, 9, 7, 5, 3, 1][merged["client"]]


def test_a_length_beyond_float32_is_null(tmp_path):
    trail = AuditTrail(tmp_path / "merged.jsonl")
    merged = [MergedReply(0, "", 1.0, float("inf")), MergedReply(1, "", 1.0, 2.0)]
    trail.add(AuditedRound(1, [0, 1], merged))
    (line,) = lines_of(tmp_path)
    assert [each["norm"] for each in line["merged"]] == [None, 2.0]
    assert not check(tmp_path / "merged.jsonl").broken


def test_what_the_guard_does_is_in_the_trail(tmp_path):
    def far(client, reply):
        if client == CULPRIT:
            for name, array in reply.content["arrays"].items():
                reply.content["arrays"][name] = type(array)(array.numpy() + 50)
        return [reply]

    run(tamper=far, rounds=1, folder=tmp_path / "clip", guard=Guard(5.0, weight=5.0))
    line = lines_of(tmp_path / "clip")[0]
    assert [b["client"] for b in line["bounded"]] == [CULPRIT] and not line["refused"]
    assert CULPRIT in [m["client"] for m in line["merged"]]
    run(tamper=far, rounds=1, folder=tmp_path / "drop", guard=Guard(5.0, "drop", weight=5.0))
    line = lines_of(tmp_path / "drop")[0]
    assert [r["client"] for r in line["refused"]] == [CULPRIT] and not line["bounded"]
    assert CULPRIT not in [m["client"] for m in line["merged"]]


def test_a_node_that_says_what_cannot_be_is_in_the_trail(tmp_path):
    def lying(client, reply):
        return [changed(reply, partition_id=77) if client == CULPRIT else reply]

    federation = toy_federation(parse("fedavg", "method"), participation="fraction(rate=1.0)")
    strategy = strategy_for(federation, federation.method, folder=tmp_path)
    grid = LocalGrid(app_for(federation), 6, misstate=lying)
    arrays = ArrayRecord(federation.net.state_dict(*federation.net.initial()))
    strategy.start(grid, arrays, num_rounds=1, timeout=0.5)
    (refused,) = lines_of(tmp_path)[0]["refused"]
    assert refused["client"] is None and "partition-id 77" in refused["reason"]
    assert grid.client(refused["node"]) == CULPRIT


def test_a_merge_that_is_refused_merges_nobody(tmp_path):
    def silent(client, reply):
        del reply.content["report"], reply.content["report-shape"]
        return [reply]

    run("scaffold", silent, rounds=1, folder=tmp_path, fails="no client rule reports a Change")
    assert lines_of(tmp_path)[0]["merged"] == []


def test_a_run_that_goes_on_adds_to_the_trail(tmp_path):
    run(rounds=2, folder=tmp_path)
    before = (tmp_path / "merged.jsonl").read_bytes()
    run(rounds=3, folder=tmp_path)
    after = (tmp_path / "merged.jsonl").read_bytes()
    assert after.startswith(before)
    assert [line.get("round") for line in lines_of(tmp_path)] == [1, 2, None, 3]
    assert lines_of(tmp_path)[2]["started_after_round"] == 2
    found = check(tmp_path / "merged.jsonl")
    assert (found.lines, found.broken) == (4, "")
    assert json.loads((tmp_path / "summary.json").read_text())["audit"] == found.head


def edited(lines, how):
    if how == "changed":
        lines[1] = lines[1].replace(b'"weight": 16.0', b'"weight": 17.0', 1)
    elif how == "taken out":
        del lines[1]
    elif how == "put in":
        lines.insert(1, lines[1])
    elif how == "swapped":
        lines[1], lines[2] = lines[2], lines[1]
    elif how == "damaged":
        lines[1] = lines[1][:-5]
    elif how == "no object":
        lines[1] = b"[" * 100_000
    return b"".join(line + b"\n" for line in lines)


@pytest.mark.parametrize(
    "how", ["changed", "taken out", "put in", "swapped", "damaged", "no object"]
)
def test_an_edit_shows(tmp_path, how):
    run(rounds=4, folder=tmp_path)
    file = tmp_path / "merged.jsonl"
    data = file.read_bytes()
    assert check(file).broken == ""
    file.write_bytes(edited(data.splitlines(), how))
    assert file.read_bytes() != data
    assert check(file).broken in (
        "line 2 does not follow from the line before it",
        "line 3 does not follow from the line before it",
        "line 2 is damaged",
    )


def test_the_command_compares_the_last_line_with_the_summary(tmp_path):
    run(rounds=2, folder=tmp_path, tamper=nan_of_culprit)
    result = CliRunner().invoke(command, ["flower", "audit", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "2 lines, the chain holds" in result.output and "client 2" in result.output
    file = tmp_path / "merged.jsonl"
    lines = file.read_bytes().splitlines()
    file.write_bytes(lines[0] + b"\n" + lines[1].replace(b"NaN", b"non") + b"\n")
    result = CliRunner().invoke(command, ["flower", "audit", str(tmp_path)])
    assert result.exit_code == 1
    assert "the last line is not the one in summary.json" in result.output
    file.write_bytes(lines[1] + b"\n")
    result = CliRunner().invoke(command, ["flower", "audit", str(tmp_path)])
    assert result.exit_code == 1 and "line 1 does not follow" in result.output
    (tmp_path / "none").mkdir()
    result = CliRunner().invoke(command, ["flower", "audit", str(tmp_path / "none")])
    assert "has no merged.jsonl" in str(result.exception)


def test_a_line_that_a_power_cut_tore_is_kept_and_named(tmp_path):
    run(rounds=1, folder=tmp_path)
    file = tmp_path / "merged.jsonl"
    file.write_bytes(file.read_bytes() + b'{"round": 2, "asked"')
    run(rounds=2, folder=tmp_path)
    lines = file.read_bytes().splitlines()
    assert json.loads(lines[2])["broken"] == "line 2 is damaged"
    assert json.loads(lines[3])["round"] == 2
    assert check(file).broken == "line 2 is damaged"


@pytest.mark.parametrize("exists", [False, True])
def test_a_trail_that_is_a_link_leads_nowhere(tmp_path, exists):
    folder, victim = tmp_path / "run", tmp_path / "victim"
    run(folder=folder, rounds=1)
    if exists:
        victim.write_bytes((folder / "merged.jsonl").read_bytes())
        before = victim.read_bytes()
    (folder / "merged.jsonl").unlink()
    (folder / "merged.jsonl").symlink_to(victim)
    run(folder=folder, rounds=2)
    assert victim.read_bytes() == before if exists else not victim.exists()
    assert lines_of(folder)[-1]["round"] == 2
    assert not (folder / "merged.jsonl").is_symlink()


def test_nothing_is_written_without_a_folder():
    trail = AuditTrail(None)
    trail.begin(0)
    assert run(rounds=1).journal.audit.head == trail.head == FIRST
