import sys
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

from fedbasin.core.rng import fold_in, root
from fedbasin.local import SGD
from fedbasin.local.step import Point, step
from fedbasin.methods import FedAvg, FedGEN
from fedbasin.methods.fedgen import (
    Counts,
    Generator,
    SharedGenerator,
    generator_loss,
    labels_at,
    noise_at,
)
from fedbasin.methods.parts.descent import Adam
from fedbasin.methods.parts.heads import Head
from fedbasin.testing import _one_round, toy_federation, trajectory

SMALL = FedGEN(steps=7, noise=4, hidden=6, batch=9, lr=0.02)
MAKE = Generator(noise=4, classes=3, hidden=6, width=5)


def module_of(flat):
    """The generator as a torch module."""
    first, last = MAKE.layers(flat)
    module = torch.nn.Sequential(torch.nn.Linear(7, 6), torch.nn.ReLU(), torch.nn.Linear(6, 5))
    module = module.double()
    with torch.no_grad():
        for layer, matrix in ((module[0], first), (module[2], last)):
            layer.weight.copy_(matrix[:, :-1])
            layer.bias.copy_(matrix[:, -1])
    return module


def flat_of(module):
    pairs = [torch.cat([m.weight, m.bias[:, None]], 1) for m in (module[0], module[2])]
    return torch.cat([pair.reshape(-1) for pair in pairs]).detach()


def inputs_of(noise, labels):
    return torch.cat([noise, torch.nn.functional.one_hot(labels, 3).double()], 1)


def test_the_generator_is_a_plain_network_of_two_layers():
    flat = MAKE.fresh(root(0), torch.zeros(1, dtype=torch.float64))
    assert len(flat) == MAKE.size == 6 * 8 + 5 * 7
    noise, labels = noise_at(KEY, 8, 4, flat), torch.arange(8) % 3
    expected = module_of(flat)(inputs_of(noise, labels))
    torch.testing.assert_close(MAKE(flat, noise, labels), expected.detach())
    first, last = MAKE.layers(flat)
    assert first.abs().max() <= 7**-0.5 and last.abs().max() <= 6**-0.5
    assert (noise >= 0).all() and (noise < 1).all() and noise.std() > 0.2


def numpy_loss(features, noise, labels, models, counts):
    """The stated loss with a loop over clients, rows and pairs of rows."""
    total = 0.0
    for head, bias, mine in zip(*models, counts, strict=True):
        for g, y in zip(features, labels, strict=True):
            logits = head @ g + bias
            missed = np.log(np.exp(logits).sum()) - logits[y]
            total += mine[y] / counts[:, y].sum() * missed / len(labels)
    pairs = [
        ((noise[a] - noise[b]) ** 2).mean() * np.abs(features[a] - features[b]).mean()
        for a in range(len(labels))
        for b in range(len(labels))
    ]
    return total + np.exp(-np.mean(pairs))


def test_the_generators_loss_is_the_stated_one():
    rng = np.random.default_rng(1)
    features, noise = rng.normal(size=(6, 5)), rng.random((6, 4))
    labels, counts = np.array([0, 2, 2, 0, 1, 2]), np.array([[3, 1, 2], [1, 0, 4]])
    heads, biases = rng.normal(size=(2, 3, 5)), rng.normal(size=(2, 3))
    matrices = torch.from_numpy(np.concatenate([heads, biases[..., None]], 2))
    share = torch.from_numpy(counts / counts.sum(0))
    tensor = torch.from_numpy
    extended = torch.cat([tensor(features), torch.ones(6, 1)], 1)
    found = generator_loss(
        tensor(features), tensor(noise), tensor(labels), extended, matrices, share
    )
    assert float(found) == pytest.approx(
        numpy_loss(features, noise, labels, (heads, biases), counts)
    )


def test_a_round_of_the_server_is_adam_on_that_loss():
    """Two rounds in a row, so that the optimiser's state must be carried; against torch's Adam."""
    state, server, replies, context = _one_round(SMALL, 0)
    served, after = SMALL.aggregate(state, server, replies, context)
    assert torch.equal(served.send, FedAvg().aggregate((), server, replies, context)[0].send)
    counts = replies.report(Counts).counts
    assert torch.equal(counts, context.class_counts[replies.clients].double())
    head = Head.of(context.layout)
    module = module_of(state.generator)
    lr = 0.02 * 0.98**context.round
    adam = torch.optim.Adam(module.parameters(), lr=lr, weight_decay=0.01)
    for layer, (m, v) in zip(
        (module[0], module[2]),
        zip(MAKE.layers(state.adam.first), MAKE.layers(state.adam.second), strict=True),
        strict=True,
    ):
        for tensor, cut in ((layer.weight, slice(None, -1)), (layer.bias, -1)):
            adam.state[tensor] = {
                "step": torch.tensor(float(state.adam.steps)),
                "exp_avg": m[:, cut].clone(),
                "exp_avg_sq": v[:, cut].clone(),
            }
    owned = counts.sum(0)
    for number in range(7):
        key = context.key.fold("fedgen", number).tensor()
        labels = labels_at(fold_in(key, 2), 9, (owned > 0).double())
        noise = noise_at(fold_in(key, 1), 9, 4, owned)
        features = module(inputs_of(noise, labels))
        loss = generator_loss(
            features,
            noise,
            labels,
            head.inputs(features),
            head.matrix(replies.models),
            counts / owned.clamp(min=1),
        )
        adam.zero_grad()
        loss.backward()
        adam.step()
    torch.testing.assert_close(after.generator, flat_of(module), rtol=1e-9, atol=1e-12)
    assert after.adam.steps == 14 and state.adam.steps == 7


def client_case(known=(1.0, 1.0, 1.0), strengths=(0.7, 0.3), synthetic=20):
    net = small_net()
    (rule,) = replace(SMALL, synthetic=synthetic).own_rules()
    flat = MAKE.fresh(root(3), torch.zeros(1, dtype=torch.float64)) * 3
    shared = SharedGenerator(
        flat, torch.tensor(known).double(), torch.tensor(strengths, dtype=torch.float64)
    )
    at = net.initial()[0] + 0.1
    return net, rule, start_with(at, shared=shared), at


def test_the_step_follows_the_numerical_gradient_of_the_stated_loss():
    net, rule, start, at = client_case()
    batch, flat = small_batch(), start.shared.generator
    other = labels_at(fold_in(KEY, 2), 6, start.shared.known)
    new = MAKE(flat, noise_at(fold_in(KEY, 1), 6, 4, flat), other)
    like = MAKE(flat, noise_at(fold_in(KEY, 3), 6, 4, flat), batch.labels)
    target = torch.softmax(net.classify(at, like), 1)  # a constant
    assert len(set(other.tolist())) == 3

    def objective(v):
        logits = net(v, batch.inputs).logits
        value = torch.nn.functional.cross_entropy(logits, batch.labels)
        value = value + 0.7 * torch.nn.functional.cross_entropy(net.classify(v, new), other)
        apart = target * (target.log() - torch.log_softmax(logits, 1))
        return value + 0.3 * apart.sum(1).mean()

    found, _ = direction_of(rule, net, batch, start, at)
    torch.testing.assert_close(found, numerical_gradient(objective, at), rtol=1e-6, atol=1e-8)
    padded, _ = direction_of(rule, net, small_batch(padding=2), start, at)
    torch.testing.assert_close(padded, found, rtol=1e-12, atol=1e-14)


def test_generated_features_count_for_so_many_epochs():
    net, rule, start, at = client_case(synthetic=1)  # an epoch of two steps
    plain, _ = direction_of(rule, net, small_batch(), client_case(strengths=(0.0, 0.0))[2], at)
    carry, seen = rule.begin(start, net), []
    for _ in range(3):
        point = Point(at, (), at.new_zeros(0), (carry,))
        after, _ = step(point, small_batch(), 1.0, KEY, net=net, rules=(rule,), optimiser=SGD())
        carry = after.carries[0]
        seen.append(torch.allclose(at - after.vector, plain))
    assert seen == [False, False, True]


def test_only_marked_classes_are_drawn():
    drawn = labels_at(KEY, 3000, torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 0.0]))
    counts = torch.bincount(drawn, minlength=6)
    assert counts[[0, 2, 5]].sum() == 0
    assert (counts[[1, 3, 4]] / 3000 - 1 / 3).abs().max() < 0.03


def test_the_least_number_that_is_drawn_falls_on_a_marked_class(monkeypatch):
    fedgen = sys.modules["fedbasin.methods.fedgen"]  # the attribute of this name is the class
    monkeypatch.setattr(fedgen, "uniform", lambda key, counter: torch.zeros(len(counter)))
    assert labels_at(KEY, 3, torch.tensor([0.0, 0.0, 1.0, 1.0])).tolist() == [2, 2, 2]


def test_a_class_once_learnt_stays_known_and_a_client_without_weight_teaches_none():
    state, server, replies, context = _one_round(SMALL, 0)
    count = len(replies.weights)
    counts = torch.tensor([[0.0, 4.0, 0.0]]).repeat(count, 1).to(server)
    counts[0] = torch.tensor([0.0, 0.0, 5.0])
    weights = replies.weights * (torch.arange(count) > 0)
    replies = replace(
        replies, weights=weights, reports=(replies.report(Counts)._replace(counts=counts),)
    )
    before = replace(state, known=torch.tensor([1.0, 0.0, 0.0]).to(server))
    served, after = SMALL.aggregate(before, server, replies, context)
    assert after.known.tolist() == [1, 1, 0] and served.notes.known == 2


def test_classes_absent_from_the_cohort_are_not_learnt_nor_sent():
    state, server, replies, context = _one_round(SMALL, 0)
    state = replace(state, known=torch.zeros(3, dtype=torch.float64))
    counts = replies.report(Counts).counts.clone()
    counts[:, 2] = 0
    cohort = replace(replies, reports=(replies.report(Counts)._replace(counts=counts),))
    _, after = SMALL.aggregate(state, server, cohort, context)
    assert after.known.tolist() == [1, 1, 0]
    # Without decay, the column of the class in the generator stays: no gradient ever reached it.
    _, plain = replace(SMALL, weight_decay=0.0).aggregate(
        replace(state, adam=Adam.at(state.generator)), server, cohort, context
    )
    before, later = (MAKE.layers(g)[0][:, 4:7] for g in (state.generator, plain.generator))
    assert torch.equal(before[:, 2], later[:, 2]) and not torch.equal(before[:, 0], later[:, 0])


def test_the_first_round_is_fedavg_and_strengths_fall_to_a_floor():
    ours, plain = trajectory(SMALL), trajectory(FedAvg())
    assert torch.equal(ours[0].send, plain[0].send)
    assert not torch.allclose(ours[1].send, plain[1].send)
    context = toy_federation(SMALL).context
    for round, expected in ((1, [9.8, 9.8]), (2, [9.604, 9.604]), (2000, [1e-4, 1e-4])):
        (sent,) = SMALL.own_broadcast(ours[0].state, ours[0].send, context.at(round, 0.1))
        assert sent.strengths.tolist() == pytest.approx(expected)
    (off,) = FedGEN(0.0, 0.0).own_broadcast(ours[0].state, ours[0].send, context.at(2000, 0.1))
    assert off.strengths.tolist() == [0.0, 0.0]


def test_a_generator_travels_down_and_counts_travel_up():
    ours, theirs = (
        next(iter(f.rounds_from(*f.begin())))[1]
        for f in (toy_federation(SMALL), toy_federation(FedAvg()))
    )
    assert ours.bytes_down - theirs.bytes_down == 3 * 8 * (MAKE.size + 3 + 2)
    assert ours.bytes_up - theirs.bytes_up == 3 * 8 * 3


@pytest.mark.parametrize(
    "name",
    [
        "alpha",
        "beta",
        "decay",
        "synthetic",
        "steps",
        "lr",
        "weight_decay",
        "batch",
        "noise",
        "hidden",
    ],
)
def test_bad_settings_are_refused(name):
    with pytest.raises(ValueError, match=name):
        FedGEN(**{name: -1})
