from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from methods.numpy_clients import NumpyClients, linear_federation

from fedbasin.core.expressions import parse
from fedbasin.core.method import Plan
from fedbasin.core.rule import LocalRule, Start
from fedbasin.local import SGD, Prox
from fedbasin.methods import FedAvg, FedCM
from fedbasin.methods.parts.client_momentum import (
    ClientMomentum,
    EvenMomentum,
    SharedMomentum,
    mean_direction,
)
from fedbasin.testing import LAWS, check_method, replies_of, trajectory

QUICK_LAWS = [law for law in LAWS if "order" not in law.__name__]


def length(steps, rho):
    """How many gradients K steps of SGD with momentum add up to, summed one by one."""
    return sum(sum(rho**j for j in range(k + 1)) for k in range(steps))


def numpy_fedcm(world, rounds, method, sgd, mu=0.0):
    """Xu et al., Algorithm 1; every displacement is divided by what produced it."""
    server, m = world.start.copy(), np.zeros_like(world.start)
    for t in range(rounds):
        lr, ends, sizes, paces, grads = world.lr(t), [], [], [], []
        for client in world.cohort(t):
            v, speed, raw = server.copy(), np.zeros_like(server), []
            for inputs, labels in world.steps(t, client):
                raw.append(world.gradient(v, inputs, labels))
                mixed = method.alpha * (raw[-1] + mu * (v - server)) + (1 - method.alpha) * m
                speed = sgd.momentum * speed + mixed + sgd.weight_decay * v
                v = v - lr * speed
            ends.append(v)
            sizes.append(world.sizes[client] if method.weighting == "samples" else 1)
            taken = length(len(raw), sgd.momentum)
            if method.counted == "rows":
                taken *= world.sizes[client] * 2 / 4 / len(raw)  # 2 epochs, batches of 4
            paces.append((server - v) / (lr * taken))
            grads.append(np.mean(raw, axis=0))
        before = m
        m = np.average(paces, axis=0, weights=sizes)
        server = server + method.server_lr * (np.average(ends, axis=0, weights=sizes) - server)
        yield server, m, before, np.average(grads, axis=0, weights=sizes)


def rounds_of(federation):
    return federation.rounds_from(*federation.begin())


@pytest.mark.parametrize("sgd", [SGD(), SGD(0.5, 0.01)])
@pytest.mark.parametrize(
    "method",
    [
        *(FedCM(), FedCM(0.4, 0.7, "samples"), FedCM(0.05), FedCM(1.0, weighting="samples")),
        *(FedCM(counted="rows"), FedCM(0.4, 0.7, "samples", counted="rows")),
    ],
)
def test_fedcm_equals_a_plain_numpy_loop(method, sgd):
    federation = linear_federation(method, rounds=6, optimiser=sgd)
    oracle = numpy_fedcm(NumpyClients(federation), 6, method, sgd)
    for (after, record), (model, m, _, _) in zip(rounds_of(federation), oracle, strict=True):
        np.testing.assert_allclose(after.send.numpy(), model, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(after.state.momentum.numpy(), m, rtol=1e-9, atol=1e-12)
        assert record.notes["momentum_norm"] == pytest.approx(np.linalg.norm(m))


def test_the_momentum_is_a_moving_average_of_gradients_whatever_steps_clients_take():
    method = FedCM(0.3)
    federation = linear_federation(method, rounds=6)
    oracle = numpy_fedcm(NumpyClients(federation), 6, method, SGD())
    ratios = []
    for (after, record), (_, _, before, gradient) in zip(
        rounds_of(federation), oracle, strict=True
    ):
        expected = 0.3 * gradient + 0.7 * before
        np.testing.assert_allclose(after.state.momentum.numpy(), expected, rtol=1e-8, atol=1e-11)
        ratios.append(record.notes["steps_ratio"])
    assert max(ratios) > 1, "the cohorts must have unequal steps for this to say something"


def test_counted_by_rows_the_momentum_grows_without_bound_where_batches_are_not_full():
    """6 clients of 5 rows in batches of 4: 2 steps an epoch count as 1.25, A (1 - alpha) = 1.44."""
    norms = {}
    for counted in ("steps", "rows"):
        federation = linear_federation(FedCM(counted=counted), rounds=30)
        population = federation.population
        shards = [np.arange(5 * i, 5 * i + 5) for i in range(6)]
        population = type(population).of(
            population.inputs.numpy(), population.labels.numpy(), shards
        )
        federation = replace(
            federation,
            population=population,
            executor=replace(federation.executor, population=population),
            eligible=np.arange(6),
            schedule=lambda t: Plan(1e-9, 2),  # steps too small to move
        )
        norms[counted] = [r.notes["momentum_norm"] for _, r in rounds_of(federation)]
    assert max(norms["steps"]) < 2
    growth = norms["rows"][-1] / norms["rows"][-2]
    assert growth == pytest.approx(1.6 * 0.9, rel=1e-2)


def test_steps_of_a_client_without_rows_are_not_compared():
    server = torch.zeros(15, dtype=torch.float64)
    replies = replies_of(torch.ones(3, 15, dtype=torch.float64), [5, 3, 0])
    replies = replace(replies, steps=torch.tensor([2.0, 8.0, 1.0]).double())
    context = linear_federation(FedCM()).context.at(0, 0.1)
    served, _ = FedCM().aggregate(FedCM().init(server, context), server, replies, context)
    assert served.notes.steps_ratio == 4


def test_counted_by_rows_says_what_it_needs():
    with pytest.raises(ValueError, match=r"counted=.rows. needs local\.epochs and local\.batch"):
        list(rounds_of(full_batch(FedCM(counted="rows"), Plan(0.5, None, 1), 1)))
    federation = linear_federation(FedCM(counted="rows"))
    unknown = replace(federation, context=replace(federation.context, batch=0))
    with pytest.raises(ValueError, match=r"counted=.rows. needs local\.epochs and local\.batch"):
        next(iter(unknown.rounds_from(*unknown.begin())))


def full_batch(method, plan, rounds, sgd=None):
    """All clients, all rows in every step."""
    federation = linear_federation(
        method, rounds=rounds, participation="count(clients=6)", optimiser=sgd or SGD()
    )
    trainer = replace(federation.trainer, batch=64)
    return replace(
        federation,
        schedule=lambda t: plan,
        trainer=trainer,
        executor=replace(federation.executor, trainer=trainer),
    )


def mean_gradient(world, at):
    return np.mean([world.gradient(at, *world.rows(i)) for i in range(6)], axis=0)


def test_one_full_step_of_all_clients_is_gradient_descent_with_momentum():
    federation = full_batch(FedCM(0.2), Plan(0.5, None, 1), 8)
    world = NumpyClients(federation)
    model, speed = world.start.copy(), 0.0
    for after, record in rounds_of(federation):
        speed = 0.2 * mean_gradient(world, model) + 0.8 * speed
        model = model - 0.5 * speed
        np.testing.assert_allclose(after.send.numpy(), model, rtol=1e-10, atol=1e-13)
        assert record.notes["steps_ratio"] == 1


def test_the_first_round_is_fedavg_with_alpha_times_the_rate():
    ours = full_batch(FedCM(0.2), Plan(0.5, 3), 1)
    theirs = full_batch(FedAvg("uniform"), Plan(0.1, 3), 1)
    (a, _), (b, _) = next(iter(rounds_of(ours))), next(iter(rounds_of(theirs)))
    torch.testing.assert_close(a.send, b.send, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("rho", "decay"), [(0.9, 0.0), (0.0, 0.05)])
def test_local_momentum_does_not_inflate_the_servers_and_weight_decay_grows_by_alpha(rho, decay):
    """With steps too small to move, M settles at the gradient plus decay / alpha times x."""
    federation = full_batch(FedCM(0.5), Plan(1e-8, None, 5), 20, SGD(rho, decay))
    world = NumpyClients(federation)
    *_, (after, _) = rounds_of(federation)
    expected = mean_gradient(world, world.start) + decay / 0.5 * world.start
    np.testing.assert_allclose(after.state.momentum.numpy(), expected, rtol=1e-4, atol=1e-6)


def test_a_round_of_steps_of_length_zero_leaves_the_momentum_finite():
    federation = linear_federation(FedCM(), rounds=4)
    federation = replace(federation, schedule=lambda t: Plan(0.0 if t == 1 else 0.2, 1))
    for after, _ in rounds_of(federation):
        assert torch.isfinite(after.state.momentum).all() and torch.isfinite(after.send).all()


def test_a_client_without_steps_adds_nothing():
    replies = replies_of(torch.tensor([[1.0, 0.0], [3.0, 3.0]], dtype=torch.float64))
    gone = torch.tensor([1.0, 0.0], dtype=torch.float64)
    replies = replace(replies, steps=gone, effective_steps=gone, lr_sum=0.1 * gone)
    share = torch.tensor([0.5, 0.5], dtype=torch.float64)
    found = mean_direction(replies, share, torch.zeros(2, dtype=torch.float64))
    assert found.tolist() == [-5.0, 0.0]


class Moved(NamedTuple):
    by: torch.Tensor


@dataclass(frozen=True)
class Ahead(LocalRule):
    """Takes the gradient a fixed way off, as SAM does."""

    layer = "perturb"

    def begin(self, start, net):
        return Moved(torch.full_like(start.vector, 0.5))

    def direction(self, carry, vector, gradient):
        return gradient(vector + carry.by), carry


def test_a_perturbing_rule_acts_inside_the_mixture_and_prox_too():
    method = FedCM(0.2, local=(Ahead(),))
    federation = full_batch(method, Plan(0.5, None, 1), 5)
    world = NumpyClients(federation)
    model, speed = world.start.copy(), 0.0
    for after, _ in rounds_of(federation):
        speed = 0.2 * mean_gradient(world, model + 0.5) + 0.8 * speed
        model = model - 0.5 * speed
        np.testing.assert_allclose(after.send.numpy(), model, rtol=1e-10, atol=1e-13)
    method = FedCM(0.3, local=Prox(0.2))
    federation = linear_federation(method, rounds=4)
    oracle = numpy_fedcm(NumpyClients(federation), 4, method, SGD(), mu=0.2)
    for (after, _), (model, _, _, _) in zip(rounds_of(federation), oracle, strict=True):
        np.testing.assert_allclose(after.send.numpy(), model, rtol=1e-9, atol=1e-12)


def test_the_rule_is_the_same_for_a_whole_cohort_at_once():
    exact = torch.tensor(0.3, dtype=torch.float64)  # 0.3 of float32 is another number
    shared = SharedMomentum(torch.randn(5).double(), exact, torch.tensor(4.0))
    steps, vectors = torch.tensor([2.0, 8.0, 4.0]).double(), torch.randn(3, 5).double()

    def one(rule):
        def direction(steps, vector):
            carry = rule.begin(Start(vector, shared, (), *(steps,) * 6, ()), None)
            found, same = rule.direction(carry, vector, lambda v: v**2)
            assert same is carry
            factor = rule.lr_factor(carry)
            return found, vector.new_ones(()) if factor is None else factor

        return direction

    for rule, pace in ((ClientMomentum(), torch.ones(3)), (EvenMomentum(), 4 / steps)):
        direction, found = torch.vmap(one(rule))(steps, vectors)
        torch.testing.assert_close(direction, 0.3 * vectors**2 + 0.7 * shared.momentum)
        torch.testing.assert_close(found, pace.double())


@pytest.mark.parametrize("source", ["wima(fedcm, window=2)", "ima(fedcm, start=0.0)"])
def test_fedcm_composes(source):
    check_method(parse(source, "method"), QUICK_LAWS)
    assert not torch.equal(trajectory(parse(source))[-1].score, trajectory(FedCM())[-1].score)


@pytest.mark.parametrize("alpha", [0.0, -0.1, 1.1, float("nan")])
def test_alpha_out_of_range_is_refused(alpha):
    with pytest.raises(ValueError, match=r"alpha must be above 0 and at most 1, got"):
        FedCM(alpha)


def test_bad_server_rates_are_refused():
    with pytest.raises(ValueError, match="server_lr must be above 0, got 0"):
        FedCM(server_lr=0.0)
