from dataclasses import replace

import numpy as np
import pytest
import torch
from methods.numpy_clients import (
    NumpyClients,
    check_composed,
    close,
    linear_federation,
    models,
    rounds_of,
    same_models,
)
from torch import nn

from fedbasin.core.expressions import parse
from fedbasin.core.method import Plan
from fedbasin.core.rule import LocalRule, Setting, Start
from fedbasin.local import SGD
from fedbasin.methods import Mime, MimeLite, Scaffold
from fedbasin.methods.mimelite import FullGradient, ReportGradient
from fedbasin.models.dropout import Dropout
from fedbasin.sim.cohort import CohortExecutor
from fedbasin.sim.population import Population
from fedbasin.testing import toy_federation


def numpy_mime(world, rounds, method, lite, sgd=None, damped=True):
    """Karimireddy et al., Algorithms 1 and 2; undamped is how fedjax and optax write momentum."""
    w, m, b = world.start.copy(), np.zeros_like(world.start), method.momentum
    fresh = 1 - b if damped else 1.0
    for t in range(rounds):
        cohort, ends = world.cohort(t), []
        full = world.mean(
            [world.gradient(w, *world.rows(i)) for i in cohort], cohort, method.weighting
        )
        for i in cohort:

            def direction(v, inputs, labels, w=w, m=m, full=full):
                g = world.gradient(v, inputs, labels)
                if not lite:
                    g = g - world.gradient(w, inputs, labels) + full
                return fresh * g + b * m

            ends.append(world.descend(t, i, w, direction, sgd)[0])
        w = w + method.server_lr * (world.mean(ends, cohort, method.weighting) - w)
        m = fresh * full + b * m
        yield w, m


@pytest.mark.parametrize("sgd", [SGD(), SGD(0.3, 0.01)])
@pytest.mark.parametrize("make", [Mime, MimeLite])
@pytest.mark.parametrize("settings", [(), (0.0,), (0.6, 0.5, "samples")])
def test_mime_equals_a_plain_numpy_loop(make, settings, sgd):
    method = make(*settings)
    federation = linear_federation(method, rounds=5, optimiser=sgd)
    oracle = numpy_mime(NumpyClients(federation), 5, method, make is MimeLite, sgd)
    for (after, _, _), (w, m) in zip(rounds_of(federation), oracle, strict=True):
        close(after.send, w)
        close(after.state.momentum, m)


@pytest.mark.parametrize("make", [Mime, MimeLite])
def test_undamped_momentum_is_ours_with_a_tenth_of_the_rate(make):
    """At beta 0.9 a learning rate copied from fedjax or torch is 10 times off."""
    method = make(0.9)
    federation = linear_federation(method, rounds=4)
    world = NumpyClients(federation)
    tenth = replace(federation, schedule=lambda t: Plan(0.03 * 0.9**t, 2))
    undamped = numpy_mime(NumpyClients(tenth), 4, method, make is MimeLite, damped=False)
    for ours, (w, _) in zip(models(federation), undamped, strict=True):
        close(ours, w)
    assert world.lr(0) == pytest.approx(0.3)


@pytest.mark.parametrize("sgd", [SGD(), SGD(0.0, 0.01)])
@pytest.mark.parametrize("make", [Mime, MimeLite])
def test_undamped_takes_the_rates_of_fedjax_as_they_are(make, sgd):
    method = make(0.9, damped=False)
    federation = linear_federation(method, rounds=4, optimiser=sgd)
    oracle = numpy_mime(NumpyClients(federation), 4, method, make is MimeLite, sgd, damped=False)
    for (after, _, _), (w, m) in zip(rounds_of(federation), oracle, strict=True):
        close(after.send, w)
        close(after.state.momentum, 0.1 * m)  # the state stays a mean of gradients


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_one_step_is_gradient_descent_on_the_cohorts_objective_whatever_the_batch(weighting):
    federation = linear_federation(Mime(0.0, weighting=weighting), rounds=5)
    federation = replace(federation, schedule=lambda t: Plan(0.5, None, 1))
    world = NumpyClients(federation)
    w = world.start
    for t, ours in enumerate(models(federation)):
        cohort = world.cohort(t)
        w = w - 0.5 * world.mean(
            [world.gradient(w, *world.rows(i)) for i in cohort], cohort, weighting
        )
        close(ours, w)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_identical_clients_with_full_batches_make_mime_and_lite_the_same(momentum):
    def federation(method):
        made = linear_federation(method, participation="count(clients=6)")
        shard = made.population.shard(0)
        alike = Population(
            shard.inputs.repeat(6, 1), shard.labels.repeat(6), np.arange(7) * len(shard.labels)
        )
        trainer = replace(made.trainer, batch=16)
        executor = replace(made.executor, trainer=trainer, population=alike)
        return replace(made, trainer=trainer, population=alike, executor=executor)

    same_models(federation(Mime(momentum)), federation(MimeLite(momentum)))


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_mimes_second_gradient_has_the_batchs_dropout_mask(momentum):
    """With its own mask G at v = x would not be C, and one step would not be gradient descent."""
    module = nn.Sequential(nn.Linear(4, 8), Dropout(0.5), nn.Linear(8, 3))
    federation = toy_federation(Mime(momentum), module=module, rounds=2)
    federation = replace(federation, schedule=lambda t: Plan(0.5, None, 1))
    server, states = federation.begin()
    x = server.send
    executor = federation.executor
    after, _ = next(iter(federation.rounds_from(server, states)))
    world = NumpyClients(federation)
    shards = [executor.population.shard(i) for i in world.cohort(0)]
    full = torch.stack([executor.trainer.full_gradient(s, x, server.buffers) for s in shards]).mean(
        0
    )
    torch.testing.assert_close(after.send, x - 0.5 * (1 - momentum) * full, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("method", "down", "up"), [(Mime(0.0), 2, 2), (Mime(), 3, 2), (MimeLite(), 2, 2)]
)
def test_payload_counts_both_messages(method, down, up):
    federation = linear_federation(method)
    _, record, _ = next(iter(rounds_of(federation)))
    model = 15 * 8
    assert record.bytes_down // record.replies // model == down
    assert record.bytes_up // record.replies // model == up


def test_a_round_to_which_nobody_comes_leaves_everything_as_it_is():
    federation = replace(linear_federation(Mime(), rounds=12), dropout=0.9)
    before, empty = None, 0
    for after, record, _ in rounds_of(federation):
        if not record.replies:
            empty += 1
            if before is not None:
                assert torch.equal(after.send, before.send)
                assert torch.equal(after.state.momentum, before.state.momentum)
        before = after
    assert 0 < empty < 12


@pytest.mark.parametrize(
    "source", ["wima(mime, window=2)", "ima(mime, start=0.0)", "wima(mimelite, window=2)"]
)
def test_mime_composes(source):
    check_composed(source)


def test_the_cohort_engine_trains_mime_like_the_loop_with_two_chunks():
    federation = linear_federation(Mime())
    one = federation.executor
    chunks = CohortExecutor(one.trainer, one.population, one.key, compiled=False, chunk=2)
    same_models(federation, replace(federation, executor=chunks), 1e-9)


def test_a_client_without_rows_reports_a_gradient_of_zero():
    nothing, none = torch.zeros(()), FullGradient(torch.zeros(3))
    start = Start(torch.ones(3), (), (), *[nothing] * 5, torch.zeros(2), none)
    _, report = ReportGradient().end((), start, None)
    assert report.gradient.tolist() == [0, 0, 0]


class Squared(LocalRule):
    owns = frozenset({"loss"})

    def loss(self, carry, value, view):
        return view.outputs.logits.square().mean(), carry


@pytest.mark.parametrize("make", [Mime, MimeLite])
def test_cautions(make):
    calm = Setting(0.0, 0.0, None, True, False)
    assert not list(make().cautions(calm))
    assert "stay frozen" in next(make().cautions(calm._replace(momentum=0.9)))
    assert "the task's loss" in next(make(local=Squared()).cautions(calm))
    assert "the task's loss" in next(Scaffold(option="full", local=Squared()).cautions(calm))
    assert not list(Scaffold(local=Squared()).cautions(calm))


@pytest.mark.parametrize("name", ["mime", "mimelite"])
def test_bad_settings_are_refused(name):
    for momentum in (1.0, -0.1):
        with pytest.raises(ValueError, match=rf"momentum must be in \[0, 1\), got {momentum}"):
            parse(f"{name}(momentum={momentum})", "method")
    with pytest.raises(ValueError, match="server_lr must be above 0, got 0"):
        parse(f"{name}(server_lr=0.0)", "method")


def test_the_recorded_loss_is_that_of_the_model_being_trained():
    """Not that of the received one, at which the second gradient of a batch is taken."""
    federation = linear_federation(Mime(0.0), rounds=1)
    world = NumpyClients(federation)
    cohort, losses, x = world.cohort(0), [], world.start
    full = np.mean([world.gradient(x, *world.rows(i)) for i in cohort], axis=0)

    def direction(v, inputs, labels):
        losses.extend([world.loss(v, inputs, labels)] * len(labels))
        return world.gradient(v, inputs, labels) - world.gradient(x, inputs, labels) + full

    for i in cohort:
        world.descend(0, i, x, direction)
    _, record, _ = next(rounds_of(federation))
    assert record.train_loss == pytest.approx(np.mean(losses), rel=1e-9)
