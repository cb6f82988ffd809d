from dataclasses import replace

import numpy as np
import pytest
import torch
from methods.numpy_clients import (
    NumpyClients,
    check_composed,
    close,
    linear_federation,
    rounds_of,
    same_models,
    unit,
)

from fedbasin.core.expressions import parse
from fedbasin.local import SGD
from fedbasin.methods import FedSMOO
from fedbasin.methods.fedsmoo import AgreedShift, ShiftCarry
from fedbasin.sim.cohort import CohortExecutor


def numpy_fedsmoo(world, rounds, method, sgd=None):
    """Sun et al., in the paper's duals q_i and mu_i."""
    server, s = world.start.copy(), np.zeros_like(world.start)
    q, mu = (np.zeros((world.count, len(server))) for _ in range(2))
    for t in range(rounds):
        cohort, ends, told = world.cohort(t), [], []
        for i in cohort:
            last = np.zeros_like(server)

            def direction(v, inputs, labels, i=i, x=server, s=s, last=last):
                e = method.rho * unit(world.gradient(v, inputs, labels) - mu[i] - s)
                mu[i] += e - s
                last[:] = e
                return world.gradient(v + e, inputs, labels) - q[i] + (v - x) / method.beta

            ends.append(world.descend(t, i, server, direction, sgd)[0])
            told.append(mu[i] - last if method.sends == "paper" else mu[i].copy())
        for i, y in zip(cohort, ends, strict=True):
            q[i] -= (y - server) / method.beta
        server = world.mean(ends, cohort, method.weighting) - method.beta * q.mean(0)
        s = method.rho * unit(world.mean(told, cohort, method.weighting))
        yield server, s, q.copy(), mu.copy()


@pytest.mark.parametrize("sgd", [SGD(), SGD(0.5, 0.01)])
@pytest.mark.parametrize(
    "method", [FedSMOO(), FedSMOO(0.4, 2.0, "release", "samples"), FedSMOO(0.4, 2.0)]
)
def test_fedsmoo_equals_a_plain_numpy_loop(method, sgd):
    federation = linear_federation(method, rounds=5, optimiser=sgd)
    oracle = numpy_fedsmoo(NumpyClients(federation), 5, method, sgd)
    for (after, _, states), (model, s, q, mu) in zip(rounds_of(federation), oracle, strict=True):
        close(after.send, model)
        close(after.state.shift, s)
        assert after.state.shift.norm() == pytest.approx(method.rho)
        for i in range(6):
            close(-states.get(i)[0].total / method.beta, q[i])
            close(states.get(i)[1].dual, mu[i])


@pytest.mark.parametrize("sends", ["paper", "release"])
def test_without_a_radius_it_is_feddyn(sends):
    method = FedSMOO(0.0, 4.0, sends)
    federation = linear_federation(method, rounds=5)
    same_models(federation, linear_federation(parse("feddyn(alpha=0.25)", "method"), rounds=5))
    for after, _, states in rounds_of(federation):
        assert after.state.shift.norm() == 0
        assert all(states.get(i)[1].dual.norm() == 0 for i in range(6))


def test_every_perturbation_has_the_radius():
    seen = []
    carry = ShiftCarry(*torch.randn(3, 7, generator=torch.Generator().manual_seed(0)).double())

    def gradient(v):
        seen.append(v)
        return v**2

    at = torch.linspace(-1, 1, 7, dtype=torch.float64)
    _, after = AgreedShift(0.3, "paper").direction(carry, at, gradient)
    assert (seen[1] - at).norm() == pytest.approx(0.3)
    torch.testing.assert_close(after.dual, carry.dual + (seen[1] - at) - carry.shared)


@pytest.mark.parametrize("source", ["wima(fedsmoo, window=2)", "ima(fedsmoo, start=0.0)"])
def test_fedsmoo_composes(source):
    check_composed(source)


def test_a_step_of_two_passes_can_be_compiled():
    """A warning that the step runs uncompiled would be an error here."""
    federation = linear_federation(FedSMOO(), rounds=1)
    one = federation.executor
    traced = CohortExecutor(one.trainer, one.population, one.key, compiled=True, backend="eager")
    same_models(federation, replace(federation, executor=traced), 1e-9)
    assert traced.counters.compiled
