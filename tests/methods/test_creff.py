from dataclasses import replace

import numpy as np
import pytest
import torch
from local.directions import small_net
from methods.numpy_network import NumpyNetworkClients, flat, forward, one_hot, softmax

from fedbasin.local.batches import epoch_order, epoch_orders
from fedbasin.methods import CReFF, FedAvg
from fedbasin.methods.creff import Gradients, matching_gradient
from fedbasin.methods.parts.heads import Head
from fedbasin.testing import _one_round, toy_federation, trajectory

QUICK = CReFF(features=4, match=3, epochs=2, batch=5)


def test_what_is_sent_is_fedavg_and_what_is_scored_differs_in_the_head_alone():
    for ours, plain in zip(trajectory(QUICK), trajectory(FedAvg()), strict=True):
        assert torch.equal(ours.send, plain.send)
        assert torch.equal(ours.score[:25], ours.send[:25])  # the backbone
        assert not torch.allclose(ours.score[25:], ours.send[25:])
        head = torch.cat([ours.state.head[:, :5].reshape(-1), ours.state.head[:, 5]])
        assert torch.equal(ours.score[25:], head)


def autograd_loss(features, matrix, real, head):
    """M by second-order autograd, class by class and row by row."""
    total = 0.0
    for c in range(head.classes):
        leaf = matrix.detach().clone().requires_grad_()
        labels = torch.full((features.shape[1],), c)
        loss = torch.nn.functional.cross_entropy(head.inputs(features[c]) @ leaf.T, labels)
        (found,) = torch.autograd.grad(loss, leaf, create_graph=True)
        pairs = [(found[k, : head.width], real[c, k, : head.width]) for k in range(head.classes)]
        if head.bias is not None:
            pairs.append((found[:, -1], real[c, :, -1]))
        for mine, theirs in pairs:
            total = total + 1 - torch.cosine_similarity(mine, theirs, dim=0, eps=1e-30)
    return total


def matching_case(bias):
    head = Head.of(small_net(bias).layout)
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    width = 5 + bias
    return drawn(3, 4, 5), drawn(3, width), drawn(3, 3, width), head


@pytest.mark.parametrize("bias", [True, False])
def test_the_written_out_gradient_is_autograds(bias):
    features, matrix, real, head = matching_case(bias)
    value, slope = matching_gradient(features, matrix, real, head)
    leaf = features.clone().requires_grad_()
    total = autograd_loss(leaf, matrix, real, head)
    (expected,) = torch.autograd.grad(total, leaf)
    torch.testing.assert_close(value, total.detach())
    torch.testing.assert_close(slope, expected)


def test_the_loss_is_zero_where_real_gradients_come_from_the_features():
    features, matrix, _, head = matching_case(True)
    inputs = head.inputs(features)
    wrong = torch.softmax(inputs @ matrix.T, 2) - torch.eye(3, dtype=torch.float64)[:, None]
    real = torch.einsum("cmk,cmd->ckd", wrong, inputs) / 4
    value, slope = matching_gradient(features, matrix, real, head)
    assert abs(value) < 1e-12 and slope.abs().max() < 1e-12


@pytest.mark.parametrize("scale", [20, 100, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_features_that_a_head_fits_to_the_last_bit_are_not_thrown_far_away(dtype, scale):
    """Some rows of their gradient are then zero, or too small for their squares."""
    features, _, real, head = (
        x.to(dtype) if torch.is_tensor(x) else x for x in matching_case(True)
    )
    features = 0.1 * features
    features[torch.arange(3), :, torch.arange(3)] += 1
    matrix = torch.zeros(3, 6, dtype=dtype)
    matrix[:, :3] = scale * torch.eye(3)
    for theirs in (real, 1e-30 * real):
        value, slope = matching_gradient(features, matrix, theirs, head)
        assert 0 <= value <= 2 * 12 and slope.abs().max() < scale
    zero = torch.softmax(head.inputs(features) @ matrix.T, 2) == torch.eye(3)[:, None]
    assert not slope[zero.all(2).all(1)].any()


def test_clients_report_the_mean_gradient_of_every_class_they_own():
    """With the backbone that was sent and the re-trained head, over the plain rows."""
    state, server, replies, _ = _one_round(QUICK, 3)
    world = NumpyNetworkClients(toy_federation(QUICK, seed=3))
    head = state.head.numpy()
    for row, client in enumerate(replies.clients.tolist()):
        inputs, labels = world.rows(client)
        h, _ = forward(server.numpy(), inputs)
        extended = np.hstack([h, np.ones((len(h), 1))])
        wrong = softmax(extended @ head.T) - one_hot(labels)
        report = replies.report(Gradients)
        for c in range(3):
            mine = labels == c
            expected = wrong[mine].T @ extended[mine] / max(mine.sum(), 1)
            np.testing.assert_allclose(report.heads[row, c].numpy(), expected, atol=1e-12)
            assert report.counts[row, c] == float(mine.any())
    assert 0 < replies.report(Gradients).counts.sum() < 3 * len(replies.clients)


def numpy_head(features, method, key):
    """SGD from a fresh head over shuffled synthetic features, sample by sample order."""
    x = features.reshape(-1, 5)
    x = np.hstack([x, np.ones((len(x), 1))])
    labels = np.repeat(np.arange(3), method.features)
    start = replace(method, epochs=0)._trained(HEAD, torch.from_numpy(features), key).numpy()
    matrix = start.copy()
    assert np.abs(start).max() <= 1 / np.sqrt(5)
    for epoch in range(method.epochs):
        order = epoch_order(key.fold("creff", "order").tensor(), epoch, len(x)).numpy()
        for first in range(0, len(x), method.batch):
            some = order[first : first + method.batch]
            wrong = softmax(x[some] @ matrix.T) - one_hot(labels[some])
            matrix = matrix - method.lr * wrong.T @ x[some] / len(some)
    return matrix


HEAD = Head.of(toy_federation(FedAvg()).context.layout)


def test_a_round_of_the_server_equals_autograd_and_numpy():
    state, server, replies, context = _one_round(QUICK, 1)
    counts = replies.report(Gradients).counts
    served, after = QUICK.aggregate(state, server, replies, context)
    real = torch.zeros(3, 3, 6, dtype=torch.float64)
    for c in range(3):
        owners = [i for i in range(len(counts)) if counts[i, c]]
        if owners:  # uniform over those that own the class
            real[c] = sum(replies.report(Gradients).heads[i, c] for i in owners) / len(owners)
    features = state.features
    for _ in range(QUICK.match):
        leaf = features.clone().requires_grad_()
        (slope,) = torch.autograd.grad(autograd_loss(leaf, state.head, real, HEAD), leaf)
        features = features - QUICK.match_lr * slope
    torch.testing.assert_close(after.features, features)
    expected = numpy_head(after.features.numpy(), QUICK, context.key)
    np.testing.assert_allclose(after.head.numpy(), expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(served.score.numpy()[25:], flat(expected[:, :5], expected[:, 5]))


def test_classes_nobody_owns_keep_their_features_and_matching_lowers_the_loss():
    state, server, replies, context = _one_round(CReFF(match=100, epochs=0), 2)
    report = replies.report(Gradients)
    counts = report.counts.clone()
    counts[:, 1] = 0
    absent = replace(replies, reports=(report._replace(counts=counts),))
    _, after = CReFF(match=100, epochs=0).aggregate(state, server, absent, context)
    assert torch.equal(after.features[1], state.features[1])
    assert not torch.equal(after.features[0], state.features[0])
    real = (report.heads * counts[..., None, None]).sum(0)
    real = real / counts.sum(0).clamp(min=1)[:, None, None]
    before, later = (
        matching_gradient(f, state.head, real, HEAD)[0] - 4  # a zero gradient adds 1 a row
        for f in (state.features, after.features)
    )
    assert 0 <= later < 0.8 * before


def test_without_matching_all_features_stay_as_drawn():
    still = CReFF(features=4, match=0, epochs=2)
    state, server, replies, context = _one_round(still, 1)
    served, after = still.aggregate(state, server, replies, context)
    assert torch.equal(after.features, state.features)
    assert not torch.equal(served.score, served.send)


def test_uniform_weights_are_those_of_fedavg():
    ours, plain = trajectory(replace(QUICK, weighting="uniform")), trajectory(FedAvg("uniform"))
    assert all(torch.equal(a.send, b.send) for a, b in zip(ours, plain, strict=True))


def test_a_head_and_gradients_travel_beside_the_model():
    ours, theirs = (
        next(iter(f.rounds_from(*f.begin())))[1]
        for f in (toy_federation(QUICK), toy_federation(FedAvg()))
    )
    head = 3 * 6 * 8
    assert ours.bytes_down - theirs.bytes_down == 3 * head
    assert ours.bytes_up - theirs.bytes_up == 3 * (3 * head + 3 * 8)


def test_many_orders_at_once_are_the_orders_of_each_epoch():
    key = torch.tensor([5, 9])
    for epoch, order in enumerate(epoch_orders(key, 4, 13)):
        assert torch.equal(order, epoch_order(key, epoch, 13))


@pytest.mark.parametrize("name", ["features", "match", "match_lr", "epochs", "lr", "batch"])
def test_bad_settings_are_refused(name):
    with pytest.raises(ValueError, match=name):
        CReFF(**{name: -1})
    if name in ("match", "epochs"):
        CReFF(**{name: 0})
    else:
        with pytest.raises(ValueError, match=name):
            CReFF(**{name: 0})
