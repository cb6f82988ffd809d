import subprocess
import sys

import pytest

from fedbasin.core.record import RunFolder
from fedbasin.methods import FedAvg
from fedbasin.sim import runner
from fedbasin.sim.allocator import hand_back_gaps
from fedbasin.testing import toy_federation

# Every second one of 100 blocks of 1 MB is freed. Told are the megabytes of the heap that the
# system takes back when they are freed and when gaps are handed back.
GAPS = """
from pathlib import Path
import sys

import torch

from fedbasin.sim.allocator import hand_back_gaps, keep_freed_memory

def held():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))

assert keep_freed_memory()
blocks = [torch.ones(1 << 18) for _ in range(100)]
whole = held()
del blocks[::2]
freed = held()
assert hand_back_gaps()
sys.stdout.write(f"{whole - freed} {freed - held()}")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the allocator is glibc's")
def test_freed_memory_is_kept_until_gaps_are_handed_back(monkeypatch):
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)
    answer = subprocess.run([sys.executable, "-c", GAPS], stdout=subprocess.PIPE, check=True)
    when_freed, when_handed_back = map(float, answer.stdout.split())
    assert when_freed < 10 and when_handed_back > 40


def test_other_systems_are_left_alone(monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    assert hand_back_gaps() is False


def test_a_run_hands_gaps_back_with_every_checkpoint(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(runner, "hand_back_gaps", lambda: calls.append(1))
    federation = toy_federation(FedAvg(), rounds=7)
    options = runner.RunOptions(checkpoint_every=3)
    runner.drive(runner.Run.open(federation, RunFolder(tmp_path), options))
    assert len(calls) == 3  # after rounds 3, 6 and the last
