r"""FedGEN: the server learns to generate features that all clients' heads recognise.

    server:  w+ = sum_i p_i y_i
             G <- Adam, `steps` times, on  mean_b sum_i a_i(y_b) CE(head_i(G(e_b, y_b)), y_b)
                                           + exp(- mean_{b,b'} |e_b - e_b'|^2/n |g_b - g_b'|_1/d)
    client:  CE + A CE(head(G(e, y')), y') + B KL( softmax(head(G(e, y))) || softmax(z(x)) )

G(e, y) maps noise e (n numbers, uniform in [0, 1)) and a one-hot label to features g (d numbers) by
one hidden layer of ReLU. a_i(y) is client i's share of the cohort's samples of class y; labels y_b
are drawn evenly from the classes the cohort owns. The client draws one y' for every row of its
batch, evenly from the classes G has learnt so far; y are the labels of its rows, and the target of
KL is a constant. A and B fall by `decay` a round (down to 1e-4) and count in the first `synthetic`
local epochs of the rounds after the first. The paper's A = B = 10 go with its learning rate 0.01;
at 0.1 they drown the data (docs/methods/server_data.md): take 1.

Departures from the paper: no batch normalisation inside G; class counts are the clients' true ones
(the code: those of drawn batches, plus one); as many generated as real rows in a step. The
adversarial student, of weight 0 in the paper's settings, is left out.
Cost: one model, G and C numbers down; one model and C class counts up, which the server sees in
plain; 3 G of memory on the server.
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
from fedbasin.core.rng import Key, fold_in, uniform
from fedbasin.core.rule import Finish, LocalRule, LossInputs, Rules, Start
from fedbasin.core.space import Range
from fedbasin.core.vectors import Weighting
from fedbasin.local.step import batch_mean
from fedbasin.methods.parts.descent import Adam
from fedbasin.methods.parts.heads import Head

_BETAS = (0.9, 0.999)
_LEAST = 1e-4  # of A and B
# What a key is folded with.
_NOISE = 1
_LABELS = 2
_MORE = 3


@dataclass(frozen=True)
class Generator:
    """A network from noise and a label to features, as a function of one flat vector [G]."""

    noise: int  # n
    classes: int
    hidden: int
    width: int  # d

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Shapes of the two layers' weights, biases as one more column."""
        return (self.hidden, self.noise + self.classes + 1), (self.width, self.hidden + 1)

    @property
    def size(self) -> int:
        """How many numbers it has, G."""
        return sum(rows * columns for rows, columns in self.shapes)

    def layers(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two layers as views."""
        (rows, columns), last = self.shapes
        cut = rows * columns
        return flat[:cut].view(rows, columns), flat[cut:].view(last)

    def __call__(self, flat: Tensor, noise: Tensor, labels: Tensor) -> Tensor:
        """Return features [B, d] for noise [B, n] and labels [B]."""
        first, last = self.layers(flat)
        ones = torch.ones_like(noise[:, :1])
        label = (labels[:, None] == torch.arange(self.classes, device=labels.device)).to(noise)
        inside = torch.relu(torch.cat([noise, label, ones], 1) @ first.T)
        return torch.cat([inside, ones], 1) @ last.T

    def fresh(self, key: Key, like: Tensor) -> Tensor:
        """Draw the vector [G] as torch draws linear layers: uniform within 1 / sqrt(inputs)."""
        drawn = (
            2 * uniform(key.tensor(like.device), torch.arange(self.size, device=like.device)) - 1
        )
        layers = [layer / (layer.shape[1] - 1) ** 0.5 for layer in self.layers(drawn)]
        return torch.cat([layer.reshape(-1) for layer in layers]).to(like)


class SharedGenerator(NamedTuple):
    """What the server sends beside the model."""

    generator: Tensor  # [G]
    known: Tensor  # [classes] 1 for classes the generator has learnt
    strengths: Tensor  # [2] A and B of this round; 0 before the generator has learnt


class GeneratorCarry(NamedTuple):
    """What a client carries through its steps."""

    shared: SharedGenerator
    left: Tensor  # 0-d, steps in which generated features still count


class Counts(NamedTuple):
    """What a client reports."""

    counts: Tensor  # [classes]


@dataclass(frozen=True)
class GeneratedFeatures(LocalRule):
    """The client half."""

    noise: int
    hidden: int
    synthetic: int

    def begin(self, start: Start, net: Net) -> GeneratorCarry:
        """Take the generator as sent."""
        Head.of(net.layout)  # says what is missing
        return GeneratorCarry(start.shared, self.synthetic * start.epoch_steps)

    def loss(
        self, carry: GeneratorCarry, value: Tensor, view: LossInputs
    ) -> tuple[Tensor, GeneratorCarry]:
        """Add the two terms."""
        flat, known, strengths = carry.shared
        head = Head.of(view.net.layout)
        generate = Generator(self.noise, head.classes, self.hidden, head.width)
        labels = view.batch.labels
        rows = len(labels)
        other = labels_at(fold_in(view.key, _LABELS), rows, known)
        features = generate(
            flat, noise_at(fold_in(view.key, _NOISE), rows, self.noise, known), other
        )
        guessed = view.net.classify(view.vector, features)
        learnt = batch_mean(F.cross_entropy(guessed, other, reduction="none"), view.batch)
        like = generate(flat, noise_at(fold_in(view.key, _MORE), rows, self.noise, known), labels)
        target = torch.softmax(view.net.classify(view.vector, like).detach(), 1)
        said = F.log_softmax(view.outputs.logits, 1)
        apart = batch_mean((torch.xlogy(target, target) - target * said).sum(1), view.batch)
        on = (carry.left > 0).to(value.dtype)
        total = value + on * (strengths[0] * learnt + strengths[1] * apart)
        return total, carry._replace(left=carry.left - 1)

    def end(self, carry: GeneratorCarry, start: Start, finish: Finish) -> tuple[Any, Counts]:
        """Report the class counts."""
        return start.client_state, Counts(start.class_counts)


def noise_at(key: Tensor, rows: int, width: int, like: Tensor) -> Tensor:
    """Draw noise [rows, width], uniform in [0, 1)."""
    counter = torch.arange(rows * width, device=like.device).view(rows, width)
    return uniform(key, counter).to(like.dtype)


def labels_at(key: Tensor, rows: int, known: Tensor) -> Tensor:
    """Draw labels [rows], evenly from the classes that are marked with 1."""
    below = known.cumsum(0)
    at = uniform(key, torch.arange(rows, device=known.device)).to(known.dtype) * below[-1]
    return (at[:, None] >= below).sum(1).clamp(max=len(known) - 1)


@dataclass(frozen=True)
class FedGENState:
    """What the server remembers."""

    generator: Tensor  # [G]
    adam: Adam  # of the generator
    known: Tensor  # [classes]


class FedGENNotes(NamedTuple):
    """What a round leaves in the record."""

    generator_loss: Tensor  # of the last step
    known: Tensor  # how many classes the generator has learnt


@entry(
    "method",
    name="fedgen",
    paper="Zhu et al., ICML 2021",
    url="https://arxiv.org/abs/2105.10056",
    needs=("classes", "features"),
    is_fedavg_when={"alpha": 0.0, "beta": 0.0},
    exempt={
        "law_payload_is_what_the_card_says": "a generator travels beside the model, which no "
        "number of models expresses; its own test counts the bytes"
    },
    tunable={"alpha": Range(0.1, 100.0, "log"), "beta": Range(0.1, 100.0, "log")},
)
@dataclass(frozen=True)
class FedGEN(Averaging):
    """A generator of features, learnt on the server without data, guides the clients.

    Args:
        alpha: A, weight of the cross-entropy on generated features.
        beta: B, weight of the agreement with them.
        decay: what is left of A, B and the generator's learning rate after a round.
        synthetic: local epochs in which generated features count.
        steps: of the generator in a round.
        lr: of the generator.
        weight_decay: of the generator.
        batch: features generated in a step.
        noise: n, numbers of noise.
        hidden: units of the generator.
        weighting: p_i by ``"samples"`` or ``"uniform"``.
        local: further rules for the clients.
    """

    alpha: float = at_least(0, default=10.0)
    beta: float = at_least(0, default=10.0)
    decay: float = within("(0, 1]", words="must be above 0 and at most 1", default=0.98)
    synthetic: int = at_least(0, default=20)
    steps: int = at_least(1, default=50)
    lr: float = at_least(0, default=0.0003)
    weight_decay: float = at_least(0, default=0.01)
    batch: int = at_least(1, default=32)
    noise: int = at_least(1, default=32)
    hidden: int = at_least(1, default=256)
    weighting: Weighting = "samples"
    local: Rules = ()

    def init(self, server: Tensor, context: Context) -> FedGENState:
        """Draw a generator."""
        head = Head.of(context.layout)
        generate = Generator(self.noise, head.classes, self.hidden, head.width)
        fresh = generate.fresh(context.key.fold("fedgen"), server)
        return FedGENState(fresh, Adam.at(fresh), server.new_zeros(head.classes))

    def own_rules(self) -> tuple[LocalRule, ...]:
        """Return the client half."""
        return (GeneratedFeatures(self.noise, self.hidden, self.synthetic),)

    def own_broadcast(
        self, state: FedGENState, server: Tensor, context: Context
    ) -> tuple[Any, ...]:
        """Send the generator; in the first round it does not count."""
        fall = self.decay**context.round
        sizes = [max(size * fall, _LEAST) if size else 0.0 for size in (self.alpha, self.beta)]
        strengths = server.new_tensor(sizes) * (state.known.sum() > 0)
        return (SharedGenerator(state.generator, state.known, strengths),)

    def aggregate(
        self, state: FedGENState, server: Tensor, replies: Replies, context: Context
    ) -> tuple[Served, FedGENState]:
        """Average the models and train the generator on the clients' heads."""
        mean = self.mean(replies)
        head = Head.of(context.layout)
        counts = replies.report(Counts).counts * (replies.weights > 0)[:, None]
        matrices = head.matrix(replies.models)
        owned = counts.sum(0)
        share = counts / owned.clamp(min=1)
        generate = Generator(self.noise, head.classes, self.hidden, head.width)
        flat = state.generator
        adam = state.adam
        loss = mean.new_zeros(())
        lr = self.lr * self.decay**context.round
        for step in range(self.steps):
            key = context.key.fold("fedgen", step).tensor(mean.device)
            labels = labels_at(fold_in(key, _LABELS), self.batch, (owned > 0).to(owned.dtype))
            noise = noise_at(fold_in(key, _NOISE), self.batch, self.noise, owned)
            with torch.enable_grad():
                leaf = flat.detach().requires_grad_()
                features = generate(leaf, noise, labels)
                loss = generator_loss(
                    features, noise, labels, head.inputs(features), matrices, share
                )
                (gradient,) = torch.autograd.grad(loss, leaf)
            flat, adam = adam.step(flat, gradient + self.weight_decay * flat, lr, _BETAS)
        known = torch.where(owned > 0, 1.0, state.known)
        notes = FedGENNotes(loss.detach(), known.sum())
        return Served(send=mean, score=mean, notes=notes), FedGENState(flat, adam, known)


def generator_loss(
    features: Tensor, noise: Tensor, labels: Tensor, inputs: Tensor, matrices: Tensor, share: Tensor
) -> Tensor:
    """Return how badly the clients' heads [m, C, d + 1] know the features, plus their sameness."""
    logs = F.log_softmax(torch.einsum("bd,mcd->mbc", inputs, matrices), -1)
    missed = -logs.gather(2, labels.expand(len(logs), -1)[..., None])[..., 0]  # [m, B]
    noise_apart = (noise[:, None] - noise).square().mean(2)
    apart = (features[:, None] - features).abs().mean(2)
    return (share[:, labels] * missed).sum(0).mean() + torch.exp(-(noise_apart * apart).mean())
