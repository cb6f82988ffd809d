r"""Losses for classes of unequal size; each takes the place of the cross-entropy.

With p = softmax(z) of the logits z and y a sample's label, the mean over a batch of

    focal             (1 - p_y)^gamma CE(z, y)
    class_balanced    w_y CE(z, y),   w_c ~ (1 - beta) / (1 - beta^n_c), mean 1 over owned classes
    balanced_softmax  CE(z + log n, y)           n_c: the client's own samples of class c
    logit_adjusted    CE(z + tau log pi, y)      pi_c: class c's share in all clients' samples

They act in training alone: a model is scored by its plain logits. A class that nobody counts has
log 0: its logit is left out of the softmax.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fedbasin.core.bounds import at_least, within
from fedbasin.core.catalogue import entry
from fedbasin.core.net import Net
from fedbasin.core.rule import DrawsRows, LocalRule, LossInputs, Start
from fedbasin.local.step import batch_mean, task_loss

if TYPE_CHECKING:
    from fedbasin.core.method import Context


class Weights(NamedTuple):
    """What class_balanced carries."""

    weight: Tensor  # [classes] w_c


class Shift(NamedTuple):
    """What the logit-shifting losses carry, and what logit_adjusted is sent."""

    shift: Tensor  # [classes] added to the logits; -inf leaves a class out


class Replaced(LocalRule):
    """A rule whose loss takes the place of the cross-entropy."""

    owns: ClassVar[frozenset[Literal["loss", "rows"]]] = frozenset({"loss"})


@entry(
    "rule",
    paper="Lin et al., ICCV 2017",
    url="https://arxiv.org/abs/1708.02002",
    needs=("classes",),
)
@dataclass(frozen=True)
class Focal(Replaced):
    """Count samples less the better they are classified: (1 - p_y)^gamma CE.

    Args:
        gamma: how much less; 0 is the cross-entropy.
    """

    gamma: float = at_least(0, default=2.0)

    def loss(self, carry: Any, value: Tensor, view: LossInputs) -> tuple[Tensor, Any]:
        """Weigh each sample's cross-entropy."""
        each = F.cross_entropy(view.outputs.logits, view.batch.labels, reduction="none")
        # 1 - p_y; its floor keeps the slope of a fractional power finite at p_y = 1.
        missed = -torch.expm1(-each).clamp(max=-torch.finfo(each.dtype).eps)
        return batch_mean(missed**self.gamma * each, view.batch), carry


@entry(
    "rule",
    name="class_balanced",
    paper="Cui et al., CVPR 2019",
    url="https://arxiv.org/abs/1901.05555",
    needs=("classes",),
)
@dataclass(frozen=True)
class ClassBalanced(Replaced):
    """Weigh classes by their effective number of samples, (1 - beta) / (1 - beta^n_c).

    Args:
        beta: 0 is the cross-entropy; 1 is the limit 1 / n_c.
    """

    beta: float = within("[0, 1]", default=0.999)

    def begin(self, start: Start, net: Net) -> Weights:
        """Form the weights from the client's own counts."""
        owned = start.class_counts > 0
        counts = start.class_counts.clamp(min=1)
        if self.beta == 1:
            effective = counts
        elif self.beta == 0:
            effective = torch.ones_like(counts)
        else:  # (1 - beta^n) / (1 - beta), without a difference of near-equal numbers
            effective = torch.expm1(counts * math.log(self.beta)) / (self.beta - 1)
        weight = torch.where(owned, 1 / effective, 0.0)
        return Weights(weight * owned.sum() / weight.sum().clamp(min=1e-30))

    def loss(self, carry: Weights, value: Tensor, view: LossInputs) -> tuple[Tensor, Weights]:
        """Weigh each sample's cross-entropy by its class."""
        each = F.cross_entropy(view.outputs.logits, view.batch.labels, reduction="none")
        return batch_mean(carry.weight[view.batch.labels] * each, view.batch), carry


class _Shifted(Replaced):
    """A cross-entropy of shifted logits."""

    def loss(self, carry: Shift, value: Tensor, view: LossInputs) -> tuple[Tensor, Shift]:
        """Take the cross-entropy with the shift."""
        shifted = view.outputs.logits + carry.shift
        return task_loss(shifted, view.batch, view.task), carry


@entry(
    "rule",
    name="balanced_softmax",
    paper="Ren et al., NeurIPS 2020",
    url="https://arxiv.org/abs/2007.10740",
    needs=("classes",),
)
@dataclass(frozen=True)
class BalancedSoftmax(_Shifted):
    """Shift logits by the log of the client's own class counts.

    Args:
        floor: least count of a class. At 0 absent classes are left out of the softmax, so that a
            client of one class learns nothing; 1 keeps them in.
    """

    floor: float = at_least(0, default=0.0)

    def begin(self, start: Start, net: Net) -> Shift:
        """Form the shift from the client's own counts."""
        return Shift(log_share(start.class_counts.clamp(min=self.floor)))


@entry(
    "rule",
    name="logit_adjusted",
    paper="Menon et al., ICLR 2021",
    url="https://arxiv.org/abs/2007.07314",
    needs=("class_counts", "classes"),
)
@dataclass(frozen=True)
class LogitAdjusted(_Shifted):
    """Shift logits by tau times the log of the classes' shares in all clients' data.

    The server needs the class counts of all clients together for this, and sends the shares to all
    clients. Where counts are private it sees that sum alone.

    Args:
        tau: strength of the shift; 0 is the cross-entropy.
    """

    tau: float = at_least(0, default=1.0)

    def shared(self, context: Context) -> Shift:
        """Send tau log pi."""
        private = context.private_counts
        if private is not None:
            total = private.total
        else:
            total = context.need("class_counts", "logit_adjusted").sum(0)
        shift = log_share(total.double())
        # 0 log 0 counts as 0 here: without a shift no class is left out.
        return Shift(self.tau * shift if self.tau else torch.zeros_like(shift))

    def begin(self, start: Start, net: Net) -> Shift:
        """Take the shift as sent."""
        return Shift(start.shared.shift.to(start.vector.dtype))


@entry("rule", name="balanced_rows", needs=("class_labels",))
@dataclass(frozen=True)
class BalancedRows(DrawsRows):
    """Draw rows with replacement so that every class the client owns is equally likely.

    An epoch has as many draws as the client has rows, so its steps stay what they were; it no
    longer visits every row. Beside a loss that balances classes it corrects twice.
    """

    def chances(self, labels: Tensor, class_counts: Tensor) -> Tensor:
        """Draw a row with chance 1 / n_c."""
        return class_counts[labels].double().reciprocal()


def log_share(counts: Tensor) -> Tensor:
    """Return the log of each class's share [classes]; -inf for a class without a sample."""
    return (counts / counts.sum()).log()
