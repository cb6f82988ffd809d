"""The direction a client steps along is the gradient of the objective its method states.

The gradient is numerical, the loss is NumPy's, and each objective is written from the paper in the
paper's variables: a factor 1/2, a sign, a missing alpha or a norm that is not squared shows here.
"""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from methods.numpy_clients import NumpyClients, linear_federation, unit

from fedbasin.core.expressions import parse
from fedbasin.core.protocols import needs_gradients
from fedbasin.core.round import ProbeRequest, Sent
from fedbasin.local import SGD
from fedbasin.local.step import Point, step
from fedbasin.local.train import Received

CLIENT = 1  # nine rows, present in the first rounds of the toy federation


class Seen(NamedTuple):
    """What an objective is written with."""

    loss: object  # f(v), the mean cross-entropy of the batch
    x: np.ndarray  # the received model
    v: np.ndarray  # where the client stands
    state: object  # the server's
    own: tuple  # the client's, one entry for each rule
    full: np.ndarray  # the cohort's mean gradient over all rows


def numerical(function, at, width=1e-5):
    steps = width * np.eye(len(at))
    return np.array([(function(at + h) - function(at - h)) / (2 * width) for h in steps])


def one_direction(source, at_start=False):
    """Train three rounds, then take one step of length 1 from somewhere; return its direction."""
    method = parse(source, "method")
    federation = linear_federation(method, rounds=3)
    world = NumpyClients(federation)
    server, states = federation.begin()
    for after, _ in federation.rounds_from(server, states):
        server = after
    trainer, shard = federation.trainer, federation.population.shard(CLIENT)
    plan = federation.schedule(3)
    context = federation.context.at(3, plan.lr, plan)
    cohort = np.array([CLIENT, 3])
    if needs_gradients(method):
        probe = federation.executor.probe(
            [ProbeRequest(cohort, Sent(server.send, server.buffers, (), 3))]
        )[0]
        context = context.__class__(**{**context.__dict__, "probe": probe})
    shared = method.broadcast(server.state, server.send, context)
    own = states.get(CLIENT)
    key = torch.tensor([5, 7])
    received = Received(server.send, server.buffers, shared, own, 3, key)
    starts = trainer._starts(shard, received, plan, 6)
    carries = tuple(r.begin(s, trainer.net) for r, s in zip(trainer.rules, starts, strict=True))
    x = server.send.numpy()
    v = x + (0 if at_start else 0.3) * np.random.default_rng(0).normal(size=15)
    index = torch.tensor([0, 2, 5])
    point = Point(torch.from_numpy(v), (), server.buffers, carries)
    batch = trainer._batch(shard, index, None)
    moved, _ = step(point, batch, 1.0, key, net=trainer.net, rules=trainer.rules, optimiser=SGD())
    inputs, labels = (part[index.numpy()] for part in world.rows(CLIENT))
    full = np.mean([world.gradient(x, *world.rows(int(i))) for i in cohort], axis=0)
    seen = Seen(lambda u: world.loss(u, inputs, labels), x, v, server.state, own, full)
    return v - moved.vector.numpy(), seen


def away(seen, u):
    return np.sum((u - seen.x) ** 2) / 2


def uphill(seen, rho):
    return rho * unit(numerical(seen.loss, seen.v))


def feddyn(s, u):
    q = -0.4 * s.own[0].total.numpy()
    return s.loss(u) - q @ u + 0.4 * away(s, u)


def scaffold(s, u):
    return s.loss(u) + (s.state.control - s.own[0].control).numpy() @ u


def mime(s, u):
    at_x = numerical(s.loss, s.x)
    return 0.4 * (s.loss(u) - at_x @ u + s.full @ u) + 0.6 * s.state.momentum.numpy() @ u


def mofedsam(s, u):
    return 0.3 * s.loss(u + uphill(s, 0.5)) + 0.7 * s.state.momentum.numpy() @ u


def fedasam(s, u):
    t = np.concatenate([np.abs(s.v[:12]) + 0.2, np.ones(3)])
    g = numerical(s.loss, s.v)
    return s.loss(u + 0.7 * t**2 * g / np.linalg.norm(t * g))


def fedspeed(s, u):
    q = -s.own[0].total.numpy() / 4
    mixed = 0.3 * s.loss(u) + 0.7 * s.loss(u + uphill(s, 0.5))
    return mixed - q @ u + away(s, u) / 4


def fedsmoo(s, u):
    q, mu = -s.own[0].total.numpy() / 4, s.own[1].dual.numpy()
    e = 0.5 * unit(numerical(s.loss, s.v) - mu - s.state.shift.numpy())
    return s.loss(u + e) - q @ u + away(s, u) / 4


def fedlesam(s, u):
    return s.loss(u + 0.5 * unit(s.own[0].model.numpy() - s.x))


OBJECTIVES = {
    "fedprox(mu=0.7)": lambda s, u: s.loss(u) + 0.7 * away(s, u),
    "scaffold": scaffold,
    "feddyn(alpha=0.4)": feddyn,
    "adabest(mu=0.5)": lambda s, u: s.loss(u) - s.own[0].bias.numpy() @ u,
    "fedcm(alpha=0.3)": lambda s, u: 0.3 * s.loss(u) + 0.7 * s.state.momentum.numpy() @ u,
    "fedacg(beta=0.6)": lambda s, u: s.loss(u) + 0.6 * away(s, u),
    "mime(momentum=0.6)": mime,
    "mimelite(momentum=0.6)": lambda s, u: 0.4 * s.loss(u) + 0.6 * s.state.momentum.numpy() @ u,
    "fedsam(rho=0.5)": lambda s, u: s.loss(u + uphill(s, 0.5)),
    "fedasam": fedasam,
    "mofedsam(rho=0.5, alpha=0.3)": mofedsam,
    "fedspeed(rho=0.5, lam=4.0, share=0.7)": fedspeed,
    "fedsmoo(rho=0.5, beta=4.0)": fedsmoo,
    "fedlesam(rho=0.5)": fedlesam,
}


@pytest.mark.parametrize("source", OBJECTIVES)
def test_the_direction_is_the_gradient_of_the_stated_objective(source):
    direction, seen = one_direction(source)
    expected = numerical(lambda u: OBJECTIVES[source](seen, u), seen.v)
    np.testing.assert_allclose(direction, expected, rtol=1e-7, atol=1e-8)
    plain = numerical(seen.loss, seen.v)
    assert np.linalg.norm(direction - plain) > 1e-3, "the objective must differ from plain SGD's"


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("scaffold(local=lesam(rho=0.5))", lambda s: (s.own[1].model, scaffold)),
        ("feddyn(alpha=0.4, local=lesam(rho=0.5))", lambda s: (s.own[1].model, feddyn)),
    ],
    ids=["FedLESAM-S", "FedLESAM-D"],
)
def test_lesam_inside_scaffold_and_feddyn_perturbs_the_loss_alone(source, parts):
    direction, seen = one_direction(source)
    last, objective = parts(seen)
    e = 0.5 * unit(last.numpy() - seen.x)
    lifted = seen._replace(loss=lambda u: seen.loss(u + e))
    expected = numerical(lambda u: objective(lifted, u), seen.v)
    np.testing.assert_allclose(direction, expected, rtol=1e-7, atol=1e-8)


def test_where_a_round_starts_mimes_gradient_is_the_cohorts_for_any_batch():
    direction, seen = one_direction("mime(momentum=0.0)", at_start=True)
    np.testing.assert_allclose(direction, seen.full, rtol=1e-10, atol=1e-12)
