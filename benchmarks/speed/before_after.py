"""Rounds of W0, W1 and W2 with two checkouts of fedbasin, in turns: did a change cost speed?

    git worktree add ../before COMMIT
    python benchmarks/speed/before_after.py ../before .

Each turn is a process of one thread. The number shown is the least CPU time over all turns, which a
busy machine disturbs least, and the ratio of the second checkout to the first.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

ROUNDS = {"W0": 1, "W1": 1, "W2": 10}  # of one measurement
MEASUREMENTS = 3  # in a process


def measure(tree: Path, shape: str) -> None:
    """Print the least CPU seconds of some rounds, with the sources of one checkout."""
    sys.path[:0] = [str(tree / "src"), str(tree / "benchmarks" / "speed")]
    import torch
    from peers import ours, work

    torch.set_num_threads(1)
    options = SimpleNamespace(device="cpu", processes=1, compile="off", precision="auto")
    federation = ours.Ours(work.make(work.SHAPES[shape]), options)
    federation.rounds(1)
    least = float("inf")
    for _ in range(MEASUREMENTS):
        began = time.process_time()
        federation.rounds(ROUNDS[shape])
        least = min(least, time.process_time() - began)
    print(least)


def main() -> None:
    """Run both checkouts in turns."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("trees", nargs=2, type=Path, help="two checkouts")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--only", choices=ROUNDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    trees = [tree.resolve() for tree in options.trees]
    if options.only:
        measure(trees[0], options.only)
        return
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    for shape in ROUNDS:
        least = [float("inf")] * 2
        for _ in range(options.turns):
            for number, tree in enumerate(trees):
                command = [sys.executable, __file__, str(tree), str(tree), "--only", shape]
                done = subprocess.run(
                    command, env=one_thread, capture_output=True, text=True, check=True
                )
                least[number] = min(least[number], float(done.stdout.split()[-1]))
        print(f"{shape}: {least[0]:.4f} s, {least[1]:.4f} s, ratio {least[1] / least[0]:.3f}")


if __name__ == "__main__":
    main()
