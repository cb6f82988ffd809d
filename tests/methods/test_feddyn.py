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
)

from fedbasin.core.expressions import parse
from fedbasin.core.method import Context, Plan
from fedbasin.core.rng import root
from fedbasin.core.rule import Setting
from fedbasin.core.vectors import Layout
from fedbasin.local import SGD
from fedbasin.methods import FedDyn, FedSpeed
from fedbasin.testing import replies_of, trajectory


def numpy_feddyn(world, rounds, method, sgd=None):
    """Acar et al., Algorithm 1, in the paper's own variables h and q_i (their nabla L_i)."""
    server, h = world.start.copy(), np.zeros_like(world.start)
    q = np.zeros((world.count, len(server)))
    for t in range(rounds):
        cohort, ends = world.cohort(t), []
        for i in cohort:

            def direction(v, inputs, labels, i=i, server=server):
                pull = method.alpha * (v - server)
                return world.gradient(v, inputs, labels) - q[i] + pull

            ends.append(world.descend(t, i, server, direction, sgd)[0])
        for i, y in zip(cohort, ends, strict=True):
            q[i] = q[i] - method.alpha * (y - server)
        h = h - method.alpha / world.count * np.sum([y - server for y in ends], axis=0)
        mean = world.mean(ends, cohort, method.weighting)
        server = mean - h / method.alpha
        yield server, mean, h, q.copy()


@pytest.mark.parametrize("sgd", [SGD(), SGD(0.5, 0.01)])
@pytest.mark.parametrize("method", [FedDyn(), FedDyn(0.7, "server", weighting="samples")])
def test_feddyn_equals_a_plain_numpy_loop(method, sgd):
    federation = linear_federation(method, rounds=6, optimiser=sgd)
    oracle = numpy_feddyn(NumpyClients(federation), 6, method, sgd)
    for (after, record, states), (model, mean, h, q) in zip(
        rounds_of(federation), oracle, strict=True
    ):
        close(after.send, model)
        close(after.score, mean if method.score == "mean" else model)
        close(-method.alpha * after.state.drift, h)
        for i in range(6):
            close(-method.alpha * states.get(i)[0].total, q[i])
        assert record.notes["drift_norm"] == pytest.approx(np.linalg.norm(h) / method.alpha)
        assert record.notes["guarded"] == 0


def test_the_servers_drift_is_the_mean_over_all_clients_not_the_cohort():
    for after, _, states in rounds_of(linear_federation(FedDyn(), rounds=6)):
        mean = torch.stack([states.get(i)[0].total for i in range(6)]).mean(0)
        torch.testing.assert_close(after.state.drift, mean, rtol=1e-10, atol=1e-13)
        assert after.state.drift.norm() > 0


def test_only_clients_that_took_part_change_their_duals():
    federation = linear_federation(FedDyn(), rounds=3)
    world = NumpyClients(federation)
    before = [torch.zeros(15).double()] * 6
    for t, (_, _, states) in enumerate(rounds_of(federation)):
        now = [states.get(i)[0].total for i in range(6)]
        moved = [i for i in range(6) if not torch.equal(now[i], before[i])]
        assert moved == sorted(world.cohort(t))
        before = now


def test_a_clients_pull_goes_by_its_data_where_asked():
    """The authors' code: alpha nbar/n_i; clients with more rows are held less."""
    method = FedDyn(0.5, "server", by_size=True)
    federation = linear_federation(method, rounds=4)
    world = NumpyClients(federation)
    server, r = world.start.copy(), np.zeros((6, 15))
    for t, ours in enumerate(models(federation)):
        ends = []
        for i in world.cohort(t):
            alpha = 0.5 * world.sizes.mean() / world.sizes[i]

            def direction(v, inputs, labels, alpha=alpha, i=i, server=server):
                return world.gradient(v, inputs, labels) + alpha * (v + r[i] - server)

            ends.append(world.descend(t, i, server, direction)[0])
        for i, y in zip(world.cohort(t), ends, strict=True):
            r[i] += y - server
        server = np.mean(ends, axis=0) + r.mean(0)
        close(ours, server)


def test_the_guard_shortens_the_shift_and_keeps_the_drift():
    replies = replies_of(torch.tensor([[3.0, 4.0], [3.0, 4.0]], dtype=torch.float64))
    context = linear_federation(FedDyn()).context  # N = 6
    server = torch.zeros(2, dtype=torch.float64)
    free, state = FedDyn().aggregate(FedDyn().init(server, context), server, replies, context)
    assert free.send.tolist() == pytest.approx([4.0, 4 + 4 / 3])
    assert free.score.tolist() == [3.0, 4.0]
    guarded = FedDyn(guard=0.1, score="server")
    served, kept = guarded.aggregate(guarded.init(server, context), server, replies, context)
    assert served.send.tolist() == pytest.approx([3.3, 4.4])
    assert served.send is served.score and served.notes.guarded == 1
    torch.testing.assert_close(kept.drift, state.drift)


def test_the_guard_stops_an_explosion():
    """One client a round and a long step: the drift runs away, the guard holds the model."""

    def last(method):
        federation = linear_federation(method, rounds=20, participation="count(clients=1)")
        federation = replace(federation, schedule=lambda t: Plan(6.0, 1))
        return np.linalg.norm(models(federation)[-1])

    assert last(FedDyn(0.3, guard=0.02)) < 0.6 * last(FedDyn(0.3))


def test_by_size_needs_to_know_the_sizes():
    federation = linear_federation(FedDyn(by_size=True))
    blind = replace(federation, context=replace(federation.context, examples=0.0))
    with pytest.raises(ValueError, match="how much data"):
        blind.begin()


@pytest.mark.parametrize("source", ["wima(feddyn, window=2)", "ima(feddyn, start=0.0)"])
def test_feddyn_composes(source):
    check_composed(source)
    assert not torch.equal(trajectory(parse(source))[-1].score, trajectory(FedDyn())[-1].score)


@pytest.mark.parametrize("source", ["feddyn", "fedspeed", "fedsmoo", "wima(feddyn)"])
def test_local_momentum_is_cautioned(source):
    setting = Setting(0.9, 0.0, None, True, False)
    assert "10 times" in next(parse(source, "method").cautions(setting))
    assert not list(parse(source, "method").cautions(setting._replace(momentum=0.0)))


@pytest.mark.parametrize("field", ["alpha", "guard"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_bad_settings_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} must be above 0"):
        FedDyn(**{field: value})


def test_the_mean_drift_is_over_the_clients_that_hold_rows():
    layout = Layout(("head.weight",), ((2,),), head=("head.weight",))
    server = torch.zeros(2, dtype=torch.float64)
    sent = replies_of(torch.tensor([[1.0, 2.0], [3.0, -2.0]], dtype=torch.float64))

    def drift(method, **known):
        context = Context(layout, rounds=4, key=root(0), **known)
        return method.aggregate(method.init(server, context), server, sent, context)[1].drift

    for method in (FedDyn(), FedSpeed(server="release")):
        assert drift(method, clients=8, holders=4).tolist() == [1.0, 0.0], method
        assert drift(method, clients=8).tolist() == [0.5, 0.0], method
