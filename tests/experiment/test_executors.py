"""The stored rules by which `auto` chooses an executor, and what a CPU run is prepared with."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fedbasin.core.net import Net
from fedbasin.core.rng import root, torch_draws_from
from fedbasin.experiment import Experiment, build
from fedbasin.experiment.config import LocalConfig, PartitionConfig, SimConfig
from fedbasin.sim import LoopExecutor
from fedbasin.sim.cohort import CohortExecutor

BASE = Experiment(
    method="fedprox",  # with no rule dense layers are batched products, which are not compiled
    model="logistic",
    rounds=20_000,
    partition=PartitionConfig(how="iid", clients=40),
    local=LocalConfig(steps=1),
    sim=SimConfig(device="cpu"),
)


@pytest.fixture(autouse=True)
def compiler(monkeypatch):
    """Every machine has a compiler, unless a test takes it away."""
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")


def executor(**changes):
    return build(replace(BASE, **changes)).executor


@pytest.mark.parametrize(
    ("changes", "compiled"),
    [
        ({}, True),
        ({"rounds": 19_999}, False),
        ({"rounds": 10_000, "local": LocalConfig(steps=2)}, True),
        ({"local": LocalConfig(epochs=1, batch=1000)}, True),
        ({"rounds": 1, "sim": SimConfig(device="cpu", compile="on")}, True),
        ({"sim": SimConfig(device="cpu", compile="off")}, False),
    ],
)
def test_a_long_run_of_a_small_network_compiles_its_step(changes, compiled):
    found = executor(**changes)
    assert isinstance(found, CohortExecutor)
    assert found.compiled is compiled


def test_nothing_is_compiled_without_a_compiler(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert executor().compiled is False


def test_batched_products_are_not_compiled():
    assert executor(method="fedavg").compiled is False
    asked = executor(method="fedavg", sim=SimConfig(device="cpu", compile="on"))
    assert asked.compiled is True


@pytest.mark.parametrize(
    ("method", "model", "batch", "kind"),
    [
        ("fedavg", "mlp(widths=(200,))", 10, CohortExecutor),
        ("fedavg", "mlp(widths=(1024, 512))", 10, CohortExecutor),
        ("fedprox", "mlp(widths=(1024, 512))", 10, LoopExecutor),
        ("fedavg", "mlp(widths=(1024, 512))", 50, LoopExecutor),
        ("fedavg", "lenet", 1, CohortExecutor),
        ("fedavg", "lenet", 50, LoopExecutor),
        ("fedavg", "resnet8(norm='batch')", 1, LoopExecutor),
    ],
)
def test_the_matrix_is_for_steps_of_little_work(method, model, batch, kind):
    local = LocalConfig(steps=1, batch=batch)
    assert type(executor(method=method, model=model, rounds=1, local=local)) is kind


def test_only_images_for_convolutions_are_laid_out_channels_last():
    image, tokens = torch.rand(4, 3, 8, 8), torch.zeros(4, 8, dtype=torch.int64)
    convolutions, dense = Net(nn.Conv2d(3, 2, 3)), Net(nn.Linear(8, 2))
    turned = convolutions.arranged(image)
    assert torch.equal(turned, image)
    assert turned.is_contiguous(memory_format=torch.channels_last)
    assert dense.arranged(image) is image
    assert convolutions.arranged(tokens) is tokens


class Tied(nn.Module):
    """A network whose two layers are one."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x))


def test_a_tied_weight_is_one_part_of_the_vector_and_moves_in_both_places():
    with torch_draws_from(root(0)):
        module, x = Tied(), torch.rand(2, 5)
    net = Net(module)
    vector, _ = net.initial()
    assert len(vector) == 25 + 5 + 5
    torch.testing.assert_close(net(vector * 2, x).logits, _doubled(module)(x))


def _doubled(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter *= 2
    return module
