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

from fedbasin.core.catalogue import needs_of
from fedbasin.core.expressions import ExpressionError, parse
from fedbasin.core.needs import NeedError
from fedbasin.core.net import Net
from fedbasin.core.rule import check_rules
from fedbasin.core.task import Regression
from fedbasin.local import (
    SGD,
    BalancedRows,
    BalancedSoftmax,
    ClassBalanced,
    Focal,
    LogitAdjusted,
    Trainer,
)
from fedbasin.local.batches import epoch_order
from fedbasin.methods import FedAvg, FedCM
from fedbasin.sim.cohort import CohortExecutor
from fedbasin.testing import LAWS, check_method, toy_federation, trajectory

COUNTS = np.array([2.0, 1.0, 3.0])  # what `small_batch` holds and `start_with` says


def log_softmax(logits):
    shifted = logits - logits.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def cross_entropies(logits, labels):
    return -log_softmax(logits)[np.arange(len(labels)), labels]


def focal(logits, labels, gamma):
    each = cross_entropies(logits, labels)
    return np.mean((1 - np.exp(-each)) ** gamma * each)


def class_balanced(logits, labels, beta):
    effective = np.array([sum(beta**k for k in range(int(n))) for n in COUNTS])
    weight = 1 / effective
    return np.mean((weight / weight.mean())[labels] * cross_entropies(logits, labels))


def shifted(logits, labels, counts, tau=1.0):
    return np.mean(cross_entropies(logits + tau * np.log(counts / counts.sum()), labels))


GLOBAL = np.array([[4, 0, 1], [3, 2, 0], [0, 5, 9]])
ORACLES = [
    (Focal(2.0), lambda z, y: focal(z, y, 2.0)),
    (Focal(0.5), lambda z, y: focal(z, y, 0.5)),
    (ClassBalanced(0.9), lambda z, y: class_balanced(z, y, 0.9)),
    (ClassBalanced(1.0), lambda z, y: class_balanced(z, y, 1.0)),
    (BalancedSoftmax(), lambda z, y: shifted(z, y, COUNTS)),
    (LogitAdjusted(1.3), lambda z, y: shifted(z, y, GLOBAL.sum(0), 1.3)),
]


def shared_with(rule, counts=GLOBAL):
    context = replace(toy_federation(FedAvg()).context, class_counts=torch.tensor(counts))
    return rule.shared(context)


@pytest.mark.parametrize(("rule", "oracle"), ORACLES, ids=lambda r: str(r)[:22])
def test_the_step_follows_the_numerical_gradient_of_the_stated_loss(rule, oracle):
    net, batch = small_net(), small_batch()
    at = net.initial()[0] * 2 + 0.05
    labels = batch.labels.numpy()

    def objective(v):
        return oracle(net(v, batch.inputs).logits.numpy(), labels)

    start = start_with(at, shared=shared_with(rule))
    found, _ = direction_of(rule, net, batch, start, at)
    torch.testing.assert_close(found, numerical_gradient(objective, at), rtol=1e-6, atol=1e-8)
    padded, _ = direction_of(rule, net, small_batch(padding=3), start, at)
    torch.testing.assert_close(padded, found, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "rule", [Focal(0.0), ClassBalanced(0.0), LogitAdjusted(0.0)], ids=lambda r: type(r).__name__
)
def test_at_its_neutral_setting_a_loss_is_the_cross_entropy(rule):
    for ours, plain in zip(trajectory(FedCM(local=rule)), trajectory(FedCM()), strict=True):
        torch.testing.assert_close(ours.send, plain.send, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("rule", [BalancedSoftmax(), LogitAdjusted(0.7)])
def test_a_uniform_prior_is_the_cross_entropy(rule):
    net, batch = small_net(), small_batch((0, 1, 2))
    at = net.initial()[0]
    start = start_with(at, (4, 4, 4), shared=shared_with(rule, [[2, 1, 0], [1, 2, 3]]))
    found, _ = direction_of(rule, net, batch, start, at)
    plain, _ = direction_of(Focal(0.0), net, batch, start, at)
    torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("weight", [ClassBalanced(1.0), ClassBalanced(1 - 1e-7)])
def test_class_weights_near_beta_one_are_inverse_counts_of_mean_one(weight):
    start = start_with(torch.zeros(3, dtype=torch.float32), (2, 0, 6))
    found = weight.begin(start, None).weight
    torch.testing.assert_close(found, torch.tensor([1.5, 0.0, 0.5]), rtol=1e-5, atol=0)


def test_an_absent_class_is_left_out_or_counts_as_the_floor():
    net, batch = small_net(), small_batch((0, 2, 2))
    at = net.initial()[0]
    start = start_with(at, (1, 0, 2))
    masked, _ = direction_of(BalancedSoftmax(), net, batch, start, at)
    assert torch.isfinite(masked).all()
    head = net.layout.views(masked)["head.weight"]
    assert head[1].abs().max() == 0 and head[0].abs().max() > 0
    kept, _ = direction_of(BalancedSoftmax(floor=1.0), net, batch, start, at)
    assert net.layout.views(kept)["head.weight"][1].abs().max() > 0


def test_a_sample_that_is_certain_has_a_finite_focal_slope():
    net, batch = small_net(), small_batch((0, 0))
    at = net.initial()[0]
    views = net.layout.views(at)
    views["head.bias"][0] = 800.0
    found, _ = direction_of(Focal(0.5), net, batch, start_with(at), at)
    assert torch.isfinite(found).all() and found.abs().max() < 1e-6


def test_balanced_rows_draw_every_owned_class_alike_and_keep_the_steps():
    labels = torch.tensor([0] * 30 + [2] * 6 + [3] * 2)
    chances = BalancedRows().chances(labels, torch.bincount(labels, minlength=5))
    seen = torch.zeros(5)
    key = torch.tensor([5, 6])
    for epoch in range(200):
        order = epoch_order(key, epoch, len(labels), chances)
        assert len(order) == len(labels)
        seen += torch.bincount(labels[order], minlength=5)
    share = seen / seen.sum()
    assert share[[1, 4]].sum() == 0
    assert (share[[0, 2, 3]] - 1 / 3).abs().max() < 0.02
    even = BalancedRows().chances(torch.tensor([0, 1, 1, 0]), torch.tensor([2, 2]))
    assert even.tolist() == [0.5] * 4  # plain sampling with replacement


def test_balanced_rows_leave_steps_and_weights_of_the_merge_alone():
    plain, ours = (toy_federation(FedCM(local=local)) for local in ((), BalancedRows()))
    for a, b in ((plain, ours), (plain, cohort_of(ours))):
        replies = [f.executor.train([request(f)])[0].replies for f in (a, b)]
        assert replies[0].steps.tolist() == replies[1].steps.tolist()
        assert replies[0].weights.tolist() == replies[1].weights.tolist()
        assert not torch.equal(replies[0].models, replies[1].models)


def cohort_of(federation):
    one = federation.executor
    return replace(
        federation, executor=CohortExecutor(one.trainer, one.population, one.key, compiled=False)
    )


def request(federation):
    from fedbasin.core.round import Launch, Sent

    server, states = federation.begin()
    shared = federation.method.broadcast(server.state, server.send, federation.context)
    sent = Sent(server.send, server.buffers, shared, 0)
    return Launch(federation.eligible, sent, federation.schedule(0), states)


COMPOSED = ["focal(2)", "balanced_rows", "balanced_softmax", "class_balanced", "logit_adjusted"]


@pytest.mark.parametrize("rule", COMPOSED)
def test_fedcm_with_each_rule_obeys_the_laws_and_is_fedavg_with_it_at_alpha_one(rule):
    method = parse(f"fedcm(local={rule})", "method")
    quick = ("differs", "cohort", "text")
    check_method(method, [law for law in LAWS if any(word in law.__name__ for word in quick)])
    one = replace(method, alpha=1.0)
    plain = FedAvg("uniform", local=method.local)
    for ours, theirs in zip(trajectory(one), trajectory(plain), strict=True):
        torch.testing.assert_close(ours.send, theirs.send, rtol=1e-9, atol=1e-12)


def test_what_a_rule_needs_is_asked_of_the_run():
    pair = parse("fedcm(local=(balanced_rows, logit_adjusted))", "method")
    assert needs_of(pair) == {"class_counts", "class_labels", "classes", "plain_sgd"}
    one = parse("fedcm(local=logit_adjusted)", "method")
    assert needs_of(one) == {"class_counts", "classes", "plain_sgd"}
    averaged = parse("wima(fedavg(local=logit_adjusted))", "method")
    assert needs_of(averaged) == {"class_counts", "classes"}
    assert needs_of(parse("fedcm(local=balanced_softmax)", "method")) == {"classes", "plain_sgd"}
    context = replace(toy_federation(FedAvg()).context, class_counts=None)
    with pytest.raises(ValueError, match="logit_adjusted needs the clients' class counts"):
        FedAvg(local=LogitAdjusted()).broadcast((), torch.zeros(3), context)


def test_two_replacing_losses_or_samplers_are_refused_and_one_of_each_is_not():
    with pytest.raises(ValueError, match="only one rule may replace the task loss"):
        check_rules((Focal(), BalancedSoftmax()))
    with pytest.raises(ValueError, match="only one rule may choose the rows"):
        check_rules((BalancedRows(), BalancedRows()))
    check_rules((Focal(), BalancedRows()))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("focal(gamma=-1)", "gamma must be at least 0, got -1"),
        ("class_balanced(beta=1.5)", r"beta must be in \[0, 1\], got 1.5"),
        ("balanced_softmax(floor=-1)", "floor must be at least 0"),
        ("logit_adjusted(tau=-0.1)", "tau must be at least 0"),
    ],
)
def test_bad_settings_are_refused(text, message):
    with pytest.raises(ExpressionError, match=message):
        parse(text, "rule")


@pytest.mark.parametrize("rule", [Focal(), BalancedRows()], ids=str)
def test_a_client_refuses_a_rule_for_classes_where_its_task_has_none(rule):
    net = Net(torch.nn.Linear(2, 1))
    with pytest.raises(NeedError, match="and regression has no"):
        Trainer(net, (rule,), SGD(), 4, lambda raw, key: raw, 0, task=Regression())
