"""WIMA's window at the size of its largest setting: 370 models of 5 M parameters.

    python benchmarks/methods/window_memory.py --out window.json

Pushes so many models that every slot has been filled, and some replaced, and compares the most
anonymous memory (RssAnon, after each round) with what wima.py states: W x 4 P bytes (2 P in
bfloat16) + 12 P. Each storage is a process of its own; milliseconds are the median of a round.

Memory is allocated as in a run on a CPU, which keeps freed blocks in glibc's heap and hands gaps
back with every checkpoint, here after every tenth round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")


def anonymous() -> int:
    """Return the anonymous memory of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def cell(storage: str, width: int, size: int) -> dict:
    """Push models into one window and watch the memory."""
    import torch
    from tqdm import trange

    from fedbasin.methods.parts.trajectory import empty, mean, push
    from fedbasin.sim.allocator import hand_back_gaps, keep_freed_memory

    keep_freed_memory()  # as a run does
    torch.set_num_threads(1)
    draws = torch.Generator().manual_seed(0)
    model = torch.randn(size, generator=draws)
    window, before, most, rounds = empty(width, model, storage), anonymous(), 0, []
    for number in trange(width + 20, desc=storage, mininterval=5):
        # Every element moves; random numbers for each would take longer than what is measured.
        model = model + 1e-3 * torch.randn(1, generator=draws)
        began = time.perf_counter()
        window = push(window, model)
        mean(window)
        rounds.append(time.perf_counter() - began)
        most = max(most, anonymous() - before)
        if number % 10 == 9:  # where a run writes a checkpoint
            hand_back_gaps()
    stated = width * size * (2 if storage == "bfloat16" else 4) + 12 * size
    return {
        "storage": storage,
        "window": width,
        "parameters": size,
        "stated_bytes": stated,
        "peak_bytes": most,
        "ms_per_round": 1e3 * statistics.median(rounds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--window", type=int, default=370, help="W")
    parser.add_argument("--parameters", type=int, default=5_000_000, help="P")
    parser.add_argument("--storages", nargs="+", default=["same", "bfloat16"])
    parser.add_argument("--out", type=Path, default=None, help="JSON of all numbers")
    parser.add_argument("--cell", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        sys.stdout.write(json.dumps(cell(args.storages[0], args.window, args.parameters)) + "\n")
        return
    found = []
    for storage in args.storages:
        shape = [f"--window={args.window}", f"--parameters={args.parameters}"]
        command = [sys.executable, __file__, "--cell", "--storages", storage, *shape]
        answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found.append(line := json.loads(answer.stdout))
        stated, peak = line["stated_bytes"] / 1e9, line["peak_bytes"] / 1e9
        print(
            f"{storage}: stated {stated:.2f} GB, peak {peak:.2f} GB, "
            f"{line['ms_per_round']:.0f} ms a round"
        )
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
