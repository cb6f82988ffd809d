"""Which executor is faster on a CPU: the numbers behind `sim.executor = "auto"`.

    python benchmarks/speed/executors.py --out executors.json

Ten clients of 60 rows, batch 10, SGD, on 28 x 28 images: milliseconds of a client-step in the loop,
in the cohort's matrix, and (with --compile) in the compiled matrix, in turns.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from peers import driver
from rich.console import Console
from rich.table import Table

import fedbasin.experiment  # noqa: F401  (fills the catalogue)
from fedbasin.core.expressions import parse
from fedbasin.core.method import Plan
from fedbasin.core.net import Net
from fedbasin.core.rng import root, torch_draws_from
from fedbasin.core.round import Launch, Sent
from fedbasin.data.transform import Transform
from fedbasin.local import SGD, Trainer
from fedbasin.sim import LoopExecutor, Population
from fedbasin.sim.allocator import keep_freed_memory
from fedbasin.sim.clients import ClientStates
from fedbasin.sim.cohort import CohortExecutor

MODELS = (
    "logistic",
    "mlp(widths=(64,))",
    "mlp(widths=(200, 200))",
    "mlp(widths=(320,))",
    "mlp(widths=(512, 256))",
    "mlp(widths=(1024, 512))",
    "fmnist_cnn(channels=(4, 4), widths=(16,))",
    "fmnist_cnn",
)
SHAPE, CLASSES, CLIENTS, ROWS, BATCH = (1, 28, 28), 10, 10, 60, 10
KEY = root(0)


def executors(model: str, compiled: bool):
    """Return the executors of one model, by name."""
    rng = KEY.fold("rows").numpy()
    count = CLIENTS * ROWS
    people = Population.of(
        rng.integers(0, 256, (count, *SHAPE), dtype=np.uint8),
        rng.integers(0, CLASSES, count),
        np.arange(count).reshape(CLIENTS, ROWS),
    )
    with torch_draws_from(KEY):
        net = Net(parse(model, "model")(SHAPE, CLASSES))
    trainer = Trainer(net, (), SGD(), BATCH, Transform((0.5,), (0.25,)), CLASSES)
    found = {
        "loop": LoopExecutor(trainer, people, KEY),
        "cohort": CohortExecutor(trainer, people, KEY, compiled=False),
    }
    if compiled:
        found["compiled"] = CohortExecutor(trainer, people, KEY, compiled=True)
    return found


def measure(model: str, args: argparse.Namespace) -> dict[str, object]:
    """Time rounds of every executor in turns, in processor milliseconds of a client-step."""
    running = executors(model, args.compile)
    vector, buffers = running["loop"].trainer.net.initial()
    spent: dict[str, list[float]] = {name: [] for name in running}
    for turn in range(args.repeats + 1):
        for name, executor in running.items():
            began = time.process_time()
            executor.train(
                [
                    Launch(
                        np.arange(CLIENTS),
                        Sent(vector, buffers, (), turn),
                        Plan(0.01, 1),
                        ClientStates((), vector),
                    )
                ]
            )[0]
            if turn:
                spent[name].append(1000 * (time.process_time() - began))
    steps = CLIENTS * ROWS // BATCH
    medians = {name: statistics.median(times) / steps for name, times in spent.items()}
    return {"model": model, "weights": len(vector), **medians}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    names = ("loop", "cohort", *(("compiled",) if args.compile else ()))
    table = Table(title="CPU-ms of a client-step", title_justify="left")
    for name in ("model", "weights", *names):
        table.add_column(name, justify="left" if name == "model" else "right")
    lines = []
    for model in MODELS:
        driver.note(model)
        line = measure(model, args)
        lines.append(line)
        table.add_row(model, f"{line['weights']:,}", *(f"{line[name]:.3f}" for name in names))
    Console(width=110).print(table)
    if args.out:
        facts = {**driver.machine("cpu"), "lines": lines}
        args.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
