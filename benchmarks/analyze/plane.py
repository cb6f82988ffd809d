"""Seconds for a loss plane: a grid of models over test rows, as one vmapped batch in chunks.

    python benchmarks/analyze/plane.py --out plane.json                       # 51 x 51, 10,000 rows
    python benchmarks/analyze/plane.py --points 5 --rows 100 --device cpu     # a few seconds

Random models and rows of the papers' shapes: the time does not depend on what they hold.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

import fedbasin.experiment  # noqa: F401  (fills the catalogue)
from fedbasin.analyze.landscape import plane
from fedbasin.core.evaluator import Evaluator
from fedbasin.core.expressions import parse
from fedbasin.core.net import Net
from fedbasin.core.rng import root, torch_draws_from
from fedbasin.core.task import Classification
from fedbasin.data.transform import Transform

SHAPES = {"fmnist_cnn": (1, 28, 28), "cifar_cnn": (3, 32, 32), "resnet20": (3, 32, 32)}
KEY = root(0)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="cifar_cnn", choices=SHAPES)
    parser.add_argument("--points", type=int, default=51)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--models-at-once", type=int, default=0)
    parser.add_argument("--rows-at-once", type=int, default=1000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--fp32", action="store_true", help="keep tf32 off on CUDA")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = not args.fp32
    torch.backends.cudnn.allow_tf32 = not args.fp32
    shape, rng = SHAPES[args.model], KEY.fold("data").numpy()
    with torch_draws_from(KEY.fold("model")):
        net = Net(parse(args.model, "model")(shape, 10), args.device)
    inputs = torch.from_numpy(rng.integers(0, 256, (args.rows, *shape), dtype=np.uint8))
    labels = torch.from_numpy(rng.integers(0, 10, args.rows))
    transform = Transform((0.5,) * shape[0], (0.25,) * shape[0], augment=False, kind="image")
    ground = Evaluator(
        net, inputs.to(args.device), labels.to(args.device), transform, Classification(),
        rows_at_once=args.rows_at_once, models_at_once=args.models_at_once,
    )  # fmt: skip
    noise = torch.from_numpy(rng.standard_normal((3, net.layout.size), dtype=np.float32))
    three = net.initial()[0].cpu() + 0.01 * noise
    none = torch.empty(0, net.layout.size)
    plane(ground, three, none, points=2)  # warm-up: kernels are chosen and loaded
    began = time.perf_counter()
    found = plane(ground, three, none, points=args.points)
    seconds = time.perf_counter() - began
    on_cuda = args.device.startswith("cuda")
    line = {
        "model": args.model, "points": args.points, "rows": args.rows, "seconds": seconds,
        "models_times_rows_per_second": args.points**2 * args.rows / seconds,
        "models_at_once": ground.chunk_of_models(), "rows_at_once": args.rows_at_once,
        "tf32": on_cuda and not args.fp32, "mean_loss": float(found.loss.mean()),
        "device": torch.cuda.get_device_name() if on_cuda else args.device,
        "peak_device_memory_bytes": torch.cuda.max_memory_allocated() if on_cuda else None,
        "torch": torch.__version__,
    }  # fmt: skip
    print(json.dumps(line), flush=True)
    if args.out:
        args.out.write_text(json.dumps(line, indent=2) + "\n")


if __name__ == "__main__":
    main()
