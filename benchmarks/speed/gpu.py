"""Milliseconds per client-step: a plain eager loop, our loop and our cohort, in one go.

    python benchmarks/speed/gpu.py --out results.json

Synthetic rows of the papers' shapes; 100 clients, 10 a round, batch 50, SGD with momentum.
`equal` clients hold 500 rows each; `dirichlet` clients share 50,000 rows by Dirichlet(0.1).
`eager` is what one would write by hand: an nn.Module, torch.optim.SGD, one client after another on
rows that lie on the device, with cuDNN's autotuner off (ragged batches would run it again and
again). Achieved FLOP/s count products of the forward and backward pass once for every useful
client-step; `--ceiling` is the chip's TFLOP/s for the precision. `--profile` says what the time of
a round goes into, kernel by kernel.
"""

import argparse
import copy
import json
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import fedbasin.experiment  # noqa: F401  (fills the catalogue)
from fedbasin.core.expressions import parse
from fedbasin.core.method import Plan
from fedbasin.core.net import Net
from fedbasin.core.rng import root, torch_draws_from
from fedbasin.core.round import Launch, Sent
from fedbasin.data.transform import Transform
from fedbasin.local import SGD, Trainer
from fedbasin.local.batches import count_steps
from fedbasin.partition import Pool
from fedbasin.sim import LoopExecutor, Population
from fedbasin.sim.clients import ClientStates
from fedbasin.sim.cohort import CohortExecutor, Counters

MODELS = {
    "fmnist_cnn": (1, 28, 28),
    "fedcda_cnn": (1, 28, 28),
    "cifar_cnn": (3, 32, 32),
    "resnet20": (3, 32, 32),
    "resnet18": (3, 32, 32),
    "resnet18(stem='imagenet')": (3, 32, 32),
}
KEY = root(0)


def population(shape, split, device):
    rng = KEY.fold("data").numpy()
    labels = rng.integers(0, 10, 50_000)
    inputs = rng.integers(0, 256, (50_000, *shape), dtype=np.uint8)
    how = "iid" if split == "equal" else "dirichlet(alpha=0.1)"
    parts = parse(how, "partition")(Pool(labels, 10), 100, KEY.fold("partition").numpy())
    return Population.of(inputs, labels, parts.clients, device)


def trainer_for(model, shape, device, precision="tf32"):
    with torch_draws_from(KEY.fold("model")):
        net = Net(parse(model, "model")(shape, 10), device, mixed=precision == "bf16")
    channels = shape[0]
    transform = Transform((0.5,) * channels, (0.25,) * channels, augment=False, kind="image")
    return Trainer(net, (), SGD(0.9, 1e-3), 50, transform, 10)


def flops_of_step(trainer, people):
    """Count the products of one step of one client on a full batch."""
    module = parse_module(trainer)
    inputs = trainer.transform(people.inputs[:50], None)
    with FlopCounterMode(display=False) as counted:
        F.cross_entropy(module(inputs), people.labels[:50]).backward()
    return counted.get_total_flops()


def parse_module(trainer):
    """Return a fresh copy of the network as a plain module."""
    module = copy.deepcopy(trainer.net._training.module)
    return module.train()


class EagerLoop:
    """What one would write by hand; it counts as an executor of a round."""

    def __init__(self, trainer, people):
        self.trainer, self.population = trainer, people
        self.module = parse_module(trainer)
        self.counters = Counters()

    def train(self, cohort, sent, plan, states):
        parameters = list(self.module.parameters())
        start = [p.detach().clone() for p in parameters]
        losses = []
        for client in cohort:
            with torch.no_grad():
                torch._foreach_copy_(parameters, start)
            sgd = torch.optim.SGD(parameters, plan.lr, 0.9, weight_decay=1e-3)
            shard = self.population.shard(int(client))
            for _ in range(plan.epochs):
                order = torch.randperm(len(shard.labels), device=shard.labels.device)
                for rows in order.split(50):
                    inputs = self.trainer.transform(shard.inputs[rows], None)
                    sgd.zero_grad()
                    with torch.autocast(inputs.device.type, torch.bfloat16, self.trainer.net.mixed):
                        logits = self.module(inputs)
                    loss = F.cross_entropy(logits.float(), shard.labels[rows])
                    loss.backward()
                    sgd.step()
            losses.append(loss.detach())
        return Timed(torch.stack(losses).mean())


class Timed(NamedTuple):
    train_loss: torch.Tensor


def seconds_of_rounds(executor, cohorts, plan):
    """Return seconds and client-steps of each round, after one round of warm-up."""
    vector, buffers = executor.trainer.net.initial()
    states, found = ClientStates((), vector), []
    for number, cohort in enumerate(cohorts):
        torch.cuda.synchronize() if vector.is_cuda else None
        began = time.perf_counter()
        gathered = executor.train(
            [Launch(cohort, Sent(vector, buffers, (), number), plan, states)]
        )[0]
        float(gathered.train_loss)
        spent = time.perf_counter() - began
        steps = sum(count_steps(plan, int(n), 50) for n in executor.population.sizes[cohort])
        found.append((spent, steps))
    return found


def kernels_of(executor, cohort, plan, most=30):
    """Return the kernels (operators, without a GPU) that take most of a round's time."""
    cuda = executor.trainer.net.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as seen:
        ((_, steps),) = seconds_of_rounds(executor, [cohort], plan)
    found = [
        {
            "kernel": event.key,
            "calls": event.count,
            "us_per_step": (event.self_device_time_total if cuda else event.self_cpu_time_total)
            / steps,
        }
        for event in seen.key_averages()
    ]
    return sorted(found, key=lambda each: -each["us_per_step"])[:most]


def measure(model, split, precision, args, device):
    shape = MODELS[model]
    people = population(shape, split, device)
    trainer = trainer_for(model, shape, device, precision)
    rng = KEY.fold("cohorts").numpy()
    cohorts = [np.sort(rng.choice(100, 10, replace=False)) for _ in range(args.rounds)]
    line = {"model": model, "split": split, "precision": precision}
    runners = {
        "eager": lambda: EagerLoop(trainer, people),
        "loop": lambda: LoopExecutor(trainer, people, KEY),
        "captured": lambda: CohortExecutor(trainer, people, KEY, compiled=False),
        "cohort": lambda: CohortExecutor(trainer, people, KEY),
    }
    for name in args.runners.split(","):
        slow = name in ("eager", "loop")
        # One cohort is enough for loops; others meet every size of the active set first.
        chosen, epochs = (cohorts[:2], 1) if slow else (cohorts, 5)
        torch.backends.cudnn.benchmark = not slow
        executor = runners[name]()
        began = time.perf_counter()
        seconds_of_rounds(executor, chosen[:1] if slow else chosen, Plan(0.01, epochs))
        line[f"{name}_warm_seconds"] = time.perf_counter() - began
        timed = seconds_of_rounds(executor, chosen, Plan(0.01, epochs))
        spent, steps = (sum(column) for column in zip(*timed, strict=True))
        line[f"{name}_ms"] = 1000 * spent / steps
        if not slow:
            line[f"{name}_share_useful"] = executor.counters.share_useful
            line[f"{name}_shapes"] = executor.counters.compiled
            if args.profile:
                line[f"{name}_kernels"] = kernels_of(executor, chosen[0], Plan(0.01, epochs))
    line["gflop_per_step"] = flops_of_step(trainer, people) / 1e9
    if "cohort_ms" in line:
        line["cohort_samples_per_second"] = 50_000 / line["cohort_ms"]
        line["cohort_tflops"] = line["gflop_per_step"] / line["cohort_ms"]
        line["share_of_ceiling"] = line["cohort_tflops"] / args.ceiling
        for slow in ("eager", "loop"):
            if f"{slow}_ms" in line:
                line[f"ratio_to_{slow}"] = line[f"{slow}_ms"] / line["cohort_ms"]
    torch._dynamo.reset()
    return line


def shown(lines):
    """Return the lines as a table."""
    table = Table(title="ms per client-step")
    names = [k for k in lines[0] if k.endswith("_ms")]
    for head in ("model", "clients", "precision", *names, "x eager", "useful", "TFLOP/s"):
        table.add_column(head.removesuffix("_ms"), justify="right")
    for line in lines:
        table.add_row(
            line["model"],
            line["split"],
            line["precision"],
            *(f"{line[name]:.3f}" for name in names),
            f"{line.get('ratio_to_eager', float('nan')):.1f}",
            f"{100 * line.get('cohort_share_useful', float('nan')):.0f} %",
            f"{line.get('cohort_tflops', float('nan')):.1f}",
        )
    return table


def shown_kernels(line, name):
    """Return what a round's time goes into as a table."""
    table = Table("kernel", "calls", "us per client-step", title=f"{line['model']}, {name}")
    for each in line[f"{name}_kernels"]:
        label = Text(each["kernel"], overflow="ellipsis", no_wrap=True)
        table.add_row(label, str(each["calls"]), f"{each['us_per_step']:.2f}")
    return table


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--splits", default="equal,dirichlet")
    parser.add_argument("--precisions", default="tf32", help="of tf32, bf16")
    parser.add_argument(
        "--runners",
        default="eager,loop,cohort",
        help="also captured: the cohort as a graph, not compiled",
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--profile", action="store_true", help="of cohort and captured")
    parser.add_argument("--ceiling", type=float, default=494.0, help="TFLOP/s of the chip")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    lines, console = [], Console()
    for model in args.models.split(","):
        for split in args.splits.split(","):
            for precision in args.precisions.split(","):
                lines.append(measure(model, split, precision, args, args.device))
                few = {k: v for k, v in lines[-1].items() if not k.endswith("_kernels")}
                console.print_json(json.dumps(few), indent=None)
                for key in lines[-1].keys() - few.keys():
                    console.print(shown_kernels(lines[-1], key.removesuffix("_kernels")))
                if args.out:  # after every line, so that an interrupted run leaves what it has
                    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
                    facts = {"device": name, "torch": torch.__version__, "lines": lines}
                    args.out.write_text(json.dumps(facts, indent=1) + "\n")
    console.print(shown(lines))


if __name__ == "__main__":
    main()
