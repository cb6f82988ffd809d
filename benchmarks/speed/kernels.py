"""What bounds a client's step on a CPU: its convolutions and matrix products alone, one thread.

    python benchmarks/speed/kernels.py --out kernels.json

For the CNNs of the comparison with peers, CPU-ms a step of three things in turns: the plain loop's
step (torch's order of memory, `torch.optim.SGD`), fedbasin's, and the kernels that neither can do
without: every convolution and dense layer forward, and backward for weight and input, channels
last. No activation, pooling, dropout, loss or update is in the third: it is what a simulator that
calls the same kernels in this order could at best come to.
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


def kernels(made: work.Work):
    """Return a function that runs the convolutions and products of one step, and nothing else."""
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
    found = [
        (part, *(t.detach().to(memory_format=torch.channels_last) for t in pair))
        if isinstance(part, nn.Conv2d)
        else (part, *pair)
        for part, *pair in found
    ]

    @torch.no_grad()
    def run() -> None:
        for n, (part, x, y) in enumerate(found):
            part(x)
            if isinstance(part, nn.Linear):
                _ = y.T @ x, y @ part.weight
                continue
            torch.ops.aten.convolution_backward(
                *(y, x, part.weight, [len(y[0])], part.stride, part.padding, part.dilation),
                *(False, [0, 0], 1, [n > 0, True, True]),
            )

    return run


def ours(made: work.Work):
    """Return a function that trains one client with fedbasin."""
    shape = made.shape
    module = parse(shape.model, "model")(shape.image, work.CLASSES)
    net, channels = Net(module), shape.image[0]
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
            "kernels alone": lambda alone=alone, steps=steps: [alone() for _ in range(steps)],
        }
        spent = {case: [] for case in cases}
        for turn in range(args.repeats + 2):
            for case, run in cases.items():
                began = time.process_time()
                run()
                if turn >= 2:  # the first fill caches
                    spent[case].append((time.process_time() - began) / steps * 1e3)
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
    if args.out:
        facts = driver.machine("cpu")
        args.out.write_text(json.dumps({**facts, "rows": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
