from dataclasses import replace

import numpy as np
import pytest
import torch
from local.directions import (
    direction_of,
    numerical_gradient,
    small_batch,
    small_net,
    start_with,
)
from methods.numpy_network import NumpyNetworkClients, backward, forward, one_hot, parts

from fedbasin.core.rule import LossInputs
from fedbasin.methods import FedGraB
from fedbasin.methods.fedgrab import ControllerState, Open, response, tail_of
from fedbasin.sim.cohort import CohortExecutor
from fedbasin.testing import replies_of, toy_federation


def f(u):
    return (10 / 9) / (1 / 9 + np.exp(-u / 2))


class NumpyPID:
    """One class's controller with its history, as in a textbook."""

    def __init__(self, method):
        self.method, self.errors, self.out = method, [0.0, 0.0, 0.0], 0.0
        self.pull = self.push = 0.0

    def move(self, is_open):
        if not is_open:
            self.errors, self.out = [0.0, 0.0, 0.0], 0.0
            return 0.0
        self.errors = [-(self.pull - self.push), *self.errors[:2]]
        a, b, c = self.errors
        m = self.method
        self.out = np.clip(self.out + m.kp * (a - b) + m.ki * a + m.kd * (a - 2 * b + c), -100, 100)
        return self.out


def numpy_fedgrab(world, rounds, method):
    server, priors = world.start.copy(), []
    controllers = {i: [NumpyPID(method) for _ in range(3)] for i in range(world.count)}
    for t in range(rounds):
        tail = np.zeros(3, bool)
        if priors:
            prior, reached = np.mean(priors, axis=0), 0.0
            for c in np.argsort(-prior, kind="stable"):
                tail[c] = reached >= method.cut * prior.sum()
                reached += prior[c]
        ends = []
        for client in world.cohort(t):
            v = server.copy()
            for inputs, labels in world.steps(t, client):
                u = np.array([p.move(tail[c]) for c, p in enumerate(controllers[client])])
                _, z = forward(v, inputs)
                y = one_hot(labels)
                slope = (1 / (1 + np.exp(-z)) - y) * (y * f(u) + (1 - y) * f(-u)) / len(labels)
                for c, p in enumerate(controllers[client]):
                    p.pull += np.abs(slope[:, c] * y[:, c]).sum()
                    p.push += np.abs(slope[:, c] * (1 - y[:, c])).sum()
                v = v - world.lr(t) * backward(v, inputs, slope)
            ends.append(v)
        by_samples = method.weighting == "samples"
        weights = [world.sizes[i] if by_samples else 1 for i in world.cohort(t)]
        server = np.average(ends, axis=0, weights=weights)
        norms = np.linalg.norm(parts(server)[2], axis=1)
        priors.append((norms - norms.min()) / (norms - norms.min()).sum())
        yield server, tail, controllers, np.sum(priors, axis=0)


@pytest.mark.parametrize(
    "method",
    [
        FedGraB(),
        FedGraB(2.0, 0.5, 0.3, cut=0.3),
        FedGraB(cut=0.0),
        FedGraB(cut=0.3, weighting="uniform"),
    ],
)
def test_fedgrab_equals_a_plain_numpy_loop(method):
    federation = toy_federation(method, rounds=5)
    oracle = numpy_fedgrab(NumpyNetworkClients(federation), 5, method)
    server, states = federation.begin()
    seen = np.zeros(3, bool)
    for (after, _), (model, tail, controllers, prior) in zip(
        federation.rounds_from(server, states), oracle, strict=True
    ):
        np.testing.assert_allclose(after.send.numpy(), model, rtol=1e-7, atol=1e-10)
        np.testing.assert_allclose(after.state.prior.numpy(), prior, rtol=1e-7, atol=1e-10)
        seen |= tail
        for client, mine in controllers.items():
            kept = states.get(client)[0].numbers[:, :3].numpy()
            expected = [[p.errors[0], p.errors[1], p.out, p.pull, p.push] for p in mine]
            np.testing.assert_allclose(kept.T, expected, rtol=1e-7, atol=1e-10)
    assert seen.any()


def rule_and_start(net, tail=(1.0, 1.0, 1.0), numbers=None):
    (rule,) = FedGraB(most_classes=4).own_rules()
    at = net.initial()[0] + 0.1
    own = ControllerState(torch.zeros(5, 4, dtype=torch.float64) if numbers is None else numbers)
    return rule, start_with(at, shared=Open(torch.tensor(tail).double()), own=own), at


@pytest.mark.parametrize("is_open", [0.0, 1.0])
def test_the_step_follows_the_numerical_gradient_of_the_stated_loss(is_open):
    """u before this step is 0.4 times (1, -1, 2); closed controllers make it plain BCE."""
    net, batch = small_net(), small_batch()
    numbers = torch.zeros(5, 4, dtype=torch.float64)
    numbers[2, :3] = torch.tensor([0.4, -0.4, 0.8])
    rule, start, at = rule_and_start(net, (is_open,) * 3, numbers)
    u = numbers[2, :3] * is_open
    y = torch.nn.functional.one_hot(batch.labels, 3).double()
    weight = torch.from_numpy(y.numpy() * f(u.numpy()) + (1 - y.numpy()) * f(-u.numpy()))

    def objective(v):
        z = net(v, batch.inputs).logits
        each = -(y * torch.sigmoid(z).log() + (1 - y) * (1 - torch.sigmoid(z)).log())
        return (weight * each).sum() / len(y)

    found, carry = direction_of(rule, net, batch, start, at)
    torch.testing.assert_close(found, numerical_gradient(objective, at), rtol=1e-6, atol=1e-8)
    head = net.layout.views(found)["head.weight"]
    assert head.abs().min() > 0  # the head is trained as everything else
    padded, after = direction_of(rule, net, small_batch(padding=2), start, at)
    torch.testing.assert_close(padded, found, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(after.numbers, carry.numbers)


def test_the_response_is_one_at_rest_and_rises_within_its_bounds():
    u = torch.linspace(-100, 100, 2001, dtype=torch.float64)
    found = response(u)
    assert response(torch.zeros(1)) == pytest.approx(1)
    assert (found > 0).all() and (found <= 10).all() and (found.diff() >= 0).all()


def test_a_class_with_only_positives_drives_its_positive_weight_down():
    net = small_net()
    batch = small_batch((1, 1, 1, 1))
    rule, start, at = rule_and_start(net)
    carry, weights = rule.begin(start, net), []
    for _ in range(4):
        view = LossInputs(net, at, net(at, batch.inputs), batch, torch.zeros(2))
        _, carry = rule.loss(carry, None, view)
        weights.append(float(response(carry.numbers[2, 1])))
    assert weights[0] == pytest.approx(1) and weights[1:] == sorted(weights[1:], reverse=True)
    assert weights[-1] < 0.1
    assert float(response(-carry.numbers[2, 0])) < 0.1  # only negatives: their weight falls


def test_the_output_is_limited():
    numbers = torch.zeros(5, 4, dtype=torch.float64)
    numbers[4] = 1e6  # only negatives so far
    rule, start, _ = rule_and_start(small_net(), numbers=numbers)
    moved = rule._controlled(rule.begin(start, None))
    assert moved[2].tolist() == [100.0] * 3
    start = start._replace(client_state=ControllerState(numbers.roll(-1, 0)))  # only positives
    moved = rule._controlled(rule.begin(start, None))
    assert moved[2].tolist() == [-100.0] * 3


def test_the_tail_is_what_lies_beyond_the_cut():
    prior = torch.tensor([0.04, 0.5, 0.0, 0.26, 0.2])
    assert tail_of(prior, 0.95).tolist() == [1, 0, 1, 0, 0]
    assert tail_of(prior, 0.97).tolist() == [0, 0, 1, 0, 0]
    assert tail_of(prior, 0.75).tolist() == [1, 0, 1, 0, 1]
    assert tail_of(prior * 7, 0.97).tolist() == [0, 0, 1, 0, 0]


def test_a_head_of_equal_rows_has_no_tail():
    method = FedGraB()
    context = toy_federation(method).context
    server = torch.zeros(context.layout.size, dtype=torch.float64)
    state = method.init(server, context)
    _, state = method.aggregate(state, server, replies_of(server.repeat(2, 1)), context)
    (sent,) = method.own_broadcast(state, server, context)
    assert state.prior.tolist() == sent.tail.tolist() == [0.0] * 3


def test_controllers_that_close_forget_and_sums_stay():
    numbers = torch.arange(20.0, dtype=torch.float64).view(5, 4) / 100
    rule, start, _ = rule_and_start(small_net(), (0.0, 1.0, 0.0), numbers)
    moved = rule._controlled(rule.begin(start, None))
    assert moved[:3, [0, 2]].abs().sum() == 0 and moved[2, 1] != 0
    assert torch.equal(moved[3:], numbers[3:, :3])


def test_too_many_classes_say_what_to_write():
    with pytest.raises(ValueError, match=r"write fedgrab\(most_classes=3\)"):
        federation = toy_federation(FedGraB(most_classes=2))
        next(iter(federation.rounds_from(*federation.begin())))
    federation = toy_federation(FedGraB(most_classes=3))
    one = federation.executor
    whole = CohortExecutor(one.trainer, one.population, one.key, compiled=False)
    next(iter(replace(federation, executor=whole).rounds_from(*federation.begin())))


@pytest.mark.parametrize("name", ["kp", "ki", "kd", "cut", "most_classes"])
def test_bad_settings_are_refused(name):
    with pytest.raises(ValueError, match=name):
        FedGraB(**{name: -1})


def test_settings_at_their_limits():
    FedGraB(0.0, 0.0, 0.0, cut=1.0, most_classes=1)
    with pytest.raises(ValueError, match="most_classes must be at least 1, got 0"):
        FedGraB(most_classes=0)
