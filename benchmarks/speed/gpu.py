"""Milliseconds per client-step: the loop executor against the cohort executor, in one go.

    python benchmarks/speed/gpu.py --out results.json

Synthetic rows of the papers' shapes; 100 clients, 10 a round, batch 50, SGD with momentum.
`equal` clients hold 500 rows each; `dirichlet` clients share 50,000 rows by Dirichlet(0.1).
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

import fedbasin.experiment  # noqa: F401  (fills the catalogue)
from fedbasin.core.expressions import parse
from fedbasin.core.method import Plan
from fedbasin.core.net import Net
from fedbasin.core.rng import root, torch_draws_from
from fedbasin.data.transform import Transform
from fedbasin.local import SGD, Trainer
from fedbasin.local.batches import count_steps
from fedbasin.partition import Pool
from fedbasin.sim import LoopExecutor, Population
from fedbasin.sim.clients import ClientStates
from fedbasin.sim.cohort import CohortExecutor
from fedbasin.sim.loop import Sent

MODELS = {
    "fmnist_cnn": (1, 28, 28),
    "cifar_cnn": (3, 32, 32),
    "resnet20": (3, 32, 32),
    "resnet18": (3, 32, 32),
}
KEY = root(0)


def population(shape, split, device):
    rng = KEY.fold("data").numpy()
    labels = rng.integers(0, 10, 50_000)
    inputs = rng.integers(0, 256, (50_000, *shape), dtype=np.uint8)
    how = "iid" if split == "equal" else "dirichlet(alpha=0.1)"
    parts = parse(how, "partition")(Pool(labels, 10), 100, KEY.fold("partition").numpy())
    return Population.of(inputs, labels, parts.clients, device)


def trainer_for(model, shape, device):
    with torch_draws_from(KEY.fold("model")):
        net = Net(parse(model, "model")(shape, 10), device)
    channels = shape[0]
    transform = Transform((0.5,) * channels, (0.25,) * channels, augment=False, kind="image")
    return Trainer(net, (), SGD(0.9, 1e-3), 50, transform, 10)


def seconds_of_rounds(executor, cohorts, plan):
    """Return seconds and client-steps of each round, after one round of warm-up."""
    vector, buffers = executor.trainer.net.initial()
    states, found = ClientStates((), vector), []
    for number, cohort in enumerate(cohorts):
        torch.cuda.synchronize() if vector.is_cuda else None
        began = time.perf_counter()
        gathered = executor.train(cohort, Sent(vector, buffers, (), number), plan, states)
        float(gathered.train_loss)
        spent = time.perf_counter() - began
        steps = sum(count_steps(plan, int(n), 50) for n in executor.population.sizes[cohort])
        found.append((spent, steps))
    return found


def measure(model, split, args, device):
    shape = MODELS[model]
    people, trainer = population(shape, split, device), trainer_for(model, shape, device)
    rng = KEY.fold("cohorts").numpy()
    cohorts = [np.sort(rng.choice(100, 10, replace=False)) for _ in range(args.rounds)]
    line = {"model": model, "split": split}
    for name, executor, count, epochs in (
        ("loop", LoopExecutor(trainer, people, KEY), 2, 1),
        ("cohort", CohortExecutor(trainer, people, KEY), args.rounds, 5),
    ):
        torch.backends.cudnn.benchmark = name == "cohort"  # the loop meets too many batch sizes
        # Every shape is compiled once in the warm-up, as in a run of hundreds of rounds.
        warm = cohorts if name == "cohort" else cohorts[:1]
        seconds_of_rounds(executor, warm, Plan(0.01, epochs))
        timed = seconds_of_rounds(executor, cohorts[:count], Plan(0.01, epochs))
        spent, steps = (sum(column) for column in zip(*timed, strict=True))
        line[f"{name}_ms_per_client_step"] = 1000 * spent / steps
        line[f"{name}_samples_per_second"] = steps * 50 / spent
        if name == "cohort":
            line["share_useful"] = executor.counters.share_useful
            line["shapes_compiled"] = len(executor.counters.compiled)
    line["ratio"] = line["loop_ms_per_client_step"] / line["cohort_ms_per_client_step"]
    return line


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--splits", default="equal,dirichlet")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    lines = []
    for model in args.models.split(","):
        for split in args.splits.split(","):
            line = measure(model, split, args, args.device)
            lines.append(line)
            print(json.dumps(line), flush=True)
    if args.out:
        name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
        facts = {"device": name, "torch": torch.__version__, "lines": lines}
        args.out.write_text(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
