"""LoRA: a frozen network learns through small matrices beside its linear layers.

With the frozen weight W of a layer, A [r, in] and B [out, r]: ``y = W x + b + (alpha / r) B A x``.
A starts as torch starts a linear layer and B at zero, so the network starts as it was. Only A, B
and the head are trained and sent. `Layout.pairs` names the pairs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedbasin.core.catalogue import CATALOGUE, entry
from fedbasin.core.expressions import Choice
from fedbasin.models.parts import Shape


class LoRALinear(nn.Module):
    """A linear layer with a pair of small matrices beside it.

    Args:
        base: the layer W, b; it stays as it is.
        rank: r, rows of A and columns of B.
        alpha: the pair's product is scaled by alpha / r.
    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base = base
        like = base.weight
        self.lora_A = nn.Parameter(like.new_empty(rank, base.in_features))
        self.lora_B = nn.Parameter(like.new_zeros(base.out_features, rank))
        self.scale = alpha / rank
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """Return what the layer and the pair give together."""
        small = F.linear(F.linear(x, self.lora_A), self.lora_B)
        together: Tensor = self.base(x) + small * self.scale
        return together


def with_lora(
    module: nn.Module,
    *,
    rank: int = 8,
    alpha: float = 16.0,
    targets: tuple[str, ...] = ("query", "value"),
) -> nn.Module:
    """Return a copy of a network that is frozen but for its head and new A/B pairs.

    The head is `module.head`, or the last linear layer of a network without one.

    Args:
        module: any network; it is not changed.
        rank: r, rows of A and columns of B.
        alpha: the pair's product is scaled by alpha / r.
        targets: names of linear layers; the end of a name suffices.
    """
    return _adapt(copy.deepcopy(module), rank, alpha, targets)


def without_lora(module: nn.Module) -> nn.Module:
    """Return a copy of a network with every A/B pair added to the weight it stands beside."""
    module = copy.deepcopy(module)
    pairs = [(name, p) for name, p in module.named_modules() if isinstance(p, LoRALinear)]
    for name, pair in pairs:
        parent, _, last = name.rpartition(".")
        with torch.no_grad():
            pair.base.weight += pair.scale * pair.lora_B @ pair.lora_A
        setattr(module.get_submodule(parent), last, pair.base)
    return module


@entry("model", paper="Hu et al., ICLR 2022", url="https://arxiv.org/abs/2106.09685")
def lora(
    shape: Shape,
    classes: int,
    *,
    inner: Choice,
    rank: int = 8,
    alpha: float = 16.0,
    targets: tuple[str, ...] = ("query", "value"),
) -> nn.Module:
    """Another network, frozen but for its head and A/B pairs beside named linear layers.

    Args:
        inner: the network, such as ``hf(path="folder")`` or ``mlp``.
        rank: r, rows of A and columns of B.
        alpha: the pair's product is scaled by alpha / r.
        targets: names of linear layers; the end of a name suffices.
    """
    if isinstance(inner, Choice) and CATALOGUE[inner.name].kind != "model":
        kind = CATALOGUE[inner.name].kind
        raise ValueError(f"lora: inner is the {kind} {inner}; name a model, such as lora(mlp, ...)")
    return _adapt(inner(shape, classes), rank, alpha, targets)


def _adapt(module: nn.Module, rank: int, alpha: float, targets: Iterable[str]) -> nn.Module:
    """Freeze a network but for its head and put pairs beside the layers that are named."""
    if rank < 1:
        raise ValueError(f"rank must be at least 1, got {rank}")
    if not alpha > 0:
        raise ValueError(f"alpha must be above 0, got {alpha}")
    linear = {name: part for name, part in module.named_modules() if isinstance(part, nn.Linear)}
    head = _head(module, list(linear))
    body = {n: part for n, part in linear.items() if not f"{n}.".startswith(f"{head}.")}
    targets = tuple(targets)
    for target in targets:
        if not any(_names(target, name) for name in body):
            known = sorted({name.rpartition(".")[2] for name in body})
            raise ValueError(
                f"targets: no linear layer but the head is called {target!r}; this network has "
                f"{', '.join(known) or 'none'}"
            )
    for name, parameter in module.named_parameters():
        if not name.startswith(f"{head}."):
            parameter.requires_grad_(False)
    for name, part in body.items():
        if any(_names(target, name) for target in targets):
            parent, _, last = name.rpartition(".")
            setattr(module.get_submodule(parent), last, LoRALinear(part, rank, alpha))
    return module


def _head(module: nn.Module, linear: list[str]) -> str:
    """Return the name of a network's head: as `Net` has it, the last linear layer without one."""
    if isinstance(getattr(module, "head", None), nn.Module):
        return "head"
    if not linear:
        raise ValueError(
            f"{type(module).__name__} has no nn.Linear layer: lora puts A/B pairs beside these"
        )
    return linear[-1]


def _names(target: str, name: str) -> bool:
    """Whether a target is the name of a layer, or the end of it."""
    return f".{name}".endswith(f".{target}")
