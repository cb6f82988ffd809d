"""What bounds a client's step on a CPU: its convolutions and matrix products alone, one thread.

    python benchmarks/speed/kernels.py --out kernels.json

For the CNNs of the comparison with peers, CPU-ms a step of four things in turns: the plain loop's
step (torch's order of memory, `torch.optim.SGD`), fedbasin's, fedbasin's in bfloat16 where autocast
allows it (`sim.precision = "bf16"`), and the kernels that no float32 step can do without: every
convolution and dense layer forward, and backward for weight and input, channels last. No
activation, pooling, dropout, loss or update is in these: it is what a simulator that calls the same
kernels in this order could at best come to. Then every kernel repeated by itself, with its
GFLOP/s, beside a square product of 1024 rows, which is about what a core can do.
"""

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch
from peers import driver, networks, work
from peers.plain import Plain
from torch import nn

import fedbasin.experiment  # noqa: F401  (fills the catalogue)
from fedbasin.core.expressions import parse
from fedbasin.core.method import Plan
from fedbasin.core.net import Net
from fedbasin.core.rng import root
from fedbasin.data.transform import Transform
from fedbasin.local import SGD, Received, Shard, Trainer
from fedbasin.sim.allocator import keep_freed_memory


def layers(made: work.Work):
    """Return every convolution and dense layer of a network, with its inputs and outputs."""
    net, found = networks.network(made), []
    hooks = [
        part.register_forward_hook(lambda part, x, y: found.append((part, x[0], y)))
        for part in net
        if isinstance(part, nn.Conv2d | nn.Linear)
    ]
    with torch.no_grad():
        net(torch.from_numpy(work.pixels(made.inputs[0][: made.shape.batch])))
    for hook in hooks:
        hook.remove()
    return [
        (part, *(t.detach().to(memory_format=torch.channels_last) for t in pair))
        if isinstance(part, nn.Conv2d)
        else (part, *pair)
        for part, *pair in found
    ]


def passes(part, x, y):
    """Return a layer's three passes by name: forward, and back to its inputs and its weights."""
    if isinstance(part, nn.Linear):
        return {
            "forward": lambda: part(x),
            "inputs": lambda: y @ part.weight,
            "weights": lambda: y.T @ x,
        }

    def back(inputs: bool, weights: bool):
        return lambda: torch.ops.aten.convolution_backward(
            *(y, x, part.weight, [len(y[0])], part.stride, part.padding, part.dilation),
            *(False, [0, 0], 1, [inputs, weights, weights]),
        )

    return {"forward": lambda: part(x), "inputs": back(True, False), "weights": back(False, True)}


def kernels(made: work.Work):
    """Return a function that runs the convolutions and products of one step, and nothing else."""
    calls = [passes(*layer) for layer in layers(made)]
    del calls[0]["inputs"]  # nobody asks for the gradient of the images

    @torch.no_grad()
    def run() -> None:
        for layer in calls:
            for call in layer.values():
                call()

    return run


@torch.no_grad()
def speeds(name: str, made: work.Work, repeats: int):
    """Yield the time and GFLOP/s of every kernel by itself, and of a large product."""
    square = torch.randn(1024, 1024)
    cases = {"product of 1024 x 1024": (2 * 1024**3, lambda: square @ square)}
    for n, (part, x, y) in enumerate(layers(made)):
        shape = "x".join(str(size) for size in part.weight.shape)
        for which, call in passes(part, x, y).items():
            if n or which != "inputs":
                flops = 2 * part.weight.numel() * y.numel() // len(part.weight)
                cases[f"{type(part).__name__} {shape}, {which}"] = (flops, call)
    for what, (flops, call) in cases.items():
        took = statistics.median([_cpu_ms(call) for _ in range(repeats + 2)][2:])
        rate = round(flops / took / 1e6, 1)
        yield {"shape": name, "what": what, "cpu_ms": round(took, 3), "gflop_a_second": rate}


def _cpu_ms(call) -> float:
    began = time.process_time()
    call()
    return (time.process_time() - began) * 1e3


def ours(made: work.Work, mixed: bool = False):
    """Return a function that trains one client with fedbasin."""
    shape = made.shape
    module = parse(shape.model, "model")(shape.image, work.CLASSES)
    net, channels = Net(module, mixed=mixed), shape.image[0]
    transform = Transform((0.5,) * channels, (0.25,) * channels)
    trainer = Trainer(net, (), SGD(shape.momentum), shape.batch, transform, work.CLASSES)
    shard = Shard(torch.from_numpy(made.inputs[0]), torch.from_numpy(made.labels[0]))
    given = Received(*net.initial(), (), (), 0, root(0).tensor())
    return lambda: trainer.train(shard, given, Plan(shape.lr, 1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    keep_freed_memory()
    options = argparse.Namespace(device="cpu", processes=1)
    results = []
    for name in ("W0", "W1"):
        shape = work.SHAPES[name]
        made = work.make(replace(shape, clients=shape.cohort))
        steps = -(-made.shape.rows // made.shape.batch)
        plain, alone = Plain(made, options), kernels(made)
        cases = {
            "plain loop": lambda plain=plain: plain.train(0),
            "fedbasin": ours(made),
            "fedbasin, bf16": ours(made, mixed=True),
            "kernels alone": lambda alone=alone, steps=steps: [alone() for _ in range(steps)],
        }
        spent = {case: [] for case in cases}
        for turn in range(args.repeats + 2):
            for case, run in cases.items():
                took = _cpu_ms(run) / steps
                if turn >= 2:  # the first fill caches
                    spent[case].append(took)
        for case, times in spent.items():
            ratio = statistics.median(
                a / b for a, b in zip(spent["plain loop"], times, strict=True)
            )
            line = {
                "shape": name,
                "what": case,
                "cpu_ms_a_step": round(statistics.median(times), 2),
                "plain_loop_to_this": round(ratio, 2),
            }
            results.append(line)
            print(json.dumps(line))
        for line in speeds(name, made, args.repeats):
            results.append(line)
            print(json.dumps(line))
    if args.out:
        facts = driver.machine("cpu")
        args.out.write_text(json.dumps({**facts, "rows": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
