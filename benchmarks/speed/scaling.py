"""Seconds a round and peak memory as cohorts and populations grow, on rows of the digits' size.

    python benchmarks/speed/scaling.py --out scaling.json

Every client holds 20 rows of 8 x 8 pixels and trains an MLP for one epoch of batch 10. A cell is a
process of its own, so that its peak memory is its own; memory is shown less what the rows take.
A round of 10 clients should cost the same among 100 clients as among 100,000.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

COHORTS, POPULATIONS = (10, 100, 1000), (100, 1_000, 10_000, 100_000)
ROWS, SHAPE, CLASSES = 20, (1, 8, 8), 10


def federation(clients: int, cohort: int):
    """Build a federation of so many clients with the executor that `auto` picks."""
    import numpy as np
    import torch

    import fedbasin.experiment  # noqa: F401  (fills the catalogue)
    from fedbasin.core.evaluator import Evaluator
    from fedbasin.core.expressions import parse
    from fedbasin.core.method import Context, Plan
    from fedbasin.core.net import Net
    from fedbasin.core.rng import root, torch_draws_from
    from fedbasin.core.task import Classification
    from fedbasin.data.transform import Transform
    from fedbasin.experiment import Experiment
    from fedbasin.experiment.executors import pick_executor
    from fedbasin.local import SGD, Trainer
    from fedbasin.sim import Federation, Population

    torch.set_num_threads(1)
    key = root(0)
    rng = key.fold("rows").numpy()
    count = clients * ROWS
    inputs = rng.integers(0, 256, (count, *SHAPE), dtype=np.uint8)
    labels = rng.integers(0, CLASSES, count)
    rows = np.arange(count).reshape(clients, ROWS)
    with torch_draws_from(key):
        net = Net(parse("mlp(widths=(32,))", "model")(SHAPE, CLASSES))
    transform = Transform((0.5,), (0.25,))
    people = Population.of(inputs, labels, rows)
    trainer = Trainer(net, (), SGD(), 10, transform, CLASSES)
    test = (torch.from_numpy(inputs[:1000]), torch.from_numpy(labels[:1000]))
    return Federation(
        method=parse("fedavg", "method"),
        net=net,
        trainer=trainer,
        population=people,
        evaluator=Evaluator(net, *test, transform, Classification()),
        executor=pick_executor(Experiment(), trainer, people, key),
        context=Context(net.layout, clients, 1_000_000, key),
        schedule=lambda round: Plan(0.1, 1),
        participation=parse(f"count(clients={cohort})", "participation"),
        eligible=np.arange(clients),
        key=key,
        rounds=1_000_000,
        evaluate_every=1_000_000,
    )


def cell(clients: int, cohort: int, rounds: int) -> dict[str, float]:
    """Measure one cell in this process."""
    import resource

    made = federation(clients, cohort)
    server, states = made.begin()
    going, spent, used = made.rounds_from(server, states), [], []
    for _ in range(rounds + 2):
        began, before = time.perf_counter(), time.process_time()
        next(going)
        spent.append(time.perf_counter() - began)
        used.append(time.process_time() - before)
    people = made.population
    held = sum(t.numel() * t.element_size() for t in (people.inputs, people.labels))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "clients": clients,
        "cohort": cohort,
        "executor": made.executor.facts()["executor"],
        "seconds": statistics.median(spent[2:]),
        "cpu_seconds": statistics.median(used[2:]),
        "rows_bytes": held,
        "peak_bytes": peak,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--cell", nargs=2, type=int, help="clients and cohort: measure this alone")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    if args.cell:
        sys.stdout.write(json.dumps(cell(*args.cell, args.rounds)) + "\n")
        return
    from peers import driver
    from rich.console import Console
    from rich.table import Table

    found = []
    table = Table(title="A round of C clients among N, digits-sized rows", title_justify="left")
    for name in ("C", "N", "executor", "ms / round", "CPU-ms / round", "peak MB", "rows MB"):
        table.add_column(name, justify="right")
    for cohort in COHORTS:
        for clients in (n for n in POPULATIONS if n >= cohort):
            driver.note(f"{cohort} of {clients} clients")
            command = [sys.executable, __file__, "--cell", str(clients), str(cohort)]
            command += ["--rounds", str(args.rounds)]
            answer = subprocess.run(command, capture_output=True, text=True, check=True)
            line = json.loads(answer.stdout)
            found.append(line)
            times = (1000 * line["seconds"], 1000 * line["cpu_seconds"])
            sizes = (line["peak_bytes"] / 1e6, line["rows_bytes"] / 1e6)
            shown = [f"{value:.1f}" for value in (*times, *sizes)]
            table.add_row(f"{cohort:,}", f"{clients:,}", line["executor"], *shown)
    Console(width=110).print(table)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        facts = {**driver.machine("cpu"), "cells": found}
        args.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
