r"""FedFA: all clients pull the features of a class towards one anchor, and fit their heads to it.

    client:  loss = CE + lambda 1/C sum_b |h_b - a_{y_b}|^2 / n_b   n_b: rows of b's class in batch
             after every step one Adam step of the head alone on  1/C sum_c CE(head(a_c), c)
             after every epoch  a_c <- r a_c + (1 - r) m_c           for the classes it owns
    server:  w+ = sum_i p_i y_i,   a+ = sum_i p_i a_i

h is the input of the head, C the number of classes, and m_c the mean, over the batches of the epoch
that hold class c, of the batch's mean feature of the class. A client that lacks a class sends its
anchor back as it came, which holds the mean of that anchor back. Anchors are not trained by
gradients. Adam starts afresh in every round, and moves the bias that all classes share as well.

Departures from the paper: none known in the rule; its code divides m_c by all batches of an epoch,
which shrinks the anchors of rare classes. Anchors start as unit vectors (drawn directions where
classes outnumber features). The IMA paper's runs keep r = 0.9 as its table says (its code: 0.5) and
calibrate the head from a quarter of the rounds on: `calibrate_from=0.25`. A last, unfinished epoch
(`local.steps`) renews anchors too.
Cost: one model and C x d anchors each way; on the client three heads of memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fedbasin.core.bounds import at_least, within
from fedbasin.core.catalogue import entry
from fedbasin.core.method import Averaging, Context, Replies, Served
from fedbasin.core.net import Net
from fedbasin.core.rng import normal
from fedbasin.core.rule import Finish, LocalRule, LossInputs, Rules, Start
from fedbasin.core.space import Range
from fedbasin.core.vectors import Weighting, shares, weighted_mean
from fedbasin.local.step import one_hot
from fedbasin.methods.parts.descent import Adam
from fedbasin.methods.parts.heads import Head

_BETAS = (0.9, 0.999)  # Adam's defaults


class SharedAnchors(NamedTuple):
    """What the server sends beside the model."""

    anchors: Tensor  # [classes, d]
    calibrate: Tensor  # 0-d, 1 where heads are fitted to the anchors in this round


class AnchorCarry(NamedTuple):
    """What a client carries through its steps."""

    shared: SharedAnchors  # anchors as they stand on this client
    total: Tensor  # [classes, d] sum of the batches' class means in this epoch
    batches: Tensor  # [classes] how many batches held the class
    step: Tensor  # 0-d, steps taken in this epoch
    epoch_steps: Tensor  # 0-d
    adam: Adam  # of the head


class Report(NamedTuple):
    """What a client sends beside its model."""

    anchors: Tensor  # [classes, d]


@dataclass(frozen=True)
class FeatureAnchors(LocalRule):
    """The client half."""

    strength: float
    keep: float
    head_lr: float

    def begin(self, start: Start, net: Net) -> AnchorCarry:
        """Start with the anchors as sent."""
        head = Head.of(net.layout)
        zero = torch.zeros_like(start.lr)
        anchors = start.shared.anchors
        fresh = Adam.at(head.matrix(start.vector))._replace(steps=zero)
        return AnchorCarry(
            start.shared,
            torch.zeros_like(anchors),
            anchors[:, 0] * 0,
            zero,
            start.epoch_steps,
            fresh,
        )

    def loss(
        self, carry: AnchorCarry, value: Tensor, view: LossInputs
    ) -> tuple[Tensor, AnchorCarry]:
        """Pull features to their anchors, and remember the batch's class means."""
        features = view.outputs.features
        anchors = carry.shared.anchors
        assert features is not None  # Head.of has checked that there are some
        member = one_hot(view.batch.labels, view.outputs.logits)
        member = member * view.batch.weight[:, None]  # [B, classes]
        counts = member.sum(0)
        mean_weight = member / counts.clamp(min=1)
        distance = (features - anchors[view.batch.labels]).square().sum(1)
        term = (mean_weight.sum(1) * distance).sum() / len(anchors)
        total = carry.total + mean_weight.T @ features.detach()
        seen = carry.batches + (counts > 0)
        return value + self.strength * term, carry._replace(total=total, batches=seen)

    def after_step(
        self, carry: AnchorCarry, vector: Tensor, net: Net
    ) -> tuple[Tensor, AnchorCarry]:
        """Fit the head to the anchors; at the end of an epoch, renew these."""
        if self.head_lr:
            vector, carry = self._calibrated(carry, vector, net)
        step = carry.step + 1
        over = step >= carry.epoch_steps
        renewed = torch.where(over, self._renewed(carry), carry.shared.anchors)
        return vector, carry._replace(
            shared=carry.shared._replace(anchors=renewed),
            total=torch.where(over, 0.0, carry.total),
            batches=torch.where(over, 0.0, carry.batches),
            step=torch.where(over, 0.0, step),
        )

    def _calibrated(
        self, carry: AnchorCarry, vector: Tensor, net: Net
    ) -> tuple[Tensor, AnchorCarry]:
        """Take one Adam step of the head on the mean cross-entropy of the anchors."""
        head = Head.of(net.layout)
        anchors = carry.shared.anchors
        matrix = head.matrix(vector)
        inputs = head.inputs(anchors)
        right = torch.eye(len(anchors), dtype=inputs.dtype, device=inputs.device)
        wrong = torch.softmax(inputs @ matrix.T, 1) - right
        moved, adam = carry.adam.step(matrix, wrong.T @ inputs / len(anchors), self.head_lr, _BETAS)
        moved = torch.where(carry.shared.calibrate > 0, moved, matrix)
        return head.put(vector, moved), carry._replace(adam=adam)

    def _renewed(self, carry: AnchorCarry) -> Tensor:
        """Move the anchors of the classes that were seen towards their mean features."""
        mean = carry.total / carry.batches.clamp(min=1)[:, None]
        old = carry.shared.anchors
        moved = self.keep * old + (1 - self.keep) * mean
        return torch.where(carry.batches[:, None] > 0, moved, old)

    def end(self, carry: AnchorCarry, start: Start, finish: Finish) -> tuple[Any, Report]:
        """Report the anchors."""
        return start.client_state, Report(self._renewed(carry))


@dataclass(frozen=True)
class FedFAState:
    """What the server remembers."""

    anchors: Tensor  # [classes, d]


@entry(
    "method",
    paper="Zhou et al., IEEE TMC 2024",
    url="https://arxiv.org/abs/2211.09299",
    needs=("classes", "features"),
    is_fedavg_when={"pull": 0.0, "head_lr": 0.0},
    exempt={
        "law_payload_is_what_the_card_says": "anchors of C x d numbers travel both ways, which no "
        "number of models expresses; its own test counts the bytes"
    },
    tunable={"pull": Range(0.01, 1.0, "log"), "head_lr": Range(0.0001, 0.1, "log")},
)
@dataclass(frozen=True)
class FedFA(Averaging):
    """Pull the features of each class to an anchor that all clients share.

    Args:
        pull: lambda, the strength of the pull; 0 leaves features alone.
        keep: r, the share of an anchor that one epoch keeps; 1 holds anchors fixed.
        head_lr: of the Adam step that fits the head to the anchors; 0 takes none.
        calibrate_from: the share of rounds after which heads are fitted; 0 from the first on.
        weighting: p_i by ``"samples"`` or ``"uniform"``.
        local: further rules for the clients.
    """

    pull: float = at_least(0, default=0.1)
    keep: float = within("[0, 1]", default=0.9)
    head_lr: float = at_least(0, default=0.001)
    calibrate_from: float = within("[0, 1]", default=0.0)
    weighting: Weighting = "samples"
    local: Rules = ()

    def init(self, server: Tensor, context: Context) -> FedFAState:
        """Start with unit vectors."""
        head = Head.of(context.layout)
        if head.classes <= head.width:
            return FedFAState(torch.eye(head.classes, head.width).to(server))
        counter = torch.arange(head.classes * head.width, device=server.device)
        drawn = normal(context.key.fold("fedfa").tensor(server.device), counter)
        return FedFAState(F.normalize(drawn.view(head.classes, head.width)).to(server))

    def own_rules(self) -> tuple[LocalRule, ...]:
        """Return the anchors' client half."""
        return (FeatureAnchors(self.pull, self.keep, self.head_lr),)

    def own_broadcast(self, state: FedFAState, server: Tensor, context: Context) -> tuple[Any, ...]:
        """Send the anchors, and whether heads are fitted."""
        on = context.round >= int(self.calibrate_from * context.rounds + 1e-9)
        return (SharedAnchors(state.anchors, server.new_tensor(float(on))),)

    def aggregate(
        self, state: FedFAState, server: Tensor, replies: Replies, context: Context
    ) -> tuple[Served, FedFAState]:
        """Average models and anchors with the same weights."""
        share = shares(replies.weights, self.weighting)
        mean = self.mean(replies)
        sent = replies.report(Report).anchors
        anchors = weighted_mean(sent.flatten(1), share).view_as(state.anchors)
        return Served(send=mean, score=mean), FedFAState(anchors)
