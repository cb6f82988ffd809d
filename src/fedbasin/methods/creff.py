r"""CReFF: re-train the head on features that give the head the gradients real data give it.

    client:  y_i by plain training from w, and for every class c it owns, at the received model,
             g_ic = mean over its rows of class c of the gradient of CE(head_r(h(x)), c) in head_r
    server:  w+ = sum_i p_i y_i
             g_c = mean of g_ic over the clients of the cohort that own c
             F_c <- F_c - eta_F dM/dF_c, `match` times;   M = sum_c sum_rows (1 - cos(g_c, g(F_c)))
             r+ = a fresh head after `epochs` passes of SGD over all F_c
    scored:  the backbone of w+ under the head r+; clients train w+ with its own head

r is the head re-trained in the last round (at first a drawn one), F_c are `features` vectors of
class c that the server keeps, g(F_c) the gradient that they give head r. Rows are those of the
head's weight, and its bias as one more. Gradients of M run through the head alone and are written
out below. Classes that nobody in the cohort owns keep their features.

Departures from the paper: g_ic is the mean over all rows of a class, without augmentation; the
paper draws 32 augmented rows ten times. F_c takes part in a step through its own class alone, as in
the paper's code, which adds 1e-6 to the product of the norms in each cosine; here there is none.
Cost: one model and a head down; one model, C heads and C numbers up (a client in the field would
send the owned classes' alone); C x features x d numbers on the server, and `match` + `epochs` x
batches small steps a round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedbasin.core.bounds import above, at_least
from fedbasin.core.catalogue import entry
from fedbasin.core.method import Averaging, Context, Replies, Served
from fedbasin.core.net import Net
from fedbasin.core.rng import Key, normal, uniform
from fedbasin.core.rule import Finish, LocalRule, Rules, Start, SurveyBatch
from fedbasin.core.space import Range
from fedbasin.core.vectors import Weighting
from fedbasin.local.batches import epoch_orders
from fedbasin.local.step import one_hot
from fedbasin.methods.parts.heads import Head


class Retrained(NamedTuple):
    """What the server sends beside the model."""

    head: Tensor  # [classes, d + 1] r


class Gradients(NamedTuple):
    """What a client finds and reports."""

    heads: Tensor  # [classes, classes, d + 1] g_ic by class c; zero for classes it lacks
    counts: Tensor  # [classes] its rows of each class; as reported, 1 or 0


@dataclass(frozen=True)
class ClassGradients(LocalRule):
    """The client half: the head's gradients, class by class."""

    surveys: ClassVar[bool] = True

    def survey(self, look: SurveyBatch) -> Gradients:
        """Sum the gradients of the re-trained head over the rows of each class."""
        outputs = look.net(look.vector, look.batch.inputs, look.buffers)
        assert outputs.features is not None  # Head.of has checked the network
        member = one_hot(look.batch.labels, outputs.logits)
        inputs = Head.of(look.net.layout).inputs(outputs.features)
        wrong = torch.softmax(inputs @ look.shared.head.T, 1) - member
        weighted = member * look.batch.weight[:, None]
        return Gradients(torch.einsum("bc,bk,bd->ckd", weighted, wrong, inputs), weighted.sum(0))

    def begin(self, start: Start, net: Net) -> Gradients:
        """Turn sums into means."""
        sums: Gradients = start.survey
        means = sums.heads / sums.counts.clamp(min=1)[:, None, None]
        return Gradients(means, (sums.counts > 0).to(means.dtype))

    def end(self, carry: Gradients, start: Start, finish: Finish) -> tuple[Any, Gradients]:
        """Report them."""
        return start.client_state, carry


@dataclass(frozen=True)
class CReFFState:
    """What the server remembers."""

    features: Tensor  # [classes, m, d] F
    head: Tensor  # [classes, d + 1] r


@entry(
    "method",
    name="creff",
    paper="Shang et al., IJCAI 2022",
    url="https://arxiv.org/abs/2204.13399",
    needs=("classes", "features"),
    is_fedavg_when="never: it sends FedAvg's models, but scores them under a re-trained head",
    exempt={
        "law_payload_is_what_the_card_says": "heads travel beside the model, which no number of "
        "models expresses; its own test counts the bytes"
    },
    tunable={"match_lr": Range(0.01, 1.0, "log"), "lr": Range(0.001, 0.1, "log")},
)
@dataclass(frozen=True)
class CReFF(Averaging):
    """FedAvg scored under a head that is re-trained on synthetic, balanced features.

    Args:
        features: how many synthetic features a class has.
        match: steps that fit features to the clients' gradients.
        match_lr: eta_F, of these steps.
        epochs: passes over the features that train the new head.
        lr: of this training.
        batch: its batch size.
        weighting: p_i by ``"samples"`` or ``"uniform"``.
        local: rules that clients follow beyond SGD.
    """

    features: int = at_least(1, default=100)
    match: int = at_least(0, default=100)
    match_lr: float = above(0, default=0.1)
    epochs: int = at_least(0, default=300)
    lr: float = above(0, default=0.01)
    batch: int = at_least(1, default=32)
    weighting: Weighting = "samples"
    local: Rules = ()

    def init(self, server: Tensor, context: Context) -> CReFFState:
        """Draw features and a head."""
        head = Head.of(context.layout)
        shape = (head.classes, self.features, head.width)
        counter = torch.arange(shape[0] * shape[1] * shape[2], device=server.device)
        drawn = normal(context.key.fold("creff", "features").tensor(server.device), counter)
        return CReFFState(drawn.view(shape).to(server), _fresh_head(head, context.key, server))

    def own_rules(self) -> tuple[LocalRule, ...]:
        """Return the gradients' client half."""
        return (ClassGradients(),)

    def own_broadcast(self, state: CReFFState, server: Tensor, context: Context) -> tuple[Any, ...]:
        """Send the re-trained head."""
        return (Retrained(state.head),)

    def aggregate(
        self, state: CReFFState, server: Tensor, replies: Replies, context: Context
    ) -> tuple[Served, CReFFState]:
        """Average; fit the features; train a head on them."""
        mean = self.mean(replies)
        head = Head.of(context.layout)
        report = replies.report(Gradients)
        counted = (replies.weights > 0).to(mean.dtype)[:, None] * report.counts
        owners = counted.sum(0)
        real = torch.einsum("ic,ickd->ckd", counted, report.heads)
        real = real / owners.clamp(min=1)[:, None, None]
        features = state.features
        for _ in range(self.match):
            # Where nobody owns a class its real gradient is zero, and so is the slope.
            slope = matching_gradient(features, state.head, real, head)[1]
            features = features - self.match_lr * slope
        retrained = self._trained(head, features, context.key)
        score = head.put(mean, retrained)
        return Served(send=mean, score=score), CReFFState(features, retrained)

    def _trained(self, head: Head, features: Tensor, key: Key) -> Tensor:
        """Return a fresh head after SGD on the synthetic features."""
        inputs = head.inputs(features.flatten(0, 1))
        right = torch.eye(head.classes).to(inputs).repeat_interleave(self.features, 0)
        matrix = _fresh_head(head, key, inputs)
        order_key = key.fold("creff", "order").tensor(inputs.device)
        for order in epoch_orders(order_key, self.epochs, len(inputs)):
            for x, y in zip(
                inputs[order].split(self.batch), right[order].split(self.batch), strict=True
            ):
                wrong = torch.softmax(x @ matrix.T, 1) - y
                matrix = torch.addmm(matrix, wrong.T, x, alpha=-self.lr / len(x))
        return matrix


def matching_gradient(
    features: Tensor, matrix: Tensor, real: Tensor, head: Head
) -> tuple[Tensor, Tensor]:
    r"""Return M and dM/dF for features F [C, m, d] and real head gradients [C, C, d + 1].

    With p_j = softmax(A [f_j, 1]) and q_j = p_j - e_c, class c's gradient is the mean of
    q_j [f_j, 1]^T. If G = dM/dg(F_c), then with s_j = G [f_j, 1]

        dM/df_j = 1/m (G^T q_j + W^T (p_j * s_j - p_j <p_j, s_j>)),   without the bias's column.
    """
    width = head.width
    count = features.shape[1]
    inputs = head.inputs(features)
    p = torch.softmax(inputs @ matrix.T, -1)
    q = p - torch.eye(head.classes, dtype=p.dtype, device=p.device)[:, None]
    made = torch.einsum("cmk,cmd->ckd", q, inputs) / count
    total, slope = _one_minus_cosine(made[..., :width], real[..., :width])
    if head.bias is not None:
        more, last = _one_minus_cosine(made[..., width], real[..., width])
        total = total + more
        slope = torch.cat([slope, last[..., None]], -1)
    s = torch.einsum("ckd,cmd->cmk", slope, inputs)
    through = p * s - p * (p * s).sum(-1, keepdim=True)
    by_features = torch.einsum("cmk,ckd->cmd", q, slope[..., :width]) + through @ matrix[:, :width]
    return total, by_features / count


def _one_minus_cosine(made: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of 1 - cos over rows [..., d] and its gradient in the first."""
    mine, size = _units(made)
    theirs, _ = _units(real)
    cosine = (mine * theirs).sum(-1, keepdim=True)
    return (1 - cosine).sum(), (mine * cosine - theirs) / size


def _units(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows over their lengths, and these; inf where squares are lost, so 0 is returned."""
    size = rows.norm(dim=-1, keepdim=True)
    size = torch.where(size > torch.finfo(size.dtype).tiny ** 0.5, size, torch.inf)
    return rows / size, size


def _fresh_head(head: Head, key: Key, like: Tensor) -> Tensor:
    """Draw a head as torch does for a linear layer: uniform within 1 / sqrt(d)."""
    shape = (head.classes, head.width + (head.bias is not None))
    counter = torch.arange(shape[0] * shape[1], device=like.device).view(shape)
    drawn = uniform(key.fold("creff", "head").tensor(like.device), counter)
    fresh: Tensor = ((2 * drawn - 1) / head.width**0.5).to(like)
    return fresh
