import logging
from dataclasses import replace
from math import inf
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from methods.numpy_clients import NumpyClients, linear_federation, models

from fedbasin.core.expressions import parse
from fedbasin.core.method import Context, Plan, PrivateCounts
from fedbasin.core.rng import root
from fedbasin.core.rule import Setting
from fedbasin.core.vectors import Layout
from fedbasin.experiment import build, from_mapping
from fedbasin.local import SGD
from fedbasin.methods import FedAvg, FedCM, FedWCM
from fedbasin.methods.fedwcm import SCORES, TEMPERATURES, census
from fedbasin.methods.parts.client_momentum import EvenMomentum, SharedMomentum
from fedbasin.partition import Pool, client_dirichlet, longtail
from fedbasin.testing import LAWS, check_method, replies_of, trajectory

CIFAR10 = np.repeat(np.arange(10), 5000)
QUICK_LAWS = [law for law in LAWS if "order" not in law.__name__]  # that one has a test of its own


def numpy_scores(counts, kind):
    """Spec 5.3, one client and one class at a time."""
    classes, overall = counts.shape[1], counts.sum(0) / counts.sum()
    scores = []
    for row in counts:
        mix = row / max(row.sum(), 1)
        if kind == "scarcity":
            scores.append(sum(p * (1 / classes - d) for p, d in zip(mix, overall, strict=True)))
        elif kind == "tv":
            scores.append(np.abs(mix - overall).sum() / 2 if row.sum() else 0.0)
        else:
            parts = zip(mix, overall, strict=True)
            scores.append(sum(p * min(10, 1 / classes / d) / 10 for p, d in parts if p))
    return np.array(scores), np.abs(overall - 1 / classes).sum() / 2 / (1 - 1 / classes)


def numpy_weights(method, scores, imbalance, cohort, sizes):
    heat = method.tau if method.temperature == "fixed" else method.tau * (1 - imbalance) / imbalance
    raw = np.array([np.exp(scores[k] / heat) * (sizes[k] if method.unequal else 1) for k in cohort])
    return raw / raw.sum()


def numpy_alpha(method, counts, scores, imbalance, cohort, weights):
    alpha, classes = method.alpha, counts.shape[1]
    if method.momentum == "mix":
        mix = sum(w * counts[k] / counts[k].sum() for k, w in zip(cohort, weights, strict=True))
        bias = np.abs(mix - 1 / classes).sum() / 2 / (1 - 1 / classes)
        alpha = alpha + (1 - alpha) * imbalance * bias
    elif method.momentum == "scores":
        held = scores[counts.sum(1) > 0]
        lack = held.mean() - np.mean([scores[k] for k in cohort])
        alpha = alpha + method.kappa * imbalance * max(0, lack) / held.std()
    return min(max(alpha, method.alpha), max(method.alpha, method.alpha_max))


def numpy_fedwcm(world, counts, rounds, method, decay=0.0):
    """Spec 5.2 with FedCM's signs; also yields the weights and what the moving average says."""
    server, delta, alpha = world.start.copy(), np.zeros_like(world.start), method.alpha
    scores, imbalance = numpy_scores(counts, method.score)
    even = 2 * int(np.ceil(counts.sum() / (counts.sum(1) > 0).sum() / 4))  # 2 epochs, batches of 4
    for t in range(rounds):
        cohort, lr, moved, grads, steps = world.cohort(t), world.lr(t), [], [], []
        for client in cohort:
            batches = list(world.steps(t, client))
            rate = lr * even / len(batches) if method.unequal else lr
            v, raw = server.copy(), []
            for inputs, labels in batches:
                raw.append(world.gradient(v, inputs, labels))
                v = v - rate * (alpha * raw[-1] + (1 - alpha) * delta + decay * v)
            moved.append(server - v)
            counted = world.sizes[client] * 2 / 4 if method.counted == "rows" else len(batches)
            steps.append(even if method.unequal else counted)
            grads.append(np.mean(raw, axis=0))
        w = numpy_weights(method, scores, imbalance, cohort, world.sizes)
        too_long = np.array([len(list(world.steps(t, c))) for c in cohort]) / steps
        weights = w if method.unequal else w * too_long  # all 1 but where steps count by rows
        average = alpha * (weights @ np.array(grads)) + weights.sum() * (1 - alpha) * delta
        delta = sum(wk * m / (lr * k) for wk, m, k in zip(w, moved, steps, strict=True))
        server = server - method.server_lr * (w @ np.array(moved))
        used, alpha = alpha, numpy_alpha(method, counts, scores, imbalance, cohort, w)
        yield server, delta, alpha, used, w, average


VARIANTS = [
    FedWCM(),
    FedWCM(score="tv", temperature="fixed", tau=0.2, server_lr=0.7),
    FedWCM(score="inverse", momentum="scores", kappa=2.0),
    FedWCM(unequal=True),
    FedWCM(momentum="scores", unequal=True, tau=0.01, alpha=0.2, alpha_max=0.25, kappa=9.0),
    FedWCM(momentum="fixed", alpha=0.5, score="tv"),
    FedWCM(counted="rows"),
]


@pytest.mark.parametrize("method", VARIANTS, ids=str)
def test_fedwcm_equals_a_plain_numpy_loop_and_its_momentum_is_a_moving_average(method):
    federation = linear_federation(method, rounds=6)
    counts = federation.context.class_counts.numpy()
    oracle = numpy_fedwcm(NumpyClients(federation), counts, 6, method)
    rounds = federation.rounds_from(*federation.begin())
    for (after, record), (model, delta, alpha, used, w, average) in zip(
        rounds, oracle, strict=True
    ):
        np.testing.assert_allclose(after.send.numpy(), model, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(after.state.momentum.numpy(), delta, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(after.state.momentum.numpy(), average, rtol=1e-8, atol=1e-11)
        assert after.state.alpha.item() == pytest.approx(alpha, rel=1e-12)
        assert method.alpha <= after.state.alpha.item() <= max(method.alpha, method.alpha_max)
        assert record.notes["alpha"] == pytest.approx(used)
        assert record.notes["effective_clients"] == pytest.approx(1 / (w**2).sum())
        assert record.notes["shares"] == pytest.approx(w.tolist())
        scores = numpy_scores(counts, method.score)[0][federation.cohort(record.round - 1)[1]]
        assert record.notes["client_scores"] == pytest.approx(scores.tolist())
        assert record.notes["momentum_norm"] == pytest.approx(np.linalg.norm(delta))
        assert record.notes["imbalance"] == pytest.approx(numpy_scores(counts, "tv")[1])


@pytest.mark.parametrize("unequal", [False, True])
def test_the_rate_of_fedwcm_x_is_that_of_weight_decay_too(unequal):
    method = FedWCM(unequal=unequal)
    federation = linear_federation(method, rounds=4, optimiser=SGD(weight_decay=0.05))
    counts = federation.context.class_counts.numpy()
    oracle = numpy_fedwcm(NumpyClients(federation), counts, 4, method, decay=0.05)
    for ours, (model, *_) in zip(models(federation), oracle, strict=True):
        np.testing.assert_allclose(ours, model, rtol=1e-9, atol=1e-12)


def test_fedwcm_x_does_not_count_by_rows():
    with pytest.raises(ValueError, match="unequal=True evens out steps"):
        FedWCM(unequal=True, counted="rows")


@pytest.mark.parametrize("kind", [FedCM, FedWCM])
def test_a_count_by_rows_comes_with_a_caution(kind):
    even = Setting(momentum=0, weight_decay=0, clip=None, ragged=False, statistics=False)
    assert "grow without bound" in next(kind(counted="rows").cautions(even))
    assert not list(kind().cautions(even))


def with_counts(method, counts, **settings):
    federation = linear_federation(method, **settings)
    context = replace(federation.context, class_counts=torch.as_tensor(counts))
    return replace(federation, context=context)


def sent(federation):
    return [s.send for s, _ in federation.rounds_from(*federation.begin())]


def all_equal(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_equal_weights_and_fixed_alpha_are_fedcm_and_fedavg_to_the_bit():
    equal = FedWCM(tau=inf, momentum="fixed")
    assert all_equal(sent(linear_federation(equal)), sent(linear_federation(FedCM(0.1))))
    off = replace(equal, alpha=1.0)
    assert all_equal(sent(linear_federation(off)), sent(linear_federation(FedAvg("uniform"))))
    fixed = replace(equal, temperature="fixed", alpha=0.3)
    assert all_equal(sent(linear_federation(fixed)), sent(linear_federation(FedCM(0.3))))


BALANCED = [[3, 0, 0], [0, 5, 1], [4, 0, 6], [0, 2, 0], [0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("score", ["scarcity", "tv", "inverse"])
@pytest.mark.parametrize("momentum", ["mix", "scores"])
def test_balanced_data_make_it_fedcm_to_the_bit(score, momentum):
    method = FedWCM(score=score, momentum=momentum)
    ours = sent(with_counts(method, BALANCED))
    assert all_equal(ours, sent(linear_federation(FedCM(0.1))))
    tilted = [[9, 0, 0], *BALANCED[1:]]
    assert not all_equal(sent(with_counts(method, tilted)), ours)


def test_fedwcm_x_with_equal_data_is_fedwcm_to_the_bit():
    federation = linear_federation(FedWCM(), participation="count(clients=6)")
    shards = [np.arange(7 * i, 7 * i + 7) for i in range(5)]
    population = federation.population
    inputs, labels = population.inputs.numpy(), population.labels.numpy()
    population = type(population).of(inputs, labels, shards)
    counts = population.class_counts(3)
    runs = []
    for unequal in (False, True):
        method = FedWCM(unequal=unequal)
        runs.append(
            sent(
                replace(
                    federation,
                    method=method,
                    population=population,
                    executor=replace(federation.executor, population=population),
                    context=replace(federation.context, class_counts=counts),
                    eligible=np.arange(5),
                    participation=parse("count(clients=4)", "participation"),
                )
            )
        )
    assert all_equal(*runs)
    assert not all_equal(
        sent(linear_federation(FedWCM())), sent(linear_federation(FedWCM(unequal=True)))
    )


def test_a_plan_in_steps_needs_no_evening_out():
    """All take the same steps, so B^ / B_k = 1 and only the weights of FedWCM-X are left."""
    method = FedWCM(unequal=True)
    federation = linear_federation(method)
    state = method.init(torch.zeros(15), federation.context)
    context = federation.context.at(0, 0.2, Plan(0.2, None, 3))
    assert method.broadcast(state, torch.zeros(15), context)[0].steps.item() == 3
    counts = [[9, 0, 0], [0, 4, 0], [0, 0, 3], [1, 0, 0], [0, 0, 0], [0, 0, 0]]
    context = replace(federation.context, class_counts=torch.tensor(counts))
    context = context.at(0, 0.2, Plan(0.2, 2))  # 17 rows, 4 clients with rows, batches of 4
    assert method.broadcast(state, torch.zeros(15), context)[0].steps.item() == 4


def test_a_client_that_takes_no_step_has_a_finite_rate():
    shared = SharedMomentum(torch.ones(2), torch.tensor(0.1), torch.tensor(6.0))
    for steps, pace in ((0.0, 6.0), (1.0, 6.0), (4.0, 1.5)):
        start = SimpleNamespace(shared=shared, steps=torch.tensor(steps))
        assert EvenMomentum().lr_factor(EvenMomentum().begin(start, None)).item() == pace


def weights_of(method, counts, sizes=None):
    """The weights of one merge, read off one-hot models."""
    counts = torch.as_tensor(counts)
    context = Context(Layout(("w",), ((len(counts),),)), len(counts), 1, root(0))
    context = replace(context, class_counts=counts, batch=1).at(0, 0.1, Plan(0.1, 1))
    server = torch.zeros(len(counts), dtype=torch.float64)
    replies = replies_of(torch.eye(len(counts), dtype=torch.float64), sizes)
    served, _ = method.aggregate(method.init(server, context), server, replies, context)
    return served.send.numpy()


COUNTS = st.lists(
    st.lists(st.integers(0, 30), min_size=3, max_size=3).filter(any), min_size=2, max_size=6
)


@settings(max_examples=30, deadline=None)
@given(COUNTS)
def test_scores_equal_a_loop_over_clients_and_classes(counts):
    counts = np.array([[900, 0, 0], [0, 0, 0], *counts])  # a tail, and a client without rows
    for name, score in SCORES.items():
        expected, imbalance = numpy_scores(counts, name)
        found = census(torch.from_numpy(counts))
        np.testing.assert_allclose(score(found).numpy(), expected, rtol=1e-10, atol=1e-13)
        assert found.imbalance.item() == pytest.approx(imbalance)


@settings(max_examples=30, deadline=None)
@given(COUNTS, st.sampled_from(["scarcity", "tv", "inverse"]), st.randoms(use_true_random=False))
def test_weights_sum_to_one_follow_the_clients_and_sharpen_as_t_falls(counts, score, random):
    method = FedWCM(score=score, temperature="fixed", tau=0.5)
    w = weights_of(method, counts)
    assert w.sum() == pytest.approx(1) and (w >= 0).all()
    order = random.sample(range(len(counts)), len(counts))
    shuffled = weights_of(method, [counts[i] for i in order])
    np.testing.assert_allclose(shuffled, w[order], rtol=1e-12)
    sharper = weights_of(replace(method, tau=0.1), counts)
    assert sharper.max() >= w.max() - 1e-12 and (sharper**2).sum() >= (w**2).sum() - 1e-12
    scores, _ = numpy_scores(np.array(counts), score)
    assert w[np.argmax(scores)] == pytest.approx(w.max())


def test_a_shift_of_all_scores_changes_nothing(monkeypatch):
    counts = [[9, 1, 0], [0, 5, 1], [4, 0, 6]]
    plain = weights_of(FedWCM(), counts)
    monkeypatch.setitem(SCORES, "scarcity", lambda found: found.mixes @ (1 / 3 - found.overall) + 7)
    np.testing.assert_allclose(weights_of(FedWCM(), counts), plain, rtol=1e-10)


def test_scarce_classes_weigh_more_and_only_fedwcm_x_counts_samples():
    counts = [[90, 0, 0], [90, 0, 0], [0, 9, 0], [3, 3, 3], [0, 0, 2]]
    w = weights_of(FedWCM(tau=1.0), counts, sizes=[90, 90, 9, 9, 2])
    assert w[4] > w[2] > w[3] > w[0] == w[1]
    ratio = weights_of(FedWCM(tau=1.0, unequal=True), counts, sizes=[90, 90, 9, 9, 2]) / w
    np.testing.assert_allclose(ratio / ratio[4], [45, 45, 4.5, 4.5, 1], rtol=1e-12)


def merged(method, **known):
    """What a merge of clients 0 and 1 serves and leaves behind."""
    context = Context(Layout(("w",), ((2,),)), 6, 1, root(0), batch=4, **known)
    context = context.at(0, 0.1, Plan(0.1, 2))
    server = torch.zeros(2, dtype=torch.float64)
    replies = replies_of(torch.eye(2, dtype=torch.float64), [62, 41])
    return method.aggregate(method.init(server, context), server, replies, context)


HELD = torch.tensor([[60, 2, 0], [40, 0, 1], [0, 9, 3], [2, 2, 2]])
SPARSE = torch.cat([HELD, torch.zeros(2, 3, dtype=HELD.dtype)])


def test_clients_without_rows_have_no_part_in_what_the_scores_are_compared_with():
    method = FedWCM(momentum="scores", alpha_max=1.0)
    alphas = [merged(method, class_counts=counts)[1].alpha for counts in (HELD, SPARSE)]
    assert alphas[0] == alphas[1] > method.alpha


@pytest.mark.parametrize("score", ["scarcity", "tv", "inverse"])
def test_what_clients_tell_in_place_of_their_counts_gives_the_same_merge(score):
    method, total = FedWCM(score, momentum="scores", unequal=True), SPARSE.sum(0)
    scores = torch.tensor([method.score_counts(row, total) for row in SPARSE], dtype=torch.float64)
    private = PrivateCounts(total, scores, SPARSE.sum(1))
    told, state = merged(method, private_counts=private)
    shown, expected = merged(method, class_counts=SPARSE)
    torch.testing.assert_close(told.send, shown.send, rtol=1e-12, atol=0)
    torch.testing.assert_close(state.momentum, expected.momentum, rtol=1e-12, atol=0)
    torch.testing.assert_close(state.alpha, expected.alpha, rtol=1e-12, atol=0)
    with pytest.raises(ValueError, match="write momentum='scores' or momentum='fixed'"):
        merged(FedWCM(score), private_counts=private)


def test_edges_one_client_one_class_and_a_client_nobody_counted():
    assert weights_of(FedWCM(), [[5, 1]]).tolist() == [1.0]
    single = weights_of(FedWCM(), [[5, 0], [9, 0], [2, 0]])  # I = 1, T = 0, all scores equal
    np.testing.assert_allclose(single, 1 / 3)
    for score in SCORES:
        assert SCORES[score](census(torch.tensor([[8, 1], [0, 0]])))[1] == 0


@pytest.mark.parametrize(
    ("imbalance", "index", "heat"),
    [
        (1, 0, inf),
        (0.5, 0.106, 0.255),
        (0.1, 0.327, 0.062),
        (0.05, 0.404, 0.044),
        (0.01, 0.544, 0.025),
    ],
)
def test_the_partition_and_its_imbalance_are_those_of_the_paper(imbalance, index, heat):
    rng = np.random.default_rng(0)
    kept = longtail(CIFAR10, 10, imbalance, rng)
    pool = Pool(CIFAR10, 10).only(kept)
    found = census(torch.from_numpy(pool.class_sizes[None]))
    assert found.imbalance.item() == pytest.approx(index, abs=6e-4)
    assert TEMPERATURES["imbalance"](0.03, found).item() == pytest.approx(heat, rel=0.02)
    assert pool.class_sizes[9] / pool.class_sizes[0] == pytest.approx(imbalance, rel=0.02)
    split = client_dirichlet(pool, 100, rng, alpha=0.1)
    assert set(split.sizes().tolist()) == {pool.rows // 100}
    rows = np.concatenate(split.clients)
    assert len(np.unique(rows)) == len(rows)
    lost = pool.class_sizes - split.counts(pool.labels, 10).sum(0)
    assert (lost >= 0).all() and lost.sum() == pool.rows % 100


@pytest.mark.parametrize("source", ["wima(fedwcm, window=2)", "ima(fedwcm, start=0.0)"])
def test_fedwcm_composes(source):
    check_method(parse(source, "method"), QUICK_LAWS)
    with_prox = trajectory(parse("fedwcm(local=prox(mu=0.5))"))
    assert not torch.equal(with_prox[-1].send, trajectory(FedWCM())[-1].send)


@pytest.mark.parametrize("method", VARIANTS[2:5], ids=str)
def test_other_settings_obey_the_laws(method):
    check_method(method, QUICK_LAWS)


def test_it_runs_beside_local_momentum_and_weight_decay():
    states = trajectory(FedWCM(), rounds=30, optimiser=SGD(0.9, 1e-3))
    assert states[-1].state.momentum.norm() < 5


def digits(method):
    small = {"method": method, "rounds": 2, "partition": {"how": "iid", "clients": 10}}
    return build(from_mapping(small))


def test_only_methods_that_ask_see_class_counts_and_the_user_is_told(caplog):
    with caplog.at_level(logging.WARNING):
        assert digits("fedavg").context.class_counts is None
        assert not caplog.records
        federation = digits("wima(fedwcm)")
    assert federation.context.class_counts.shape == (10, 10)
    assert federation.context.batch == 32
    assert "a simulation's server sees every client's class counts" in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": 0.0}, r"alpha must be in \(0, 1\], got 0"),
        ({"alpha_max": 1.5}, r"alpha_max must be in \(0, 1\], got 1.5"),
        ({"tau": 0.0}, "tau must be above 0, got 0"),
        ({"tau": float("nan")}, "tau must be above 0"),
        ({"kappa": -1.0}, "kappa must be above 0, got -1"),
        ({"server_lr": 0.0}, "server_lr must be above 0, got 0"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        FedWCM(**settings)


def test_missing_or_useless_counts_are_named():
    context = replace(linear_federation(FedWCM()).context, class_counts=None)
    with pytest.raises(ValueError, match="fedwcm needs the clients' class counts"):
        FedWCM().init(torch.zeros(15), context)
    with pytest.raises(ValueError, match="needs two classes, class_counts has 1"):
        weights_of(FedWCM(), [[5], [3]])
    bare = linear_federation(FedWCM()).context  # not yet in a round: nobody knows the plan
    with pytest.raises(ValueError, match="needs the clients' plan and batch"):
        FedWCM(unequal=True).broadcast(FedWCM().init(torch.zeros(15), bare), torch.zeros(15), bare)
