"""A network as a pure function of vectors.

`Net` turns an `nn.Module` into ``net(vector, inputs)``: parameters come from one flat vector
[P], float buffers (BatchNorm statistics) from a second one [Q], and the randomness of
dropout from a key. Integer buffers are the module's own: they are never sent or averaged.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from fedbasin.core.randomness import (
    KeyedDraws,
    RandomnessError,
    check_rows,
    is_recurrent,
    may_draw,
)
from fedbasin.core.vectors import Layout

_log = logging.getLogger(__name__)

_ACTIVATIONS = nn.ReLU.__module__  # where torch keeps its activation functions
_WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Outputs(NamedTuple):
    """What one forward pass gives."""

    logits: Tensor  # [B, classes]
    features: Tensor | None  # [B, d] input of the last linear layer, where the module exposes it
    buffers: Tensor  # [Q] statistics after the pass


class _Exposed(nn.Module):
    """A module whose forward returns features beside logits where the module has both."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.splits = callable(getattr(module, "features", None)) and isinstance(
            getattr(module, "head", None), nn.Module
        )

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return logits and features."""
        if not self.splits:
            return self.module(inputs), None
        features = self.module.features(inputs)  # type: ignore[operator]
        return self.module.head(features), features  # type: ignore[operator]


class Net:
    """A module that runs from vectors.

    Args:
        module: the network; its own weights are the initial model. It is copied, not changed.
        device: where it runs.
        dtype: floating type of vectors and inputs.
        mixed: run layers in bfloat16 where autocast allows it; vectors and logits stay as given.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        mixed: bool = False,
    ) -> None:
        check_rows(module)
        module = _copied(module).to(device=device, dtype=dtype)
        trainable = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        if not trainable:
            raise ValueError(f"{type(module).__name__} has no trainable parameter")
        statistics = [(n, b) for n, b in module.named_buffers() if b.is_floating_point()]
        self.layout = Layout.of(trainable, _head_names(module, [n for n, _ in trainable]))
        self.buffer_layout = Layout.of(statistics)
        self.device = torch.device(device)
        self.dtype = dtype
        self.mixed = mixed
        every = list(module.named_parameters(remove_duplicate=False))
        self._tied = len(every) > len(list(module.parameters()))  # looking for ties takes time
        convolves = any(isinstance(part, nn.Conv2d) for part in module.modules())
        self._arranges = convolves and self.device.type == "cpu"
        self._order: torch.memory_format | None = None  # of images, known after a trial
        # a module may say that compiling does not pay; for recurrent layers it takes minutes
        self.compiles = bool(getattr(module, "compiles", True)) and not is_recurrent(module)
        # and that training several clients as one matrix does not
        self.stacks = bool(getattr(module, "stacks", True))
        frozen = [p for p in module.parameters() if not p.requires_grad]
        self.frozen_size = sum(p.numel() for p in frozen)
        self.frozen_bytes = sum(p.nbytes for p in frozen)
        self._may_draw = may_draw(module)
        self._counters = [
            (n, b) for n, b in module.named_buffers() if not b.is_floating_point() and b.dim() == 0
        ]
        self._keys = [n for n, b in module.named_buffers() if _is_key(n, b)]
        self._initial = self.layout.flat({n: p.detach() for n, p in trainable})
        self._initial_buffers = self.buffer_layout.flat(dict(statistics)).to(device, dtype)
        self._training = _Exposed(module).train()
        # parameters are the same tensors: those that train are replaced, the others never change
        shared: dict[int, Any] = {id(p): p for p in module.parameters()}
        self._scoring = copy.deepcopy(self._training, shared).eval()

    def initial(self) -> tuple[Tensor, Tensor]:
        """Return fresh copies of the module's own weights [P] and statistics [Q]."""
        return self._initial.clone(), self._initial_buffers.clone()

    def on(self, device: torch.device | str) -> Net:
        """Return the same network on another device."""
        return Net(self._training.module, device, self.dtype, mixed=self.mixed)

    def __call__(
        self,
        vector: Tensor,
        inputs: Tensor,
        buffers: Tensor | None = None,
        *,
        key: Tensor | None = None,
        training: bool = False,
    ) -> Outputs:
        """Run the network; nothing given is changed.

        Args:
            vector: parameters [P].
            inputs: a batch.
            buffers: statistics [Q]; the module's own initial ones if not given.
            key: int64 [2], the randomness of dropout in training.
            training: whether dropout and batch statistics are on.
        """
        return self.run(self.layout.views(vector), inputs, buffers, key=key, training=training)

    def run(
        self,
        parts: Mapping[str, Tensor],
        inputs: Tensor,
        buffers: Tensor | None = None,
        *,
        key: Tensor | None = None,
        training: bool = False,
    ) -> Outputs:
        """Run the network from the named parts of a vector."""
        statistics = self._initial_buffers if buffers is None else buffers
        if training and self.buffer_layout.size:
            statistics = statistics.clone()  # BatchNorm writes into these views
        named = {**parts, **self.buffer_layout.views(statistics)}
        if training:
            for name, counter in self._counters:
                named[name] = counter.clone()
            if key is not None:
                for name in self._keys:
                    named[name] = key
        named = {f"module.{name}": tensor for name, tensor in named.items()}
        with self._draws(len(inputs), key, training), self._precision():
            module = self._training if training else self._scoring
            logits, features = functional_call(module, named, (inputs,), tie_weights=self._tied)
        if self.mixed:
            logits = logits.to(self.dtype)
            features = None if features is None else features.to(self.dtype)
        return Outputs(logits, features, statistics)

    @torch.no_grad()
    def check_draws(self, inputs: Tensor) -> None:
        """Refuse a module whose random numbers cannot be drawn from a key, by running it.

        Args:
            inputs: a few rows, three if there are so many.
        """
        if not self._may_draw:
            return
        batches = [inputs[:2], inputs[:3]]
        key = torch.zeros(2, dtype=torch.int64, device=self.device)
        scored = [self(self._initial, rows).logits for rows in batches]
        trained = [self(self._initial, rows, key=key, training=True).logits for rows in batches]
        parts = self._training.modules()
        if self.has_statistics or any(isinstance(part, _BatchNorm) for part in parts):
            return  # each row's output depends on the others
        if _same_rows(*scored) and not _same_rows(*trained):
            raise RandomnessError(
                f"{type(self._training.module).__name__}: in training a row added to the batch "
                "changes the outputs of the others; dropout must be given tensors whose rows lie "
                "on axis 0 (batch_first=True)"
            )

    def _draws(self, rows: int, key: Tensor | None, training: bool) -> AbstractContextManager[Any]:
        """Return where dropout takes its masks from while the module runs."""
        if not self._may_draw:
            return nullcontext()
        if training and key is None:
            key = torch.zeros(2, dtype=torch.int64, device=self.device)
        module = self._training.module if training else self._scoring.module
        return KeyedDraws(module, rows, key if training else None)

    def _precision(self) -> AbstractContextManager[Any]:
        if not self.mixed:
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def activations(
        self, vector: Tensor, inputs: Tensor, buffers: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return what each activation function puts out in a scoring pass, by name and call.

        A network without any gives the outputs of its linear and convolutional layers.
        """
        module = self._scoring.module
        outputs = dict[str, Tensor]()
        named = dict(module.named_modules())
        chosen = {n: m for n, m in named.items() if type(m).__module__ == _ACTIVATIONS}
        chosen = chosen or {n: m for n, m in named.items() if isinstance(m, _WEIGHTED)}

        def keep(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
            def hook(_: nn.Module, __: Any, output: Tensor) -> None:
                again = sum(key.split(" ")[0] == name for key in outputs)
                outputs[f"{name} {again + 1}" if again else name] = output

            return hook

        hooks = [part.register_forward_hook(keep(name)) for name, part in chosen.items()]
        try:
            self(vector, inputs, buffers)
        finally:
            for hook in hooks:
                hook.remove()
        return outputs

    def classify(self, vector: Tensor, features: Tensor) -> Tensor:
        """Return the logits [B, classes] of the head alone, for features [B, d]."""
        if not self._scoring.splits:
            raise ValueError(
                "this method works on features: the network needs `features` and `head`, as the "
                "catalogue's networks have"
            )
        views = self.layout.views(vector)
        named = {name.removeprefix("head."): views[name] for name in self.layout.head}
        logits: Tensor = functional_call(self._scoring.module.head, named, (features,))  # type: ignore[arg-type]
        return logits

    def arranged(self, inputs: Tensor) -> Tensor:
        """Return inputs in the memory order that the network runs fastest on; not for `vmap`.

        On a CPU the convolutions and poolings of oneDNN are faster with the channels innermost. A
        module that cannot take images so, because it calls `view`, gets them in the usual order.
        """
        if not self._arranges or inputs.dim() != 4:
            return inputs
        if self._order is None:
            self._order = self._order_for(inputs[:2])
        return _in_order(inputs, self._order or torch.channels_last)

    def _order_for(self, images: Tensor) -> torch.memory_format | None:
        """Return the order of memory that the module takes; None if it fails on both."""
        if self._takes(_in_order(images, torch.channels_last)):
            return torch.channels_last
        if not self._takes(_in_order(images, torch.contiguous_format)):
            return None  # the memory is not why it fails
        _log_usual_order(type(self.module).__name__)
        return torch.contiguous_format

    @torch.no_grad()
    def _takes(self, images: Tensor) -> bool:
        """Whether the module scores and trains on images as they lie in memory."""
        try:
            for training in (False, True):
                self(self._initial, images, training=training)
        except (RuntimeError, ValueError, IndexError, TypeError):
            return False
        return True

    @property
    def has_features(self) -> bool:
        """Whether the network shows the input of its last layer: it has `features` and `head`."""
        return self._scoring.splits

    @property
    def module(self) -> nn.Module:
        """The module as it trains."""
        return self._training.module

    @property
    def plain(self) -> bool:
        """Whether the module is run as its layers say: no hooks, no weight in two places."""
        hooked = any(m._forward_hooks or m._forward_pre_hooks for m in self.module.modules())
        return not self._tied and not hooked

    @property
    def draws(self) -> bool:
        """Whether a pass in training may draw random numbers."""
        return self._may_draw or bool(self._keys)

    @property
    def has_statistics(self) -> bool:
        """Whether the network carries float buffers that training changes."""
        return self.buffer_layout.size > 0

    def state_dict(self, vector: Tensor, buffers: Tensor) -> dict[str, Tensor]:
        """Return everything the module's `load_state_dict` wants, for shipping."""
        fixed = self._training.module.state_dict()  # what does not travel: frozen parts, counters
        named = fixed | self.layout.views(vector) | self.buffer_layout.views(buffers)
        return {name: tensor.detach().clone() for name, tensor in named.items()}


def _copied(module: nn.Module) -> nn.Module:
    """Return a copy of a module; refuse one whose copy would run the original's forward pass."""
    for name, part in module.named_modules():
        if isinstance(vars(part).get("forward"), FunctionType):
            raise ValueError(
                f"layer {name!r} ({type(part).__name__}) has a `forward` set on the object; "
                "a copy of it would run the original's weights: define `forward` in the class"
            )
    return copy.deepcopy(module)


def _in_order(images: Tensor, order: torch.memory_format) -> Tensor:
    """Return images [B, C, H, W] in an order of memory, as a copy if they lie otherwise."""
    if order == torch.channels_last:
        return images.to(memory_format=order)
    _, channels, height, width = images.shape
    usual = (channels * height * width, height * width, width, 1)
    # with one channel `contiguous` keeps strides that convolutions take for channels innermost
    return images if images.stride() == usual else images.clone(memory_format=order)


@cache  # once a process: a client of a federation makes its network anew for each message
def _log_usual_order(network: str) -> None:
    _log.warning(
        "%s cannot take images with the channels innermost in memory, as `view` cannot: it gets "
        "them in the usual order, which is slower on a CPU. `flatten` or `reshape` takes both.",
        network,
    )


def _same_rows(few: Tensor, more: Tensor) -> bool:
    """Whether the first rows of two batches have the same outputs, up to rounding."""
    return torch.allclose(few, more[: len(few)], rtol=1e-2, atol=1e-4)


def _is_key(name: str, buffer: Tensor) -> bool:
    """Whether a buffer is where a keyed module (dropout) reads its randomness from."""
    return name.split(".")[-1] == "key" and buffer.dtype == torch.int64 and buffer.shape == (2,)


def _head_names(module: nn.Module, trainable: list[str]) -> tuple[str, ...]:
    """Return the parameter names of `module.head`, or of the last linear layer."""
    prefix = "head"
    if not isinstance(getattr(module, "head", None), nn.Module):
        linear = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
        prefix = linear[-1] if linear else ""
    return tuple(n for n in trainable if prefix and n.startswith(f"{prefix}."))
