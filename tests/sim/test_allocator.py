import subprocess
import sys

import pytest

from fedbasin.core.record import RunFolder
from fedbasin.methods import FedAvg
from fedbasin.sim import runner
from fedbasin.sim.allocator import hand_back_gaps
from fedbasin.testing import toy_federation

# A window of models beside the models of the rounds, as in a run on a CPU; megabytes at the end.
WINDOW = """
from pathlib import Path
import sys

import torch

from fedbasin.methods.parts.trajectory import empty, mean, push
from fedbasin.sim.allocator import hand_back_gaps, keep_freed_memory

def held():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))

torch.set_num_threads(1)
assert keep_freed_memory()
model = torch.zeros(1 << 20)
window, before = empty(60, model), held()
for number in range(60):
    model = model + 1
    window = push(window, model)
    mean(window)
    if number % 10 == 9:
        hand_back_gaps()
sys.stdout.write(str(held() - before))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the allocator is glibc's")
def test_handing_gaps_back_holds_a_window_to_its_size(monkeypatch):
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)
    answer = subprocess.run([sys.executable, "-c", WINDOW], stdout=subprocess.PIPE, check=True)
    assert float(answer.stdout) < 1.25 * (60 * 4 + 12)  # twice that without


def test_other_systems_are_left_alone(monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    assert hand_back_gaps() is False


def test_a_run_hands_gaps_back_with_every_checkpoint(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(runner, "hand_back_gaps", lambda: calls.append(1))
    runner.run(toy_federation(FedAvg(), rounds=7), RunFolder(tmp_path), {}, checkpoint_every=3)
    assert len(calls) == 3  # after rounds 3, 6 and the last
