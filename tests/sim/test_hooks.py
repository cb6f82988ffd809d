"""Every hook of a client rule does the same in the loop and in the cohort engine."""

import itertools
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedbasin.core.expressions import parse
from fedbasin.core.method import Method, Served
from fedbasin.core.net import Net
from fedbasin.core.protocols import NeedsGradients
from fedbasin.core.round import Launch, Sent
from fedbasin.core.rule import DrawsRows, LocalRule, Setting, check_rules
from fedbasin.core.vectors import shares, weighted_mean
from fedbasin.local.step import summed_gradient
from fedbasin.methods.fedavg import FedAvg
from fedbasin.sim.clients import ClientStates
from fedbasin.sim.cohort import CohortExecutor, _Rows
from fedbasin.sim.participation import draw_cohort
from fedbasin.sim.population import Population
from fedbasin.testing import toy_federation


class Sums(NamedTuple):
    counts: Tensor
    gradient: Tensor


class Held(NamedTuple):
    survey: Sums
    taken: Tensor


@dataclass(frozen=True)
class Nosy(DrawsRows):
    """Fill every hook with something that shows."""

    owns: ClassVar[frozenset] = frozenset({"rows", "loss"})
    surveys: ClassVar[bool] = True

    def chances(self, labels, class_counts):
        return 1 / class_counts[labels].double()

    def survey(self, look):
        onehot = torch.nn.functional.one_hot(look.batch.labels, 3).to(look.vector.dtype)
        counts = (onehot * look.batch.weight[:, None]).sum(0)
        return Sums(counts, summed_gradient(look))

    def begin(self, start, net):
        return Held(start.survey, torch.zeros_like(start.steps))

    def loss(self, carry, value, view):
        logits = view.net.classify(view.vector, view.outputs.features) + 0.1 * view.outputs.logits
        each = torch.nn.functional.cross_entropy(logits, view.batch.labels, reduction="none")
        new = (each * view.batch.weight).sum() / view.batch.weight.sum().clamp(min=1)
        return new, carry._replace(taken=carry.taken + 1)

    def lr_factor(self, carry):
        return 1 / (1 + carry.taken)

    def after_step(self, carry, vector, net):
        return vector * 0.99 + 0.001 * carry.survey.gradient, carry

    def end(self, carry, start, finish):
        return start.client_state, Held(carry.survey, carry.taken / start.epoch_steps)


def both(method):
    loop = toy_federation(method)
    one = loop.executor
    return loop, replace(loop, executor=CohortExecutor(one.trainer, one.population, one.key, False))


def gathered(federation, cohort):
    server, states = federation.begin()
    shared = federation.method.broadcast(server.state, server.send, federation.context)
    sent = Sent(server.send, server.buffers, shared, 0)
    request = Launch(cohort, sent, federation.schedule(0), states)
    return federation.executor.train([request])[0]


def test_every_hook_does_the_same_in_both_engines():
    loop, cohort = both(FedAvg(local=Nosy()))
    clients = loop.eligible
    a = gathered(loop, clients)
    b = gathered(cohort, clients)
    torch.testing.assert_close(a.replies.models, b.replies.models, rtol=1e-9, atol=1e-12)
    for mine, theirs in zip(a.replies.reports[0].survey, b.replies.reports[0].survey, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)
    plain = gathered(both(FedAvg())[0], clients)
    assert not torch.allclose(a.replies.models, plain.replies.models)


def test_a_survey_sums_over_exactly_the_clients_rows():
    loop, cohort = both(FedAvg(local=Nosy()))
    population = loop.executor.population
    for federation in (loop, cohort):
        report = gathered(federation, loop.eligible).replies.reports[0]
        assert report.survey.counts.tolist() == population.class_counts(3).tolist()
        assert report.taken.tolist() == [2.0] * 6  # epochs: steps over steps of one pass


class Numbers(NamedTuple):
    round: Tensor
    lr: Tensor
    steps: Tensor
    epoch_steps: Tensor
    examples: Tensor
    class_counts: Tensor
    taken: Tensor
    lr_sum: Tensor


@dataclass(frozen=True)
class Told(LocalRule):
    """Report what a rule is told when a client begins and ends."""

    def end(self, carry, start, finish):
        began = start.round, start.lr, start.steps, start.epoch_steps, start.examples
        return start.client_state, Numbers(*began, start.class_counts, finish.steps, finish.lr_sum)


def test_a_rule_is_told_the_round_and_what_its_client_holds_and_does():
    for federation in both(FedAvg(local=Told())):
        server, states = federation.begin()
        sent = Sent(server.send, server.buffers, ((),), 3)
        plan = federation.schedule(3)
        request = Launch(np.array([5, 2, 0]), sent, plan, states)
        replies = federation.executor.train([request])[0].replies
        found = replies.reports[0]
        sizes = np.array([1, 7, 16])
        passes = -(-sizes // 4)
        assert replies.clients.tolist() == [5, 2, 0]
        assert found.round.tolist() == [3] * 3 and found.lr.tolist() == [plan.lr] * 3
        assert found.examples.tolist() == replies.weights.tolist() == sizes.tolist()
        assert found.epoch_steps.tolist() == passes.tolist()
        assert found.steps.tolist() == found.taken.tolist() == (plan.epochs * passes).tolist()
        np.testing.assert_allclose(found.lr_sum, plan.lr * plan.epochs * passes)
        counts = federation.population.class_counts(3)[[5, 2, 0]]
        assert found.class_counts.tolist() == counts.tolist()


def test_each_rule_uploads_what_the_one_before_it_would_have():
    @dataclass(frozen=True)
    class Doubled(LocalRule):
        def upload(self, carry, start, finish):
            return 2 * finish.vector

    @dataclass(frozen=True)
    class Raised(LocalRule):
        def upload(self, carry, start, finish):
            return finish.vector + 1

        def end(self, carry, start, finish):
            return start.client_state, finish.vector

    for federation in both(FedAvg(local=(Doubled(), Raised()))):
        replies = gathered(federation, federation.eligible).replies
        torch.testing.assert_close(replies.models, 2 * replies.reports[1] + 1)


def test_clients_of_the_same_rows_and_rounds_of_the_same_model_draw_other_batches():
    everything = np.arange(41)
    for federation in both(FedAvg()):
        people = federation.population
        people = Population.of(people.inputs.numpy(), people.labels.numpy(), [everything] * 2)
        executor = replace(federation.executor, population=people)
        server, states = federation.begin()
        plan = federation.schedule(0)
        sent = [Sent(server.send, server.buffers, (), round) for round in (0, 1)]
        requests = [Launch(np.arange(2), each, plan, states) for each in sent]
        models = [
            model for gathered in executor.train(requests) for model in gathered.replies.models
        ]
        assert all(not torch.equal(a, b) for a, b in itertools.combinations(models, 2))


def test_a_survey_of_more_rows_than_a_block_holds(monkeypatch):
    for module in ("fedbasin.local.train", "fedbasin.sim.survey"):
        monkeypatch.setattr(f"{module}.SURVEY_ROWS", 3)
    test_a_survey_sums_over_exactly_the_clients_rows()


def test_rows_are_drawn_in_proportion_to_their_chances():
    federation = both(FedAvg(local=Nosy()))[1]
    executor = federation.executor
    labels = executor.population.shard(0).labels
    counts = torch.zeros(3)
    for round in range(200):
        sent = Sent(*federation.net.initial(), ((),), round)
        plan = federation.schedule(0)
        request = Launch(federation.eligible[:1], sent, plan, ClientStates((), sent.vector))
        one = np.array([0])
        batches, _ = executor._batch_plan(_Rows([request], one, request.cohort, one + 8))
        counts += torch.bincount(labels[batches.rows[batches.real]], minlength=3)
    present = torch.bincount(labels, minlength=3) > 0
    share = counts / counts.sum()
    assert share[~present].sum() == 0
    assert (share[present] - 1 / present.sum()).abs().max() < 0.02


@dataclass(frozen=True)
class GradientDescent(NeedsGradients, Method):
    """Step along the mean of the probe, and ignore what the clients trained."""

    def aggregate(self, state, server, replies, context):
        mean = weighted_mean(context.probe.gradients, shares(context.probe.weights))
        model = server - 0.1 * mean
        return Served(model, model), state


def test_a_probe_gathers_the_full_gradients_before_training():
    loop, cohort = both(GradientDescent())
    server, states = loop.begin()
    a, record = next(iter(loop.rounds_from(server, states)))
    b, _ = next(iter(cohort.rounds_from(*cohort.begin())))
    torch.testing.assert_close(a.send, b.send, rtol=1e-9, atol=1e-12)
    # The mean gradient over the cohort's rows, by hand.
    clients = draw_cohort(loop.participation, loop.eligible, loop.key, 0)
    shards = [loop.executor.population.shard(int(c)) for c in clients]
    inputs = torch.cat([s.inputs for s in shards]).double() / 255
    labels = torch.cat([s.labels for s in shards])
    leaf = server.send.clone().requires_grad_()
    torch.nn.functional.cross_entropy(loop.net(leaf, inputs).logits, labels).backward()
    torch.testing.assert_close(a.send, server.send - 0.1 * leaf.grad, rtol=1e-9, atol=1e-12)
    _, without = next(iter(toy_federation(FedAvg()).rounds_from(*loop.begin())))
    models = len(clients) * server.send.numel() * 8
    assert record.bytes_up - without.bytes_up == models + len(clients) * 8
    assert record.bytes_down == without.bytes_down


def test_two_rules_that_own_one_hook_are_refused():
    with pytest.raises(ValueError, match="only one rule may replace the task loss"):
        check_rules((Nosy(), Nosy()))
    check_rules((Nosy(), LocalRule()))


def test_a_rule_that_owns_the_rows_must_say_how_they_are_drawn():
    class Claims(LocalRule):
        owns: ClassVar[frozenset] = frozenset({"rows"})

    with pytest.raises(ValueError, match="derive it from DrawsRows"):
        check_rules((Claims(),))


def test_the_rule_that_replaces_the_loss_comes_first_wherever_it_stands():
    @dataclass(frozen=True)
    class Added(LocalRule):
        def loss(self, carry, value, view):
            return value + view.vector.square().sum(), carry

    @dataclass(frozen=True)
    class Replaced(LocalRule):
        owns: ClassVar[frozenset] = frozenset({"loss"})

        def loss(self, carry, value, view):
            return view.outputs.logits.square().mean(), carry

    clients = toy_federation(FedAvg()).eligible
    a = gathered(both(FedAvg(local=(Added(), Replaced())))[0], clients)
    b = gathered(both(FedAvg(local=(Replaced(), Added())))[0], clients)
    assert torch.equal(a.replies.models, b.replies.models)
    only = gathered(both(FedAvg(local=(Replaced(),)))[0], clients)
    assert not torch.equal(a.replies.models, only.replies.models)


def test_a_network_without_a_head_says_what_a_feature_method_needs():
    net = Net(nn.Sequential(nn.Linear(4, 3)))
    with pytest.raises(ValueError, match="`features` and `head`"):
        net.classify(net.initial()[0], torch.zeros(1, 4))


def test_cautions_name_what_a_paper_does_not_foresee():
    calm = Setting(momentum=0.0, weight_decay=0.0, clip=None, ragged=False, statistics=False)
    rough = Setting(momentum=0.9, weight_decay=0.0, clip=None, ragged=True, statistics=True)
    for expression in (
        "scaffold",
        "fedcm",
        "fedwcm",
        "wima(scaffold)",
        "ima(fedcm)",
        "swa",
        "fedavg",
    ):
        assert list(parse(expression, "method").cautions(calm)) == []
    assert "10 times" in next(parse("scaffold", "method").cautions(rough))
    assert "fedwcm(unequal=True)" in next(parse("fedcm", "method").cautions(rough))
    for expression in ("fedcm(counted='rows')", "ima(fedwcm(counted='rows'))"):
        (caution,) = parse(expression, "method").cautions(calm)
        assert "write counted='steps'" in caution
    found = list(parse("wima(scaffold)", "method").cautions(rough))
    assert len(found) == 2 and "recalibrate" in found[1]
