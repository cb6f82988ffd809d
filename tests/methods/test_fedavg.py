from dataclasses import replace

import numpy as np
import pytest
import torch
from methods.numpy_clients import NumpyClients, linear_federation, models

from fedbasin.core.expressions import parse
from fedbasin.core.method import Plan
from fedbasin.local import SGD
from fedbasin.methods import FedAvg
from fedbasin.testing import replies_of


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_fedavg_equals_a_plain_numpy_loop(weighting, seed):
    federation = linear_federation(FedAvg(weighting), seed=seed)
    world = NumpyClients(federation)
    server = world.start
    for t, ours in enumerate(models(federation)):
        ends, sizes = [], []
        for client in world.cohort(t):
            v = server.copy()
            for inputs, labels in world.steps(t, client):
                v = v - world.lr(t) * world.gradient(v, inputs, labels)
            ends.append(v)
            sizes.append(world.sizes[client] if weighting == "samples" else 1)
        server = np.average(ends, axis=0, weights=sizes)
        np.testing.assert_allclose(ours, server, rtol=1e-9, atol=1e-12)


def test_one_client_is_centralised_sgd():
    federation = linear_federation(FedAvg(), rounds=3)
    world = NumpyClients(federation)
    alone = replace(federation, eligible=np.array([0]), participation=parse("count(clients=1)"))
    v = world.start.copy()
    for t, ours in enumerate(models(alone)):
        for inputs, labels in world.steps(t, 0):
            v = v - world.lr(t) * world.gradient(v, inputs, labels)
        np.testing.assert_allclose(ours, v, rtol=1e-9, atol=1e-12)


def test_a_mean_is_in_the_hull_and_weights_count():
    replies = replies_of(torch.tensor([[0.0], [1.0], [5.0]]), weights=[1, 2, 0])
    served, _ = FedAvg().aggregate((), torch.zeros(1), replies, None)
    assert served.send.item() == pytest.approx(2 / 3)
    served, _ = FedAvg("uniform").aggregate((), torch.zeros(1), replies, None)
    assert served.send.item() == pytest.approx(1 / 2)


def test_local_momentum_does_not_survive_a_round():
    federation = linear_federation(FedAvg(), optimiser=SGD(momentum=0.9))
    world = NumpyClients(federation)
    server = world.start
    for t, ours in enumerate(models(federation)):
        ends, sizes, _ = world.sgd(t, server, momentum=0.9)  # from rest in every round
        server = np.average(ends, axis=0, weights=sizes)
        np.testing.assert_allclose(ours, server, rtol=1e-9, atol=1e-12)


def test_one_step_on_all_rows_is_gradient_descent_on_everything():
    federation = linear_federation(FedAvg(), rounds=3, participation="count(clients=6)")
    trainer = replace(federation.trainer, batch=1000)
    executor = replace(federation.executor, trainer=trainer)
    federation = replace(federation, trainer=trainer, executor=executor)
    federation = replace(federation, schedule=lambda _: Plan(0.2, None, 1))
    world = NumpyClients(federation)
    v, shards = world.start, [world.rows(c) for c in range(6) if world.sizes[c]]
    inputs, labels = (np.concatenate(parts) for parts in zip(*shards, strict=True))
    for ours in models(federation):
        v = v - 0.2 * world.gradient(v, inputs, labels)
        np.testing.assert_allclose(ours, v, rtol=1e-9, atol=1e-12)
