"""Robust rules against NumPy, at hostile replies, and in their reductions to a mean."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from methods.numpy_clients import NumpyClients, linear_federation
from torch import nn

from fedbasin.core.expressions import parse
from fedbasin.core.method import Context, Probe, ReplyError
from fedbasin.core.protocols import merge_statistics
from fedbasin.core.rng import root
from fedbasin.core.vectors import Layout
from fedbasin.methods import FedAvg
from fedbasin.methods.parts.robust import krum_scores, squared_distances
from fedbasin.methods.scaffold import Change
from fedbasin.testing import LAWS, check_method, replies_of, toy_federation

TEXT = """
median
trimmed_mean(hostile=0.25)
krum(hostile=0.2)
krum(hostile=0.2, keep=1)
bulyan(hostile=0.15)
rfa
rfa(iterations=4)
centered_clipping(tau=0.5)
centered_clipping(tau=0.5, iterations=3)
"""
RULES = TEXT.split("\n")[1:-1]
BOUNDED = [r for r in RULES if not r.startswith("centered") and r != "rfa(iterations=4)"]


def context_of(parameters, round=0):
    return Context(Layout(("w",), ((parameters,),)), 30, 5, root(0)).at(round, 0.1)


def step(method, updates, weights=None, reports=(), clients=None, server=None):
    """Return the model after one round from `server`, zero by default."""
    updates = torch.as_tensor(np.asarray(updates), dtype=torch.float64)
    start = torch.zeros(updates.shape[1], dtype=torch.float64) if server is None else server
    context = context_of(len(start))
    replies = replies_of(start + updates, weights, clients, reports)
    state = method.init(start, context)
    return method.aggregate(state, start, replies, context)[0].send


def numpy_krum(d, f, keep):
    """The rows that Krum keeps, from its definition: loops over pairs."""
    scores = []
    for i in range(len(d)):
        apart = sorted(((d[i] - d[j]) ** 2).sum() for j in range(len(d)) if j != i)
        scores.append(sum(apart[: max(1, len(d) - f - 2)]))
    return np.argsort(scores, kind="stable")[:keep]


def numpy_bulyan(d, f):
    left, chosen = list(range(len(d))), []
    for _ in range(len(d) - 2 * f):
        best = left[int(numpy_krum(d[left], f, 1)[0])]
        chosen.append(best)
        left.remove(best)
    rows, out = d[chosen], []
    for column in rows.T:
        near = sorted(column, key=lambda value: abs(value - np.median(column)))
        out.append(np.mean(near[: len(chosen) - 2 * f]))
    return np.array(out)


def numpy_weiszfeld(d, steps, nu=1e-5):
    z = d.mean(0)
    for _ in range(steps):
        b = 1 / np.maximum(nu, np.linalg.norm(d - z, axis=1))
        z = (b[:, None] * d).sum(0) / b.sum()
    return z


def numpy_clipping(d, tau, passes):
    v = np.zeros(d.shape[1])
    for _ in range(passes):
        apart = [row - v for row in d]
        v = v + sum(a * min(1, tau / np.linalg.norm(a)) for a in apart) / len(d)
    return v


def numpy_trimmed(d, f):
    return np.sort(d, 0)[f : len(d) - f].mean(0)


ORACLES = {
    "median": lambda d: np.median(d, 0),
    "trimmed_mean(hostile=0.25)": lambda d: numpy_trimmed(d, int(0.25 * len(d))),
    "krum(hostile=0.2)": lambda d: d[
        numpy_krum(d, int(0.2 * len(d)), len(d) - int(0.2 * len(d)))
    ].mean(0),
    "krum(hostile=0.2, keep=1)": lambda d: d[numpy_krum(d, int(0.2 * len(d)), 1)[0]],
    "bulyan(hostile=0.15)": lambda d: numpy_bulyan(d, int(0.15 * len(d))),
    "rfa(iterations=4)": lambda d: numpy_weiszfeld(d, 4),
    "centered_clipping(tau=0.5)": lambda d: numpy_clipping(d, 0.5, 1),
    "centered_clipping(tau=0.5, iterations=3)": lambda d: numpy_clipping(d, 0.5, 3),
}


@pytest.mark.parametrize("rule", ORACLES)
@pytest.mark.parametrize("count", [9, 12])
@pytest.mark.parametrize("seed", range(3))
def test_a_rule_equals_numpy(rule, count, seed):
    d = np.random.default_rng(seed).normal(size=(count, 7))
    ours = step(parse(rule, "method"), d)
    np.testing.assert_allclose(ours, ORACLES[rule](d), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rule", ORACLES)
def test_a_rule_equals_numpy_over_rounds_of_training(rule):
    """All six clients train; the last rule keeps its centre from round to round."""
    method = parse(rule.replace("hostile=0.15", "hostile=0.1"), "method")
    federation = linear_federation(method, rounds=3, participation="count(clients=6)")
    world = NumpyClients(federation)
    server, centre = world.start, 0.0
    for t, (after, _) in enumerate(federation.rounds_from(*federation.begin())):
        ends, _, _ = world.sgd(t, server)
        d = ends - server
        if rule.startswith("centered"):
            passes = 3 if "iterations" in rule else 1
            for _ in range(passes):
                apart = d - centre
                scale = np.minimum(1, 0.5 / np.linalg.norm(apart, axis=1))
                centre = centre + (scale[:, None] * apart).mean(0)
            server = server + centre
        elif rule.startswith("bulyan"):
            server = server + d.mean(0)  # f is 0 of 6
        else:
            server = server + ORACLES[rule](d)
        np.testing.assert_allclose(after.send, server, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "source",
    ["trimmed_mean(hostile=0.34)", "krum(hostile=0.2, keep=1)", "rfa(weighting='samples')"],
)
def test_other_settings_obey_the_laws(source):
    kept = ("order", "scale", "zero_weight", "given", "dtype")
    laws = [law for law in LAWS if any(word in law.__name__ for word in kept)]
    assert len(laws) == 5
    check_method(parse(source, "method"), laws)


@pytest.mark.parametrize("rule", BOUNDED)
@pytest.mark.parametrize("wrapper", ["{}", "norm_bound({})"])
def test_hostile_replies_move_a_rule_boundedly(rule, wrapper):
    d = np.random.default_rng(0).normal(size=(21, 6)) * 0.1 + 1.0
    bad = d.copy()
    bad[:3] = 1e6
    method = parse(wrapper.format(rule), "method")
    moved = np.linalg.norm(step(method, bad) - step(method, d))
    assert moved < 1.5
    plain = np.linalg.norm(step(FedAvg(), bad) - step(FedAvg(), d))
    assert plain > 1e5


@pytest.mark.parametrize("rule", RULES)
def test_all_equal_order_and_origin(rule):
    method = parse(rule, "method")
    rng = np.random.default_rng(4)
    d = rng.normal(size=(11, 5)) * 0.1
    one = np.tile(d[:1], (11, 1))
    np.testing.assert_allclose(step(method, one), one[0], rtol=1e-12)
    order = rng.permutation(11)
    permuted = step(method, d[order], clients=order.tolist())
    np.testing.assert_allclose(permuted, step(method, d), rtol=1e-9)
    elsewhere = torch.from_numpy(rng.normal(size=5))
    np.testing.assert_allclose(step(method, d, server=elsewhere) - elsewhere, step(method, d), 1e-9)
    if not rule.startswith("centered"):  # moving all updates moves the result
        np.testing.assert_allclose(step(method, d + 3), step(method, d) + 3, rtol=1e-9)
    np.testing.assert_allclose(step(method, d, weights=[1e9, *[1] * 10]), step(method, d), 1e-9)


@pytest.mark.parametrize(
    "source",
    [
        "trimmed_mean(hostile=0)",
        "krum(hostile=0)",
        "krum(hostile=0.2, keep=15)",
        "bulyan(hostile=0)",
        "rfa(nu=1e30)",
        "centered_clipping(tau=1e999)",
        "norm_bound(fedavg(weighting='uniform'), times=1e999)",
        "bucketing(fedavg(weighting='uniform'), size=5)",
    ],
)
def test_reductions_to_the_plain_mean(source):
    d = np.random.default_rng(2).normal(size=(15, 5))
    np.testing.assert_allclose(step(parse(source, "method"), d), d.mean(0), rtol=1e-10)


@given(st.integers(3, 12), st.integers(0, 50))
@settings(max_examples=30, deadline=None)
def test_weiszfeld_never_raises_its_objective(count, seed):
    d = np.random.default_rng(seed).normal(size=(count, 4))

    def objective(z):
        return np.linalg.norm(d - np.asarray(z), axis=1).sum()

    values = [objective(step(parse(f"rfa(iterations={t})", "method"), d)) for t in (1, 2, 4, 8)]
    assert values == sorted(values, reverse=True) or np.ptp(values) < 1e-9 * values[0]
    assert values[0] <= objective(d.mean(0)) * (1 + 1e-12)


@given(st.integers(1, 9), st.integers(0, 50), st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_one_client_pulls_a_clipped_centre_by_tau_over_n(count, seed, passes):
    rng = np.random.default_rng(seed)
    d = rng.normal(size=(count, 4))
    other = d.copy()
    other[0] = 1e6 * rng.normal(size=4)
    method = parse(f"centered_clipping(tau=0.3, iterations={passes})", "method")
    assert np.linalg.norm(step(method, d)) <= passes * 0.3 * (1 + 1e-9)
    once = parse("centered_clipping(tau=0.3)", "method")
    assert np.linalg.norm(step(once, d) - step(once, other)) <= 2 * 0.3 / count * (1 + 1e-9)


def test_krum_sums_squared_distances_and_takes_a_mean():
    """Two releases differ: one squares twice and sums the winners, one takes plain distances."""
    d = np.random.default_rng(5).normal(size=(10, 3)) * np.linspace(1, 4, 10)[:, None]
    rows = torch.from_numpy(d)
    ours = krum_scores(squared_distances(rows), 2)
    apart = ((d[:, None] - d[None]) ** 2).sum(2)
    expected = [np.sort(np.delete(row, i))[:6].sum() for i, row in enumerate(apart)]
    np.testing.assert_allclose(ours, expected, rtol=1e-10)


@pytest.mark.parametrize(
    ("source", "count", "least"),
    [("krum(hostile=0.4)", 6, 7), ("bulyan(hostile=0.2)", 6, 7), ("bulyan(hostile=0.2)", 10, 11)],
)
def test_too_few_replies_are_refused_with_the_numbers(source, count, least):
    with pytest.raises(ReplyError, match=rf"at least {least} replies .* got {count}: raise"):
        step(parse(source, "method"), np.eye(count))


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("trimmed_mean(hostile=0.5)", r"hostile must be in \[0, 0.5\)"),
        ("krum(hostile=-0.1)", "hostile"),
        ("krum(keep=-1)", "keep"),
        ("bulyan(hostile=0.25)", r"hostile must be in \[0, 0.25\)"),
        ("rfa(nu=0)", "nu"),
        ("rfa(iterations=0)", "iterations"),
        ("centered_clipping(tau=0)", "tau"),
        ("bucketing(size=0)", "size"),
        ("norm_bound(times=0.5)", "times"),
        ("norm_bound(claims=0)", "claims"),
        ("norm_bound(bound=-1)", "bound"),
    ],
)
def test_bad_settings_are_named(source, word):
    with pytest.raises(ValueError, match=word):
        parse(source, "method")


# What comes beside models


def statistics(method, rows, before=None, weights=None):
    rows = torch.as_tensor(np.asarray(rows), dtype=torch.float64)
    before = torch.zeros(rows.shape[1], dtype=torch.float64) if before is None else before
    replies = replace(replies_of(rows[:, :0], weights), buffers=rows)
    return merge_statistics(method, before, replies, context_of(rows.shape[1])).numpy()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("around", ["{}", "ima({})", "norm_bound({})"])
def test_statistics_go_through_the_rule(rule, around):
    rows = 1 + 0.1 * np.random.default_rng(0).normal(size=(14, 4))
    bad = rows.copy()
    bad[:2] = -1e6
    method = parse(around.format(rule), "method")
    merged = statistics(method, bad, weights=[1e9, 1e9, *[1] * 12])
    assert np.abs(merged - 1).max() < (1.5 if rule in BOUNDED or "clipping" in rule else 1e3)
    assert np.abs(statistics(FedAvg(), bad)).max() > 1e5
    if rule in ORACLES and around == "{}" and not rule.startswith("centered"):
        np.testing.assert_allclose(statistics(method, rows), ORACLES[rule](rows), rtol=1e-9)


def test_statistics_of_a_round_are_those_of_the_rule():
    module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    plan = {"participation": "only(clients=(0, 2, 4))", "rounds": 1}
    after = {}
    for source in ("fedavg", "median", "bucketing(median, size=1)", "norm_bound(median)"):
        federation = toy_federation(parse(source, "method"), module=module, **plan)
        (server, _) = next(iter(federation.rounds_from(*federation.begin())))
        after[source] = server.buffers
    assert not torch.allclose(after["fedavg"], after["median"])
    torch.testing.assert_close(after["median"], after["bucketing(median, size=1)"])
    assert not torch.allclose(after["median"], after["norm_bound(median)"])


def test_a_hostile_report_is_bounded_like_a_model():
    """SCAFFOLD's c moves by the sum of the reports, which a plain merge does not look at."""
    method, bare = parse("norm_bound(scaffold)", "method"), parse("scaffold", "method")
    changes = 0.1 * np.random.default_rng(1).normal(size=(9, 4))
    hostile = changes.copy()
    hostile[0] = 1e6
    server = torch.zeros(4, dtype=torch.float64)

    def control(chosen, reported):
        report = Change(torch.from_numpy(reported))
        replies = replies_of(torch.zeros(9, 4, dtype=torch.float64), reports=(report,))
        context = context_of(4)
        state = chosen.init(server, context)
        after = chosen.aggregate(state, server, replies, context)[1]
        return getattr(after, "inner", after).control.numpy()

    lengths = np.linalg.norm(hostile, axis=1)
    short = hostile * np.minimum(1, np.median(lengths) / lengths)[:, None]
    np.testing.assert_allclose(control(method, hostile), short.sum(0) / 30, rtol=1e-10)
    assert np.linalg.norm(control(bare, hostile)) > 1e4


def test_claims_are_bounded():
    d = np.array([[1.0], [1.0], [1.0], [-1.0]])
    one = parse("norm_bound(claims=5)", "method")
    assert step(one, d, weights=[1, 1, 1, 1e12]) == pytest.approx((3 - 5) / 8)
    assert step(FedAvg(), d, weights=[1, 1, 1, 1e12]) == pytest.approx(-1)
    nova = parse("norm_bound(fednova)", "method")
    server = torch.zeros(1, dtype=torch.float64)
    replies = replies_of(torch.from_numpy(d))
    lying = replace(replies, effective_steps=torch.tensor([1, 1, 1, 1e-9], dtype=torch.float64))
    context = context_of(1)
    served, _ = nova.aggregate(nova.init(server, context), server, lying, context)
    assert abs(float(served.send)) < 3


def test_clients_without_samples_set_no_limit():
    d = np.array([[4.0], [4.0], [0.1], [0.1], [0.1]])
    assert step(parse("norm_bound", "method"), d, weights=[1, 1, 0, 0, 0]) == pytest.approx(4)


def test_numbers_beside_the_model_stay_near_their_median():
    method = parse("norm_bound(claims=5)", "method")
    models = torch.ones(4, 2, dtype=torch.float64)
    odd = torch.tensor([2, 2, 2, 1e9], dtype=torch.float64)
    numbers = dict(steps=odd, lr_sum=odd, effective_steps=1 / odd, last_loss=odd, train_loss=odd)
    replies = replace(replies_of(models), **numbers)
    lengths = models.norm(dim=1)
    near = method._bounded(replies, lengths, lengths[0], lengths > 0)
    for name in ("steps", "lr_sum", "last_loss", "train_loss"):
        assert getattr(near, name).tolist() == [2, 2, 2, 10]
    assert near.effective_steps.tolist() == pytest.approx([0.5, 0.5, 0.5, 0.1])


def test_gradients_of_a_probe_are_bounded():
    method = parse("norm_bound(mime)", "method")
    federation = toy_federation(method)
    gradients = torch.ones(4, federation.net.layout.size, dtype=torch.float64)
    gradients[0] = 1e9
    bounded = method._probe(Probe(gradients, torch.tensor([1e9, 1, 1, 1], dtype=torch.float64)))
    torch.testing.assert_close(bounded.gradients, torch.ones_like(gradients))
    assert bounded.weights.tolist() == [5, 1, 1, 1]


def test_long_updates_are_shortened_or_dropped():
    d = np.array([[3.0, 4], [0, 1], [0, 2], [2, 0]])
    np.testing.assert_allclose(
        step(parse("norm_bound(bound=2)", "method"), d), [(1.2 + 2) / 4, (1.6 + 3) / 4]
    )
    np.testing.assert_allclose(
        step(parse("norm_bound(bound=2, action='drop')", "method"), d), [2 / 3, 1]
    )
    np.testing.assert_allclose(step(parse("norm_bound(times=2.5)", "method"), d), d.mean(0))


def test_buckets_are_means_of_members_that_change_from_round_to_round():
    d = np.arange(12.0)[:, None] ** 3
    method = parse("bucketing(median, size=4)", "method")
    server = torch.zeros(1, dtype=torch.float64)
    replies = replies_of(torch.from_numpy(d))
    seen = set()
    for round in range(8):
        context = context_of(1, round)
        places = method._buckets(replies, context)
        assert sorted(torch.cat(places).tolist()) == list(range(12))
        means = sorted(float(d[bucket.numpy()].mean()) for bucket in places)
        served, _ = method.aggregate(method.init(server, context), server, replies, context)
        assert float(served.send) == pytest.approx(means[1])
        seen.add(means[1])
    assert len(seen) > 4
