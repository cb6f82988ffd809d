"""Methods on tasks: refused, or equal to rounds written out by hand with losses of their own."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from fedbasin.core.catalogue import CATALOGUE, cards, entry
from fedbasin.core.expressions import parse
from fedbasin.core.method import Plan, Served
from fedbasin.core.needs import NeedError, check_task
from fedbasin.core.task import Regression, Task
from fedbasin.experiment import ConfigError, Experiment, build
from fedbasin.experiment.checks import check_needs
from fedbasin.experiment.config import DataConfig
from fedbasin.methods import FedAvg, FedDF
from fedbasin.sim import LoopExecutor
from fedbasin.testing import TOY_TASKS, law_right_or_refused_on_every_task, toy_federation

OTHERS = [type(task).__name__.lower() for task in TOY_TASKS[1:]]
TASKS = dict(zip(["classification", *OTHERS], TOY_TASKS, strict=True))
WITH_ROW_LOSSES = [name for name in TASKS if name != "survival"]

# --- who is refused where ------------------------------------------------------------------------

ONLY_CLASSES = ["balancefl", "creff", "fedbe", "feddf", "fedfa", "fedgen", "fedgrab"]
REFUSED = {
    "classification": [],
    "binary": ONLY_CLASSES,
    "regression": [*ONLY_CLASSES, "fedwcm"],
    "multilabel": [*ONLY_CLASSES, "fedwcm"],
    "tokens": [*ONLY_CLASSES, "fedwcm"],
    "survival": [*ONLY_CLASSES, "fedwcm", "mime", "mimelite"],
}


def expression(name):
    return "tokens(vocabulary=3)" if name == "tokens" else name


def test_every_task_of_the_catalogue_is_among_the_toys():
    assert {type(task) for task in TOY_TASKS} == {card.make for card in cards("task")}


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("card", cards("method"), ids=lambda card: card.name)
def test_a_method_is_refused_exactly_where_its_formulas_do_not_hold(card, name):
    method = card.make()
    if card.name not in REFUSED[name]:
        check_task(method, TASKS[name])
        return
    with pytest.raises(NeedError, match=rf"^{card.name}.* and .*{name}.*; (take|drop) \w+") as told:
        check_task(method, TASKS[name])
    assert "\n" not in str(told.value) and ". " not in str(told.value)
    with pytest.raises(NeedError):
        toy_federation(method, task=TASKS[name])


@pytest.mark.parametrize(
    ("method", "tasks"),
    [
        ("scaffold(option='full')", "survival"),
        ("fedavgm(scaffold(option='full'))", "survival"),
        ("ima(mime)", "survival"),
        ("wima(feddf)", "binary regression survival multilabel tokens"),
        ("fedavg(local=focal)", "binary regression survival multilabel tokens"),
        ("fedavg(local=balanced_softmax)", "binary regression survival multilabel tokens"),
        ("fedprox(local=class_balanced)", "binary regression survival multilabel tokens"),
        ("fedavg(local=logit_adjusted)", "binary regression survival multilabel tokens"),
        ("fedadam(fedavg(local=balanced_rows))", "regression survival multilabel tokens"),
    ],
)
def test_what_lies_inside_a_method_is_refused_too(method, tasks):
    for name, task in TASKS.items():
        if name not in tasks.split():
            check_task(parse(method, "method"), task)
            continue
        with pytest.raises(NeedError, match=r"; (take|drop) "):
            check_task(parse(method, "method"), task)


@pytest.mark.parametrize(
    ("method", "task"),
    [("feddf", "regression"), ("mime", "survival"), ("fedwcm", "multilabel"), ("fedfa", "binary")],
)
def test_a_run_is_refused_before_its_data_is_looked_for(method, task):
    nowhere = DataConfig(name="no-such-data", proxy_rows=4)
    experiment = Experiment(method, task=task, data=nowhere)
    with pytest.raises(ConfigError, match=rf"method: {method}.*; take "):
        check_needs(experiment.resolved())
    with pytest.raises(ConfigError, match=rf"method: {method}"):
        build(experiment)


def test_a_federation_made_by_hand_is_refused_as_well():
    federation = toy_federation(FedAvg(), task=TASKS["regression"])
    with pytest.raises(NeedError, match="feddf"):
        replace(federation, method=parse("feddf", "method"))


# --- rounds by hand ------------------------------------------------------------------------------


def mean_loss(name, z, y):
    """The mean loss of rows, from the formulas."""
    if name == "classification":
        return (z.exp().sum(1).log() - z[torch.arange(len(y)), y]).mean()
    if name == "binary":
        return (torch.log1p(z[:, 0].exp()) - y * z[:, 0]).mean()
    if name == "regression":
        return ((z[:, 0] - y) ** 2).mean()
    if name == "multilabel":
        return (torch.log1p(z.exp()) - y * z).mean()
    if name == "tokens":
        rows = []
        for said, true in zip(z, y, strict=True):
            at = [said[t].exp().sum().log() - said[t, w] for t, w in enumerate(true) if w >= 0]
            rows.append(torch.stack(at).mean())
        return torch.stack(rows).mean()
    total = z.sum() * 0
    for i in range(len(z)):
        if y[i, 1]:
            total = total + z[y[:, 0] >= y[i, 0], 0].exp().sum().log() - z[i, 0]
    return total / len(z)


@dataclass
class ByHand:
    """A toy federation whose clients take two steps on all their rows, and its arithmetic."""

    name: str
    method: str
    lr: float = 0.2

    def __post_init__(self):
        made = toy_federation(parse(self.method, "method"), task=TASKS[self.name])
        trainer = replace(made.trainer, batch=16)
        self.federation = replace(
            made,
            trainer=trainer,
            executor=LoopExecutor(trainer, made.population, made.key),
            schedule=lambda round: Plan(self.lr, 2),
        )
        self.start = made.net.initial()[0]

    def rounds(self, count):
        """What the library makes of it: models and notes."""
        steps = self.federation.rounds_from(*self.federation.begin())
        found = [next(steps) for _ in range(count)]
        return [server.send for server, _ in found], [record.notes for _, record in found]

    def cohort(self, round):
        return self.federation.cohort(round)[1]

    def loss(self, vector, inputs, targets):
        width = inputs.shape[-1]
        if self.name == "survival":  # its head has no bias
            vector = torch.cat([vector, torch.zeros(1).double()])
        outputs = (len(vector) - 5 * width - 5) // 6
        parts = vector.split([5 * width, 5, 5 * outputs, outputs])
        x = inputs.double()
        x = x / 255 if self.name == "classification" else x
        hidden = torch.tanh(x @ parts[0].view(5, width).T + parts[1])
        z = hidden @ parts[2].view(outputs, 5).T + parts[3]
        return mean_loss(self.name, z, targets)

    def gradient(self, vector, rows):
        leaf = vector.clone().requires_grad_()
        return torch.autograd.grad(self.loss(leaf, rows.inputs, rows.labels), leaf)[0]

    def slope(self, vector, client):
        return self.gradient(vector, self.federation.population.shard(client))

    def proxy_loss(self, vector):
        proxy = self.federation.context.proxy
        return self.loss(vector, proxy.inputs, proxy.labels)

    def trained(self, start, client, direction=lambda g, v: g):
        vector = start
        for _ in range(2):
            vector = vector - self.lr * direction(self.slope(vector, client), vector)
        return vector

    def mean(self, models, round=0, uniform=False):
        sizes = self.federation.population.sizes[self.cohort(round)].astype(float)
        share = np.ones_like(sizes) if uniform else sizes
        return sum(w * m for w, m in zip(share / share.sum(), models, strict=True))


def close(found: Tensor, wanted: Tensor) -> None:
    assert (found - wanted).abs().max() < 1e-12


@pytest.mark.parametrize("name", TASKS)
def test_fedavg_and_fedprox(name):
    for method, mu in (("fedavg", 0.0), ("fedprox(mu=0.5)", 0.5)):
        world = ByHand(name, method)
        (found,), _ = world.rounds(1)
        x = world.start
        ends = [
            world.trained(x, client, lambda g, v, x=x, mu=mu: g + mu * (v - x))
            for client in world.cohort(0)
        ]
        close(found, world.mean(ends))
        assert (found - x).norm() > 1e-3


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("option", ["steps", "full"])
def test_scaffold_for_two_rounds(name, option):
    if (name, option) == ("survival", "full"):
        return  # refused
    world = ByHand(name, f"scaffold(option={option!r})")
    found, _ = world.rounds(2)
    x = world.start
    own = [torch.zeros_like(x)] * 6
    c = torch.zeros_like(x)
    for round in range(2):
        ends, change = [], torch.zeros_like(x)
        for i in world.cohort(round):
            correction = c - own[i]
            end = world.trained(x, i, lambda g, v, extra=correction: g + extra)
            raw = (x - end) / (2 * world.lr) - correction  # the mean gradient of the two steps
            renewed = world.slope(x, i) if option == "full" else raw
            change = change + (renewed - own[i]) / 6
            own[i] = renewed
            ends.append(end)
        x = world.mean(ends, round, uniform=True)
        c = c + change
        close(found[round], x)


@pytest.mark.parametrize("name", WITH_ROW_LOSSES)
def test_mime_takes_full_gradients_of_the_task(name):
    world = ByHand(name, "mime(momentum=0.0)")
    (found,), _ = world.rounds(1)
    x = world.start
    full = [world.slope(x, i) for i in world.cohort(0)]
    centre = world.mean(full, uniform=True)
    ends = [
        world.trained(x, i, lambda g, v, own=own: g - own + centre)
        for i, own in zip(world.cohort(0), full, strict=True)
    ]
    close(found, world.mean(ends, uniform=True))
    lite = ByHand(name, "mimelite")
    (found,), (notes,) = lite.rounds(1)
    ends = [lite.trained(x, i, lambda g, v: 0.1 * g) for i in lite.cohort(0)]
    close(found, lite.mean(ends, uniform=True))
    assert notes["gradient_norm"] == pytest.approx(float(centre.norm()), rel=1e-12)


@pytest.mark.parametrize("name", TASKS)
def test_server_fine_tuning_steps_along_the_tasks_gradient(name):
    world = ByHand(name, "serverft(epochs=1, lr=0.5, optimiser='sgd', betas=(0.0, 0.0))")
    (found,), _ = world.rounds(1)
    mean = world.mean([world.trained(world.start, i) for i in world.cohort(0)])
    close(found, mean - 0.5 * world.gradient(mean, world.federation.context.proxy))


@pytest.mark.parametrize("name", TASKS)
def test_fedlaw_descends_the_tasks_loss_on_the_servers_rows(name):
    world = ByHand(name, "fedlaw(epochs=1, lr=0.05, guard=0.0)")
    (found,), (notes,) = world.rounds(1)
    ends = torch.stack([world.trained(world.start, i) for i in world.cohort(0)])
    sizes = torch.from_numpy(world.federation.population.sizes[world.cohort(0)]).double()

    def model(free):
        return free[-1].exp() * (torch.softmax(free[:-1], 0) @ ends)

    free = torch.cat([(sizes / sizes.sum()).log(), torch.zeros(1).double()]).requires_grad_()
    before = world.proxy_loss(model(free))
    (slope,) = torch.autograd.grad(before, free)
    before = before.item()
    after = model((free - 0.05 * slope / (slope.abs() + 1e-8)).detach())  # Adam's first step
    assert (found - after).abs().max() < 1e-9
    assert notes["proxy_loss_before"] == pytest.approx(before, rel=1e-12)
    assert notes["proxy_loss_after"] == pytest.approx(float(world.proxy_loss(found)), rel=1e-12)
    assert notes["proxy_loss_after"] < notes["proxy_loss_before"]


# --- the law itself ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Careless(FedDF):
    """FedDF whose card does not say that it needs classes: with one output it is FedAvg."""


@dataclass(frozen=True)
class Classy(FedAvg):
    """Looks at labels as at numbers of classes."""

    def aggregate(self, state, server, replies, context):
        served, state = super().aggregate(state, server, replies, context)
        proxy = context.need("proxy", self)
        loss = torch.nn.functional.cross_entropy(proxy.logits(server), proxy.labels)
        return Served(*(2 * [served.send * (1 - 1e-3 * loss.detach())])), state


@pytest.mark.parametrize("kind", [Careless, Classy])
def test_the_law_catches_methods_that_assume_classes(kind):
    try:
        entry("method", name="assuming", is_fedavg_when="never: a test")(kind)
        with pytest.raises(AssertionError, match=r"on the task \w+"):
            law_right_or_refused_on_every_task(kind())
        del CATALOGUE["assuming"]
        entry("method", name="assuming", needs=("classes",), is_fedavg_when="never: a test")(kind)
        law_right_or_refused_on_every_task(kind())
    finally:
        del CATALOGUE["assuming"]


def test_the_toys_can_be_learnt():
    """Otherwise the laws would compare noise."""
    for name, task in TASKS.items():
        federation = toy_federation(FedAvg(), task=task, rounds=12)
        first = federation.evaluator.score(federation.net.initial()[0])["loss"]
        *_, (_, record) = federation.rounds_from(*federation.begin())
        assert record.metric("loss") < 0.97 * first, name


@dataclass(frozen=True)
class Skewed(Regression):
    """A task of the user's own with a kind of its own: numbers of one column."""

    kind = "own"
    usual_metrics = ("loss",)

    def each(self, outputs, targets):
        gap = targets.reshape(outputs.shape) - outputs
        return torch.where(gap > 0, 2 * gap.square(), gap.square())[:, 0]


def test_a_task_of_ones_own_runs_on_the_toys():
    assert issubclass(Skewed, Task)
    federation = toy_federation(parse("scaffold", "method"), task=Skewed())
    *_, (server, record) = federation.rounds_from(*federation.begin())
    assert server.send.isfinite().all() and record.metric("loss") > 0
