"""Secure aggregation on real SuperNodes, of which one is killed in each stage.

Every message starts a process that imports torch, so this takes minutes: `make test-federation`.
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("flwr", reason="needs the extra fedbasin[flower]")
if not os.environ.get("FEDBASIN_TEST_FEDERATION"):
    pytest.skip("takes minutes: make test-federation", allow_module_level=True)

from deploy.test_processes import LEAN, federation, finished, rounds, wait
from deploy.test_secure import Losing
from flwr.app import ArrayRecord, ConfigRecord

from fedbasin.core.record import RunFolder
from fedbasin.core.state import read
from fedbasin.deploy import FedbasinStrategy, Secure, resume
from fedbasin.deploy.secure.client import KEYS, SHARES, UNMASK

pytestmark = pytest.mark.timeout(1800)
NODES = 4
STAGES = (KEYS, SHARES, "train", UNMASK)  # where node 3 is killed, one stage a round


def in_process(lost, name, monkeypatch):
    """The same rounds on a grid inside this process, where client 3 is lost in the same stages.

    It has the name of the real run, and with it the same batches.
    """
    monkeypatch.setattr(resume, "secrets", SimpleNamespace(token_hex=lambda size: name))
    sys.path.insert(0, str(LEAN))
    try:
        from lean.client_app import app, model
    finally:
        sys.path.remove(str(LEAN))
    grid = Losing(app, NODES)
    grid.lost = lost
    for context in grid.contexts.values():
        context.run_config = {"method": "fedavg"}
    secure = Secure(clip=1.0, rows=100, threshold=0.5)
    strategy = FedbasinStrategy("fedavg", fraction_evaluate=0.0, secure=secure)
    lr = ConfigRecord({"lr": 0.1})
    arrays = ArrayRecord(model().state_dict())
    result = strategy.start(grid, arrays, num_rounds=len(STAGES), timeout=9, train_config=lr)
    return strategy.journal.records, result.arrays.to_torch_state_dict()


def test_a_node_is_killed_in_each_stage(tmp_path, monkeypatch):
    run = RunFolder(tmp_path / "run")
    settings = {
        "folder": str(run.path),
        "rounds": len(STAGES),
        "timeout": 60.0,
        "min-nodes": NODES,
        "method": "fedavg",
        "secure": True,
    }
    with federation(tmp_path / "f", NODES) as nodes:
        process = nodes.run(LEAN, settings)
        for number, stage in enumerate(STAGES, 1):
            before = f"round {number}: {stage}: asking"
            wait(lambda text=before: text in nodes.log("run"), before)
            nodes.kill("node3")
            wait(lambda n=number: len(rounds(run)) >= n, f"round {number} ends without node 3")
            nodes.start_node(3)
        summary = finished(run, process, nodes)
        log = nodes.log("run")
    lost = {(n, stage): [3] for n, stage in enumerate(STAGES, 1)}
    expected, model = in_process(lost, read(run.checkpoint)["name"], monkeypatch)
    found = rounds(run)
    assert summary["status"] == "finished"
    assert [r.replies for r in found] == [r.replies for r in expected] == [3, 3, 3, 4]
    assert not any("secure_failed" in r.notes for r in found)
    assert log.count("no reply from client 3") == len(STAGES)
    for name, tensor in load_file(run.model).items():
        torch.testing.assert_close(tensor, model[name], rtol=1e-5, atol=1e-6)
