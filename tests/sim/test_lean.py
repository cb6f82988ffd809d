"""The lean step equals the step under `torch.func`, and several requests equal each alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedbasin.core.catalogue import cards
from fedbasin.core.expressions import parse
from fedbasin.core.method import Plan, Probe
from fedbasin.core.needs import NeedError
from fedbasin.core.net import Net
from fedbasin.core.protocols import needs_gradients
from fedbasin.core.rng import root, torch_draws_from
from fedbasin.core.round import Launch, Sent
from fedbasin.core.task import CLASSIFICATION
from fedbasin.core.tree import tensors
from fedbasin.local import SGD, Adam, AdamW
from fedbasin.methods import FedAvg, FedProx
from fedbasin.models.network import Network
from fedbasin.sim import lean
from fedbasin.sim.clients import ClientStates
from fedbasin.sim.cohort import CohortExecutor, Counters
from fedbasin.sim.dense import Dense
from fedbasin.testing import TOY_TASKS, toy_federation

METHODS = cards("method")
TASKS = {type(task).__name__.lower(): task for task in TOY_TASKS}


def requests_of(federation, seeds):
    """Requests of runs with models, rates, randomness and rounds of their own."""
    found = []
    for seed in seeds:
        server, _ = federation.begin()
        vector = server.send + 0.01 * seed
        probe = None
        if needs_gradients(federation.method):
            probe = Probe(torch.stack([vector, 2 * vector]), torch.ones(2, dtype=torch.float64))
        context = replace(federation.context.at(seed, 0.1), probe=probe)
        shared = federation.method.broadcast(server.state, vector, context)
        zero = federation.executor.trainer.zero_state(vector)
        sent = Sent(vector, server.buffers, shared, seed)
        cohort = np.array([0, 2, 3, 5][: 2 + seed % 3])
        plan = Plan(0.1 / (1 + seed), 1 + seed % 2)
        states = ClientStates(zero, vector)
        found.append(Launch(cohort, sent, plan, states, root(seed)))
    return found


def in_cohort(federation, lean=True, **settings):
    one = federation.executor
    counters = Counters(lean=lean)
    return CohortExecutor(
        one.trainer, one.population, one.key, compiled=False, counters=counters, **settings
    )


def last(federation, lean, **settings):
    """The server after all rounds in a cohort, with the lean step or without."""
    executor = in_cohort(federation, lean, **settings)
    federation = replace(federation, executor=executor)
    *_, (server, record) = federation.rounds_from(*federation.begin())
    return server, record, executor.counters.lean


def assert_the_same(federation, tolerance=1e-9, **settings):
    ours, line, _ = last(federation, True, **settings)
    theirs, other, _ = last(federation, False)
    assert not torch.equal(theirs.send, federation.begin()[0].send)
    torch.testing.assert_close(ours.send, theirs.send, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ours.score, theirs.score, rtol=tolerance, atol=tolerance)
    assert line.train_loss == pytest.approx(other.train_loss, rel=1e-9, nan_ok=True)


def all_of(gathered):
    return tensors(gathered._replace(own=tuple(gathered.own)))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("card", METHODS, ids=lambda card: card.name)
def test_every_method_on_every_task(card, task):
    try:
        federation = toy_federation(card.make(), task=TASKS[task])
    except NeedError:
        return  # tests/laws say which
    (request,) = requests_of(federation, [1])
    lean, other = (in_cohort(federation, lean).train([request])[0] for lean in (True, False))
    assert not torch.equal(lean.replies.models[0], request.sent.vector)
    for a, b in zip(all_of(lean), all_of(other), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    ("method", "spared"),
    [("fedavg", True), ("fedprox", True), ("scaffold", True), ("feddyn", True), ("fedsam", False)],
)
def test_only_rules_that_look_elsewhere_take_the_other_step(method, spared):
    federation = toy_federation(parse(method, "method"), rounds=1)
    assert last(federation, True)[2] is spared


OPTIMISERS = [
    SGD(),
    SGD(0.9),
    SGD(0.0, 0.1),
    SGD(0.9, 0.1),
    SGD(0.9, 0.1, nesterov=True),
    Adam(weight_decay=0.1),
    AdamW(),
]


class Bent(nn.Module):
    """A network that is no chain of dense layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, dtype=torch.float64), nn.Linear(4, 3)

    def forward(self, x):
        return self.second(x + self.first(x).tanh())


NETWORKS = {
    "bent": Bent,
    "chain": lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)),
    "three": lambda: nn.Sequential(
        nn.Linear(4, 5), nn.Linear(5, 6, bias=False), nn.ReLU(), nn.Linear(6, 3), nn.ReLU()
    ),
    "ours": lambda: Network(nn.Flatten(), nn.Linear(4, 3)),
}


@pytest.mark.parametrize("keep", [False, True], ids=["fresh", "kept"])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("optimiser", OPTIMISERS, ids=str)
def test_every_optimiser_and_clipping(optimiser, clip, keep):
    settings = {"optimiser": optimiser, "clip": clip, "keep_optimiser": keep}
    assert_the_same(toy_federation(FedAvg(), rounds=2, **settings))
    assert_the_same(toy_federation(FedProx(), rounds=2, **settings))


@pytest.mark.parametrize("optimiser", OPTIMISERS[:4], ids=str)
@pytest.mark.parametrize("network", NETWORKS)
def test_dense_layers_and_others(network, optimiser):
    with torch_draws_from(root(1)):
        module = NETWORKS[network]()
    federation = toy_federation(FedAvg(), rounds=2, module=module, optimiser=optimiser)
    trainer = federation.trainer
    assert (Dense.of(trainer.net, trainer.task, 2) is None) is (network == "bent")
    assert_the_same(federation)


class Twice(Network):
    """Looks like a chain, and runs its body twice."""

    def forward(self, x):
        return self.head(self.body(self.body(x)))


def hooked():
    module = nn.Sequential(nn.Linear(4, 3))
    module[0].register_forward_hook(lambda part, given, out: 2 * out)
    return module


def frozen():
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
    module[0].weight.requires_grad_(False)
    return module


def tied():
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    module[2].weight = module[0].weight
    return module


@pytest.mark.parametrize(
    "make",
    [
        lambda: Twice(nn.Linear(4, 4), nn.Linear(4, 3)),
        hooked,
        frozen,
        tied,
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)),
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 3)),
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Flatten(0)),
    ],
)
def test_what_is_no_chain_of_dense_layers_is_not_taken_for_one(make):
    assert Dense.of(Net(make()), CLASSIFICATION, 2) is None


def test_inputs_with_axes_need_a_layer_that_flattens_them():
    chain = Net(nn.Sequential(nn.Linear(4, 3)))
    assert Dense.of(chain, CLASSIFICATION, 2) and Dense.of(chain, CLASSIFICATION, 4) is None


@pytest.mark.parametrize("method", ["fedavg", "fedprox"])
@pytest.mark.parametrize("bytes_", [1, 1000])
def test_blocks_of_rows_change_nothing(method, bytes_, monkeypatch):
    federation = toy_federation(parse(method, "method"), rounds=2)
    monkeypatch.setattr(lean, "BLOCK_BYTES", bytes_)
    assert_the_same(federation)
    assert_the_same(federation, chunk=2)


def test_all_rows_are_aligned_alike():
    """Products may round otherwise where memory is aligned otherwise."""
    models = torch.arange(15.0).view(3, 5)
    copy = lean._aligned(models)
    assert torch.equal(copy, models)
    assert len({row.data_ptr() % 64 for row in copy}) == 1
    assert len({row.data_ptr() % 64 for row in models}) > 1


ROUNDED = {"fedgrab"}  # a product of what it broadcasts, of one matrix or of several


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("card", METHODS, ids=lambda card: card.name)
def test_requests_that_are_answered_together_equal_each_alone(card, dtype):
    federation = toy_federation(card.make(), dtype=dtype)
    asked = requests_of(federation, range(5))
    found_together = in_cohort(federation).train(asked)
    alone = in_cohort(federation)
    for found, request in zip(found_together, asked, strict=True):
        (expected,) = alone.train([request])
        for a, b in zip(all_of(found), all_of(expected), strict=True):
            if card.name in ROUNDED:
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
            else:
                assert torch.equal(a, b), (a - b).abs().max()
