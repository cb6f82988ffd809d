"""Dropout of a user's module gives one result in every engine."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedbasin.core.randomness import RandomnessError
from fedbasin.core.rng import root, torch_draws_from
from fedbasin.experiment import Experiment, build
from fedbasin.experiment.config import LocalConfig, PartitionConfig, SimConfig
from fedbasin.local import SGD
from fedbasin.methods import FedAvg, FedSAM, Mime
from fedbasin.sim.cohort import CohortExecutor
from fedbasin.sim.workers import WorkerExecutor
from fedbasin.testing import toy_federation


def dense():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


class Convolutional(nn.Module):
    """Drops whole channels, then single elements by a function."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(1, 6, 2, padding=1)
        self.channels = nn.Dropout2d(0.4)
        self.head = nn.Linear(54, 3)

    def forward(self, x):
        x = self.channels(torch.relu(self.convolution(x.view(-1, 1, 2, 2))))
        return self.head(F.dropout(x.flatten(1), 0.2, self.training))


def attentive(layers=2):
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    body = nn.TransformerEncoder(layer, layers)
    return nn.Sequential(
        nn.Unflatten(1, (4, 1)), nn.Linear(1, 4), body, nn.Flatten(), nn.Linear(16, 3)
    )


class Recurrent(nn.Module):
    """Two layers with dropout between them, over the four inputs as a sequence."""

    def __init__(self, kind=nn.GRU):
        super().__init__()
        self.body = kind(1, 4, 2, dropout=0.5, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.body(x[:, :, None])[0][:, -1])


NETWORKS = [dense, Convolutional, attentive, Recurrent, lambda: Recurrent(nn.LSTM)]
NAMES = ["dense", "convolutional", "attentive", "gru", "lstm"]


def federation(maker, method, **settings):
    with torch_draws_from(root(3)):
        module = maker()
    settings = {"rounds": 2, "optimiser": SGD(0.5, weight_decay=0.01), "clip": 2.0, **settings}
    return toy_federation(method, module=module, **settings)


def sent(federation):
    server, states = federation.begin()
    return torch.stack([after.send for after, _ in federation.rounds_from(server, states)])


def in_cohort(federation, **settings):
    one = federation.executor
    return replace(
        federation, executor=CohortExecutor(one.trainer, one.population, one.key, **settings)
    )


@pytest.mark.parametrize("maker", NETWORKS, ids=NAMES)
@pytest.mark.parametrize("method", [FedAvg(), FedSAM(), Mime()], ids=str)
def test_cohort_equals_loop(maker, method):
    loop = federation(maker, method)
    expected = sent(loop)
    found = sent(in_cohort(loop, compiled=False, chunk=2))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("maker", NETWORKS, ids=NAMES)
def test_dropout_is_on_and_other_seeds_draw_other_masks(maker):
    loop = federation(maker, FedAvg())
    assert not torch.allclose(sent(loop), sent(federation(without(maker), FedAvg())), atol=1e-5)
    other = replace(loop, key=root(9))
    assert not torch.allclose(sent(loop), sent(other), atol=1e-5)
    assert torch.equal(sent(loop), sent(loop))


def without(maker):
    def made():
        module = maker()
        for part in module.modules():
            if hasattr(part, "dropout") and isinstance(part.dropout, float):
                part.dropout = 0.0
            if hasattr(part, "p"):
                part.p = 0.0
        return module

    return made


@pytest.mark.parametrize("maker", [Convolutional, lambda: attentive(1)], ids=["conv", "attention"])
def test_compiled_equals_loop(maker):
    loop = federation(maker, FedAvg(), participation="count(clients=2)")
    found = sent(in_cohort(loop, compiled=True, backend="eager"))
    torch.testing.assert_close(found, sent(loop), rtol=1e-9, atol=1e-11)


SOURCE = """
import torch
from torch import nn
from torch.nn import functional as F

class Lines(nn.Module):
    "The lines of an image as a sequence, through a transformer with torch's own dropout."

    def __init__(self, shape, classes):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 1)
        self.drop = nn.Dropout(0.25)
        self.head = nn.Linear(64, classes)

    def forward(self, x):
        return self.head(self.drop(self.body(x[:, 0]).flatten(1)))

class Noisy(Lines):
    def forward(self, x):
        return super().forward(x + torch.randn_like(x))

class Turned(Lines):
    def forward(self, x):
        lines = x[:, 0].repeat(1, 3, 1).transpose(0, 1)  # 24 of them: a multiple of few rows
        lines = F.dropout(lines, 0.5, self.training)
        return self.head(lines[:8].transpose(0, 1).flatten(1))
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "networks_that_drop.py").write_text(SOURCE)
    yield
    monkeypatch.delitem(__import__("sys").modules, "networks_that_drop", raising=False)


def experiment(name, **settings):
    return Experiment(
        model=f'custom(path="networks_that_drop:{name}")',
        rounds=2,
        partition=PartitionConfig(clients=6),
        local=LocalConfig(lr=0.1, batch=32),
        sim=SimConfig(participation="count(clients=4)", device="cpu", **settings),
    )


def test_a_run_of_a_users_transformer_is_the_same_in_processes_and_as_a_matrix(mine):
    loop = build(experiment("Lines", executor="loop"))
    expected = sent(loop)
    shared = build(experiment("Lines", executor="loop", workers=2))
    assert isinstance(shared.executor, WorkerExecutor)
    try:
        found = sent(shared)
    finally:
        shared.executor.close()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    matrix = build(experiment("Lines", executor="cohort", compile="off"))
    torch.testing.assert_close(sent(matrix), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Noisy", "the Noisy calls torch's randn_like, which draws from a global generator"),
        ("Turned", "Turned: in training a row added to the batch changes the outputs"),
    ],
)
def test_what_cannot_be_keyed_is_refused_before_the_run(mine, name, told):
    with pytest.raises(RandomnessError, match=told):
        build(experiment(name))
