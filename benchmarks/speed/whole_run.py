"""Seconds of a whole run, and what they are spent on: FedIMA's CIFAR-10 setting by default.

    python benchmarks/speed/whole_run.py --out whole.json

100 clients by Dirichlet(0.1), 10 a round, 5 epochs of batch 50, 400 rounds, the test rows scored in
every round, on real rows (FEDBASIN_DATA); `--preset demo` is a try-out without any.
The run is repeated in a second process, which finds the compiled kernels in the cache.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="cifar10")
    parser.add_argument("--method", default="ima")
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--set", action="append", default=[], help="further settings, key=value")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    lines = []
    for number in range(args.repeats):
        with tempfile.TemporaryDirectory() as folder:
            lines.append(one_run(args, Path(folder) / "run") | {"repeat": number})
            print(json.dumps(lines[-1]), flush=True)
        if args.out:  # after every run, so that an interrupted one leaves what it has
            args.out.write_text(json.dumps(lines, indent=1) + "\n")


def one_run(args, folder):
    """Run in a process of its own; return its seconds by what they were spent on."""
    command = [
        *(sys.executable, "-m", "fedbasin", "run", "--preset", args.preset),
        *("--method", args.method, "--rounds", str(args.rounds), "--out", str(folder)),
        *(part for setting in args.set for part in ("--set", setting)),
    ]
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - began
    records = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    spent = {
        part: sum(record[f"seconds_{part}"] or 0 for record in records)
        for part in ("train", "merge", "evaluate")
    }
    inside = sum(record["seconds"] for record in records)
    return {
        "method": args.method,
        "rounds": args.rounds,
        "seconds": seconds,
        "seconds_first_ten_rounds": sum(record["seconds"] for record in records[:10]),
        **{f"seconds_{part}": value for part, value in spent.items()},
        "seconds_rounds": inside,
        "accuracy": summary["accuracy_mean_last10"],
        "share_useful_steps": summary.get("share_useful_steps"),
    }


if __name__ == "__main__":
    main()
