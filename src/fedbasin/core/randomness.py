"""The randomness inside a network's forward pass, drawn from a key.

Torch's dropout draws from a global generator. Its masks depend on everything that was drawn before,
so a cohort trained together and a loop over its clients would see different masks. `KeyedDraws`
is active while a user's module runs. It answers torch's dropout functions with masks that depend
on a key, and refuses every other random function by name.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fedbasin.core import unrolled
from fedbasin.core.rng import bits, fold_in

_DROPS = 0x64726F70  # keeps the masks' keys apart from those that rules fold from the same key
_SELU = 1.7580993408473766  # minus the value at which SELU saturates, lambda alpha
_CHECKPOINTS = "torch.utils.checkpoint"
_RECURRENT = (torch.gru, torch.lstm, torch.rnn_tanh, torch.rnn_relu)
_FEATURES = {F.dropout1d: (3,), F.dropout2d: (3, 4), F.dropout3d: (5,)}  # axes of a batch
# torch functions and methods that draw, by name; those that are answered below come first
_RANDOM = {
    "_sample_dirichlet",
    "_standard_gamma",
    "alpha_dropout",
    "alpha_dropout_",
    "bernoulli",
    "bernoulli_",
    "binomial",
    "cauchy_",
    "dropout_",
    "exponential_",
    "feature_alpha_dropout",
    "feature_alpha_dropout_",
    "feature_dropout",
    "feature_dropout_",
    "fractional_max_pool2d",
    "fractional_max_pool2d_with_indices",
    "fractional_max_pool3d",
    "fractional_max_pool3d_with_indices",
    "geometric_",
    "gumbel_softmax",
    "log_normal_",
    "multinomial",
    "native_dropout",
    "normal",
    "normal_",
    "poisson",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "random_",
    "randperm",
    "rrelu_",
    "uniform_",
}
# Torch's layers draw nothing in a forward pass, except those of these modules and classes.
_DRAWING_MODULES = ("dropout", "rnn", "transformer")
_DRAWING = (nn.MultiheadAttention, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


class RandomnessError(ValueError):
    """Randomness of a network that cannot be drawn from a key, with the fix."""


def draw_kept(
    key: Tensor, shape: tuple[int, ...], p: float, device: torch.device, first: int = 0
) -> tuple[Tensor, float]:
    """Draw which elements of a tensor are kept, 0 or 1 (uint8), and return the share kept too.

    An element is kept if ``u >= p``. The u are the bytes of ``bits(key, first + j)`` over 2^8, or
    their 16-bit halves over 2^16 where p is no multiple of 1/256 (it is then rounded to one of
    1/65536). j counts row by row, and a row takes the lowest bytes of all its words first. So one
    hash serves four elements, or two, and rows added at the end change no earlier row.

    Args:
        key: int64 [2].
        shape: of the tensor, rows on axis 0.
        p: probability of dropping an element, at least 0 and below 1.
        device: where the tensor lies.
        first: the first number that is hashed.
    """
    rows = shape[0]
    size = math.prod(shape[1:])
    wide = 8 if (p * 256).is_integer() else 16
    places = range(0, 32, wide)
    each = -(-size // len(places))  # words of a row
    words = bits(key, torch.arange(first, first + rows * each, device=device))
    least = min(round(p * (1 << wide)), (1 << wide) - 1)
    lanes = words.view(rows, each)
    keep = [lanes & (((1 << wide) - 1) << at) >= least << at for at in places]
    mask = torch.cat(keep, 1)[:, :size].reshape(shape)
    # as bytes, which torch turns to floats several times faster than truth values
    return mask.to(torch.uint8), 1 - least / (1 << wide)


def may_draw(module: nn.Module) -> bool:
    """Whether a forward pass may draw random numbers: torch's dropout, or code that is not ours."""
    return any(_may_draw(part) for part in module.modules())


def _may_draw(part: nn.Module) -> bool:
    home = type(part).__module__
    if part._forward_hooks or part._forward_pre_hooks:
        return True
    if home.startswith("torch.nn.modules."):
        return home.split(".")[-1] in _DRAWING_MODULES or isinstance(part, _DRAWING)
    return not home.startswith("fedbasin.")


def is_recurrent(module: nn.Module) -> bool:
    """Whether a module has recurrent layers, which a compiler unrolls step by step."""
    return any(isinstance(part, nn.RNNBase | nn.RNNCellBase) for part in module.modules())


def check_rows(module: nn.Module) -> None:
    """Refuse layers that drop elements of sequences whose rows do not lie on axis 0.

    Masks are drawn by row, so that the padded rows of a batch change no other row's mask.
    """
    for name, part in module.named_modules():
        layered = isinstance(part, nn.RNNBase) and part.num_layers > 1
        if not (layered or isinstance(part, nn.MultiheadAttention)):
            continue
        if part.dropout and not part.batch_first:
            raise RandomnessError(
                f"{_described(name, part)} has dropout={part.dropout} and batch_first=False: the "
                "rows of a batch must lie on axis 0; make it with batch_first=True"
            )


class KeyedDraws(TorchFunctionMode):
    """While active, dropout takes its masks from a key and other random functions are refused.

    Masks are keyed by the number of the dropout call within the forward pass, so no two layers and
    no two calls of one layer share a mask. Within a call they are drawn by `draw_kept`.

    Args:
        module: the network, to name its layers in errors.
        rows: rows of the batch.
        key: int64 [2], or None in evaluation, where dropout is refused too.
    """

    def __init__(self, module: nn.Module, rows: int, key: Tensor | None) -> None:
        super().__init__()
        self.module = module
        self.rows = rows
        self.key = key
        self.calls = 0

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer a call of a torch function."""
        kwargs = kwargs or {}
        answer = _ANSWERS.get(func)
        if answer is not None:
            return answer(self, func, *args, **kwargs)
        if getattr(func, "__name__", "") in _RANDOM:
            raise self._refusal(func)
        return func(*args, **kwargs)

    def dropout(
        self, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        """Answer `F.dropout`: ``y = x / (1 - p)`` where kept, else 0."""
        if not training or not 0 < p < 1:  # nothing to draw, or torch's own error
            return func(input, p, training, inplace)  # type: ignore[no-any-return]
        return _times(input, self._scale(input, p, input.shape), inplace)

    def plain_dropout(self, func: Any, input: Tensor, p: float, train: bool) -> Tensor:
        """Answer `torch.dropout`."""
        return self.dropout(F.dropout, input, p, train)

    def feature_dropout(
        self, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        """Answer `F.dropout1d` to `F.dropout3d`, which drop whole channels."""
        if not training or not 0 < p < 1:
            return func(input, p, training, inplace)  # type: ignore[no-any-return]
        if input.dim() not in _FEATURES[func]:
            raise RandomnessError(
                f"{self._where()} calls {func.__name__} on {list(input.shape)}; it takes a batch "
                f"with {' or '.join(map(str, _FEATURES[func]))} axes, rows first, then channels"
            )
        return _times(input, self._scale(input, p, _channels(input)), inplace)

    def alpha_dropout(
        self,
        func: Any,
        input: Tensor,
        p: float = 0.5,
        training: bool = False,
        inplace: bool = False,
    ) -> Tensor:
        """Answer `F.alpha_dropout` and `F.feature_alpha_dropout`, which keep mean and variance."""
        if not training or not 0 < p < 1:
            return func(input, p, training, inplace)  # type: ignore[no-any-return]
        shape = input.shape if func is F.alpha_dropout else _channels(input)
        kept, share = self._kept(input, p, shape)
        slope = (share * (1 + (1 - share) * _SELU**2)) ** -0.5
        offset = (kept - share) * (_SELU * slope)
        return _times(input, kept * slope, inplace).add_(offset)

    def product_attention(
        self,
        func: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        """Answer `F.scaled_dot_product_attention`, with dropout as torch's documentation has it."""
        # not every kernel that torch takes here has a batching rule for `vmap`; what follows has
        if dropout_p == 0 and not is_functorch_wrapped_tensor(query):
            return func(query, key, value, attn_mask, 0.0, is_causal, **options)  # type: ignore[no-any-return]
        if options.pop("enable_gqa", False):
            key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
            value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
        scale = options.pop("scale", None) or query.shape[-1] ** -0.5
        scores = (query @ key.transpose(-2, -1)) * scale
        if is_causal:
            past = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            scores = scores.masked_fill(~past, -math.inf)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        blind = (scores == -math.inf).all(-1, keepdim=True)  # attends to nothing: zeros, as torch
        weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
        if dropout_p:
            weights = self.dropout(F.dropout, weights, dropout_p)
        mixed: Tensor = weights @ value
        return mixed

    def heads(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Answer `F.multi_head_attention_forward`: torch's own, with this mode on inside it."""
        with self:
            return _opened(func)(*args, **kwargs)

    def recurrent(self, func: Any, *args: Any) -> Any:
        """Answer torch's recurrent functions: layer by layer, with dropout between the layers."""
        packed = not isinstance(args[3], bool)  # then the sizes of batches stand in between
        layers, p, training, both_ways = args[5:] if packed else args[4:8]
        drops = training and p > 0 and layers > 1
        if drops and (packed or not args[8]):
            raise RandomnessError(
                f"{self._where()} has dropout={p} and rows that do not lie on axis 0; use padded "
                "sequences in place of packed ones, and batch_first=True"
            )
        mapped = any(is_functorch_wrapped_tensor(each) for each in (args[0], *args[2]))
        # torch's own GRU and RNN are faster, and known to work in training on a CPU
        safe = func is not torch.lstm and training and args[0].is_cpu
        written_out = mapped and not packed and not safe
        if not drops and not written_out:
            return func(*args)
        sequence, start, weights, biases = args[:4]
        start = (start,) if isinstance(start, Tensor) else start
        sequence = sequence if args[8] else sequence.transpose(0, 1)
        per_layer = len(weights) // layers
        directions = 2 if both_ways else 1
        ends = []
        for number in range(layers):
            if number and drops:
                sequence = self.dropout(F.dropout, sequence, p)
            begin = tuple(each[number * directions :][:directions] for each in start)
            own = weights[number * per_layer :][:per_layer]
            if written_out:
                cell = unrolled.CELLS[func.__name__]
                sequence, *end = unrolled.layer(cell, sequence, begin, own, biases)
            else:
                state = begin if func is torch.lstm else begin[0]
                sequence, *end = func(sequence, state, own, biases, 1, 0.0, True, both_ways, True)
            ends.append(end)
        sequence = sequence if args[8] else sequence.transpose(0, 1)
        return (sequence, *(torch.cat(each) for each in zip(*ends, strict=True)))

    def rrelu(self, func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Refuse `F.rrelu` in training; in evaluation its slope is fixed."""
        if kwargs.get("training", len(args) > 2 and args[2]):
            raise self._refusal(func)
        return func(input, *args, **kwargs)  # type: ignore[no-any-return]

    def _kept(self, input: Tensor, p: float, shape: tuple[int, ...]) -> tuple[Tensor, float]:
        """Draw what is kept in the next call, as numbers of the input's type."""
        if self.key is None:
            raise RandomnessError(
                f"{self._where()} drops elements in evaluation; pass training=self.training to "
                "torch's dropout function, or use nn.Dropout"
            )
        if input.dim() == 0 or input.shape[0] % max(self.rows, 1):
            raise RandomnessError(
                f"{self._where()} drops elements of {list(input.shape)} in a batch of {self.rows} "
                "rows; rows must lie on axis 0 (batch_first=True)"
            )
        if any(frame.f_globals.get("__name__") == _CHECKPOINTS for frame in _callers()):
            raise RandomnessError(
                f"{self._where()} drops elements under activation checkpointing, whose second "
                "forward pass would draw other masks; turn checkpointing off"
            )
        key = fold_in(fold_in(self.key, _DROPS), self.calls)
        self.calls += 1
        kept, share = draw_kept(key, tuple(shape), p, input.device)
        return kept.to(input.dtype), share

    def _scale(self, input: Tensor, p: float, shape: tuple[int, ...]) -> Tensor:
        kept, share = self._kept(input, p, shape)
        return kept / share

    def _refusal(self, func: Any) -> RandomnessError:
        return RandomnessError(
            f"{self._where()} calls torch's {func.__name__}, which draws from a global generator; "
            "remove it, or use dropout, whose masks are drawn from a key"
        )

    def _where(self) -> str:
        """Name the innermost layer of the network that is running."""
        names = {id(part): name for name, part in self.module.named_modules()}
        for frame in _callers():
            part = frame.f_locals.get("self")
            if id(part) in names:
                return _described(names[id(part)], part)
        return "the network"


def _callers() -> Iterator[FrameType]:
    """Yield the frames of the functions that are running, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _described(name: str, part: Any) -> str:
    return f"layer {name!r} ({type(part).__name__})" if name else f"the {type(part).__name__}"


def _times(input: Tensor, factor: Tensor, inplace: bool) -> Tensor:
    return input.mul_(factor) if inplace else input * factor


def _channels(input: Tensor) -> tuple[int, ...]:
    """Return the shape of one number for every row and channel."""
    return (*input.shape[:2], *(1,) * (input.dim() - 2))


@cache
def _opened(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a Python function of torch's that does not hand the whole call to an active mode.

    Torch leaves a mode before it answers a call. With the mode on again, the original function
    would ask the mode about itself forever.
    """
    assert isinstance(func, FunctionType)
    names = {**func.__globals__, "has_torch_function": lambda _: False}
    opened = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    opened.__kwdefaults__ = func.__kwdefaults__
    return opened


_ANSWERS: dict[Any, Callable[..., Any]] = {
    F.dropout: KeyedDraws.dropout,
    torch.dropout: KeyedDraws.plain_dropout,
    **dict.fromkeys(_FEATURES, KeyedDraws.feature_dropout),
    F.alpha_dropout: KeyedDraws.alpha_dropout,
    F.feature_alpha_dropout: KeyedDraws.alpha_dropout,
    F.scaled_dot_product_attention: KeyedDraws.product_attention,
    F.multi_head_attention_forward: KeyedDraws.heads,
    **dict.fromkeys(_RECURRENT, KeyedDraws.recurrent),
    F.rrelu: KeyedDraws.rrelu,
    torch.rrelu: KeyedDraws.rrelu,
}
