"""Convolutions of many clients at once, each with weights of its own, for a GPU.

cuDNN runs a grouped convolution client after client, and one client's batch is too small to fill a
GPU. Here clients are an axis of the launch. A convolution is a product of rows [M, T C] (M
positions of the batch, T taps of the window, C channels) with weights [T C, N], whose rows are read
from the image as it goes. Sums are taken in a fixed order: the same inputs give the same bits.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from fedbasin.models.convolution import FEW, halves

_PROGRAMS = 264  # about two for each multiprocessor of a large GPU


@triton.jit
def _place(
    high,
    wide,
    t,
    H: tl.constexpr,
    W: tl.constexpr,
    KW: tl.constexpr,
    STRIDE: tl.constexpr,
    PAD: tl.constexpr,
    BACK: tl.constexpr,
):
    """Return where tap t looks from a position, of H x W places, and whether it is one of them.

    BACK, the position is an input pixel, and the place the output that saw it through the tap.
    """
    if BACK:
        up = high + PAD - t // KW
        left = wide + PAD - t % KW
        some = (up >= 0) & (left >= 0) & (up < H * STRIDE) & (left < W * STRIDE)
        if STRIDE > 1:
            some = some & (up % STRIDE == 0) & (left % STRIDE == 0)
        up = up // STRIDE
        left = left // STRIDE
    else:
        up = high * STRIDE + t // KW - PAD
        left = wide * STRIDE + t % KW - PAD
        some = high >= 0  # always, as every tap looks within
        if PAD > 0:
            some = (up >= 0) & (left >= 0) & (up < H) & (left < W)
    return up, left, some


@triton.jit
def _tap(j, first_high, first_wide, across, KW: tl.constexpr, S: tl.constexpr):
    """Return the j-th of the taps that lie S apart from a first one, with so many in a row."""
    if S > 1:
        j = (first_high + j // across * S) * KW + first_wide + j % across * S
    return j


@triton.jit
def _product(
    x,
    w,
    bias,
    y,
    x_client,
    x_row,
    x_height,
    x_width,
    x_channel,
    w_output: tl.constexpr,
    w_tap: tl.constexpr,
    w_channel: tl.constexpr,
    B: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    STRIDE: tl.constexpr,
    PAD: tl.constexpr,
    BACK: tl.constexpr,
    BIAS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """y[a, m, n] = bias[a, n] + sum over taps t and channels c of x[a, at(m, t), c] w[a, n, t, c].

    at(m, t) is where tap t looks from position m, see `_place`; BACK, x are gradients of outputs.
    Under a stride S a pixel was seen through every S-th tap alone, in either direction, and pixels
    that lie S apart through the same ones: a program takes such pixels, and those taps.
    """
    S: tl.constexpr = STRIDE if BACK else 1
    T: tl.constexpr = KH * KW
    HIGH: tl.constexpr = (OH + S - 1) // S
    WIDE: tl.constexpr = (OW + S - 1) // S
    tiles = tl.cdiv(N, BN)
    tile = tl.program_id(0)
    a = tl.program_id(1).to(tl.int64)
    top = 0
    side = 0
    first_high = 0
    first_wide = 0
    if S > 1:
        top = tl.program_id(2) // S
        side = tl.program_id(2) % S
        first_high = (top + PAD) % S
        first_wide = (side + PAD) % S
    across = (KW - first_wide + S - 1) // S
    taps = (KH - first_high + S - 1) // S * across
    m = (tile // tiles) * BM + tl.arange(0, BM)
    n = (tile % tiles) * BN + tl.arange(0, BN)
    row = m // (HIGH * WIDE)
    high = (m // WIDE) % HIGH * S + top
    wide = m % WIDE * S + side
    x += a * x_client
    w += a * (N * T * C)
    rows = row.to(tl.int64) * x_row
    some_m = m < B * HIGH * WIDE
    place = m
    if S > 1:
        some_m = some_m & (high < OH) & (wide < OW)
        place = (row * OH + high) * OW + wide
    some_n = n < N
    k = tl.arange(0, BK)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    if C % BK == 0:  # a block lies within one tap, so that positions are one number a row
        for i in range(taps * (C // BK)):
            t = _tap(i // (C // BK), first_high, first_wide, across, KW, S)
            c = (i % (C // BK)) * BK + k
            up, left, some = _place(high, wide, t, H, W, KW, STRIDE, PAD, BACK)
            at = rows + up * x_height + left * x_width
            some = (some & some_m)[:, None]
            seen = tl.load(x + at[:, None] + (c * x_channel)[None, :], some, 0.0)
            weights = w + (n * w_output)[None, :] + (t * w_tap + c * w_channel)[:, None]
            total = tl.dot(seen, tl.load(weights, some_n[None, :], 0.0), total)
    else:
        for i in range(tl.cdiv(taps * C, BK)):
            tc = i * BK + k
            some_k = tc < taps * C
            t = _tap(tc // C, first_high, first_wide, across, KW, S)
            c = tc % C
            up, left, some = _place(
                high[:, None], wide[:, None], t[None, :], H, W, KW, STRIDE, PAD, BACK
            )
            at = rows[:, None] + up * x_height + left * x_width + (c * x_channel)[None, :]
            seen = tl.load(x + at, some & some_m[:, None] & some_k[None, :], 0.0)
            weights = w + (n * w_output)[None, :] + (t * w_tap + c * w_channel)[:, None]
            total = tl.dot(seen, tl.load(weights, some_n[None, :] & some_k[:, None], 0.0), total)
    if BIAS:
        total += tl.load(bias + a * N + n, some_n, 0.0)[None, :]
    out = y + a * (B * OH * OW * N) + place.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out, total.to(y.dtype.element_ty), some_m[:, None] & some_n[None, :])


@triton.jit
def _outer(
    x,
    dy,
    dw,
    A,
    LENGTH,
    M: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    STRIDE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """dw[s, a, n, k] = sum over positions m of part s of x[a, at(m, k)] dy[a, n, m].

    k is a channel and a tap of the window, at(m, k) the pixel that it looks at from position m. A
    part is LENGTH blocks of BM positions. Positions are innermost in memory on both sides, as
    tensor cores want it for the axis that is summed over; neighbouring k read the same pixels.
    """
    T: tl.constexpr = KH * KW
    tiles = tl.cdiv(N, BN)
    tile = tl.program_id(0)
    a = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    k = (tile // tiles) * BK + tl.arange(0, BK)
    n = (tile % tiles) * BN + tl.arange(0, BN)
    some_k = k < C * T
    some_n = n < N
    x += a * (M // (OH * OW) * C * H * W)
    dy += a * (N * M)
    tap = (k // T) * (H * W) + (k % T // KW) * W + k % KW
    total = tl.zeros((BK, BN), dtype=tl.float32)
    for i in range(LENGTH):
        m = (part * LENGTH + i) * BM + tl.arange(0, BM)
        some = m < M
        place = m % (OH * OW)
        pixel = (m // (OH * OW)) * (C * H * W) + place // OW * (STRIDE * W) + place % OW * STRIDE
        at = tap[:, None] + pixel[None, :]
        seen = tl.load(x + at, some_k[:, None] & some[None, :], 0.0)
        out = n[None, :] * M + m[:, None]
        total = tl.dot(seen, tl.load(dy + out, some[:, None] & some_n[None, :], 0.0), total)
    place = n[None, :] * (C * T) + k[:, None]
    tl.store(dw + (part * A + a) * (N * C * T) + place, total, some_k[:, None] & some_n[None, :])


@triton.jit
def _outer_inside(
    x,
    dy,
    dw,
    A,
    LENGTH,
    M: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    STRIDE: tl.constexpr,
    PAD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """dw[s, a, n, k] = sum over positions m of part s of x[a, at(m, k)] dy[a, m, n].

    As `_outer`, with channels innermost in memory on both sides: tensor cores turn tiles of halves
    around themselves, so that images are read as they lie and nothing is copied. k is a tap and a
    channel of it.
    """
    T: tl.constexpr = KH * KW
    tiles = tl.cdiv(N, BN)
    tile = tl.program_id(0)
    a = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    k = (tile // tiles) * BK + tl.arange(0, BK)
    n = (tile % tiles) * BN + tl.arange(0, BN)
    some_k = k < T * C
    some_n = n < N
    t = (k // C)[None, :]
    c = (k % C)[None, :]
    x += a * (M // (OH * OW) * H * W * C)
    dy += a * (M * N)
    total = tl.zeros((BK, BN), dtype=tl.float32)
    for i in range(LENGTH):
        m = (part * LENGTH + i) * BM + tl.arange(0, BM)
        high = (m // OW) % OH
        wide = m % OW
        some_m = (m < M)[:, None]
        up, left, some = _place(high[:, None], wide[:, None], t, H, W, KW, STRIDE, PAD, False)
        at = ((m // (OH * OW))[:, None] * H + up) * (W * C) + left * C + c
        seen = tl.load(x + at, some & some_m & some_k[None, :], 0.0)
        out = m[:, None] * N + n[None, :]
        total = tl.dot(tl.trans(seen), tl.load(dy + out, some_m & some_n[None, :], 0.0), total)
    place = n[None, :] * (C * T) + k[:, None]
    tl.store(dw + (part * A + a) * (N * C * T) + place, total, some_k[:, None] & some_n[None, :])


def outputs_of(x: Tensor, w: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
    """Return the outputs [A, B, N, OH, OW] of images [A, B, C, H, W], weights [A, N, C, K, L] and
    biases [A, N].
    """
    sizes = [(x.shape[i] + 2 * padding - w.shape[i]) // stride + 1 for i in (3, 4)]
    return _multiplied(x, _weights_inside(w), bias, sizes, stride, padding, back=False)


def image_gradients(
    dy: Tensor, w: Tensor, size: Sequence[int], stride: int, padding: int
) -> Tensor:
    """Return the gradients of images [A, B, C, H, W] from those of outputs; `size` is (H, W)."""
    turned = w.permute(0, 2, 3, 4, 1)
    if halves(w):
        turned = _weights_inside(w).transpose(1, 4)
    return _multiplied(dy, turned, None, size, stride, padding, back=True)


def _weights_inside(w: Tensor) -> Tensor:
    """Return weights [A, N, K, L, C] of [A, N, C, K, L], as they lie where channels are inside."""
    return w.permute(0, 1, 3, 4, 2).contiguous()


def _multiplied(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    size: Sequence[int],
    stride: int,
    padding: int,
    *,
    back: bool,
) -> Tensor:
    """Launch `_product` on weights [A, N, K, L, C], of which single floats lie just so."""
    x = x if x.shape[2] < FEW else channels_inside(x)
    w = w if halves(w) else w.contiguous()
    clients, batch, channels, height, width = x.shape
    outputs = w.shape[1]
    apart = stride if back else 1
    positions = batch * -(-size[0] // apart) * -(-size[1] // apart)  # of pixels that lie so apart
    (*blocks, warps, stages) = _blocks(positions, outputs, channels, clients * apart**2, halves(x))
    tiles = triton.cdiv(positions, blocks[0]) * triton.cdiv(outputs, blocks[1])
    y = x.new_empty(clients, batch, *size, outputs)
    _product[(tiles, clients, apart**2)](
        *(x, w, x if bias is None else bias.contiguous(), y),
        *(x.stride(0), x.stride(1), x.stride(3), x.stride(4), x.stride(2)),
        *(w.stride(1), w.stride(3), w.stride(4)),
        *(batch, outputs, channels, height, width, *size, *w.shape[2:4], stride, padding),
        *(back, bias is not None, *blocks),
        num_warps=warps,
        num_stages=stages,
    )
    return y.permute(0, 1, 4, 2, 3)


def _blocks(
    positions: int, outputs: int, channels: int, products: int, halves: bool
) -> tuple[int, int, int, int, int]:
    """Return how many positions, outputs and channels a program takes at once, its warps, and how
    many steps ahead it loads, where so many products are taken side by side.
    """
    block_n = min(128, max(16, triton.next_power_of_2(outputs)))
    block_k = 32 if channels % 32 == 0 or channels < 3 else 16
    if halves and channels % 64 == 0:
        block_k = 64
    others = triton.cdiv(outputs, block_n) * products

    def rows_in_turn(rows: int) -> int:
        return rows * int(triton.cdiv(triton.cdiv(positions, rows) * others, _PROGRAMS))

    # Programs run in waves as wide as the GPU: take the blocks whose waves come to fewer rows.
    block_m = min((128, 64), key=rows_in_turn)
    return block_m, block_n, block_k, 4, 3 if block_m == 128 else 4


def weight_gradients(
    dy: Tensor, x: Tensor, window: Sequence[int], stride: int, padding: int
) -> Tensor:
    """Return the gradients [A, N, C, K, L] of weights from those of outputs, and images."""
    if not halves(x):
        x = (F.pad(x, (padding,) * 4) if padding else x).contiguous()  # a pad of 0 is a copy
        return _summed(_outer, dy.transpose(1, 2).contiguous(), x, window, (stride,))
    by_output = channels_inside(dy).transpose(1, 2)
    return _summed(_outer_inside, by_output, channels_inside(x), window, (stride, padding))


def _summed(
    kernel: Any, dy: Tensor, x: Tensor, window: Sequence[int], how: tuple[int, ...]
) -> Tensor:
    """Launch a kernel on gradients of outputs [A, N, B, OH, OW] and images, and add its parts."""
    inside = kernel is _outer_inside
    clients, batch, channels, height, width = x.shape
    outputs = dy.shape[1]
    size = dy.shape[3:]
    positions = batch * size[0] * size[1]
    taps = window[0] * window[1]
    block_n = min(128, max(16, triton.next_power_of_2(outputs)))
    block_k = 64
    block_m = 32
    if inside:
        block_k = min(128, max(16, triton.next_power_of_2(taps * channels)))
        block_m = 64
    tiles = triton.cdiv(taps * channels, block_k) * triton.cdiv(outputs, block_n)
    split = max(1, min(2 * _PROGRAMS // (tiles * clients), positions // (8 * block_m)))
    shape = (*window, channels) if inside else (channels, *window)
    dw = x.new_empty(split, clients, outputs, *shape, dtype=torch.float32)
    kernel[(tiles, clients, split)](
        *(x, dy, dw, clients, triton.cdiv(positions, split * block_m)),
        *(positions, outputs, channels, height, width, *size, *window, *how),
        *(block_m, block_n, block_k),
        num_warps=4,
        num_stages=3,
    )
    total = dw.sum(0) if split > 1 else dw[0]
    return total.permute(0, 1, 4, 2, 3) if inside else total


def channels_inside(x: Tensor) -> Tensor:
    """Return images [A, B, C, H, W] with channels innermost in memory."""
    return x.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
