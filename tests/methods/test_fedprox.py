from dataclasses import replace

import numpy as np
import pytest
from methods.numpy_clients import NumpyClients, linear_federation, models

from fedbasin.core.expressions import parse
from fedbasin.core.method import Plan
from fedbasin.local import SGD, Prox
from fedbasin.methods import FedAvg, FedProx


@pytest.mark.parametrize("seed", [0, 1])
def test_fedprox_equals_a_plain_numpy_loop(seed):
    federation = linear_federation(
        FedProx(mu=0.8), seed=seed, optimiser=SGD(momentum=0.5, weight_decay=0.01)
    )
    world = NumpyClients(federation)
    server = world.start
    for t, ours in enumerate(models(federation)):
        ends, sizes = [], []
        for client in world.cohort(t):
            v, speed = server.copy(), np.zeros_like(server)
            for inputs, labels in world.steps(t, client):
                g = world.gradient(v, inputs, labels) + 0.8 * (v - server)
                speed = 0.5 * speed + g + 0.01 * v
                v = v - world.lr(t) * speed
            ends.append(v)
            sizes.append(world.sizes[client])
        server = np.average(ends, axis=0, weights=sizes)
        np.testing.assert_allclose(ours, server, rtol=1e-9, atol=1e-12)


def test_a_strong_pull_keeps_clients_where_they_were():
    weak, strong = (models(linear_federation(FedProx(mu=mu), rounds=1))[0] for mu in (0.0, 3.0))
    start = NumpyClients(linear_federation(FedAvg())).start
    assert np.linalg.norm(strong - start) < 0.75 * np.linalg.norm(weak - start)


def test_a_single_step_is_fedavg_s_whatever_the_pull():
    """It is taken from where the pull leads to."""
    sent = [
        models(replace(linear_federation(method), schedule=lambda _: Plan(0.2, None, 1)))
        for method in (FedAvg(), FedProx(mu=5.0))
    ]
    np.testing.assert_allclose(*sent, rtol=1e-12)


def test_the_rule_composes_with_any_method():
    alone = models(linear_federation(FedProx(mu=0.3)))
    stacked = models(linear_federation(FedAvg(local=Prox(0.3))))
    twice = models(linear_federation(FedProx(mu=0.1, local=Prox(0.2))))
    for a, b, c in zip(alone, stacked, twice, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_allclose(a, c, rtol=1e-12, atol=1e-14)


def test_a_negative_pull_is_refused():
    with pytest.raises(ValueError, match=r"mu.*-0.1"):
        parse("fedprox(mu=-0.1)", "method")
