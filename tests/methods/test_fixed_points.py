"""Where methods come to rest on heterogeneous least squares: at the optimum or off it."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from methods.numpy_clients import NumpyClients, linear_federation

from fedbasin.core.expressions import parse
from fedbasin.core.method import Plan
from fedbasin.core.rule import LocalRule
from fedbasin.sim.cohort import CohortExecutor


@dataclass(frozen=True)
class LeastSquares(LocalRule):
    """Half the squared distance of the outputs from the one-hot labels."""

    owns: ClassVar[frozenset] = frozenset({"loss"})

    def loss(self, carry, value, view):
        target = torch.eye(3, dtype=view.vector.dtype)[view.batch.labels]
        each = (view.outputs.logits - target).square().sum(1) / 2
        return (each * view.batch.weight).sum() / view.batch.weight.sum(), carry


def centred(raw, key=None):
    """Inputs around zero make the problem well conditioned, and the tests short."""
    return (raw.double() / 255 - 0.5) * 3


def least_squares(source, steps, rounds, lr=0.3, one_client=False):
    """All clients, full batches; the cohort engine, which a law holds equal to the loop."""
    method = replace(parse(source, "method"), local=LeastSquares())
    federation = linear_federation(
        method,
        rounds=rounds,
        participation="count(clients=6)" if not one_client else "count(clients=1)",
    )
    one = federation.executor
    cohort = CohortExecutor(
        replace(one.trainer, batch=16, transform=centred), one.population, one.key, compiled=False
    )
    return replace(
        federation,
        executor=cohort,
        schedule=lambda t: Plan(lr, None, steps),
        eligible=np.array([0]) if one_client else federation.eligible,
        context=replace(federation.context, clients=1 if one_client else 6),
        evaluate_every=rounds,
        evaluate_last=0,
    )


class Problem:
    """The normal equations of every client."""

    def __init__(self, federation):
        world = NumpyClients(federation)
        self.sizes = world.sizes
        self.parts = []
        for i in range(6):
            inputs, labels = world.rows(i)
            a = np.column_stack([(inputs - 0.5) * 3, np.ones(len(labels))])
            self.parts.append((a.T @ a / len(labels), a.T @ np.eye(3)[labels] / len(labels)))

    def gradient(self, i, vector):
        square, right = self.parts[i]
        table = np.column_stack([vector[:12].reshape(3, 4), vector[12:]])
        found = (square @ table.T - right).T
        return np.concatenate([found[:, :4].reshape(-1), found[:, 4]])

    def optimum(self, weights):
        square = sum(w * a for w, (a, _) in zip(weights, self.parts, strict=True))
        right = sum(w * b for w, (_, b) in zip(weights, self.parts, strict=True))
        table = np.linalg.solve(square, right).T
        return np.concatenate([table[:, :4].reshape(-1), table[:, 4]])


def rest(federation):
    server, states = federation.begin()
    for after, _ in federation.rounds_from(server, states):
        server = after
    return server, states


def gap(source, rounds=40):
    federation = least_squares(source, 5, rounds)
    server, _ = rest(federation)
    best = Problem(federation).optimum(np.ones(6))
    return np.linalg.norm(server.score.numpy() - best)


def test_fedavg_rests_off_the_optimum():
    assert gap("fedavg(weighting='uniform')") > 0.05


@pytest.mark.parametrize(
    "source",
    [
        "scaffold",
        "feddyn(alpha=1.0)",
        "fedspeed(rho=0.0, lam=1.0)",
        "fedspeed(rho=0.0, lam=1.0, server='release')",
        "fedsmoo(rho=0.0, beta=1.0)",
    ],
)
def test_methods_that_correct_drift_reach_the_optimum(source):
    start = gap(source, rounds=1)
    late = gap(source)
    assert late < 1e-5 * start, (start, late)


def test_feddyn_at_rest_has_the_gradients_as_duals():
    federation = least_squares("feddyn(alpha=1.0, score='server')", 5, 70)
    server, states = rest(federation)
    problem, w = Problem(federation), server.score.numpy()
    duals = np.array([-1.0 * states.get(i)[0].total.numpy() for i in range(6)])
    for i in range(6):
        np.testing.assert_allclose(duals[i], problem.gradient(i, w), rtol=1e-7, atol=1e-9)
    assert np.abs(duals.sum(0)).max() < 1e-9
    assert server.state.drift.norm() < 1e-9


def test_pulls_by_size_rest_at_the_optimum_of_all_rows():
    weights = Problem(least_squares("feddyn", 1, 1)).sizes
    source = "feddyn(alpha=1.0, by_size=True)"
    federation = least_squares(source, 5, 60, lr=0.15)
    model, problem = rest(federation)[0].score.numpy(), Problem(federation)
    assert np.linalg.norm(model - problem.optimum(weights)) < 1e-6
    assert np.linalg.norm(model - problem.optimum(np.ones(6))) > 1e-2


@pytest.mark.parametrize("alpha", [0.2, 0.5])
def test_one_client_alone_rests_at_its_own_optimum(alpha):
    federation = least_squares(f"feddyn(alpha={alpha})", 5, 40, lr=0.2, one_client=True)
    server, _ = rest(federation)
    assert np.linalg.norm(Problem(federation).gradient(0, server.score.numpy())) < 1e-4
