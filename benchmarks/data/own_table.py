"""A table of 1,000,000 rows and 100 columns of float32, from a parquet file to a trained model.

    python benchmarks/data/own_table.py --out benchmarks/data/results/own_table.json

Writes the file, then loads it with `from_table` in a process of its own and compares the most
memory (VmHWM) above that of the imports with the array's size, 4 bytes a number. The bar is 2.5.
Then trains a logistic model on it for a few rounds, with the clients of a column.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")


def memory(field: str) -> int:
    """Return a line of this process's status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def write(path: Path, rows: int, columns: int, clients: int, row_group: int) -> None:
    """Write random numbers whose sum decides the class, a group of rows at a time."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    draws = np.random.default_rng(0)
    fields = [(f"x{at}", pa.float32()) for at in range(columns)]
    schema = pa.schema([*fields, ("client", pa.int32()), ("y", pa.int8())])
    with pq.ParquetWriter(path, schema) as file:
        for first in range(0, rows, row_group):
            count = min(row_group, rows - first)
            x = draws.standard_normal((columns, count), dtype=np.float32)
            y = (x[:10].sum(0) + draws.standard_normal(count) > 0).astype(np.int8)
            who = draws.integers(0, clients, count, dtype=np.int32)
            file.write_table(pa.table([*x, who, y], schema=schema), row_group_size=row_group)


def load(path: Path, rounds: int, clients: int) -> dict:
    """Load and train, and return what it took."""
    import torch

    from fedbasin.data import from_table
    from fedbasin.experiment import Experiment, run
    from fedbasin.experiment.config import LocalConfig, PartitionConfig, SimConfig

    torch.set_num_threads(1)
    before = memory("VmRSS")
    began = time.perf_counter()
    data = from_table(path, "y", "client")
    seconds = time.perf_counter() - began
    array = 4 * data.encoding.width * (len(data.train) + len(data.test))
    found = {
        "rows": len(data.train) + len(data.test),
        "columns": data.encoding.width,
        "array_bytes": array,
        "peak_bytes_above_start": memory("VmHWM") - before,
        "peak_to_array": (memory("VmHWM") - before) / array,
        "load_seconds": seconds,
    }
    experiment = Experiment(
        method="fedavg",
        model="logistic",
        rounds=rounds,
        partition=PartitionConfig(how="natural", clients=clients),
        local=LocalConfig(epochs=1, batch=100),
        sim=SimConfig(participation="at_most(clients=10)"),
    )
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        summary = run(experiment, Path(folder) / "run", data=data)
    return found | {
        "rounds": rounds,
        "clients": clients,
        "train_seconds": time.perf_counter() - began,
        "peak_with_training_to_array": (memory("VmHWM") - before) / array,
        "accuracy": summary["accuracy_last"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--columns", type=int, default=100)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--row-group", type=int, default=1_000_000, help="rows of a parquet group")
    parser.add_argument("--out", type=Path, default=None, help="JSON of all numbers")
    parser.add_argument("--file", type=Path, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.file:
        sys.stdout.write(json.dumps(load(args.file, args.rounds, args.clients)) + "\n")
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.parquet"
        write(path, args.rows, args.columns, args.clients, args.row_group)
        shape = [f"--rounds={args.rounds}", f"--clients={args.clients}"]
        command = [sys.executable, __file__, f"--file={path}", *shape]
        answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(answer.stdout.splitlines()[-1]) | {"row_group": args.row_group}
    print(
        f"{found['rows']:,} x {found['columns']}: loaded in {found['load_seconds']:.1f} s with "
        f"{found['peak_to_array']:.2f} times the array, {found['rounds']} rounds in "
        f"{found['train_seconds']:.1f} s, accuracy {found['accuracy']:.3f}"
    )
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
