from dataclasses import replace

import numpy as np
import pytest
import torch
from methods.numpy_clients import NumpyClients, linear_federation, models

from fedbasin.core.method import Context, Plan
from fedbasin.core.rng import root
from fedbasin.core.vectors import Layout
from fedbasin.local import SGD, Prox
from fedbasin.methods import FedAvg, FedNova
from fedbasin.testing import replies_of, toy_federation, trajectory


def work(steps, momentum, pull):
    """Gradients that K steps add up to: run them along a gradient that is always one."""
    place = speed = 0.0
    for _ in range(steps):
        speed = momentum * speed + (1.0 + pull * place)  # place = (v - x) / eta is negative
        place = place - speed
    return -place


@pytest.mark.parametrize(
    ("effective", "weighting"), [("lengths", "samples"), ("steps", "samples"), ("steps", "uniform")]
)
@pytest.mark.parametrize("momentum", [0.0, 0.7])
@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_fednova_equals_a_plain_numpy_loop(momentum, mu, effective, weighting):
    method = FedNova(effective, weighting, local=Prox(mu) if mu else ())
    federation = linear_federation(method, rounds=4, optimiser=SGD(momentum))
    world = NumpyClients(federation)
    server, apart = world.start, 0.0
    for t, ours in enumerate(models(federation)):
        ends, sizes, steps = world.sgd(t, server, momentum=momentum, mu=mu)
        p = sizes / sizes.sum() if weighting == "samples" else np.full(len(sizes), 1 / len(sizes))
        a = np.array([work(k, momentum, world.lr(t) * mu) for k in steps])
        tau = p @ (a if effective == "lengths" else steps)
        plain = p @ ends
        server = server + tau * (p / a) @ (ends - server)
        np.testing.assert_allclose(ours, server, rtol=1e-9, atol=1e-12)
        apart = max(apart, np.abs(server - plain).max())
    assert apart > 1e-3


def test_the_recursions_equal_the_closed_form():
    for rho in (0.0, 0.5, 0.9):
        for steps in (0, 1, 2, 7, 40):
            total = speed = 0.0
            for _ in range(steps):
                speed = rho * speed + 1
                total += speed
            assert SGD(rho).effective_steps(steps) == pytest.approx(total)
            assert SGD(rho).effective_steps(steps, 1e-12) == pytest.approx(total)
    for steps in (1, 5, 30):  # a <- (1 - eta mu) a + 1
        assert SGD().effective_steps(steps, 0.2) == pytest.approx((1 - 0.8**steps) / 0.2)
    assert SGD(0.9).effective_steps(9, 0.05) == pytest.approx(work(9, 0.9, 0.05))


@pytest.mark.parametrize("sgd", [SGD(), SGD(0.9)])
def test_equal_steps_are_fedavg(sgd):
    def run(method):
        federation = replace(
            toy_federation(method, optimiser=sgd), schedule=lambda t: Plan(0.2, None, 3)
        )
        return models(federation)

    for local in ((), Prox(0.5)):
        for a, b in zip(run(FedNova(local=local)), run(FedAvg(local=local)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


CONTEXT = Context(Layout(("w",), ((3,),)), clients=3, rounds=1, key=root(0))


def fixed_point(method, eta):
    """Clients with unlike quadratics 1/2 |A_i v - b_i|^2 take unequal steps until nothing moves."""
    rng = np.random.default_rng(0)
    quadratics = [(rng.normal(size=(6, 3)), rng.normal(size=6) * 3) for _ in range(3)]
    hessians = [a.T @ a / 6 for a, _ in quadratics]
    centres = [a.T @ b / 6 for a, b in quadratics]
    optimum = np.linalg.solve(sum(hessians), sum(centres))
    steps = [1, 4, 16]
    w = torch.zeros(3, dtype=torch.float64)
    for _ in range(int(20 / eta)):
        ends = []
        for hessian, centre, count in zip(hessians, centres, steps, strict=True):
            v = w.numpy().copy()
            for _ in range(count):
                v = v - eta * (hessian @ v - centre)
            ends.append(v)
        replies = replies_of(torch.from_numpy(np.array(ends)))
        counts = torch.tensor(steps, dtype=torch.float64)
        replies = replace(replies, steps=counts, effective_steps=counts)
        served, _ = method.aggregate((), w, replies, CONTEXT)
        w = served.send
    return np.linalg.norm(w.numpy() - optimum)


def test_unequal_steps_move_fedavgs_fixed_point_but_not_fednovas():
    """The gap of FedAvg stays as eta falls; that of FedNova falls with eta."""
    fedavg = [fixed_point(FedAvg(), eta) for eta in (0.05, 0.0125)]
    ours = [fixed_point(FedNova(), eta) for eta in (0.05, 0.0125)]
    assert fedavg[1] > 0.7 * fedavg[0] > 0.1
    assert ours[1] < 0.3 * ours[0] and ours[1] < 0.1 * fedavg[1]


def test_a_client_without_a_step_adds_nothing():
    replies = replies_of(torch.tensor([[1.0, 2.0], [0.0, 0.0]], dtype=torch.float64))
    counts = torch.tensor([4.0, 0.0], dtype=torch.float64)
    replies = replace(replies, steps=counts, effective_steps=counts)
    served, _ = FedNova().aggregate((), torch.zeros(2, dtype=torch.float64), replies, CONTEXT)
    # tau = (4 + 0) / 2, the mover's share 1/2 divided by its 4 steps
    np.testing.assert_allclose(served.send, [0.25, 0.5])
    assert served.notes.effective == 2


def test_the_record_says_how_unequal_the_work_was():
    federation = toy_federation(FedNova(), participation="count(clients=2)")
    federation = replace(federation, eligible=np.array([0, 5]))
    _, record = next(iter(federation.rounds_from(*federation.begin())))
    assert record.notes["length_ratio"] == 4.0  # 16 rows against 1, in batches of 4
    assert record.notes["effective"] == pytest.approx((16 * 8 + 1 * 2) / 17)


def test_work_of_a_client_without_rows_is_not_compared():
    counts = torch.tensor([2.0, 8.0, 1.0], dtype=torch.float64)
    replies = replace(replies_of(torch.ones(3, 3), [5, 3, 0]), steps=counts, effective_steps=counts)
    served, _ = FedNova().aggregate((), torch.zeros(3), replies, CONTEXT)
    assert served.notes.length_ratio == 4


def test_fednova_differs_from_fedavg_under_momentum_too():
    ours, plain = (trajectory(m, optimiser=SGD(0.9))[-1].send for m in (FedNova(), FedAvg()))
    assert not torch.allclose(ours, plain, rtol=1e-3)
