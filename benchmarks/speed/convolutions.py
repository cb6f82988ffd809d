"""Microseconds of the convolutions of ten clients: cuDNN's grouped one beside our kernels.

    python benchmarks/speed/convolutions.py --out convolutions.json

Layers of the papers' networks, ten clients of batch 50 (pfl-research's: fifty of batch 10), in tf32
or bf16.
Forwards, gradients of images and of weights, each captured as a graph of ten calls. cuDNN gets what
`vmap` would hand it, with its autotuner on; our kernels get images as the compiled step has them.
"""

import argparse
import json
from itertools import product
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F
from torch.nn import grad

from fedbasin.models.convolution import (
    halves,
    image_gradients,
    outputs_of,
    weight_gradients,
)

LAYERS = {  # clients, batch, channels, outputs, window, stride, padding, size
    "cifar_cnn 1": (10, 50, 3, 64, 5, 1, 0, 32),
    "cifar_cnn 2": (10, 50, 64, 64, 5, 1, 0, 14),
    "fmnist_cnn 1": (10, 50, 1, 32, 5, 1, 0, 28),
    "fmnist_cnn 2": (10, 50, 32, 32, 5, 1, 0, 12),
    "resnet20 a": (10, 50, 16, 16, 3, 1, 1, 32),
    "resnet20 b": (10, 50, 32, 32, 3, 1, 1, 16),
    "resnet20 c": (10, 50, 64, 64, 3, 1, 1, 8),
    "resnet18 a": (10, 50, 64, 64, 3, 1, 1, 32),
    "resnet18 a-b": (10, 50, 64, 128, 3, 2, 1, 32),
    "resnet18 b": (10, 50, 128, 128, 3, 1, 1, 16),
    "resnet18 c": (10, 50, 256, 256, 3, 1, 1, 8),
    "resnet18 d": (10, 50, 512, 512, 3, 1, 1, 4),
    "imagenet stem": (10, 50, 3, 64, 7, 2, 3, 32),
    "imagenet 8 x 8": (10, 50, 64, 64, 3, 1, 1, 8),
    "imagenet 2 x 2": (10, 50, 256, 256, 3, 1, 1, 2),
    "pfl_cnn 1": (50, 10, 3, 32, 3, 1, 0, 32),
    "pfl_cnn 2": (50, 10, 32, 64, 3, 1, 0, 30),
}


def microseconds(work, calls=10):
    """Return the time of one call within a captured graph."""
    for _ in range(2):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            work()
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(3):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1000 * start.elapsed_time(end) / (3 * calls)


def positions_inside(dy, x, padding):
    """Return gradients of outputs and padded images in float32, positions innermost in memory."""
    by_output = dy.float().transpose(1, 2).contiguous().transpose(1, 2)
    return by_output, F.pad(x.float(), (padding,) * 4).contiguous()


def measure(name, precision):
    """Return a line for each of the three passes of a layer."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    clients, batch, channels, outputs, window, stride, padding, size = LAYERS[name]
    out = (size + 2 * padding - window) // stride + 1
    draws = torch.Generator("cuda").manual_seed(0)

    def drawn(*shape):
        return torch.randn(*shape, device="cuda", generator=draws).to(dtype)

    def inside(*shape):
        return drawn(*shape).permute(0, 1, 4, 2, 3)

    x, dy = inside(clients, batch, size, size, channels), inside(clients, batch, out, out, outputs)
    w = drawn(clients, outputs, channels, window, window)
    seen, left = ((dy, x), padding) if halves(x) else (positions_inside(dy, x, padding), 0)
    how, grouped = (stride, padding), {"groups": clients}
    gx, gy = (t.transpose(0, 1).flatten(1, 2).contiguous() for t in (x, dy))
    gw = w.flatten(0, 1)
    passes = {
        "forwards": (
            lambda: outputs_of(x, w, None, *how),
            lambda: F.conv2d(gx, gw, None, *how, **grouped),
        ),
        "images": (
            lambda: image_gradients(dy, w, [size, size], *how),
            lambda: grad.conv2d_input(gx.shape, gw, gy, *how, **grouped),
        ),
        "weights": (
            lambda: weight_gradients(*seen, [window, window], stride, left),
            lambda: grad.conv2d_weight(gx, gw.shape, gy, *how, **grouped),
        ),
    }
    tflop = 2 * clients * batch * out**2 * outputs * channels * window**2 / 1e12
    for kind, (ours, theirs) in passes.items():
        if kind == "images" and channels < 4:
            continue  # nobody asks for the gradient of a picture
        times = [microseconds(work) for work in (ours, theirs)]
        yield {
            "layer": name, "precision": precision, "pass": kind,
            "ours_us": times[0], "cudnn_us": times[1],
            "ratio": times[1] / times[0], "ours_tflops": 1e6 * tflop / times[0],
        }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--precisions", default="tf32", help="of tf32, bf16")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = torch.backends.cudnn.allow_tf32 = True
    lines = []
    for name, precision in product(args.layers.split(","), args.precisions.split(",")):
        lines += measure(name, precision)
        if args.out:  # after every layer, so that an interrupted run leaves what it has
            facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
            args.out.write_text(json.dumps(facts | {"lines": lines}, indent=1) + "\n")
    table = Table(title="convolutions of all clients")
    for head in ("layer", "precision", "pass", "cuDNN us", "ours us", "ratio", "TFLOP/s"):
        table.add_column(head, justify="right")
    for line in lines:
        numbers = [line[k] for k in ("cudnn_us", "ours_us", "ratio", "ours_tflops")]
        table.add_row(
            line["layer"], line["precision"], line["pass"], *(f"{n:.1f}" for n in numbers)
        )
    Console().print(table)


if __name__ == "__main__":
    main()
