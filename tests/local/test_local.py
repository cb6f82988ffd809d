import math

import numpy as np
import pytest
import torch
from torch import nn

from fedbasin.core.method import Plan
from fedbasin.core.net import Net
from fedbasin.core.rng import fold_in, root
from fedbasin.core.rule import Batch, LocalRule
from fedbasin.core.tree import mapped, tensors
from fedbasin.local import SGD, Prox, Received, Shard, Trainer, batches
from fedbasin.local.batches import ORDER, count_steps
from fedbasin.local.optimisers import Velocity
from fedbasin.local.step import Point, clipped, nesting, step, step_in_place, task_loss

KEY = root(0).fold("client", 3, 4).tensor()


def transform(raw, key=None):
    return raw.to(torch.float64) / 255


def make_net(*layers):
    torch.manual_seed(1)
    return Net(
        nn.Sequential(*(layers or (nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))),
        dtype=torch.float64,
    )


def make_shard(rows=11, seed=0):
    rng = np.random.default_rng(seed)
    inputs = torch.from_numpy(rng.integers(0, 256, (rows, 3)).astype(np.uint8))
    return Shard(inputs, torch.from_numpy(rng.integers(0, 2, rows)))


def received(net, rules=(), shared=None, round=0):
    vector, buffers = net.initial()
    own = tuple(rule.client_state(vector) for rule in rules)
    return Received(vector, buffers, shared or tuple(() for _ in rules), own, round, KEY)


# --- batches


@pytest.mark.parametrize(
    ("rows", "batch", "epochs"), [(11, 4, 3), (4, 4, 2), (1, 10, 2), (3, 1, 1)]
)
def test_every_epoch_visits_every_row_once_and_keeps_the_partial_batch(rows, batch, epochs):
    found = batches(KEY, Plan(0.1, epochs), rows, batch)
    each = math.ceil(rows / batch)
    assert len(found) == epochs * each == count_steps(Plan(0.1, epochs), rows, batch)
    for epoch in range(epochs):
        part = torch.cat(found[epoch * each : (epoch + 1) * each])
        assert sorted(part.tolist()) == list(range(rows))


def test_steps_take_the_first_batches_of_the_same_stream():
    whole = batches(KEY, Plan(0.1, 4), 11, 4)
    first = batches(KEY, Plan(0.1, None, 7), 11, 4)
    assert len(first) == 7
    assert all(torch.equal(a, b) for a, b in zip(first, whole, strict=False))
    assert batches(KEY, Plan(0.1, 3), 0, 4) == [] and batches(KEY, Plan(0.1, None, 3), 0, 4) == []


def test_orders_differ_between_epochs_rounds_clients_and_seeds():
    def order(seed, round, client):
        key = root(seed).fold("client", round, client).tensor()
        return tuple(torch.cat(batches(key, Plan(0.1, 1), 30, 30)).tolist())

    assert order(0, 1, 2) == order(0, 1, 2)
    assert len({order(0, 1, 2), order(1, 1, 2), order(0, 2, 2), order(0, 1, 3)}) == 4
    first, second = batches(KEY, Plan(0.1, 2), 30, 30)
    assert not torch.equal(first, second)


def test_shuffles_are_fair():
    positions = np.zeros((6, 6))
    for n in range(3000):
        key = root(n).tensor()
        for position, row in enumerate(batches(key, Plan(0.1, 1), 6, 6)[0].tolist()):
            positions[position, row] += 1
    assert np.abs(positions / 3000 - 1 / 6).max() < 0.03


def test_order_augmentation_and_dropout_have_keys_of_their_own_in_every_step():
    seen = [fold_in(fold_in(KEY, ORDER), epoch) for epoch in range(2)]

    def augmenting(raw, key):
        seen.append(key)
        return transform(raw)

    class Watching(LocalRule):
        def loss(self, carry, value, view):
            seen.append(view.key)
            return value, carry

    net, rules = make_net(), (Watching(),)
    Trainer(net, rules, SGD(), 4, augmenting, 2).train(
        make_shard(), received(net, rules), Plan(0.1, 2)
    )
    assert len({tuple(key.tolist()) for key in seen}) == len(seen) == 2 + 2 * 6


# --- the step against torch's own optimiser


def _rolling(sgd, vector):
    """A state in the middle of a round."""
    return mapped(lambda velocity: velocity + 0.1, sgd.init(vector))


class PartlyUsed(nn.Sequential):
    """A network with a layer that no output depends on."""

    def __init__(self):
        super().__init__(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2), nn.Linear(2, 2))

    def forward(self, x):
        return self[2](self[1](self[0](x)))


@pytest.mark.parametrize("sgd", [SGD(), SGD(0.9), SGD(0.5, 1e-2), SGD(0.0, 0.1)])
def test_the_step_in_place_is_the_step(sgd):
    net, shard = Net(PartlyUsed(), dtype=torch.float64), make_shard()
    vector, buffers = net.initial()
    batch = Batch(transform(shard.inputs), shard.labels, torch.ones(11, dtype=torch.float64))
    pure, ours = (Point(vector.clone(), _rolling(sgd, vector), buffers, ()) for _ in range(2))
    for _ in range(3):
        pure, expected = step(pure, batch, 0.2, KEY, net=net, rules=(), optimiser=sgd)
        given = ours
        ours, loss = step_in_place(ours, batch, 0.2, KEY, net=net, optimiser=sgd)
        assert ours.vector is given.vector and not loss.requires_grad
        found, wanted = tensors((loss, ours)), tensors((expected, pure))
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
    assert torch.equal(buffers, net.initial()[1]), "statistics are not written over"


@pytest.mark.parametrize("sgd", [SGD(), SGD(0.9)])
def test_what_a_client_received_is_not_changed(sgd):
    net = make_net()
    given = received(net)
    trained = Trainer(net, (), sgd, 4, transform, 2).train(make_shard(), given, Plan(0.2, 1))
    assert torch.equal(given.vector, net.initial()[0])
    assert not torch.equal(trained.vector, given.vector)


@pytest.mark.parametrize(
    ("sgd", "clip"),
    [
        (SGD(), None),
        (SGD(0.9), None),
        (SGD(0.5, 1e-2), None),
        (SGD(0.0, 0.1), 0.2),
        (SGD(0.9, 1e-3), 0.05),
    ],
)
def test_local_training_equals_torch_sgd(sgd, clip):
    net, shard, plan = make_net(), make_shard(), Plan(0.2, 3)
    trainer = Trainer(net, (), sgd, 4, transform, 2, clip=clip)
    ours = trainer.train(shard, received(net), plan)

    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    optimiser = torch.optim.SGD(
        module.parameters(), lr=0.2, momentum=sgd.momentum, weight_decay=sgd.weight_decay
    )
    losses = []
    for index in batches(KEY, plan, 11, 4):
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(
            module(transform(shard.inputs[index])), shard.labels[index]
        )
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimiser.step()
        losses.append((loss.item(), len(index)))
    theirs = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    torch.testing.assert_close(ours.vector, theirs, rtol=1e-9, atol=1e-12)
    last = losses[-3:]
    assert float(ours.last_loss) == pytest.approx(sum(v * n for v, n in last) / 11)
    assert float(ours.mean_loss) == pytest.approx(sum(v * n for v, n in losses) / 33)
    assert (ours.steps, ours.examples) == (9, 11) and ours.lr_sum == pytest.approx(1.8)
    assert ours.length == sgd.effective_steps(9)


def test_length_is_the_weight_of_the_gradients():
    for rho in (0.0, 0.5, 0.9):
        speed = total = 0.0
        for steps in range(1, 12):
            speed = rho * speed + 1
            total += speed
            assert SGD(rho).effective_steps(steps) == pytest.approx(total)


def test_padding_has_no_weight():
    logits = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 2, 0, 0])
    weight = torch.tensor([1.0, 1, 1, 0, 0], dtype=torch.float64)
    expected = nn.functional.cross_entropy(logits[:3], labels[:3])
    torch.testing.assert_close(task_loss(logits, Batch(logits, labels, weight)), expected)
    assert task_loss(logits, Batch(logits, labels, 0 * weight)) == 0


def test_clipping_shortens_only_what_is_too_long():
    long, short = torch.tensor([3.0, 4.0]), torch.tensor([0.3, 0.4])
    assert float(clipped(long, 1.0).norm()) == pytest.approx(1, abs=1e-5)
    assert torch.equal(clipped(short, 1.0), short) and torch.equal(clipped(long, None), long)


@pytest.mark.parametrize(
    "bad", [{"momentum": 1.0}, {"momentum": -0.1}, {"weight_decay": -1.0}, {"nesterov": True}]
)
def test_bad_optimiser_settings_name_the_field(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        SGD(**bad)


@pytest.mark.parametrize(
    "bad", [(0.1, None, None), (0.1, 1, 1), (-1.0, 1, None), (float("nan"), 1, None)]
)
def test_bad_plans_are_refused(bad):
    with pytest.raises(ValueError, match=r"epochs|lr"):
        Plan(*bad)


def test_nothing_received_is_changed_and_an_empty_client_returns_its_model():
    net = make_net()
    got = received(net)
    before = got.vector.clone()
    trainer = Trainer(net, (), SGD(0.9), 4, transform, 2)
    trained = trainer.train(make_shard(), got, Plan(0.5, 2))
    assert torch.equal(got.vector, before) and not torch.equal(trained.vector, before)
    empty = trainer.train(make_shard(0), got, Plan(0.5, 2))
    assert torch.equal(empty.vector, before) and empty.steps == empty.examples == 0
    single = trainer.train(make_shard(1), got, Plan(0.5, 2))
    assert single.steps == 2 and torch.isfinite(single.vector).all()


# --- rules


def numerical_gradient(function, vector, eps=1e-6):
    gradient = torch.zeros_like(vector)
    for i in range(vector.numel()):
        shift = torch.zeros_like(vector)
        shift[i] = eps
        gradient[i] = (function(vector + shift) - function(vector - shift)) / (2 * eps)
    return gradient


def test_prox_direction_is_the_gradient_of_its_objective():
    net, shard, rule = make_net(), make_shard(6), Prox(0.7)
    anchor = net.initial()[0]
    point = anchor + torch.linspace(-1, 1, anchor.numel(), dtype=torch.float64)
    batch = Batch(transform(shard.inputs), shard.labels, torch.ones(6, dtype=torch.float64))

    def objective(v):
        distance = ((v - anchor) ** 2).sum()
        return task_loss(net(v, batch.inputs).logits, batch) + 0.7 / 2 * distance

    carry = rule.begin(start_at(anchor), net)
    start = Point(point, (), net.initial()[1], (carry,))
    after, _ = step(start, batch, 1.0, KEY, net=net, rules=(rule,), optimiser=SGD())
    torch.testing.assert_close(
        point - after.vector, numerical_gradient(objective, point), rtol=1e-6, atol=1e-8
    )


def start_at(vector):
    from fedbasin.core.rule import Start

    zero = torch.zeros(())
    return Start(vector, (), (), *(zero,) * 6, ())


class Ascend(LocalRule):
    """A SAM-like rule: the gradient is taken a little uphill."""

    layer = "perturb"

    def direction(self, carry, vector, gradient):
        uphill = gradient(vector)
        return gradient(vector + 0.1 * uphill / uphill.norm()), carry


class Count(LocalRule):
    """Doubles the loss and counts how often it was asked."""

    def begin(self, start, net):
        return torch.zeros(())

    def loss(self, carry, value, view):
        return 2 * value, carry + 1


def test_rules_that_perturb_are_inside_and_a_second_pass_counts_once():
    net, shard = make_net(), make_shard(6)
    vector, buffers = net.initial()
    batch = Batch(transform(shard.inputs), shard.labels, torch.ones(6, dtype=torch.float64))
    anchor = vector - 1
    rules = (Ascend(), Prox(0.5), Count())
    carries = tuple(rule.begin(start_at(anchor), net) for rule in rules)
    point = Point(vector, (), buffers, carries)
    after, value = step(point, batch, 1.0, KEY, net=net, rules=rules, optimiser=SGD())

    def gradient(v):
        leaf = v.clone().requires_grad_()
        loss = 2 * task_loss(net(leaf, batch.inputs).logits, batch)
        return torch.autograd.grad(loss, leaf)[0], loss

    uphill, plain = gradient(vector)
    there, _ = gradient(vector + 0.1 * uphill / uphill.norm())
    torch.testing.assert_close(vector - after.vector, there + 0.5 * (vector - anchor))
    assert nesting(rules) == [1, 2, 0]
    assert float(after.carries[2]) == 1
    assert float(value) == pytest.approx(plain.item())


class Replacing(LocalRule):
    owns = frozenset({"loss"})


def test_a_trainer_refuses_two_rules_for_one_thing():
    with pytest.raises(ValueError, match="only one rule may replace the task loss"):
        Trainer(make_net(), (Replacing(), Replacing()), SGD(), 4, transform, 2)


class Slower(LocalRule):
    """Takes every step at half the rate and counts the directions it gave."""

    def begin(self, start, net):
        return torch.zeros(())

    def direction(self, carry, vector, gradient):
        return gradient(vector), carry + 1

    def lr_factor(self, carry):
        return torch.tensor(0.5)


def test_paces_shorten_the_whole_step_and_what_a_direction_carries_is_kept():
    net, shard = make_net(), make_shard(6)
    vector, buffers = net.initial()
    batch = Batch(transform(shard.inputs), shard.labels, torch.ones(6, dtype=torch.float64))
    moved = {}
    for count in (0, 1, 2):
        rules = (Slower(),) * count
        carries = tuple(rule.begin(start_at(vector), net) for rule in rules)
        point = Point(vector, Velocity(torch.ones_like(vector)), buffers, carries)
        after, _ = step(point, batch, 0.3, KEY, net=net, rules=rules, optimiser=SGD(0.9, 0.1))
        moved[count] = after.vector - vector
        assert [float(carry) for carry in after.carries] == [1.0] * count
    torch.testing.assert_close(moved[1], moved[0] / 2)
    torch.testing.assert_close(moved[2], moved[0] / 4)


def test_full_gradient_is_that_of_the_whole_shard():
    net, shard = make_net(), make_shard(1100)
    vector, buffers = net.initial()
    trainer = Trainer(net, (), SGD(), 4, transform, 2)
    leaf = vector.clone().requires_grad_()
    loss = nn.functional.cross_entropy(net(leaf, transform(shard.inputs)).logits, shard.labels)
    torch.testing.assert_close(
        trainer.full_gradient(shard, vector, buffers), torch.autograd.grad(loss, leaf)[0]
    )


def test_full_gradient_is_taken_with_the_statistics_received():
    net, shard = make_net(nn.BatchNorm1d(3), nn.Linear(3, 2)), make_shard()
    vector, buffers = net.initial()
    buffers = buffers + 0.5
    leaf = vector.clone().requires_grad_()
    logits = net(leaf, transform(shard.inputs), buffers).logits
    wanted = torch.autograd.grad(nn.functional.cross_entropy(logits, shard.labels), leaf)[0]
    trainer = Trainer(net, (), SGD(), 4, transform, 2)
    torch.testing.assert_close(trainer.full_gradient(shard, vector, buffers), wanted)
