r"""Neuron concentration: Li et al. (FedWCM), Figures 3-7. RECONSTRUCTION.

The paper's definition is in a text that is not at hand. Two candidates, with a_j the activation
of neuron j (the mean over places of |activation| for a channel), are measured side by side:

    class   q_jc = mean of a_j over class c, shares over c;  mean over j of 1 - H(q_j) / log C
            1: each neuron fires for one class; 0: every neuron fires for all alike
    mass    Gini coefficient of the neurons' shares of a layer's activation
            0: all neurons are as active; near 1: few carry the layer

A layer is the output of an activation function (of a layer with weights where there is none).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fedbasin.core.evaluator import Evaluator


class Concentration(NamedTuple):
    """Both reconstructions, by layer."""

    layers: tuple[str, ...]
    by_class: Tensor  # [layers]
    by_mass: Tensor  # [layers]


def class_concentration(activity: Tensor) -> float:
    """Return the mean over neurons of ``1 - H(q) / log C`` for activity by class, [C, neurons].

    Neurons that never fire have no q and are left out; NaN where none fires.
    """
    alive = activity[:, activity.sum(0) > 0].double()
    if not alive.numel():
        return float("nan")
    share = alive / alive.sum(0)
    entropy = torch.special.entr(share).sum(0)
    return float((1 - entropy / math.log(len(activity))).mean())


def mass_concentration(activity: Tensor) -> float:
    """Return the Gini coefficient of activity by neuron, [neurons]; NaN where none fires."""
    ordered = activity.double().sort().values
    total = float(ordered.sum())
    count = len(ordered)
    if not total > 0:
        return float("nan")
    rank = torch.arange(1, count + 1, dtype=torch.float64, device=ordered.device)
    return float((2 * rank - count - 1) @ ordered / (count * total))


def _by_neuron(amounts: Tensor) -> Tensor:
    """Return one amount a neuron, [B, neurons]: the mean over an image's or a text's places."""
    if amounts.dim() == 3:
        return amounts.mean(1)  # [B, places, neurons] of a text
    return amounts.flatten(2).mean(2) if amounts.dim() > 3 else amounts


@torch.no_grad()
def neuron_concentration(evaluator: Evaluator, model: Tensor) -> Concentration:
    """Measure every layer of a model [P]; classes count alike however many rows they have.

    A class without rows does not count.
    """
    sums: dict[str, Tensor] = {}
    rows = torch.bincount(evaluator.labels)
    for cut in evaluator.cuts():
        inputs = evaluator.transform(evaluator.inputs[cut], None)
        for name, output in evaluator.net.activations(model, inputs, evaluator.buffers).items():
            amounts = _by_neuron(output.abs().double())
            empty = amounts.new_zeros(len(rows), amounts.shape[1])
            sums.setdefault(name, empty).index_add_(0, evaluator.labels[cut], amounts)
    present = rows > 0
    activity = {n: total[present] / rows[present][:, None] for n, total in sums.items()}
    return Concentration(
        tuple(activity),
        torch.tensor([class_concentration(one) for one in activity.values()]),
        torch.tensor([mass_concentration(one.mean(0)) for one in activity.values()]),
    )
