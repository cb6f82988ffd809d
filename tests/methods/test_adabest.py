import numpy as np
import pytest
import torch
from methods.numpy_clients import NumpyClients, close, linear_federation, rounds_of

from fedbasin.core.expressions import parse
from fedbasin.core.rule import Setting
from fedbasin.local import SGD
from fedbasin.methods import AdaBest


def numpy_adabest(world, rounds, method, sgd=None):
    """Varno et al., Algorithm 1: estimates that fade by the rounds since a client was last seen."""
    server, mean = world.start.copy(), world.start.copy()
    h, last = np.zeros((world.count, len(server))), [None] * world.count
    for t in range(rounds):
        cohort, ends = world.cohort(t), []
        for i in cohort:
            y, _ = world.descend(
                t, i, server, lambda v, a, b, i=i: world.gradient(v, a, b) - h[i], sgd
            )
            age = 1 if last[i] is None else t - last[i]
            h[i] = h[i] / age + method.mu * (server - y)
            last[i] = t
            ends.append(y)
        before, mean = mean, world.mean(ends, cohort, method.weighting)
        server = mean - method.beta * (before - mean)
        yield server, mean, h.copy(), list(last)


@pytest.mark.parametrize("sgd", [SGD(), SGD(0.5, 0.01)])
@pytest.mark.parametrize(
    "method", [AdaBest(), AdaBest(0.5, 0.5, "server", "samples"), AdaBest(0.3, 0.0)]
)
def test_adabest_equals_a_plain_numpy_loop(method, sgd):
    federation = linear_federation(method, rounds=8, optimiser=sgd)
    oracle = numpy_adabest(NumpyClients(federation), 8, method, sgd)
    ages = set()
    for (after, _, states), (model, mean, h, last) in zip(
        rounds_of(federation), oracle, strict=True
    ):
        close(after.send, model)
        close(after.score, mean if method.score == "mean" else model)
        close(after.state.mean, mean)
        for i in range(6):
            close(states.get(i)[0].bias, h[i])
            if last[i] is not None:
                ages.add(after.round - 1 - last[i])
                assert states.get(i)[0].seen == last[i] + 1
    assert max(ages) > 2, "clients must have stayed away for this to say something"


def test_the_server_extrapolates():
    before = None
    for after, _, _ in rounds_of(linear_federation(AdaBest(0.0, 0.6), rounds=4)):
        mean = after.state.mean
        if before is not None:
            torch.testing.assert_close(after.send - mean, 0.6 * (mean - before))
        before = mean


def test_a_client_of_every_round_never_forgets():
    """Its divisor stays 1, so its estimate is mu times all its displacements."""
    method = AdaBest(0.1, 0.0)
    federation = linear_federation(method, rounds=4, participation="count(clients=6)")
    world = NumpyClients(federation)
    total, server = np.zeros(15), world.start
    for t, (after, _, states) in enumerate(rounds_of(federation)):
        h = total.copy()
        y, _ = world.descend(t, 2, server, lambda v, a, b, h=h: world.gradient(v, a, b) - h)
        total = total + 0.1 * (server - y)
        close(states.get(2)[0].bias, total)
        server = after.send.numpy()


def test_local_momentum_is_cautioned_and_bad_settings_are_refused():
    setting = Setting(0.9, 0.0, None, False, False)
    assert "stretches" in next(AdaBest().cautions(setting))
    assert not list(AdaBest(mu=0.0).cautions(setting))
    with pytest.raises(ValueError, match=r"mu must be at least 0, got -1"):
        parse("adabest(mu=-1.0)", "method")
    with pytest.raises(ValueError, match=r"beta must be in \[0, 1\), got 1"):
        AdaBest(beta=1.0)
