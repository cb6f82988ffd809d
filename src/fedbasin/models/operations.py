"""What the operations of a forward pass do to the atoms of its tensors (see `symmetries`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbasin.models.atoms import FIXED, FREE, Atoms, Axes, SymmetryError, tensors_in


def _elementwise(atoms: Atoms, out: Tensor, *args: Any, **_: Any) -> None:
    """Entries of equal place meet; one entry that meets all is none of them, and stays."""
    axes: Axes = [FREE] * out.dim()
    for tensor in tensors_in(args):
        shift = out.dim() - tensor.dim()
        for i, axis in enumerate(atoms.axes(tensor)):
            if tensor.shape[i] == out.shape[shift + i]:
                axes[shift + i] = atoms.tie(axes[shift + i], axis)
            else:
                atoms.pin(axis)
    atoms.keep(out, axes)


def _convolution(
    atoms: Atoms, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any
) -> None:
    """Input channels meet the weight's second axis; with one filter a channel, its first."""
    transposed = rest[3]
    groups = rest[5]
    channels, filters = atoms.axes(x), atoms.axes(weight)
    atoms.pin(channels[0], *channels[2:], *filters[2:])
    if transposed or groups not in (1, x.shape[1]) or (groups > 1 and len(weight) != groups):
        raise SymmetryError(f"convolutions with groups={groups} are not among those understood")
    atoms.tie(channels[1], filters[1 if groups == 1 else 0])
    outputs = filters[0]
    if bias is not None:
        outputs = atoms.tie(outputs, atoms.axes(bias)[0])
    atoms.keep(out, [FIXED, outputs, *[FIXED] * (out.dim() - 2)])


def _product(atoms: Atoms, out: Tensor, x: Tensor, weight: Tensor) -> None:
    left, right = atoms.axes(x), atoms.axes(weight)
    atoms.tie(left[1], right[0])
    atoms.keep(out, [left[0], right[1]])


def _affine(atoms: Atoms, out: Tensor, bias: Tensor, x: Tensor, weight: Tensor, **_: Any) -> None:
    _product(atoms, out, x, weight)
    _elementwise(atoms, out, out, bias)


def _linear(
    atoms: Atoms, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> None:
    left, right = atoms.axes(x), atoms.axes(weight)
    atoms.tie(left[-1], right[1])
    atoms.keep(out, [*left[:-1], right[0]])
    if bias is not None:
        _elementwise(atoms, out, out, bias)


def _group_norm(
    atoms: Atoms, out: tuple[Tensor, ...], x: Tensor, weight: Any, bias: Any, *rest: Any
) -> None:
    """Channels meet scale and shift; which channels are averaged together is kept."""
    axes = _normalised(atoms, out[0], x, (weight, bias))
    if isinstance(axes[1], np.ndarray):
        atoms.norms.append((axes[1], rest[3]))


def _batch_norm(atoms: Atoms, out: tuple[Tensor, ...], x: Tensor, *rest: Any) -> None:
    _normalised(atoms, out[0], x, rest[:4])


def _normalised(atoms: Atoms, out: Tensor, x: Tensor, vectors: Iterable[Any]) -> Axes:
    axes = list(atoms.axes(x))
    atoms.pin(axes[0], *axes[2:])
    for vector in tensors_in(vectors):
        axes[1] = atoms.tie(axes[1], atoms.axes(vector)[0])
    axes = [FIXED, axes[1], *[FIXED] * (out.dim() - 2)]
    atoms.keep(out, axes)
    return axes


def _pool(atoms: Atoms, out: Any, x: Tensor, *_: Any, **__: Any) -> None:
    axes = atoms.axes(x)
    atoms.pin(*axes[2:])
    pooled = tensors_in([out])[0]
    atoms.keep(pooled, [*axes[:2], *[FIXED] * (pooled.dim() - 2)])


def _reduce(
    atoms: Atoms, out: Tensor, x: Tensor, dims: Any = None, keep: bool = False, **_: Any
) -> None:
    """A mean does not ask for the order of what it averages, but for what that is."""
    gone = {d % x.dim() for d in (range(x.dim()) if dims is None else dims)}
    axes = atoms.axes(x)
    for d in gone:
        if isinstance(axis := axes[d], np.ndarray):
            atoms.norms.append((axis, 1))
    kept: Axes = [
        FREE if d in gone else axis for d, axis in enumerate(axes) if keep or d not in gone
    ]
    atoms.keep(out, kept)


def _view(atoms: Atoms, out: Tensor, x: Tensor, *_: Any) -> None:
    """Split both shapes into runs of equal size; a run has one axis that moves, or none."""
    axes = atoms.axes(x)
    result: Axes = [FIXED] * out.dim()
    i = j = 0
    while i < x.dim() and j < out.dim():
        first = i
        start = j
        left = x.shape[i]
        right = out.shape[j]
        i += 1
        j += 1
        while left != right:
            if left < right:
                left *= x.shape[i]
                i += 1
            else:
                right *= out.shape[j]
                j += 1
        result[start:j] = _run(axes[first:i], x.shape[first:i], out.shape[start:j])
    atoms.keep(out, result)


def _run(axes: Axes, before: torch.Size, after: torch.Size) -> list[Any]:
    moving = [d for d, axis in enumerate(axes) if isinstance(axis, np.ndarray)]
    if not moving:
        return [FREE if all(a == FREE for a in axes) else FIXED] * len(after)
    shape = [1] * len(before)
    shape[moving[0]] = -1
    grid = np.broadcast_to(np.reshape(axes[moving[0]], shape), before).reshape(after)
    for d in range(len(after)):
        line = np.moveaxis(grid, d, 0).reshape(after[d], -1)
        if len(moving) == 1 and (line == line[:, :1]).all():
            return [line[:, 0] if e == d else FIXED for e in range(len(after))]
    raise SymmetryError(f"a reshape from {tuple(before)} to {tuple(after)} mixes neurons")


def _transpose(atoms: Atoms, out: Tensor, x: Tensor, *dims: Any) -> None:
    order = list(range(x.dim()))
    if len(dims) == 2:
        order[dims[0]], order[dims[1]] = order[dims[1]], order[dims[0]]
    else:
        order = [d % x.dim() for d in dims[0]] if dims else order[::-1]
    atoms.keep(out, [atoms.axes(x)[d] for d in order])


def _expand(atoms: Atoms, out: Tensor, x: Tensor, *_: Any, **__: Any) -> None:
    _elementwise(atoms, out, x)


def _cat(atoms: Atoms, out: Tensor, tensors: list[Tensor], dim: int = 0) -> None:
    dim %= out.dim()
    axes: Axes = [FREE] * out.dim()
    line = []
    for tensor in tensors:
        for d, axis in enumerate(atoms.axes(tensor)):
            if d != dim:
                axes[d] = atoms.tie(axes[d], axis)
            elif isinstance(axis, np.ndarray):
                line.append(axis)
            else:
                size = tensor.shape[d]
                line.append(np.zeros(size, np.int64) if axis == FIXED else atoms.fresh(size))
    axes[dim] = np.concatenate(line)
    atoms.keep(out, axes)


def _stack(atoms: Atoms, out: Tensor, tensors: list[Tensor], dim: int = 0) -> None:
    axes: Axes = [FREE] * (out.dim() - 1)
    for tensor in tensors:
        axes = [atoms.tie(a, b) for a, b in zip(axes, atoms.axes(tensor), strict=True)]
    axes.insert(dim % out.dim(), FIXED)
    atoms.keep(out, axes)


def _split(atoms: Atoms, out: list[Tensor], x: Tensor, _: Any, dim: int = 0) -> None:
    ends = np.cumsum([part.shape[dim] for part in out])[:-1]
    for n, part in enumerate(out):
        axes = list(atoms.axes(x))
        if isinstance(axes[dim], np.ndarray):
            axes[dim] = np.split(axes[dim], ends)[n]
        atoms.keep(part, axes)


def _slice(
    atoms: Atoms,
    out: Tensor,
    x: Tensor,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: int = 1,
) -> None:
    axes = list(atoms.axes(x))
    if isinstance(axes[dim], np.ndarray):
        axes[dim] = axes[dim][start:end:step]
    atoms.keep(out, axes)


def _select(atoms: Atoms, out: Tensor, x: Tensor, dim: int, index: int) -> None:
    axes = list(atoms.axes(x))
    gone = axes.pop(dim)
    if isinstance(gone, np.ndarray):
        atoms.pin(gone[index : index + 1 or None])
    atoms.keep(out, axes)


def _pad(atoms: Atoms, out: Tensor, x: Tensor, pad: list[int], *_: Any) -> None:
    """Constant entries are added at both ends of an axis; they are like each other."""
    axes = list(atoms.axes(x))
    for d, axis in enumerate(axes):
        place = 2 * (x.dim() - 1 - d)
        if isinstance(axis, np.ndarray) and place < len(pad):
            before, after = atoms.fresh(pad[place]), atoms.fresh(pad[place + 1])
            axes[d] = np.concatenate([before, axis, after])
    atoms.keep(out, axes)


def _embedding(atoms: Atoms, out: Tensor, weight: Tensor, index: Tensor, *_: Any) -> None:
    rows, width = atoms.axes(weight)
    atoms.pin(rows)
    atoms.keep(out, [*atoms.axes(index), width])


_MAKE = "empty zeros ones full new_zeros new_ones zeros_like ones_like"
MAKERS = frozenset(_MAKE.split())
_ELEMENTWISE = (
    "relu hardtanh sigmoid tanh silu gelu leaky_relu elu exp log abs sqrt square pow neg clamp add "
    "sub mul div maximum minimum where detach alias clone _to_copy contiguous"
)
HANDLERS: dict[str, Callable[..., None]] = {
    **dict.fromkeys(_ELEMENTWISE.split(), _elementwise),
    "convolution": _convolution,
    "mm": _product,
    "addmm": _affine,
    "linear": _linear,
    "native_group_norm": _group_norm,
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit_no_training"), _batch_norm),
    **dict.fromkeys(("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d"), _pool),
    **dict.fromkeys(("mean", "sum", "amax"), _reduce),
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze"), _view),
    **dict.fromkeys(("t", "transpose", "permute"), _transpose),
    "expand": _expand,
    "cat": _cat,
    "stack": _stack,
    **dict.fromkeys(("split", "split_with_sizes"), _split),
    "slice": _slice,
    "select": _select,
    "constant_pad_nd": _pad,
    "embedding": _embedding,
}
