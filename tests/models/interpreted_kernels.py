"""Hold the kernels against convolutions one by one; run with TRITON_INTERPRET=1."""

import numpy as np
import torch
from torch.nn import functional as F

SHAPES = [  # channels, outputs, window, stride, padding, size, batch, clients
    (3, 8, 5, 1, 0, 8, 2, 2),
    (1, 16, 5, 1, 2, 6, 2, 3),
    (32, 16, 3, 1, 1, 6, 3, 2),
    (32, 32, 3, 2, 1, 8, 2, 2),
    (16, 24, 1, 2, 0, 6, 2, 3),
    (16, 16, 3, 2, 1, 7, 2, 2),
    (16, 32, 2, 3, 1, 8, 2, 2),
    (64, 20, 5, 1, 2, 5, 2, 1),
    (80, 40, 3, 1, 1, 4, 20, 2),
    (3, 64, 7, 2, 3, 8, 2, 2),
    (64, 64, 3, 1, 1, 1, 3, 2),
    (64, 128, 3, 2, 1, 2, 3, 2),
    (3, 8, (2, 3), 2, 1, (9, 6), 2, 2),
    (32, 16, (3, 1), 1, 1, (4, 7), 2, 2),
]


def pair(of):
    """Return height and width."""
    return list(of) if isinstance(of, tuple) else [of, of]


def one_by_one(x, w, bias, dy, stride, padding):
    """Return outputs and gradients of images and weights, client after client."""
    found = []
    for image, weights, offset, gradient in zip(x, w, bias, dy, strict=True):
        leaves = [t.clone().requires_grad_() for t in (image, weights)]
        y = F.conv2d(*leaves, offset, stride, padding)
        found.append((y.detach(), *torch.autograd.grad(y, leaves, gradient)))
    return [torch.stack(each) for each in zip(*found, strict=True)]


def problem(shape, dtype=torch.float64):
    """Return images, weights, biases and gradients of outputs."""
    channels, outputs, window, stride, padding, size, batch, clients = shape
    draws = np.random.default_rng(0)
    size, window = pair(size), pair(window)
    out = [(s + 2 * padding - w) // stride + 1 for s, w in zip(size, window, strict=True)]
    sizes = [
        (clients, batch, channels, *size),
        (clients, outputs, channels, *window),
        (clients, outputs),
        (clients, batch, outputs, *out),
    ]
    return [torch.from_numpy(draws.standard_normal(each)).to(dtype) for each in sizes]


def check(kernels, shape, dtype=torch.float32):
    _, _, window, stride, padding, size, *_ = shape
    x, w, bias, dy = problem(shape, dtype)
    y, dx, dw = one_by_one(*(t.float() for t in (x, w, bias, dy)), stride, padding)
    rounded = 0.0 if dtype == torch.float32 else 2e-3  # outputs and images, not sums for weights
    for ours, theirs in (
        (kernels.outputs_of(x, w, bias, stride, padding), y),
        (kernels.outputs_of(x, w, None, stride, padding), y - bias[:, None, :, None, None]),
        (kernels.image_gradients(dy, w, pair(size), stride, padding), dx),
    ):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.float(), theirs, rtol=1e-4 + rounded, atol=1e-3)
    sums = kernels.weight_gradients(dy, x, pair(window), stride, padding)
    torch.testing.assert_close(sums, dw, rtol=1e-4, atol=1e-3)
    print("ok")


def main():
    import triton.runtime.interpreter as interpreter

    class Whole(int):  # the interpreter takes int() of arrays of one, which NumPy 2.4 refuses
        def __new__(cls, value=0, *rest):
            return int(value.item()) if isinstance(value, np.ndarray) else int(value, *rest)

    interpreter.int = Whole
    from fedbasin.models import convolution_kernels as kernels

    many_parts = (16, 16, 3, 1, 1, 24, 2, 1)
    for dtype in (torch.float32, torch.float16):
        for shape in (*SHAPES, many_parts):
            check(kernels, shape, dtype)
    kernels._PROGRAMS = 1  # a GPU that is soon full: large blocks, sums in one part
    for dtype in (torch.float32, torch.float16):
        check(kernels, many_parts, dtype)


if __name__ == "__main__":
    main()
