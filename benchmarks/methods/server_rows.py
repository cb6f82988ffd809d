"""How fast the server learns from its own rows on a CPU, beside a client's training, one thread.

    python benchmarks/methods/server_rows.py --out server_rows.json

FedLAW's CIFAR-100 setting in synthetic rows: SimpleCNN, 1,000 rows on the server, batches of 128,
20 clients (2 where they only teach). Rows per CPU-second of a pass over the server's rows, forward
and backward: a merge of three passes less one of one, so that teachers and scoring do not count.
Each method is given the rows as a run has them, in the memory order that the network runs fastest
on, and as they are stored. All take turns; numbers are medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

import fedbasin.experiment  # noqa: F401  (fills the catalogue)
from fedbasin.core.evaluator import Evaluator
from fedbasin.core.expressions import parse
from fedbasin.core.method import Context, Plan
from fedbasin.core.net import Net
from fedbasin.core.rng import root, torch_draws_from
from fedbasin.core.task import Classification
from fedbasin.data.transform import Transform
from fedbasin.local import SGD, Received, Shard, Trainer
from fedbasin.methods import FedBE, FedDF, FedLAW, ServerFT
from fedbasin.sim.allocator import keep_freed_memory
from fedbasin.testing import replies_of

ROWS, CLIENTS, CLASSES, BATCH = 1_000, 20, 100, 128
METHODS = (FedLAW(guard=0.0), FedDF(), FedBE(samples=1), ServerFT())


class AsStored(Net):
    """A network that takes its inputs as they come."""

    def arranged(self, inputs):
        return inputs


def cpu_seconds(work):
    began = time.process_time()
    work()
    return time.process_time() - began


def measured(precision: str, repeats: int) -> list[dict]:
    """Return rows per second of a client and of every method, in both orders of memory."""
    draws, key = torch.Generator().manual_seed(0), root(0)
    images = torch.randint(0, 256, (ROWS, 3, 32, 32), generator=draws, dtype=torch.uint8)
    labels = torch.randint(CLASSES, (ROWS,), generator=draws)
    transform = Transform((0.5,) * 3, (0.5,) * 3)
    with torch_draws_from(key.fold("model")):
        module = parse("simple_cnn", "model")((3, 32, 32), CLASSES)
    nets = {kind: kind(module, mixed=precision == "bf16") for kind in (Net, AsStored)}
    vector, buffers = nets[Net].initial()
    models = vector + 0.01 * torch.randn(CLIENTS, len(vector), generator=draws)
    replies, two = replies_of(models), replies_of(models[:2])

    def client():
        trainer = Trainer(nets[Net], (), SGD(), BATCH, transform, CLASSES)
        given = Received(vector, buffers, (), (), 0, key.tensor())
        trainer.train(Shard(images, labels), given, Plan(lr=0.01))

    def merging(method, kind, epochs):
        proxy = Evaluator(nets[kind], images, labels, transform, Classification())
        context = Context(nets[kind].layout, CLIENTS, 1, key, proxy=proxy)
        state, sent = method.init(vector, context), replies if method is METHODS[0] else two
        method = replace(method, epochs=epochs, batch=BATCH)
        return lambda: method.aggregate(state, vector, sent, context)

    pairs = [(method, kind) for method in METHODS for kind in nets]
    works = [tuple(merging(*pair, epochs) for epochs in (1, 3)) for pair in pairs]
    spent = {place: [] for place in range(-1, len(pairs))}
    for _ in tqdm(range(repeats + 1), desc=precision):  # the first is to warm up
        spent[-1].append(cpu_seconds(client))
        for place, (short, long) in enumerate(works):
            few = cpu_seconds(short)
            spent[place].append((cpu_seconds(long) - few) / 2)
    rates = {place: ROWS / statistics.median(times[1:]) for place, times in spent.items()}
    found = [{"precision": precision, "what": "client", "rows_per_second": rates[-1]}]
    for place in range(0, len(pairs), 2):
        line = {"precision": precision, "what": str(METHODS[place // 2])}
        fast, stored = rates[place], rates[place + 1]
        found.append(
            line
            | {"rows_per_second": fast, "as_stored": stored}
            | {"to_stored": fast / stored, "to_client": fast / rates[-1]}
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--out", type=Path, default=None, help="JSON of all numbers")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as a run does
    found = [line for name in args.precisions for line in measured(name, args.repeats)]
    for line in found:
        beside = "".join(f", {k} {v:.2f}" for k, v in line.items() if k.startswith("to_"))
        print(f"{line['precision']} {line['what']}: {line['rows_per_second']:,.0f} rows/s{beside}")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
