"""A convolution that is fast where many clients train side by side on a GPU.

Under `vmap` over clients, torch turns a convolution into a grouped one, which cuDNN runs client
after client. In training on CUDA, this layer calls kernels in which clients are an axis of the
launch (`convolution_kernels`); everywhere else it is `nn.Conv2d`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn import grad

FEW = 8  # channels below which it makes no difference how images lie in memory


class Conv2d(nn.Conv2d):
    """`nn.Conv2d`, with kernels of its own for many clients on CUDA.

    The kernels round factors to tf32 as cuDNN does, so they stand aside where that is not allowed.
    In training the gradient can be taken once; in evaluation any number of times.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the convolution of a batch [B, C, H, W]."""
        bias = self.bias
        device = input.device.type
        if not side_by_side(self, input) or not self._plain():
            return super().forward(input)
        weight, padding = self._seen(input.shape[2:])
        if torch.is_autocast_enabled(device):
            half = torch.get_autocast_dtype(device)
            input, weight = input.to(half), weight.to(half)
            bias = None if bias is None else bias.to(half)
        if weight.dtype == torch.float64 or not torch.backends.cudnn.allow_tf32:
            return super().forward(input)
        # here and not further in, so that gradients are made of the same copies
        input = input if input.shape[1] < FEW else _inside(input)
        weight = _inside(weight)
        how = (self.stride[0], padding)
        outputs: Tensor = Convolution.apply(input, weight, bias, *how)  # type: ignore[no-untyped-call]
        return outputs

    def _seen(self, size: torch.Size) -> tuple[Tensor, int]:
        """Return the weights that some output sees a pixel through, and the padding left to them.

        On images no larger than the padding the outer taps meet zeros alone: of a 3 x 3 window on
        1 x 1 images, the last stage of ResNet-18 on 32 x 32 ones, a single tap is left.
        """
        weight = self.weight
        stride = self.stride[0]
        padding = int(self.padding[0])
        ends = []
        for length, taps in zip(size, weight.shape[2:], strict=True):
            outputs = (length + 2 * padding - taps) // stride + 1
            first = max(0, padding - (outputs - 1) * stride)
            end = min(taps, length + padding)
            ends.append((first, end))
            same = outputs == (length + 2 * (padding - first) - (end - first)) // stride + 1
            if first >= end or not same or first != ends[0][0]:
                return weight, padding
        (top, bottom), (left, right) = ends
        return weight[:, :, top:bottom, left:right], padding - top

    def _plain(self) -> bool:
        """Whether nothing is asked for that the kernels do not do."""
        same = len({*self.stride}) == 1 and len({*self.padding}) == 1
        return same and self.groups == 1 and self.dilation == (1, 1)


def side_by_side(layer: nn.Module, input: Tensor) -> bool:
    """Whether a layer is to do the work of many clients on a GPU, for one gradient at most."""
    return _many_on_gpu(input) and (layer.training or not torch.is_grad_enabled())


def _many_on_gpu(input: Tensor) -> bool:
    """Whether images lie on a GPU and a transform, such as `vmap` over clients, is at work."""
    return input.is_cuda and torch._C._functorch.peek_interpreter_stack() is not None


def operator(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function of many clients' tensors as one operator: opaque to the compiler, known to
    `vmap`, and good for one client's tensors too.

    Its own gradient is not registered, so that a second derivative is an error and not a zero.
    """
    name = f"fedbasin::{function.__name__}"
    schema = torch.library.infer_schema(function, mutates_args=())
    torch.library.define(name, schema)
    torch.library.impl(name, ("cpu", "cuda"), _of_clients(function))
    op: Callable[..., Tensor] = getattr(torch.ops.fedbasin, function.__name__)

    def over_clients(info: Any, axes: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        both = zip(args, axes, strict=True)
        return op(*(_first(each, axis, info.batch_size) for each, axis in both)), 0

    torch.library.register_vmap(name, over_clients)
    return op


def _of_clients(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function of tensors [A, ...] for any number of axes in place of A; the first tensor
    is of images, of four axes without them.
    """

    def of_any(*args: Any) -> Tensor:
        lead = args[0].shape[:-4]
        if len(lead) == 1:
            return function(*args)
        one = [
            each.reshape(-1, *each.shape[len(lead) :]) if isinstance(each, Tensor) else each
            for each in args
        ]
        result = function(*one)
        return result.unflatten(0, lead) if lead else result[0]

    return of_any


def _first(each: Any, axis: int | None, clients: int) -> Any:
    """Return a tensor with the axis that `vmap` maps over in front; anything else as it is.

    A tensor that has it there is not touched: the compiler could not look through what that leaves.
    """
    if not isinstance(each, Tensor) or axis == 0:
        return each
    return each.expand(clients, *each.shape) if axis is None else each.movedim(axis, 0)


class Convolution(torch.autograd.Function):
    """The convolution of one client's images; `vmap` over it takes those of all at once."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
        """Return the outputs [B, N, OH, OW] of images [B, C, H, W] and weights [N, C, K, L]."""
        return outputs_of(x, w, bias, stride, padding)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what gradients are made of."""
        x, w, _, ctx.stride, ctx.padding = inputs
        ctx.save_for_backward(x, w)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the images, if anybody asks for them, of weights and biases."""
        x, w = ctx.saved_tensors
        dx = None
        size = list(x.shape[2:])
        window = list(w.shape[2:])
        inside = _inside(dy)
        if ctx.needs_input_grad[0]:
            turned = w if halves(w) else _inside(w.transpose(0, 1)).transpose(0, 1)
            dx = last(image_gradients(inside, turned, size, ctx.stride, ctx.padding))
        seen, padding = _for_weights(inside, x, ctx.padding)
        dw = last(weight_gradients(*seen, window, ctx.stride, padding))
        db = dy.sum((0, 2, 3)) if ctx.needs_input_grad[2] else None
        return dx, dw.to(w.dtype), db, None, None


def _inside(x: Tensor) -> Tensor:
    """Return a tensor [B, C, H, W] with channels innermost in memory.

    Said here, and not left to the kernels, so that the compiler has whatever makes it write it so.
    One that lies so is not touched, see `_first`.
    """
    inside = x.permute(0, 2, 3, 1)
    return x if inside.is_contiguous() else inside.contiguous().permute(0, 3, 1, 2)


def halves(x: Tensor) -> bool:
    """Whether tensor cores turn tiles around themselves, so that all is read as it lies."""
    return x.dtype.itemsize == 2


def _for_weights(dy: Tensor, x: Tensor, padding: int) -> tuple[tuple[Tensor, Tensor], int]:
    """Return gradients of outputs and images as the kernel for weights reads them, and what is left
    to pad.
    """
    if halves(x):
        return (dy, _inside(x)), padding
    padded = x.contiguous()
    if padding:
        padded = F.pad(padded, (padding,) * 4)
    by_output = dy.transpose(0, 1).contiguous().transpose(0, 1)
    return (by_output, padded), 0


def last(gradient: Tensor) -> Tensor:
    """Return a gradient that cannot be differentiated again."""
    same: Tensor = _Last.apply(gradient)  # type: ignore[no-untyped-call]
    return same


class _Last(torch.autograd.Function):
    """A gradient that is not differentiated again: torch would take the operators' as zero."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise NotImplementedError(
            "a second derivative of a layer in training on CUDA: take it in evaluation"
        )


@operator
def outputs_of(x: Tensor, w: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
    """Return outputs [A, B, N, OH, OW] of images [A, B, C, H, W] and weights [A, N, C, K, L]."""
    if x.is_cuda:
        from fedbasin.models import convolution_kernels as kernels

        return kernels.outputs_of(x, w, bias, stride, padding)
    all_bias = None if bias is None else bias.flatten()
    y = F.conv2d(_grouped(x), w.flatten(0, 1), all_bias, stride, padding, groups=len(x))
    return _parted(y, len(x))


@operator
def image_gradients(dy: Tensor, w: Tensor, size: list[int], stride: int, padding: int) -> Tensor:
    """Return the gradients of images [A, B, C, H, W] from those of outputs; `size` is (H, W)."""
    if dy.is_cuda:
        from fedbasin.models import convolution_kernels as kernels

        return kernels.image_gradients(dy, w, size, stride, padding)
    shape = (dy.shape[1], len(dy) * w.shape[2], *size)
    weights = w.flatten(0, 1)
    dx = grad.conv2d_input(shape, weights, _grouped(dy), stride, padding, groups=len(dy))
    return _parted(dx, len(dy))


@operator
def weight_gradients(dy: Tensor, x: Tensor, window: list[int], stride: int, padding: int) -> Tensor:
    """Return the gradients of weights [A, N, C, K, L] from those of outputs and images.

    `window` is (K, L). Sums of halves are in float32.
    """
    if x.is_cuda:
        from fedbasin.models import convolution_kernels as kernels

        return kernels.weight_gradients(dy, x, window, stride, padding)
    shape = (len(x) * dy.shape[2], x.shape[2], *window)
    dw = grad.conv2d_weight(_grouped(x), shape, _grouped(dy), stride, padding, groups=len(x))
    gradients = _shape_of_weights(dy, x, window, stride, padding)
    return gradients.copy_(dw.unflatten(0, (len(x), -1)))


def _shape_of_outputs(
    x: Tensor, w: Tensor, bias: Tensor | None, stride: int, padding: int
) -> Tensor:
    high, wide = ((x.shape[i] + 2 * padding - w.shape[i]) // stride + 1 for i in (3, 4))
    return x.new_empty(*x.shape[:2], high, wide, w.shape[1]).permute(0, 1, 4, 2, 3)


def _shape_of_images(dy: Tensor, w: Tensor, size: list[int], stride: int, padding: int) -> Tensor:
    return dy.new_empty(*dy.shape[:2], *size, w.shape[2]).permute(0, 1, 4, 2, 3)


def _shape_of_weights(
    dy: Tensor, x: Tensor, window: list[int], stride: int, padding: int
) -> Tensor:
    sums = torch.promote_types(x.dtype, torch.float32)
    if halves(x):
        gradients = x.new_empty(x.shape[0], dy.shape[2], *window, x.shape[2], dtype=sums)
        return gradients.permute(0, 1, 4, 2, 3)
    return x.new_empty(x.shape[0], dy.shape[2], x.shape[2], *window, dtype=sums)


torch.library.register_fake("fedbasin::outputs_of", _of_clients(_shape_of_outputs))
torch.library.register_fake("fedbasin::image_gradients", _of_clients(_shape_of_images))
torch.library.register_fake("fedbasin::weight_gradients", _of_clients(_shape_of_weights))


def _grouped(x: Tensor) -> Tensor:
    """Return the images [B, A C, H, W] of all clients as channels of one."""
    return x.transpose(0, 1).flatten(1, 2)


def _parted(y: Tensor, clients: int) -> Tensor:
    """Undo `_grouped`, with channels innermost in memory, as the kernels leave them."""
    inside: Tensor = y.unflatten(1, (clients, -1)).permute(1, 0, 3, 4, 2).contiguous()
    return inside.permute(0, 1, 4, 2, 3)
