import numpy as np
import pytest
import torch
from methods.numpy_clients import NumpyClients, check_composed, close, linear_federation, rounds_of

from fedbasin.core.expressions import parse
from fedbasin.local import SGD
from fedbasin.methods import FedACG


def numpy_fedacg(world, rounds, method, sgd=None):
    """Kim et al., Algorithm 1, with w, m and the look-ahead x kept apart."""
    w, m = world.start.copy(), np.zeros_like(world.start)
    for t in range(rounds):
        x, cohort, ends = w + method.momentum * m, world.cohort(t), []
        for i in cohort:

            def direction(v, inputs, labels, x=x):
                return world.gradient(v, inputs, labels) + method.beta * (v - x)

            ends.append(world.descend(t, i, x, direction, sgd)[0])
        m = method.momentum * m + world.mean([y - x for y in ends], cohort, method.weighting)
        w = w + m
        yield w, m, world.mean(ends, cohort, method.weighting)


@pytest.mark.parametrize("sgd", [SGD(), SGD(0.5, 0.01)])
@pytest.mark.parametrize("method", [FedACG(), FedACG(0.5, 0.8, "samples")])
def test_fedacg_equals_a_plain_numpy_loop(method, sgd):
    federation = linear_federation(method, rounds=6, optimiser=sgd)
    oracle = numpy_fedacg(NumpyClients(federation), 6, method, sgd)
    for (after, record, _), (w, m, mean) in zip(rounds_of(federation), oracle, strict=True):
        close(after.score, w)
        close(after.score, mean)  # w + m+ is the plain mean of the clients' models
        close(after.state.momentum, m)
        close(after.send, w + method.momentum * m)
        assert record.metric("accuracy_send") is not None  # the look-ahead is not what is scored


@pytest.mark.parametrize("source", ["wima(fedacg, window=2)", "ima(fedacg, start=0.5)"])
def test_fedacg_composes(source):
    check_composed(source)


def test_averaging_takes_the_scored_models_not_the_look_ahead():
    plain = [after for after, _, _ in rounds_of(linear_federation(FedACG(), rounds=3))]
    wima = [after for after, _, _ in rounds_of(linear_federation(parse("wima(fedacg)"), rounds=3))]
    mean = torch.stack([after.score for after in plain]).mean(0)
    torch.testing.assert_close(wima[-1].score, mean, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(wima[-1].send, plain[-1].send)


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match=r"momentum must be in \[0, 1\), got 1"):
        FedACG(momentum=1.0)
    with pytest.raises(ValueError, match=r"beta must be at least 0, got -0.1"):
        FedACG(beta=-0.1)
