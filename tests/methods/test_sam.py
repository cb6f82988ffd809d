"""SAM and ASAM as rules, and the methods that are FedAvg or FedCM around them."""

import copy
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from methods.numpy_clients import (
    NumpyClients,
    check_composed,
    close,
    linear_federation,
    models,
    rounds_of,
    same_models,
    unit,
)
from torch import nn

from fedbasin.core.expressions import parse
from fedbasin.core.method import Plan
from fedbasin.core.net import Net
from fedbasin.core.rule import LocalRule, Setting
from fedbasin.core.vectors import Layout
from fedbasin.local import SAM, SGD
from fedbasin.local.sharpness import ASAM
from fedbasin.methods import FedASAM, FedAvg, FedCM, FedSAM, MoFedSAM
from fedbasin.testing import toy_federation


def scale_of(v, eta):
    """T of ASAM for a linear layer: the weights first, then the biases."""
    return np.concatenate([np.abs(v[:12]) + eta, np.ones(3)])


def numpy_sam(world, rounds, climb, weighting, sgd):
    """FedAvg whose clients take the gradient at ``v + climb(v, g)``."""
    server = world.start.copy()
    for t in range(rounds):

        def direction(v, inputs, labels):
            e = climb(v, world.gradient(v, inputs, labels))
            return world.gradient(v + e, inputs, labels)

        cohort = world.cohort(t)
        ends = [world.descend(t, i, server, direction, sgd)[0] for i in cohort]
        server = world.mean(ends, cohort, weighting)
        yield server


@pytest.mark.parametrize("sgd", [SGD(), SGD(0.5, 0.01)])
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_fedsam_and_fedasam_equal_a_plain_numpy_loop(weighting, sgd):
    def adaptive(v, g):
        t = scale_of(v, 0.05)
        return 0.2 * t**2 * g / np.linalg.norm(t * g)

    pairs = [
        (FedSAM(0.3, weighting), lambda v, g: 0.3 * unit(g)),
        (FedASAM(0.2, 0.05, weighting), adaptive),
    ]
    for method, climb in pairs:
        federation = linear_federation(method, optimiser=sgd)
        oracle = numpy_sam(NumpyClients(federation), 4, climb, weighting, sgd)
        for ours, theirs in zip(models(federation), oracle, strict=True):
            close(ours, theirs)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("fedsam(rho=0.3)", "fedavg(local=sam(rho=0.3))"),
        ("fedasam", "fedavg(local=asam)"),
        ("mofedsam(rho=0.3, alpha=0.2)", "fedcm(alpha=0.2, local=sam(rho=0.3))"),
        ("mofedsam(rho=0.0, alpha=0.2)", "fedcm(alpha=0.2)"),
        ("mofedsam(rho=0.3, alpha=1.0, server_lr=0.5, weighting='samples')",
         "fedcm(alpha=1.0, server_lr=0.5, weighting='samples', local=sam(rho=0.3))"),
        ("mofedsam(rho=0.3, alpha=0.2, weighting='samples')",
         "fedcm(alpha=0.2, weighting='samples', local=sam(rho=0.3))"),
        ("mofedsam(rho=0.3, alpha=1.0)", "fedsam(rho=0.3, weighting='uniform')"),
        ("fedavg(local=sam(rho=0.3, share=0.0))", "fedavg"),
    ],
)  # fmt: skip
def test_reductions(one, other):
    a, b = parse(one, "method"), parse(other, "method")
    for given in ({}, {"optimiser": SGD(0.5, 0.01), "clip": 0.3}):
        same_models(linear_federation(a, **given), linear_federation(b, **given), 1e-11)


@dataclass(frozen=True)
class Linear(LocalRule):
    """A loss that is linear in the parameters, whose gradient is the same everywhere."""

    owns: ClassVar[frozenset] = frozenset({"loss"})

    def loss(self, carry, value, view):
        weights = torch.arange(3, dtype=view.vector.dtype) - 1
        return (view.outputs.logits * weights).sum(1).mean(), carry


def test_on_a_linear_loss_sam_is_sgd():
    same_models(
        linear_federation(FedSAM(0.5, local=Linear())), linear_federation(FedAvg(local=Linear()))
    )


class Nameless(nn.Module):
    """A linear layer whose tensors are not called weights."""

    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4))
        self.offset = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return x @ self.kernel.T + self.offset


def test_without_weights_asam_is_sam():
    a = toy_federation(FedASAM(0.3, 0.2), module=Nameless())
    b = toy_federation(FedSAM(0.3), module=Nameless())
    same_models(a, b)


def test_asam_scales_the_weights_of_recurrent_layers_too():
    names = ("lstm.weight_ih_l0", "lstm.bias_ih_l0", "norm.weight")
    net, start = SimpleNamespace(layout=Layout(names, ((2,), (2,), (1,)))), torch.ones(5)
    carry = ASAM().begin(SimpleNamespace(vector=start), net)
    assert carry.scaled.tolist() == [True, True, False, False, True]


def test_asam_does_not_see_how_two_layers_share_their_size():
    """Bias-free ReLU layers scaled by s and 1/s: the same function, and the same perturbed loss."""
    torch.random.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 6, bias=False), nn.ReLU(), nn.Linear(6, 3, bias=False))
    net = Net(module, dtype=torch.float64)
    inputs, labels = torch.randn(5, 4).double(), torch.tensor([0, 1, 2, 1, 0])

    def loss(vector):
        return nn.functional.cross_entropy(net(vector, inputs).logits, labels)

    def perturbed(rule, vector):
        seen = []

        def gradient(v):
            seen.append(v)
            return torch.func.grad(loss)(v)

        start = type("Start", (), {"vector": vector})
        rule.direction(rule.begin(start, net), vector, gradient)
        return float(loss(seen[-1]))

    vector = net.initial()[0]
    scaled = vector * torch.tensor([5.0] * 24 + [0.2] * 18, dtype=torch.float64)
    assert float(loss(vector)) == pytest.approx(float(loss(scaled)), rel=1e-12)
    a, b = (perturbed(ASAM(0.7, 0.0), v) for v in (vector, scaled))
    assert a == pytest.approx(b, rel=1e-10) and a > float(loss(vector))
    a, b = (perturbed(SAM(0.7), v) for v in (vector, scaled))
    assert abs(a - b) > 1e-3  # and SAM does see it


def test_mofedsam_without_rho_records_fedcms_momentum():
    found, wanted = (
        [record.notes["momentum_norm"] for _, record, _ in rounds_of(toy_federation(method))]
        for method in (MoFedSAM(rho=0.0), FedCM())
    )
    assert found == pytest.approx(wanted, rel=1e-9) and min(wanted) > 0


class WithStatistics(nn.Module):
    """A small network with BatchNorm."""

    def __init__(self):
        super().__init__()
        self.hidden, self.norm = nn.Linear(4, 5), nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.norm(self.hidden(x)))


@pytest.mark.parametrize("source", ["fedsam(rho=0.5)", "fedasam", "mime", "fedsmoo", "fedspeed"])
def test_the_second_pass_of_a_step_counts_no_statistics(source):
    """After one step the running means are those of one plain pass at the received model."""

    module = WithStatistics()

    def statistics(method):
        federation = toy_federation(method, module=copy.deepcopy(module), rounds=1)
        federation = replace(
            federation, schedule=lambda t: Plan(0.1, None, 1), eligible=np.arange(4)
        )
        return next(rounds_of(federation))[0].buffers

    plain = statistics(FedAvg())
    assert plain.norm() > 0
    assert torch.equal(statistics(parse(source, "method")), plain)


@pytest.mark.parametrize(
    "source",
    [
        "wima(fedsam, window=2)",
        "ima(mofedsam, start=0.0)",
        "fedcm(local=(prox(mu=0.1), sam(rho=0.1)))",
        "scaffold(local=asam)",
    ],
)
def test_sam_composes(source):
    check_composed(source)


def test_a_gradient_of_zero_moves_nothing_and_stays_finite():
    zero = torch.zeros(3)
    direction, _ = SAM(0.5).direction((), zero, lambda v: v * 2)
    assert direction.tolist() == [0, 0, 0]


def test_unequal_steps_are_cautioned():
    ragged = Setting(0.0, 0.0, None, True, False)
    for method in (MoFedSAM(), FedCM(local=SAM())):
        assert "different numbers of steps" in next(method.cautions(ragged))
        assert not list(method.cautions(ragged._replace(ragged=False)))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("fedsam(rho=-1.0)", "rho must be at least 0, got -1"),
        ("fedasam(rho=-1.0)", "rho must be at least 0, got -1"),
        ("fedasam(eta=-1.0)", "eta must be at least 0, got -1"),
        ("mofedsam(rho=-1.0)", "rho must be at least 0, got -1"),
        ("mofedsam(alpha=0.0)", "alpha must be above 0 and at most 1, got 0"),
        ("mofedsam(server_lr=0.0)", "server_lr must be above 0, got 0"),
        ("fedavg(local=sam(share=1.5))", r"share must be in \[0, 1\], got 1.5"),
        ("fedlesam(rho=-1.0)", "rho must be at least 0, got -1"),
        ("fedspeed(lam=0.0)", "lam must be above 0 and finite, got 0"),
        ("fedspeed(rho=-1.0)", "rho must be at least 0, got -1"),
        ("fedspeed(share=1.5)", r"share must be in \[0, 1\], got 1.5"),
        ("fedsmoo(beta=0.0)", "beta must be above 0, got 0"),
        ("fedsmoo(rho=-1.0)", "rho must be at least 0, got -1"),
    ],
)
def test_bad_settings_are_refused(source, message):
    with pytest.raises(ValueError, match=message):
        parse(source, "method")
