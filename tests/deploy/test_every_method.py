"""`flwr run` of ten methods that use every hook: the simulator's models, method by method."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("flwr", reason="needs the extra fedbasin[flower]")
if not os.environ.get("FEDBASIN_TEST_FEDERATION"):
    pytest.skip("takes minutes: make test-federation", allow_module_level=True)

import fedbasin.methods  # noqa: F401  (fills the catalogue)
from fedbasin.core.expressions import parse
from fedbasin.core.record import RunFolder
from fedbasin.deploy.federation import LocalFederation
from fedbasin.testing import toy_federation

HERE = Path(__file__).parent
PARTICIPATION = ("fraction(rate=1.0)", "count(clients=3)")
METHODS = [
    "fedavg",
    "fedprox(mu=0.1)",
    "scaffold",
    "fedcm",
    "fedadam",
    "fedlaw",
    "wima(window=2)",
    "ima(window=2, start=0.3)",
    "fedcda(warmup=1)",
    "fedwcm",
]


@pytest.mark.timeout(1200)
def test_three_rounds_in_flowers_simulation_equal_ours(tmp_path):
    settings = {"folder": str(tmp_path / "runs"), "methods": ";".join(METHODS)}
    source = {"PYTHONPATH": str(HERE.parents[1] / "src")}
    with LocalFederation(tmp_path / "f", 6, simulate=True, environment=source) as flower:
        flower.run(HERE / "every", settings).wait(timeout=1100)
        log = flower.log("run")
    for number, method in enumerate(METHODS):
        for share, participation in enumerate(PARTICIPATION):
            federation = toy_federation(
                parse(method, "method"), rounds=3, participation=participation
            )
            server, states = federation.begin()
            server, _ = list(federation.rounds_from(server, states))[-1]
            run = RunFolder(tmp_path / "runs" / f"{number}-{share}")
            assert run.model.exists(), f"{method}, {participation}: {log[-3000:]}"
            found = load_file(run.model)
            expected = federation.net.state_dict(server.score, server.buffers)
            for name, tensor in expected.items():
                torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-11)
            assert [r.replies for r in run.read_rounds()] == [6 if share == 0 else 3] * 3
