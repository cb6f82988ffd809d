"""Networks of dense layers and ReLU as batched products: a matrix of models, a batch for each.

z_l = h_{l-1} W_l^T + b_l,   h_l = max(z_l, 0)        for all rows at once
d_{l-1} = (d_l W_l) [h_{l-1} > 0]                      from d_L, the slope of the loss
W_l <- W_l + c d_l^T h_{l-1},   b_l <- b_l + c sum d_l   without a gradient in between
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedbasin.core.net import Net
from fedbasin.core.rule import Batch
from fedbasin.core.task import Classification, RowTask, Task
from fedbasin.local.step import task_loss
from fedbasin.models.network import Network

_ROW_MEANS = (RowTask.batch_loss, Classification.batch_loss)  # the mean over rows of weight 1


class _Layer(NamedTuple):
    """A dense layer: the names of its parts, and whether ReLU follows."""

    weight: str
    bias: str | None
    rectified: bool


@dataclass(frozen=True)
class Dense:
    """The layers of such a network.

    Args:
        layers: from the inputs on.
        task: what the outputs mean.
    """

    layers: tuple[_Layer, ...]
    task: Task

    @classmethod
    def of(cls, net: Net, task: Task, axes: int) -> Dense | None:
        """Return a network's layers; None where it has others, or parts that do not train.

        Args:
            net: the network.
            task: what its outputs mean.
            axes: of stored rows; with two they are flat already.
        """
        if net.draws or net.mixed or not net.plain:
            return None
        found: list[_Layer] = []
        flat = axes == 2
        for name, part in _leaves(net.module):
            if type(part) is nn.Flatten and not found and (part.start_dim, part.end_dim) == (1, -1):
                flat = True
            elif type(part) is nn.Linear:
                bias = None if part.bias is None else f"{name}.bias"
                found.append(_Layer(f"{name}.weight", bias, False))
            elif type(part) is nn.ReLU and found and not found[-1].rectified:
                found[-1] = found[-1]._replace(rectified=True)
            else:
                return None
        # frozen parts are not in the layout
        known = {n for layer in found for n in (layer.weight, layer.bias) if n is not None}
        if not flat or not found or known != set(net.layout.names):
            return None
        return cls(tuple(found), task)

    def gradients(
        self, parts: Mapping[str, Tensor], batch: Batch
    ) -> tuple[Tensor, Callable[[str, Tensor, Tensor | None], None]]:
        """Return the losses [A], and a function that adds a multiple of a part's gradient.

        Args:
            parts: the parts of every model [A, ...].
            batch: the batches [A, B, ...].
        """
        inputs = [batch.inputs.flatten(2)]
        for layer in self.layers:
            weight = parts[layer.weight].mT
            if layer.bias is None:
                outputs = torch.bmm(inputs[-1], weight)
            else:
                outputs = torch.baddbmm(parts[layer.bias][:, None], inputs[-1], weight)
            inputs.append(outputs.relu_() if layer.rectified else outputs)
        outputs = inputs.pop().requires_grad_()
        losses = losses_of(self.task, outputs, batch)
        (slope,) = torch.autograd.grad(losses.sum(), outputs)
        slopes = {self.layers[-1].weight: slope}
        if self.layers[-1].rectified:
            slopes[self.layers[-1].weight] = slope = slope * (outputs.detach() > 0)
        below = zip(self.layers[:0:-1], self.layers[-2::-1], inputs[:0:-1], strict=True)
        for layer, under, values in below:
            slope = torch.bmm(slope, parts[layer.weight])
            if under.rectified:
                slope *= values > 0
            slopes[under.weight] = slope
        known = dict(zip((layer.weight for layer in self.layers), inputs, strict=True))
        weight_of = {layer.bias: layer.weight for layer in self.layers}

        def add(name: str, part: Tensor, scale: Tensor | None) -> None:
            slope = slopes[weight_of.get(name, name)]
            if scale is not None:
                slope = slope * scale.view(-1, 1, 1)
            if name in known:
                part.baddbmm_(slope.mT, known[name])
            else:
                part += slope.sum(1)

        return losses.detach(), add


def _leaves(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers of a chain in the order they run; what is no chain is yielded whole."""
    if type(module) not in (nn.Sequential, Network):
        yield name, module
        return
    for child, part in module.named_children():
        yield from _leaves(part, f"{name}.{child}" if name else child)


def losses_of(task: Task, outputs: Tensor, batch: Batch) -> Tensor:
    """Return the loss of each client [A] from outputs and batches of all [A, B, ...]."""
    if not isinstance(task, RowTask) or type(task).batch_loss not in _ROW_MEANS:
        losses: Tensor = torch.func.vmap(lambda out, own: task_loss(out, own, task))(outputs, batch)
        return losses
    each = task.each(outputs.flatten(0, 1), batch.labels.flatten(0, 1)).view(batch.weight.shape)
    weight = batch.weight
    return (each * weight).sum(1) / weight.sum(1).clamp(min=1)
