"""FedAvgM, FedAdam, FedYogi, FedAdagrad: the papers' rules in NumPy, and their limits."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from methods.numpy_clients import NumpyClients, linear_federation, models

from fedbasin.core.expressions import parse
from fedbasin.core.method import Context
from fedbasin.core.rng import root
from fedbasin.core.vectors import Layout
from fedbasin.local import SGD
from fedbasin.methods import IMA, WIMA, FedAdagrad, FedAdam, FedAvg, FedAvgM, FedYogi
from fedbasin.methods.parts.moments import restart_round
from fedbasin.testing import replies_of, trajectory

ADAPTIVE = [FedAdam, FedYogi, FedAdagrad]


def context(round=0, rounds=8, size=4):
    return Context(Layout(("w",), ((size,),)), clients=4, rounds=rounds, key=root(0), round=round)


def walk_along(method, updates, rounds=None):
    """Let a method see the given updates [T, P] from one client each; return its models."""
    updates = torch.as_tensor(np.asarray(updates), dtype=torch.float64)
    model = torch.zeros(updates.shape[1], dtype=torch.float64)
    state, found = method.init(model, context(0, rounds or 8)), []
    for t, d in enumerate(updates):
        served, state = method.aggregate(
            state, model, replies_of((model + d)[None]), context(t, rounds or 8)
        )
        model = served.send
        found.append(model.numpy())
    return np.array(found)


class NumpyServer:
    """Reddi et al., Algorithm 2, and momentum; one elementwise update after another."""

    def __init__(self, rule, lr, beta1=0.0, beta2=0.0, tau=1e-3, first="tau"):
        self.rule, self.lr, self.beta1, self.beta2, self.tau = rule, lr, beta1, beta2, tau
        self.m, self.v = 0.0, tau**2 if first == "tau" else 0.0

    def __call__(self, w, d):
        if self.rule == "momentum":
            self.m = self.beta1 * self.m + d
            return w + self.lr * self.m
        self.m = self.beta1 * self.m + (1 - self.beta1) * d
        if self.rule == "adam":
            self.v = self.beta2 * self.v + (1 - self.beta2) * d**2
        elif self.rule == "yogi":
            self.v = self.v - (1 - self.beta2) * d**2 * np.sign(self.v - d**2)
        else:
            self.v = self.v + d**2
        return w + self.lr * self.m / (np.sqrt(self.v) + self.tau)


CASES = [
    (FedAvgM(lr=0.5, momentum=0.8), ("momentum", 0.5, 0.8)),
    (FedAdam(lr=0.02), ("adam", 0.02, 0.9, 0.99, 1e-3, "tau")),
    (FedAdam(lr=0.05, beta1=0.5, beta2=0.9, tau=0.1, first="zero"),
     ("adam", 0.05, 0.5, 0.9, 0.1, "zero")),
    (FedYogi(lr=0.02), ("yogi", 0.02, 0.9, 0.99, 1e-3, "tau")),
    (FedYogi(lr=0.05, beta1=0.5, beta2=0.7, tau=0.1, first="zero"),
     ("yogi", 0.05, 0.5, 0.7, 0.1, "zero")),
    (FedAdagrad(), ("adagrad", 0.1, 0.0, 0.0, 1e-3, "tau")),
    (FedAdagrad(lr=0.3, beta1=0.5, tau=0.01, first="zero"),
     ("adagrad", 0.3, 0.5, 0.0, 0.01, "zero")),
]  # fmt: skip


@pytest.mark.parametrize(("method", "rule"), CASES, ids=lambda case: str(case)[:40])
def test_server_optimisers_equal_a_plain_numpy_loop(method, rule):
    federation = linear_federation(method, rounds=5, optimiser=SGD(momentum=0.5))
    world, step = NumpyClients(federation), NumpyServer(*rule)
    server = world.start
    for t, ours in enumerate(models(federation)):
        ends, sizes, _ = world.sgd(t, server, momentum=0.5)
        server = step(server, np.average(ends, axis=0, weights=sizes) - server)
        np.testing.assert_allclose(ours, server, rtol=1e-9, atol=1e-12)


def test_a_constant_update_is_taken_up_to_one_over_one_minus_momentum_times():
    d = np.array([[1.0, -2.0, 0.5, 0.0]])
    found = walk_along(FedAvgM(momentum=0.6, lr=0.1), np.repeat(d, 60, 0))
    np.testing.assert_allclose(found[-1] - found[-2], 0.1 * d[0] / (1 - 0.6), rtol=1e-9)


def test_momentum_zero_is_the_inner_method_and_an_average_of_updates_is_not():
    for a, b in zip(trajectory(FedAvgM(momentum=0.0)), trajectory(FedAvg()), strict=True):
        torch.testing.assert_close(a.send, b.send, rtol=1e-12, atol=1e-14)
    # The first step is the whole update, not (1 - momentum) of it.
    np.testing.assert_allclose(walk_along(FedAvgM(), [[1.0, 2, 3, 4]])[0], [1, 2, 3, 4])


def test_from_zero_the_first_step_of_adam_and_yogi_is_the_same():
    d = np.random.default_rng(0).normal(size=(2, 4))
    adam = walk_along(FedAdam(first="zero"), d)
    yogi = walk_along(FedYogi(first="zero"), d)
    np.testing.assert_array_equal(adam[0], yogi[0])
    assert not np.allclose(adam[1], yogi[1], rtol=1e-6)
    # no bias correction: m = 0.1 d, v = 0.01 d^2
    np.testing.assert_allclose(adam[0], 0.01 * 0.1 * d[0] / (0.1 * np.abs(d[0]) + 1e-3))


@pytest.mark.parametrize("make", ADAPTIVE)
def test_the_paper_starts_v_at_tau_squared(make):
    state = make(tau=0.3).init(torch.zeros(4), context())
    assert torch.allclose(state.own.square, torch.tensor(0.09)) and not state.own.mean.any()
    assert not make(tau=0.3, first="zero").init(torch.zeros(4), context()).own.square.any()


@pytest.mark.parametrize("make", ADAPTIVE)
def test_large_tau_is_fedavg_in_the_limit(make):
    d = np.random.default_rng(1).normal(size=(4, 4))
    plain = np.cumsum(d, axis=0)
    gaps = [
        np.abs(walk_along(make(beta1=0.0, tau=tau, lr=tau, first="zero"), d) - plain).max()
        for tau in (1e2, 1e4, 1e6)
    ]
    assert gaps[0] < 0.5 and gaps[1] < gaps[0] / 50 and gaps[2] < gaps[1] / 50


@pytest.mark.parametrize("make", ADAPTIVE)
def test_without_tau_the_scale_of_updates_does_not_matter(make):
    d = np.random.default_rng(2).normal(size=(4, 4))
    tiny = make(tau=1e-30, first="zero")
    np.testing.assert_allclose(walk_along(tiny, d), walk_along(tiny, 1000 * d), rtol=1e-9)
    # tau stands outside the root: inside, a tau of 0.1 would move the first step elsewhere
    first = walk_along(replace(tiny, tau=0.1, lr=1.0), d)[0]
    share, mean = (0.0 if make is FedAdagrad else 0.99), (1.0 if make is FedAdagrad else 0.1)
    root_v = np.sqrt((1 - share) * d[0] ** 2)
    np.testing.assert_allclose(first, mean * d[0] / (root_v + 0.1), rtol=1e-12)


def test_yogi_stays_finite_where_rounding_would_make_v_negative():
    method = FedYogi(beta2=0.0, first="zero")  # v+ = d^2 or v - d^2: rounding decides the sign
    d = torch.full((30, 4), 0.1) * torch.linspace(1, 0.7, 30)[:, None]
    model, state = torch.zeros(4), method.init(torch.zeros(4), context())
    for t, row in enumerate(d):
        served, state = method.aggregate(state, model, replies_of((model + row)[None]), context(t))
        model = served.send
        assert (state.own.square >= 0).all() and torch.isfinite(model).all()


@pytest.mark.parametrize("make", [FedAdam, FedYogi])
def test_moments_start_anew_at_the_round_asked_for(make):
    d = np.random.default_rng(3).normal(size=(8, 4))
    found = walk_along(make(restart=0.5), d)
    fresh = walk_along(make(), d[4:])
    np.testing.assert_allclose(found[4:] - found[3], fresh, rtol=1e-9)
    plain = walk_along(make(), d)
    np.testing.assert_array_equal(found[:4], plain[:4])
    assert not np.allclose(found[4], plain[4], rtol=1e-6)


def test_a_share_of_the_rounds_is_not_rounded_down_by_its_last_digit():
    assert 0.29 * 100 < 29
    assert restart_round(0.29, 100) == FedAdam(restart=0.29).shared_prefix(100)[1] == 29


@pytest.mark.parametrize("make", [FedAdam, FedYogi])
def test_moments_start_anew_after_the_round_asked_for_where_nobody_answered_in_it(make):
    d = np.random.default_rng(3).normal(size=(8, 4))
    method, model = make(restart=0.5), torch.zeros(4, dtype=torch.float64)
    state, found = method.init(model, context()), []
    for t in (0, 1, 2, 3, 6, 7):
        replies = replies_of((model + torch.from_numpy(d[t]))[None])
        served, state = method.aggregate(state, model, replies, context(t, 8))
        model = served.send
        found.append(model.numpy())
    np.testing.assert_allclose(np.array(found[4:]) - found[3], walk_along(make(), d[6:]), rtol=1e-9)


def test_both_readings_of_averaging_with_an_adaptive_server():
    """`fedadam(ima)` steps towards the mean of raw means; `ima(fedadam)` averages its steps."""
    rng = np.random.default_rng(4)
    targets = torch.from_numpy(rng.normal(size=(5, 4)))
    ima = IMA(window=5, start=0.0, decay="none")
    method = FedAdam(ima, first="zero")
    model = torch.zeros(4, dtype=torch.float64)
    state, step, w = method.init(model, context()), NumpyServer("adam", 0.01, 0.9, 0.99, 1e-3, "z"), np.zeros(4)  # fmt: skip  # noqa: E501
    for t, target in enumerate(targets):
        served, state = method.aggregate(state, model, replies_of(target[None]), context(t))
        model = served.send
        w = step(w, targets[: t + 1].numpy().mean(0) - w)
        np.testing.assert_allclose(model, w, rtol=1e-10)
        assert served.score is served.send
    outside = [s.send for s in trajectory(IMA(FedAdam(), start=0.0, decay="none"))]
    inside = [s.send for s in trajectory(FedAdam(IMA(start=0.0, decay="none")))]
    assert not torch.allclose(outside[-1], inside[-1], rtol=1e-3)


def test_a_model_that_is_scored_apart_moves_with_the_step():
    """WIMA inside a server step: both models are moved by what the optimiser added."""
    plain = trajectory(WIMA(FedAvg(), window=3))[0]
    start = trajectory(FedAvg(), rounds=1)
    method = FedAvgM(WIMA(FedAvg(), window=3), lr=0.5)
    ours = trajectory(method)
    first = ours[0].send - plain.send
    torch.testing.assert_close(ours[0].score - plain.score, first, rtol=1e-9, atol=1e-12)
    assert start and first.abs().max() > 1e-4
    assert not torch.allclose(ours[-1].score, ours[-1].send)


def test_the_momentum_wraps_any_update():
    for inner in ("scaffold", "fedcm", "fednova", "fedavgm(momentum=0.5)"):
        method = parse(f"fedavgm({inner}, momentum=0)", "method")
        for a, b in zip(trajectory(method), trajectory(method.inner), strict=True):
            torch.testing.assert_close(a.send, b.send, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("fedavgm(lr=0)", "lr"),
        ("fedavgm(momentum=1)", "momentum"),
        ("fedadam(beta1=1)", "beta1"),
        ("fedadam(beta2=-0.1)", "beta2"),
        ("fedyogi(tau=0)", "tau"),
        ("fedyogi(lr=0)", "lr"),
        ("fedadam(restart=1.5)", "restart"),
        ("fedadam(restart=-0.1)", "restart"),
        ("fedadagrad(first='one')", "first"),
    ],
)
def test_bad_settings_are_named(source, word):
    with pytest.raises(ValueError, match=word):
        parse(source, "method")


@pytest.mark.parametrize("restart", [0.0, 1.0])
def test_a_restart_before_the_first_round_or_after_the_last_changes_nothing(restart):
    d = np.random.default_rng(3).normal(size=(4, 4))
    np.testing.assert_array_equal(walk_along(FedAdam(restart=restart), d), walk_along(FedAdam(), d))
