from dataclasses import replace

import numpy as np
import pytest
import torch
from local.directions import (
    KEY,
    direction_of,
    numerical_gradient,
    small_batch,
    small_net,
    start_with,
)
from methods.numpy_network import NumpyNetworkClients, backward, forward, one_hot, softmax

from fedbasin.core.rng import fold_in, normal, uniform
from fedbasin.core.rule import SurveyBatch
from fedbasin.local import BalancedRows, Focal
from fedbasin.local.batches import DROPOUT, batches
from fedbasin.methods import BalanceFL, FedAvg
from fedbasin.methods.balancefl import symmetric_root
from fedbasin.sim.loop import client_key
from fedbasin.testing import toy_federation, trajectory


def numpy_noise(world, client, server):
    """The class covariances one by one, their mean and its square root."""
    inputs, labels = world.rows(client)
    h, _ = forward(server, inputs)
    mean = np.zeros((5, 5))
    for c in set(labels.tolist()):
        mine = h[labels == c]
        mean += len(mine) / len(labels) * np.cov(mine.T, bias=True)
    values, vectors = np.linalg.eigh(mean)
    values = np.where(values > values.max() * 1e-13, values, 0)
    return vectors @ np.diag(np.sqrt(values)) @ vectors.T


def numpy_client(world, t, client, server, method):
    inputs, labels = world.rows(client)
    counts = world.counts(client)
    owned = counts > 0
    chance = 1 - counts / counts.max()
    factor = numpy_noise(world, client, server) if method.noise else np.zeros((5, 5))
    key = client_key(world.federation.key, t, client).tensor()
    chances = torch.from_numpy(1 / counts[labels])
    v = server.copy()
    plan = world.federation.schedule(t)
    for number, index in enumerate(batches(key, plan, len(labels), 4, chances)):
        x, y = inputs[index.numpy()], labels[index.numpy()]
        step = fold_in(fold_in(key, DROPOUT), number)
        h, z = forward(v, x)
        z_noisy = z
        extra = np.zeros_like(h)
        if method.noise:
            counter = torch.arange(h.size).view(h.shape)
            drawn = normal(fold_in(step, 2), counter).double().numpy()
            hit = uniform(fold_in(step, 1), counter[:, 0]).numpy() < chance[y]
            extra = hit[:, None] * (drawn @ factor)
            z_noisy = z + extra @ v[25:40].reshape(3, 5).T
        classes = np.flatnonzero(owned)
        slope = np.zeros_like(z)
        slope[:, classes] = softmax(z_noisy[:, classes]) - one_hot(y)[:, classes]
        by_noisy = slope / len(y)
        by_logits = np.zeros_like(z)
        absent = np.flatnonzero(~owned)
        if len(absent):
            _, teacher = forward(server, x)
            temperature = method.temperature
            gap = softmax(z[:, absent] / temperature) - softmax(teacher[:, absent] / temperature)
            by_logits[:, absent] += method.distil * gap / temperature / len(y)
        p = softmax(z[:, classes])
        entropy = -(p * np.log(p)).sum(1, keepdims=True)
        by_logits[:, classes] += method.entropy * p * (np.log(p) + entropy)
        gradient = backward(v, x, by_logits + by_noisy)
        gradient[25:40] += (by_noisy.T @ extra).reshape(-1)  # the head sees the noisy features
        v = v - world.lr(t) * gradient
    return v


@pytest.mark.parametrize(
    "method", [BalanceFL(), BalanceFL(False, 3.0, 1.5, 0.1), BalanceFL(True, 0.0, 2.0, 0.0)]
)
def test_balancefl_equals_a_plain_numpy_loop(method):
    federation = toy_federation(method, rounds=3)
    world = NumpyNetworkClients(federation)
    server = world.start
    for t, (after, _) in enumerate(federation.rounds_from(*federation.begin())):
        cohort = world.cohort(t)
        ends = [numpy_client(world, t, i, server, method) for i in cohort]
        server = np.average(ends, axis=0, weights=[world.sizes[i] for i in cohort])
        np.testing.assert_allclose(after.send.numpy(), server, rtol=1e-7, atol=1e-10)


def test_uniform_weights_average_clients_alike():
    method = BalanceFL(False, weighting="uniform")
    federation = toy_federation(method, rounds=1)
    world = NumpyNetworkClients(federation)
    ends = [numpy_client(world, 0, i, world.start, method) for i in world.cohort(0)]
    after, _ = next(iter(federation.rounds_from(*federation.begin())))
    np.testing.assert_allclose(after.send.numpy(), np.mean(ends, axis=0), rtol=1e-7, atol=1e-10)


def learner(**settings):
    (rule,) = BalanceFL(**({"noise": False, "entropy": 0.0} | settings)).own_rules()
    return rule


def test_with_all_classes_in_equal_numbers_it_is_fedavg_with_balanced_rows():
    """Noise off and no entropy; a federation whose clients own all classes alike."""
    runs = []
    for method in (BalanceFL(noise=True, entropy=0.0), FedAvg(local=BalancedRows())):
        federation = toy_federation(method)
        population = federation.population
        labels = torch.arange(len(population.labels)) % 3
        even = replace(population, labels=labels, offsets=np.arange(0, 42, 6))
        executor = replace(federation.executor, population=even)
        federation = replace(federation, population=even, executor=executor)
        runs.append([s.send for s, _ in federation.rounds_from(*federation.begin())])
    for ours, plain in zip(*runs, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-12)


def test_distillation_has_no_effect_where_no_class_is_absent():
    net, batch = small_net(), small_batch()
    at = net.initial()[0] + 0.1
    start = start_with(at - 0.1)
    plain, _ = direction_of(learner(distil=0.0), net, batch, start, at)
    for strength in (1.0, 50.0):
        found, _ = direction_of(learner(distil=strength), net, batch, start, at)
        assert torch.isfinite(found).all()
        torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-14)
    missing = start_with(at - 0.1, (6, 0, 0))  # a softmax over one absent class says nothing
    some = small_batch((0, 0, 0))
    a, b = (direction_of(learner(distil=s), net, some, missing, at)[0] for s in (0.0, 1.0))
    assert not torch.allclose(a, b)


@pytest.mark.parametrize("owned", [[0, 2], [2]])
def test_the_step_follows_the_numerical_gradient_of_the_stated_loss(owned):
    labels = [owned[0], owned[-1], owned[-1], owned[0]]
    absent = [c for c in range(3) if c not in owned]
    net, batch = small_net(), small_batch(labels)
    at = net.initial()[0] + 0.1
    start = start_with(at - 0.3, [labels.count(c) for c in range(3)])
    teacher = net(start.vector, batch.inputs).logits[:, absent]

    def objective(v):
        logits = net(v, batch.inputs).logits
        kept = logits[:, owned]
        places = torch.tensor([owned.index(y) for y in labels])
        p = torch.softmax(kept, 1)
        match = torch.log_softmax(logits[:, absent] / 2, 1) * torch.softmax(teacher / 2, 1)
        value = torch.nn.functional.cross_entropy(kept, places)
        return value - match.sum(1).mean() + 0.05 * (p * p.log()).sum()

    found, _ = direction_of(learner(entropy=0.05), net, batch, start, at)
    assert found.abs().max() > 0
    torch.testing.assert_close(found, numerical_gradient(objective, at), rtol=1e-6, atol=1e-8)
    padded, _ = direction_of(learner(entropy=0.05), net, small_batch(labels, 2), start, at)
    torch.testing.assert_close(padded, found, rtol=1e-12, atol=1e-14)


def test_absent_logits_are_at_the_minimum_where_they_are_the_teachers():
    net = small_net()
    at = net.initial()[0]
    owned = torch.tensor([True, False, False])
    rule = learner()
    teacher = net(at, small_batch().inputs).logits

    def objective(logits):
        return rule._distilled(owned, logits, teacher).sum()

    slope = torch.func.grad(objective)(teacher)
    assert slope.abs().max() < 1e-12
    moved = teacher + torch.tensor([3.0, 0.4, -0.2], dtype=torch.float64)
    assert objective(moved) > objective(teacher)
    only = teacher + torch.tensor([3.0, 0.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(objective(only), objective(teacher))


def test_noise_has_the_covariance_within_classes_and_spares_the_largest_class():
    net, batch = small_net(), small_batch((0, 2, 2, 1, 0, 2, 2, 2, 1, 2))
    at = net.initial()[0] * 3
    rule = learner(noise=True)
    counts = torch.bincount(batch.labels, minlength=3).tolist()
    survey = rule.survey(SurveyBatch(net, at, at.new_zeros(0), (), batch))
    carry = rule.begin(start_with(at, counts, survey=survey), net)
    h, labels = net(at, batch.inputs).features.numpy(), batch.labels.numpy()
    expected = sum((labels == c).mean() * np.cov(h[labels == c].T, bias=True) for c in range(3))
    np.testing.assert_allclose((carry.root @ carry.root).numpy(), expected, atol=1e-12)
    assert carry.chance.tolist() == pytest.approx([1 - 2 / 6, 1 - 2 / 6, 0.0])
    drawn = normal(KEY, torch.arange(50_000).view(-1, 5)).double() @ carry.root
    np.testing.assert_allclose(np.cov(drawn.numpy().T), expected, atol=0.1 * expected.max())


def test_the_root_of_a_singular_covariance_is_finite_and_keeps_its_null_space():
    line = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    found = symmetric_root(torch.outer(line, line))
    torch.testing.assert_close(found @ found, torch.outer(line, line))
    assert found @ torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64) == pytest.approx(0, abs=1e-12)
    assert torch.equal(symmetric_root(torch.zeros(2, 2)), torch.zeros(2, 2))


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_the_root_of_what_is_not_finite_is_nan_and_raises_nothing(value):
    broken = torch.eye(3).fill_diagonal_(value)
    assert symmetric_root(broken).isnan().all()
    both = torch.func.vmap(symmetric_root)(torch.stack([torch.eye(3), broken]))
    torch.testing.assert_close(both[0], torch.eye(3))
    assert both[1].isnan().all()


def test_a_covariance_of_a_real_run_on_which_float32_gave_up_has_a_root():
    """60 of its 64 features are dead. Whether float32 fails on it depends on LAPACK."""
    live = torch.tensor([5, 23, 44, 49])
    block = torch.tensor(
        [
            [0.19281888008117676, 0.06923282146453857, -5.077901732875034e-05, 0.0002535323],
            [0.06923282146453857, 0.11789664626121521, -3.909897350240499e-05, 1.2645592e-05],
            [-5.077901732875034e-05, -3.909897350240499e-05, 1.902828671518364e-06, -7.287347e-08],
            [0.0002535323437768966, 1.264559159608325e-05, -7.287346903694925e-08, 2.36219e-05],
        ]
    )
    covariance = torch.zeros(64, 64)
    covariance[live[:, None], live] = block
    root = symmetric_root(covariance)
    torch.testing.assert_close(root @ root, covariance, rtol=1e-3, atol=1e-5)


def test_the_root_is_taken_in_float64_where_float32_does_not_converge(monkeypatch):
    """The failure is made here, so that the test does not depend on LAPACK."""
    plain = torch.linalg.eigh
    seen = []

    def eigh(matrix):
        seen.append(matrix.dtype)
        if matrix.dtype == torch.float32:
            raise torch.linalg.LinAlgError("linalg.eigh: failed to converge")
        assert matrix.abs().max() <= 1
        return plain(matrix)

    half = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    for scale in (1.0, 1e30, 1e-30):
        matrix = half @ half.T * scale
        expected = symmetric_root(matrix)
        monkeypatch.setattr(torch.linalg, "eigh", eigh)
        found = symmetric_root(matrix)
        monkeypatch.undo()
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * scale**0.5)
    assert torch.float64 in seen


def test_noise_changes_training_and_needs_features():
    quiet, loud = trajectory(BalanceFL(noise=False)), trajectory(BalanceFL())
    assert not torch.equal(quiet[-1].send, loud[-1].send)
    module = torch.nn.Linear(4, 3)
    with pytest.raises(ValueError, match="needs `features` and `head`"):
        trajectory(BalanceFL(), module=module)
    trajectory(BalanceFL(noise=False), module=module)


def test_no_further_rule_may_replace_the_loss_or_draw_the_rows():
    for rule, words in ((Focal(), "replace the task loss"), (BalancedRows(), "choose the rows")):
        with pytest.raises(ValueError, match=f"only one rule may {words}"):
            trajectory(BalanceFL(noise=False, local=rule), rounds=1)


@pytest.mark.parametrize("name", ["distil", "entropy", "temperature"])
def test_bad_settings_are_refused(name):
    with pytest.raises(ValueError, match=name):
        BalanceFL(**{name: -1.0})
    if name == "temperature":
        with pytest.raises(ValueError, match="temperature must be above 0, got 0"):
            BalanceFL(temperature=0.0)
    else:
        BalanceFL(**{name: 0.0})
