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
from methods.numpy_network import (
    NumpyNetworkClients,
    backward,
    flat,
    forward,
    one_hot,
    parts,
    softmax,
)

from fedbasin.core.method import Plan
from fedbasin.core.rng import root
from fedbasin.core.round import Launch, Sent
from fedbasin.core.vectors import Layout
from fedbasin.methods import FedAvg, FedFA
from fedbasin.methods.fedfa import Report, SharedAnchors
from fedbasin.methods.parts.heads import Head
from fedbasin.sim.cohort import CohortExecutor
from fedbasin.testing import toy_federation, trajectory


class NumpyAdam:
    def __init__(self):
        self.m = self.v = self.t = 0

    def step(self, x, gradient, lr):
        self.t += 1
        self.m = 0.9 * self.m + 0.1 * gradient
        self.v = 0.999 * self.v + 0.001 * gradient**2
        size = np.sqrt(self.v / (1 - 0.999**self.t)) + 1e-8
        return x - lr * (self.m / (1 - 0.9**self.t)) / size


def numpy_client(world, t, client, server, anchors, method, calibrate):
    """One client's round, one batch after another."""
    v, a, adam = server.copy(), anchors.copy(), NumpyAdam()
    batches = list(world.steps(t, client))
    per_epoch = int(np.ceil(world.sizes[client] / 4))
    for first in range(0, len(batches), per_epoch):
        means = {c: [] for c in range(3)}
        for inputs, labels in batches[first : first + per_epoch]:
            h, z = forward(v, inputs)
            pull = np.zeros_like(h)
            for c in set(labels.tolist()):
                mine = labels == c
                means[c].append(h[mine].mean(0))
                pull[mine] = method.pull / 3 * 2 * (h[mine] - a[c]) / mine.sum()
            by_logits = (softmax(z) - one_hot(labels)) / len(labels)
            v = v - world.lr(t) * backward(v, inputs, by_logits, pull)
            if calibrate:
                *body, weight, bias = parts(v)
                wrong = (softmax(a @ weight.T + bias) - np.eye(3)) / 3
                moved = adam.step(
                    flat(weight, bias), flat(wrong.T @ a, wrong.sum(0)), method.head_lr
                )
                v = flat(*body, moved)
        for c, found in means.items():
            if found:
                a[c] = method.keep * a[c] + (1 - method.keep) * np.mean(found, axis=0)
    return v, a


def numpy_fedfa(world, rounds, method):
    server, anchors = world.start.copy(), np.eye(3, 5)
    for t in range(rounds):
        calibrate = bool(method.head_lr) and t >= int(method.calibrate_from * rounds)
        cohort = world.cohort(t)
        ends = [numpy_client(world, t, i, server, anchors, method, calibrate) for i in cohort]
        weights = [world.sizes[i] if method.weighting == "samples" else 1 for i in cohort]
        server = np.average([v for v, _ in ends], axis=0, weights=weights)
        anchors = np.average([a for _, a in ends], axis=0, weights=weights)
        yield server, anchors


@pytest.mark.parametrize(
    "method",
    [
        FedFA(head_lr=0.05),
        FedFA(0.7, 0.5, 0.02, calibrate_from=0.5),
        FedFA(0.3, 0.2, 0.0),
        FedFA(0.0, 0.9, 0.1),
        FedFA(0.3, 0.5, weighting="uniform"),
    ],
)
def test_fedfa_equals_a_plain_numpy_loop(method):
    federation = toy_federation(method)
    world = NumpyNetworkClients(federation)
    rounds = federation.rounds_from(*federation.begin())
    for (after, _), (model, anchors) in zip(rounds, numpy_fedfa(world, 4, method), strict=True):
        np.testing.assert_allclose(after.send.numpy(), model, rtol=1e-8, atol=1e-11)
        np.testing.assert_allclose(after.state.anchors.numpy(), anchors, rtol=1e-8, atol=1e-11)


def rule_and_start(net, pull=0.6, keep=0.5, head_lr=0.0):
    (rule,) = FedFA(pull, keep, head_lr).own_rules()
    anchors = torch.from_numpy(np.random.default_rng(0).normal(size=(3, 5)))
    at = net.initial()[0] + 0.1
    return rule, start_with(at, shared=SharedAnchors(anchors, torch.tensor(1.0))), at


def test_the_step_follows_the_numerical_gradient_of_the_stated_loss():
    net, batch = small_net(), small_batch()
    rule, start, at = rule_and_start(net)
    labels, anchors = batch.labels, start.shared.anchors

    def objective(v):
        outputs = net(v, batch.inputs)
        total = torch.nn.functional.cross_entropy(outputs.logits, labels)
        for b, y in enumerate(labels.tolist()):
            distance = (outputs.features[b] - anchors[y]).square().sum()
            total = total + 0.6 / 3 * distance / int((labels == y).sum())
        return total

    found, _ = direction_of(rule, net, batch, start, at)
    torch.testing.assert_close(found, numerical_gradient(objective, at), rtol=1e-6, atol=1e-8)
    padded, _ = direction_of(rule, net, small_batch(padding=2), start, at)
    torch.testing.assert_close(padded, found, rtol=1e-12, atol=1e-14)


def test_the_head_step_moves_the_head_alone_and_lowers_the_anchors_loss():
    net = small_net()
    rule, start, at = rule_and_start(net, 0.0, 1.0, 0.01)
    carry = rule.begin(start, net)
    after, _ = rule.after_step(carry, at, net)
    body = net.layout.mask(net.layout.head, at) == 0
    assert torch.equal(after[body], at[body]) and not torch.equal(after, at)
    anchors, labels = start.shared.anchors, torch.arange(3)
    losses = [
        torch.nn.functional.cross_entropy(net.classify(v, anchors), labels) for v in (at, after)
    ]
    assert losses[1] < losses[0]
    off = carry._replace(shared=carry.shared._replace(calibrate=torch.tensor(0.0)))
    assert torch.equal(rule.after_step(off, at, net)[0], at)


def test_anchors_stay_where_keep_is_one():
    for after in trajectory(FedFA(keep=1.0)):
        torch.testing.assert_close(after.state.anchors, torch.eye(3, 5).double())


def test_a_client_of_one_class_changes_only_that_anchor():
    net, batch = small_net(), small_batch((2, 2, 2))
    rule, start, at = rule_and_start(net)
    start = start._replace(epoch_steps=torch.tensor(1.0))
    _, carry = direction_of(rule, net, batch, start, at)
    report = rule.end(carry, start, None)[1].anchors
    assert torch.equal(report[:2], start.shared.anchors[:2])
    mean = net(at, batch.inputs).features.mean(0)
    torch.testing.assert_close(report[2], 0.5 * start.shared.anchors[2] + 0.5 * mean)


def test_an_unfinished_epoch_renews_anchors_once():
    """Three steps of a client with five rows: an epoch of two batches, then one batch."""
    method = FedFA(0.0, 0.5, 0.0)
    federation = toy_federation(method, participation="count(clients=6)", rounds=1)
    federation = replace(federation, schedule=lambda t: Plan(0.0, None, 3))
    server, states = federation.begin()
    reports = []
    one = federation.executor
    for executor in (one, CohortExecutor(one.trainer, one.population, one.key, False)):
        shared = method.broadcast(server.state, server.send, federation.context)
        sent = Sent(server.send, server.buffers, shared, 0)
        request = Launch(np.array([3]), sent, Plan(0.0, None, 3), states)
        gathered = executor.train([request])[0]
        reports.append(gathered.replies.report(Report).anchors[0].numpy())
    world = NumpyNetworkClients(federation)
    a = np.eye(3, 5)
    batches = list(world.steps(0, 3))
    for chunk in (batches[:2], batches[2:]):
        means = {c: [] for c in range(3)}
        for inputs, labels in chunk:
            h, _ = forward(world.start, inputs)
            for c in set(labels.tolist()):
                means[c].append(h[labels == c].mean(0))
        for c, found in means.items():
            if found:
                a[c] = 0.5 * a[c] + 0.5 * np.mean(found, axis=0)
    for report in reports:
        np.testing.assert_allclose(report, a, rtol=1e-10)


def test_anchors_travel_both_ways_and_no_more():
    federation, plain = toy_federation(FedFA()), toy_federation(FedAvg())
    (_, ours), (_, theirs) = (next(iter(f.rounds_from(*f.begin()))) for f in (federation, plain))
    anchors = 3 * 5 * 8
    assert ours.bytes_down - theirs.bytes_down == 3 * (anchors + 8)  # and whether heads are fitted
    assert ours.bytes_up - theirs.bytes_up == 3 * anchors


def test_a_share_of_the_rounds_is_not_rounded_down_by_its_last_digit():
    assert 0.29 * 100 < 29
    method = FedFA(calibrate_from=0.29)
    context = replace(toy_federation(method).context, rounds=100)
    server = torch.zeros(context.layout.size)
    state = method.init(server, context)
    fitted = [
        bool(method.own_broadcast(state, server, context.at(t, 0.1))[0].calibrate)
        for t in range(100)
    ]
    assert fitted == [False] * 29 + [True] * 71


def test_as_many_classes_as_features_start_at_the_unit_vectors():
    layout = Layout(("head.weight",), ((3, 3),), ("head.weight",))
    context = replace(toy_federation(FedAvg()).context, layout=layout)
    assert torch.equal(FedFA().init(torch.zeros(9), context).anchors, torch.eye(3))


def test_more_classes_than_features_start_in_drawn_directions():
    layout = Layout(("head.weight",), ((7, 3),), ("head.weight",))
    context = replace(toy_federation(FedAvg()).context, layout=layout, key=root(1))
    anchors = FedFA().init(torch.zeros(21), context).anchors
    torch.testing.assert_close(anchors.norm(dim=1), torch.ones(7))
    assert torch.linalg.matrix_rank(anchors) == 3
    assert Head.of(layout).bias is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pull": -1.0}, "pull must be at least 0"),
        ({"keep": 1.1}, r"keep must be in \[0, 1\]"),
        ({"head_lr": -0.1}, "head_lr"),
        ({"calibrate_from": 2.0}, "calibrate_from"),
    ],
)
def test_bad_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        FedFA(**arguments)
