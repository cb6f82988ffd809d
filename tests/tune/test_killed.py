"""kill -9 at any moment of a tune, then the same command: same result, no run trained twice.

FEDBASIN_TEST_KILLS is how many moments are tried (`make test-kills` tries 20).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

KILLS = int(os.environ.get("FEDBASIN_TEST_KILLS", "3"))


@pytest.mark.timeout(900 + 40 * KILLS)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("halving", [0, 2])
def test_killed_at_random_moments_a_tune_ends_as_if_never_killed(halving, tmp_path):
    tests = str(Path(__file__).parents[1])
    paths = os.pathsep.join(filter(None, [tests, os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-W", "ignore", "-m", "tune.dying", str(tmp_path)]
    done = subprocess.run(
        [*command, str(KILLS), str(halving), "0"],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["killed"] >= KILLS and not found["wrong"], found
