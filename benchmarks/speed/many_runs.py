"""Many runs as one matrix: CPU-seconds beside the loop, in one go and in turns.

    python benchmarks/speed/many_runs.py --out many_runs.json

`one`: a run of the demo, data included. `many`: runs of the demo with FedAvg, one seed each, side
by side and one after another. `peers`: the same runs in FedJAX and in FedLab (`peers/demo.py`), in
environments of their own, compiling included. `demo`: all its methods with three seeds. `steps`:
microseconds of a client-step of an MLP 784-64-10, batch 10, by number of clients. `auto`:
`sim.executor = "auto"` beside the faster of loop and cohort on a grid of networks, data and numbers
of clients, each in a process of its own, so first calls count.

Every measurement is a process of one thread. Numbers are the least over the turns.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

PARTS = ("one", "many", "peers", "demo", "steps", "auto")
PEERS = {"FedJAX": "fedjax", "FedLab": "fedlab"}
NETWORKS = ("logistic", "mlp(widths=(64,))", "mlp(widths=(512, 256))", "lenet")
HERE = Path(__file__).resolve().parent
COHORTS = (2, 5, 20)  # with NETWORKS, 12 settings of the grid


def demo(**sim):
    """Return the demo's settings."""
    from fedbasin.experiment import from_mapping
    from fedbasin.experiment.config import read_preset

    base = from_mapping(read_preset("demo"))
    return replace(base, sim=replace(base.sim, **sim))


def runs(methods: list[str], count: int, **sim) -> float:
    """Return the CPU-seconds of runs of the demo with some seeds."""
    from fedbasin.experiment.comparison import cells, run_cells

    with tempfile.TemporaryDirectory() as folder:
        layout = cells(demo(**sim), methods, range(count), Path(folder))
        began = time.process_time()
        summaries = run_cells(layout)
        spent = time.process_time() - began
    scores = [summary["accuracy_mean_last10"] for summary in summaries]
    print(f"  accuracy {100 * sum(scores) / len(scores):.2f}")
    return spent


def steps(way: str, clients: int) -> float:
    """Return the CPU-microseconds of a client-step of an MLP 784-64-10."""
    import executors
    import numpy as np

    from fedbasin.core.method import Plan
    from fedbasin.core.round import Launch, Sent
    from fedbasin.sim import lean
    from fedbasin.sim.allocator import keep_freed_memory
    from fedbasin.sim.clients import ClientStates

    keep_freed_memory()
    executors.CLIENTS = clients
    if way == "generic":
        lean.Dense.of = classmethod(lambda *_: None)
    executor = executors.executors("mlp(widths=(64,))", False)[
        "loop" if way == "loop" else "cohort"
    ]
    vector, buffers = executor.trainer.net.initial()
    spent = []
    for turn in range(5):
        sent = Sent(vector, buffers, (), turn)
        request = Launch(np.arange(clients), sent, Plan(0.01, 1), ClientStates((), vector))
        began = time.process_time()
        executor.train([request])
        spent.append(time.process_time() - began)
    return 1e6 * min(spent[1:]) / (clients * executors.ROWS / executors.BATCH)


def grid(executor: str, model: str, clients: int) -> float:
    """Return the CPU-seconds of a short run, first calls included."""
    from fedbasin.experiment import run

    sim = {"executor": executor, "participation": f"count(clients={clients})"}
    experiment = replace(demo(**sim), model=model, rounds=20)
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        run(experiment, Path(folder) / "run")
        return time.process_time() - began


def measured(task: list) -> float:
    """Measure in this process."""
    import torch

    torch.set_num_threads(1)
    what, *rest = task
    if what == "runs":
        methods, count, sim = rest
        return runs(methods, count, **sim)
    return steps(*rest) if what == "steps" else grid(*rest)


def apart(task: list) -> float:
    """Measure in a process of its own."""
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    if task[0] == "peer":
        return peer(*task[1:], one_thread)
    command = [sys.executable, __file__, "--task", json.dumps(task)]
    done = subprocess.run(command, env=one_thread, capture_output=True, text=True, check=True)
    *said, number = done.stdout.splitlines()
    for line in said:
        print(line)
    return float(number)


def peer(name: str, count: int, environment: dict[str, str]) -> float:
    """Return a peer's CPU-seconds of runs of the demo; say what else it measured."""
    import cpu
    from peers import demo as shared

    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "work.npz"
        shared.write(work, count)
        command = [cpu.interpreter(name, install=True), "-m", f"peers.demo_{name}", str(work)]
        done = subprocess.run(
            command, env=environment, cwd=HERE, capture_output=True, text=True, check=True
        )
    said = json.loads(done.stdout)
    seconds = said["seconds"]
    accuracy = sum(said["accuracies"]) / count
    print(f"  accuracy {accuracy:.2f}, first run {seconds[0]:.2f} s, last {seconds[-1]:.2f} s")
    return float(said["preparing"] + sum(seconds))


def tasks(options: argparse.Namespace) -> dict[str, list]:
    """Return what is measured, by name."""
    from fedbasin.cli.app import DEMO_METHODS

    found: dict[str, list] = {}
    after, beside, loop = {"together": 1}, {"together": 0}, {"executor": "loop", "together": 1}
    if "one" in options.parts:
        found |= {"one, loop": ["runs", ["fedavg"], 1, loop]}
        found |= {"one, auto": ["runs", ["fedavg"], 1, after]}
    if "many" in options.parts:
        found |= {"many, loop": ["runs", ["fedavg"], options.runs, loop]}
        found |= {"many, one after another": ["runs", ["fedavg"], options.runs, after]}
        found |= {"many, beside": ["runs", ["fedavg"], options.runs, beside]}
    if "peers" in options.parts:
        for name, module in PEERS.items():
            found[f"peers, {name}"] = ["peer", module, options.runs]
    if "demo" in options.parts:
        found |= {"demo, loop": ["runs", list(DEMO_METHODS), 3, loop]}
        found |= {"demo, beside": ["runs", list(DEMO_METHODS), 3, beside]}
    if "steps" in options.parts:
        for clients, way in product((5, 20, 100, 300), ("loop", "generic", "dense")):
            found[f"steps of {clients}, {way}"] = ["steps", way, clients]
    if "auto" in options.parts:
        for model, clients, executor in product(NETWORKS, COHORTS, ("loop", "cohort", "auto")):
            found[f"{model}, {clients}, {executor}"] = ["grid", executor, model, clients]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--runs", type=int, default=96)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--task", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        print(measured(options.task))
        return
    wanted = tasks(options)
    least = dict.fromkeys(wanted, float("inf"))
    for _ in range(options.turns):
        for name, task in wanted.items():
            least[name] = min(least[name], apart(task))
            print(f"{name}: {least[name]:.4g}", flush=True)
    if options.out:
        from peers import driver

        facts = {**driver.machine("cpu"), "runs": options.runs, "least": least}
        options.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
