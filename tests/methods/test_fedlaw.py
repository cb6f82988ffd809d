import itertools
import json
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from methods.numpy_clients import NumpyClients, linear_federation, models
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from torch.optim.swa_utils import SWALR

from fedbasin.core.catalogue import needs_of
from fedbasin.core.expressions import parse
from fedbasin.core.vectors import shares, weighted_mean
from fedbasin.local.batches import epoch_order
from fedbasin.local.prox import Prox
from fedbasin.methods import FedAvg, FedLAW
from fedbasin.methods.parts.descent import Adam
from fedbasin.methods.parts.mixture import CURVES, Mixture
from fedbasin.testing import replies_of, toy_federation, trajectory

# --- an independent loop in NumPy: explicit Jacobians, its own Adam, its own schedules ---------


def jacobian(z, c, anchors, kind):
    """The merged model gamma sum_i lambda_i v_i, its lambda and gamma, and d model / d(z, c)."""
    raw, slope = (np.exp(z), np.exp(z)) if kind == "exponential" else (z**2, 2 * z)
    gamma, slope_c = (np.exp(c), np.exp(c)) if kind == "exponential" else (c**2, 2 * c)
    lam = raw / raw.sum()
    of_z = (np.diag(slope) * raw.sum() - np.outer(raw, slope)) / raw.sum() ** 2  # d lam_i / d z_j
    mean = lam @ anchors
    return gamma * mean, lam, gamma, np.vstack([gamma * of_z.T @ anchors, slope_c * mean])


def numpy_descent(world, free, server, anchors, law, moves, epochs, rate, key, average):
    proxy = world.federation.context.proxy
    inputs, labels = proxy.inputs.numpy() / 255, proxy.labels.numpy()
    first, second, k, seen = np.zeros_like(free), np.zeros_like(free), 0, []
    mean = jacobian(free[:-1], free[-1], anchors, law.parameterisation)[1] @ anchors
    held = bool(law.guard and moves[-1])
    if held and cross_entropy(mean, inputs, labels) >= math.log(3):
        moves, held = np.append(moves[:-1], 0.0), False
    for epoch in range(epochs):
        order = epoch_order(key.tensor(), epoch, len(labels)).numpy()
        for at in range(0, len(labels), law.batch):
            rows = order[at : at + law.batch]
            model, _, _, jac = jacobian(free[:-1], free[-1], anchors, law.parameterisation)
            g = moves * (jac @ world.gradient(model, inputs[rows], labels[rows]))
            k += 1
            first = first * 0.5 + g * 0.5
            second = second * 0.999 + g**2 * 0.001
            hat = np.sqrt(second / (1 - 0.999**k))
            free = free - rate(epoch) * (first / (1 - 0.5**k)) / (hat + 1e-8)
            if held:  # r = gamma |m - x| / ((1 - gamma) |x|) may not fall below the guard
                mean = jacobian(free[:-1], free[-1], anchors, law.parameterisation)[1] @ anchors
                r = law.guard * np.linalg.norm(server) / np.linalg.norm(mean - server)
                inverse = np.log if law.parameterisation == "exponential" else np.sqrt
                free[-1] = max(free[-1], inverse(r / (1 + r)))
                if law.guard_growth and r > 1:
                    free[-1] = min(free[-1], inverse(r / (r - 1)))
        if average and epoch > 5:
            seen.append(free)
    return np.mean(seen, axis=0) if seen else free


def cross_entropy(vector, inputs, labels):
    logits = inputs @ vector[:12].reshape(3, 4).T + vector[12:]
    top = logits.max(1)
    each = np.log(np.exp(logits - top[:, None]).sum(1)) + top - logits[range(len(labels)), labels]
    return each.mean()


def step_decay(lr):
    return lambda epoch: lr * (0.5 if epoch >= 20 else 1.0) * (0.5 if epoch >= 40 else 1.0)


def swa_rate(lr):
    """The authors' two schedulers: cosine until epoch 6, then up to 0.05 in ten epochs."""
    start = lr * (1 + math.cos(math.pi * 6 / 100)) / 2

    def rate(epoch):
        if epoch <= 6:
            return lr * (1 + math.cos(math.pi * epoch / 100)) / 2
        up = 0.5 - 0.5 * math.cos(math.pi * min(1, (epoch - 6) / 10))
        return up * 0.05 + (1 - up) * start

    return rate


def numpy_fedlaw(world, law, rounds):
    server = world.start.copy()
    inverse = np.log if law.parameterisation == "exponential" else np.sqrt
    for t in range(rounds):
        ends, sizes = [], []
        for client in world.cohort(t):
            v = server.copy()
            for inputs, labels in world.steps(t, client):
                v = v - world.lr(t) * world.gradient(v, inputs, labels)
            ends.append(v)
            sizes.append(world.sizes[client] if law.weighting == "samples" else 1)
        anchors = server + law.server_lr * (np.array(ends) - server)
        free = inverse(np.append(np.array(sizes) / np.sum(sizes), law.gamma))
        key = world.federation.context.at(t, 0.0).key
        weights = law.learn in ("both", "lambda")
        weights = weights and not (law.stop_round is not None and t >= law.stop_round)
        gamma = law.learn in ("both", "gamma")
        z_moves, c_moves = np.append(np.ones(len(ends)), 0.0), np.append(np.zeros(len(ends)), 1.0)
        common = (server, anchors, law)
        if law.swa and weights:
            half = law.epochs // 2 if gamma else law.epochs
            one, two = key.fold("fedlaw", 0), key.fold("fedlaw", 1)
            free = numpy_descent(
                world, free, *common, z_moves, half, swa_rate(law.lr), one, average=True
            )
            if gamma:
                free = numpy_descent(
                    world, free, *common, c_moves, half, step_decay(law.lr), two, average=False
                )
        else:
            moves = weights * z_moves + gamma * c_moves
            free = numpy_descent(
                world,
                free,
                *common,
                moves,
                law.epochs,
                step_decay(law.lr),
                key.fold("fedlaw", 0),
                average=False,
            )
        server, lam, gamma, _ = jacobian(free[:-1], free[-1], anchors, law.parameterisation)
        yield server, lam, gamma


@pytest.mark.parametrize(
    "law",
    [
        FedLAW(epochs=25, guard=0),
        FedLAW(epochs=3, batch=4, lr=0.1, server_lr=0.5, weighting="uniform"),
        FedLAW("gamma", guard=0, epochs=6, batch=7, parameterisation="quadratic", server_lr=1.5),
        FedLAW("gamma", guard=50, epochs=9, lr=0.1, parameterisation="quadratic"),
        FedLAW("both", guard=30, guard_growth=True, epochs=9, lr=0.1),
        FedLAW("gamma", guard=9, guard_growth=True, epochs=9, parameterisation="quadratic"),
        FedLAW("both", gamma=0.8, guard=30, epochs=3, lr=1e-4),
        FedLAW("lambda", epochs=6, batch=4, lr=0.2, gamma=0.9, stop_round=2),
        FedLAW("both", epochs=5, lr=0.05, parameterisation="quadratic", gamma=0.97, stop_round=3),
        FedLAW(swa=True, epochs=43, lr=0.03),
        FedLAW("lambda", swa=True, epochs=9, batch=4, parameterisation="quadratic"),
        FedLAW(swa=True, epochs=11, lr=0.2, batch=4),  # 5 epochs for lambda: nothing to average yet
        FedLAW("none", gamma=0.95),
    ],
    ids=str,
)
def test_fedlaw_equals_a_plain_numpy_loop(law):
    federation = linear_federation(law, rounds=5)
    server, states = federation.begin()
    oracle = numpy_fedlaw(NumpyClients(federation), law, 5)
    for (after, record), (model, lam, gamma) in zip(
        federation.rounds_from(server, states), oracle, strict=True
    ):
        np.testing.assert_allclose(after.send.numpy(), model, rtol=1e-8, atol=1e-11)
        np.testing.assert_allclose(record.notes["lambdas"], lam, rtol=1e-8)
        assert record.notes["gamma"] == pytest.approx(gamma, rel=1e-9)
        assert after.score is after.send


# --- gradients, Adam and schedules against torch ----------------------------------------------


def merged_in_a_round(seed=0, **settings):
    """A cohort of the toy federation after one round: server, replies and context."""
    federation = toy_federation(FedAvg(), seed=seed, **settings)
    server, states = federation.begin()
    (server, _) = next(iter(federation.rounds_from(server, states)))
    rng = np.random.default_rng(seed)
    step = torch.from_numpy(rng.normal(0, 0.4, (4, server.send.numel()))).to(server.send.dtype)
    weights = (1 + rng.integers(0, 20, 4)).tolist()
    return server.send, replies_of(server.send + step, weights), federation.context.at(1, 0.1)


def trained(vector, context):
    """A model that has learnt the proxy set a little."""
    for _ in range(60):
        leaf = vector.detach().requires_grad_()
        vector = (leaf - torch.autograd.grad(context.proxy.loss(leaf), leaf)[0]).detach()
    return vector


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 99),
    kind=st.sampled_from(["exponential", "quadratic"]),
    eta=st.sampled_from([1.0, 0.6]),
)
def test_gradients_equal_autograd_through_the_whole_merge(seed, kind, eta):
    server, replies, context = merged_in_a_round(seed)
    rng = np.random.default_rng(seed)
    free = torch.from_numpy(rng.uniform(0.2, 1.5, 5))
    if kind == "exponential":
        free = free.log()
    leaf = free.clone().requires_grad_()
    raw = leaf.exp() if kind == "exponential" else leaf**2
    anchors = server + eta * (replies.models - server)
    loss = context.proxy.loss(raw[4] * (raw[:4] / raw[:4].sum()) @ anchors)
    (expected,) = torch.autograd.grad(loss, leaf)
    merge = Mixture(server, replies.models, eta, CURVES[kind])
    found, value = merge.gradient(free, context.proxy.loss)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-13)
    torch.testing.assert_close(value, loss.detach(), rtol=1e-12, atol=0)
    # The mat-vec formulas of the free weights mu = gamma lambda, by central differences.
    _, gamma = merge.read(free)
    lam, _ = merge.read(free)
    mu, h = gamma * lam, 1e-6
    slopes = []
    for i in range(4):
        e = torch.zeros(4, dtype=torch.float64)
        e[i] = h
        ends = [context.proxy.loss((mu + s * e) @ anchors) for s in (1, -1)]
        slopes.append((ends[0] - ends[1]) / (2 * h))
    if kind == "exponential":
        dmu = torch.stack(slopes)
        torch.testing.assert_close(found[4], (mu * dmu).sum(), rtol=1e-5, atol=1e-8)
        torch.testing.assert_close(found[:4], mu * (dmu - lam @ dmu), rtol=1e-5, atol=1e-8)


def test_adam_is_torchs_adam():
    rng = np.random.default_rng(0)
    free = torch.from_numpy(rng.normal(size=6))
    theirs = free.clone().requires_grad_()
    optimiser = torch.optim.Adam([theirs], lr=0.03, betas=(0.5, 0.999))
    adam = Adam(torch.zeros_like(free), torch.zeros_like(free))
    for scale in (1.0, 1e-3, 5.0, 1e-7, 1.0):
        gradient = torch.from_numpy(rng.normal(size=6)) * scale
        gradient[2] = 0.0  # what is not learnt never moves
        theirs.grad = gradient
        optimiser.step()
        free, adam = adam.step(free, gradient, 0.03)
        torch.testing.assert_close(free, theirs.detach(), rtol=1e-12, atol=1e-15)


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_learning_rates_are_those_of_torchs_schedulers():
    law = FedLAW(lr=0.02)
    number = torch.zeros(1, requires_grad=True)
    optimiser = torch.optim.Adam([number], lr=0.02)
    scheduler = StepLR(optimiser, 20, 0.5)
    for epoch in range(65):
        assert law._halved(epoch) == pytest.approx(optimiser.param_groups[0]["lr"])
        scheduler.step()
    optimiser = torch.optim.Adam([number], lr=0.02)
    cosine = CosineAnnealingLR(optimiser, T_max=100)
    swa = SWALR(optimiser, swa_lr=0.05)
    for epoch in range(30):
        assert law._raised(epoch) == pytest.approx(optimiser.param_groups[0]["lr"])
        (swa if epoch > 5 else cosine).step()


@dataclass
class Spy:
    """A proxy set that writes down how it was used."""

    inner: object
    seen: list

    @property
    def size(self):
        return self.inner.size

    def loss(self, vector, rows=None):
        if torch.is_grad_enabled():
            self.seen.append((vector.is_leaf, rows))
        return self.inner.loss(vector, rows)


def spied(law, seed=0, **changes):
    server, replies, context = merged_in_a_round(seed)
    spy = Spy(context.proxy, [])
    context = replace(context, proxy=spy, **changes)
    served, _ = law.aggregate((), server, replies, context)
    return served, spy.seen


def test_every_step_differentiates_one_leaf_and_each_pass_sees_each_row_once():
    _, seen = spied(FedLAW(epochs=3, batch=4))
    assert [leaf for leaf, _ in seen] == [True] * 12  # 15 rows in batches of 4, three passes
    passes = [torch.cat([rows for _, rows in seen[i : i + 4]]).tolist() for i in (0, 4, 8)]
    assert all(sorted(one) == list(range(15)) for one in passes)
    assert passes[0] != passes[1] and passes[1] != passes[2]


def test_a_proxy_set_that_fits_one_batch_is_taken_whole_and_in_order():
    a, seen = spied(FedLAW(epochs=4, batch=15))
    b, _ = spied(FedLAW(epochs=4, batch=1000))
    assert [rows for _, rows in seen] == [None] * 4
    assert torch.equal(a.send, b.send)


def test_another_round_shuffles_otherwise():
    one, again, other = (
        spied(FedLAW(epochs=2, batch=4), key=merged_in_a_round()[2].key.fold("round", t))[0].send
        for t in (1, 1, 2)
    )
    assert torch.equal(one, again) and not torch.equal(one, other)


# --- what must hold -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["exponential", "quadratic"])
def test_without_server_epochs_it_is_fedavg_to_the_last_bit(kind):
    fedavg = trajectory(FedAvg())
    for law in (FedLAW(epochs=0, parameterisation=kind), FedLAW("none", parameterisation=kind)):
        for ours, theirs in zip(trajectory(law), fedavg, strict=True):
            assert torch.equal(ours.send, theirs.send)


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 50),
    epochs=st.integers(1, 30),
    lr=st.sampled_from([0.01, 0.3]),
    kind=st.sampled_from(["exponential", "quadratic"]),
)
def test_weights_stay_on_the_simplex_and_gamma_above_zero(seed, epochs, lr, kind):
    server, replies, context = merged_in_a_round(seed)
    law = FedLAW(epochs=epochs, lr=lr, parameterisation=kind, guard=0)
    notes = law.aggregate((), server, replies, context)[0].notes
    assert float(notes.lambdas.sum()) == pytest.approx(1.0, abs=1e-12)
    assert bool((notes.lambdas > 0).all()) and float(notes.gamma) > 0


@pytest.mark.parametrize("learn", ["both", "gamma", "lambda"])
def test_full_batches_and_small_steps_never_raise_the_proxy_loss(learn):
    """Same draws, one epoch more each time: the points of one descent."""
    server, replies, context = merged_in_a_round(3)
    losses = []
    for epochs in range(0, 16):
        law = FedLAW(learn, epochs=epochs, lr=2e-3, guard=0)
        notes = law.aggregate((), server, replies, context)[0].notes
        losses.append(float(notes.proxy_loss_after))
        assert float(notes.proxy_loss_before) == losses[0]  # FedAvg's
    assert all(after < before for before, after in itertools.pairwise(losses))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_identical_models_move_gamma_alone(dtype):
    server, replies, context = merged_in_a_round(1, dtype=dtype)
    same = replies.take(torch.tensor([0, 0, 0]))
    served, _ = FedLAW(guard=0).aggregate((), server, same, context)
    torch.testing.assert_close(served.notes.lambdas, shares(same.weights), rtol=1e-14, atol=0)
    assert abs(float(served.notes.gamma) - 1) > 0.05
    same.models[2] += 0.1  # one that differs is enough for all to move
    served, _ = FedLAW(guard=0).aggregate((), server, same, context)
    assert not torch.isclose(served.notes.lambdas, shares(same.weights), rtol=1e-3).any()


def test_permuting_the_clients_permutes_lambda():
    server, replies, context = merged_in_a_round(4)
    order = torch.tensor([2, 0, 3, 1])
    straight, _ = FedLAW().aggregate((), server, replies, context)
    turned, _ = FedLAW().aggregate((), server, replies.take(order), context)
    torch.testing.assert_close(
        turned.notes.lambdas, straight.notes.lambdas[order], rtol=1e-10, atol=0
    )
    assert not torch.allclose(straight.notes.lambdas, shares(replies.weights), rtol=0.05)


class BiasFree(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(a, b, bias=False) for a, b in ((4, 6), (6, 5), (5, 3))
        )

    def forward(self, x):
        return self.layers[2](torch.relu(self.layers[1](torch.relu(self.layers[0](x)))))


def test_shrinking_a_bias_free_relu_network_keeps_every_prediction():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = BiasFree()
    server, replies, context = merged_in_a_round(5, module=module)
    whole, _ = FedLAW("none").aggregate((), server, replies, context)
    shrunk, _ = FedLAW("none", gamma=0.9).aggregate((), server, replies, context)
    torch.testing.assert_close(shrunk.send, 0.9 * whole.send, rtol=1e-14, atol=0)
    before, after = context.proxy.logits(whole.send), context.proxy.logits(shrunk.send)
    torch.testing.assert_close(after, 0.9**3 * before, rtol=1e-10, atol=1e-14)
    assert torch.equal(before.argmax(1), after.argmax(1))


@pytest.mark.parametrize("eta", [1.0, 0.7])
def test_a_round_is_a_gradient_step_and_weight_decay(eta):
    """gamma (w - eta g) = w - gamma eta g - (1 - gamma) w, and r compares the two."""
    server, replies, context = merged_in_a_round(6)
    served, _ = FedLAW(server_lr=eta, guard=0).aggregate((), server, replies, context)
    gamma, lam = served.notes.gamma, served.notes.lambdas
    g = lam @ (server - replies.models)
    torch.testing.assert_close(
        served.send, server - gamma * eta * g - (1 - gamma) * server, rtol=1e-10, atol=1e-13
    )
    torch.testing.assert_close(served.notes.gradient_norm, g.norm())
    ratio = (gamma * eta * g).norm() / ((1 - gamma) * server).norm()
    torch.testing.assert_close(served.notes.ratio, ratio)
    assert abs(float(gamma) - 1) > 1e-3


def test_three_clients_find_the_best_point_of_the_simplex():
    """A linear model's loss is convex in lambda: a grid over the simplex knows the optimum."""
    federation = linear_federation(FedAvg())
    context = federation.context.at(0, 0.1)
    start = federation.net.initial()[0]
    ends = start + torch.from_numpy(np.random.default_rng(1).normal(0, 2.0, (3, 15)))
    replies, sizes = replies_of(ends, [1, 5, 1]), np.array([1, 5, 1]) / 7
    found = FedLAW("lambda", lr=0.3).aggregate((), start, replies, context)[0].notes
    grid = [(a / 50, b / 50, (50 - a - b) / 50) for a in range(51) for b in range(51 - a)]
    with torch.no_grad():
        losses = [float(context.proxy.loss(torch.tensor(p).double() @ ends)) for p in grid]
    best = int(np.argmin(losses))
    assert float(found.proxy_loss_after) <= losses[best] + 1e-6
    np.testing.assert_allclose(found.lambdas.numpy(), grid[best], atol=0.021)
    assert np.abs(grid[best] - sizes).max() > 0.1  # FedAvg is elsewhere
    scales = torch.linspace(0.05, 2, 79)
    shrunk = FedLAW("gamma", lr=0.3, guard=0)
    fitted = shrunk.aggregate((), start, replies, context)[0].notes
    mean = torch.from_numpy(sizes) @ ends
    with torch.no_grad():
        curve = [float(context.proxy.loss(float(s) * mean)) for s in scales]
    assert float(fitted.gamma) == pytest.approx(float(scales[int(np.argmin(curve))]), abs=0.026)


# --- parts, edges and composition ---------------------------------------------------------------


def test_fixed_shrinking_scales_fedavg():
    server, replies, context = merged_in_a_round(7)
    served, _ = FedLAW("none", gamma=0.95).aggregate((), server, replies, context)
    expected = 0.95 * weighted_mean(replies.models, shares(replies.weights))
    assert torch.equal(served.send, expected)


def test_one_client_has_all_weight_and_only_gamma_is_learnt():
    server, replies, context = merged_in_a_round(8)
    alone = replies.take(torch.tensor([2]))
    served, _ = FedLAW(guard=0).aggregate((), server, alone, context)
    assert served.notes.lambdas.tolist() == [1.0]
    assert float(served.notes.gamma) != 1.0
    torch.testing.assert_close(served.send, served.notes.gamma * alone.models[0])


def test_a_client_without_samples_has_lambda_zero():
    server, replies, context = merged_in_a_round(9)
    empty = replace(replies, weights=replies.weights * torch.tensor([1.0, 0.0, 1.0, 1.0]))
    with_it, _ = FedLAW(epochs=5).aggregate((), server, empty, context)
    without, _ = FedLAW(epochs=5).aggregate(
        (), server, empty.take(torch.tensor([0, 2, 3])), context
    )
    assert torch.equal(with_it.send, without.send)
    assert with_it.notes.lambdas.tolist() == [
        without.notes.lambdas[0], 0.0, *without.notes.lambdas[1:].tolist()
    ]  # fmt: skip


def test_the_path_is_where_a_fit_of_fewer_epochs_ends():
    server, replies, context = merged_in_a_round(9)
    empty = replace(replies, weights=replies.weights * torch.tensor([1.0, 0.0, 1.0, 1.0]))
    law = FedLAW(lr=0.05, epochs=6, batch=4, trace=True)
    served, _ = law.aggregate((), server, empty, context)
    path = served.notes.fit_path.reshape(7, 5)
    for epochs, row in enumerate(path):
        notes = replace(law, epochs=epochs).aggregate((), server, empty, context)[0].notes
        torch.testing.assert_close(row, torch.cat([notes.lambdas, notes.gamma[None]]))
    assert (path[:, 1] == 0).all() and not torch.equal(path[0], path[-1])
    plain, _ = replace(law, trace=False).aggregate((), server, empty, context)
    assert plain.notes.fit_path is None and torch.equal(plain.send, served.send)
    both, _ = replace(law, swa=True, guard=0).aggregate((), server, empty, context)
    assert both.notes.fit_path.shape == path.flatten().shape  # 3 epochs for lambda, 3 for gamma


def test_a_corrupted_client_loses_its_weight():
    server, replies, context = merged_in_a_round(10)
    good = trained(server, context)
    models_ = good + 0.01 * (replies.models - server)
    models_[1] = -3 * good
    bad = replies_of(models_, [1, 1, 1, 1])
    served, _ = FedLAW("lambda", lr=0.1).aggregate((), server, bad, context)
    assert float(served.notes.lambdas[1]) < 0.05


def test_early_stopping_gives_the_data_sizes_back():
    law = FedLAW("lambda", epochs=5, lr=0.1, stop_round=2)
    server, replies, context = merged_in_a_round(11)
    share = shares(replies.weights)
    for round, stopped in ((1, False), (2, True), (3, True)):
        served, _ = law.aggregate((), server, replies, replace(context, round=round))
        assert torch.equal(served.notes.lambdas, share) == stopped
        assert torch.equal(served.send, weighted_mean(replies.models, share)) == stopped
    both, _ = replace(law, learn="both", guard=0).aggregate(
        (), server, replies, replace(context, round=2)
    )
    torch.testing.assert_close(both.notes.lambdas, share, rtol=1e-14, atol=0)
    assert float(both.notes.gamma) != 1.0


def test_patience_ends_a_descent_on_its_plateau():
    law = FedLAW(epochs=400, lr=0.05, guard=0)
    whole, all_steps = spied(law)
    short, steps = spied(replace(law, patience=5))
    assert len(all_steps) == 400 and 20 < len(steps) < 300
    assert float(short.notes.proxy_loss_after) < float(whole.notes.proxy_loss_after) * 1.02
    assert float(short.notes.proxy_loss_after) < float(short.notes.proxy_loss_before) * 0.98
    _, steps = spied(replace(law, patience=3, lr=1e-12))  # no epoch makes progress
    assert len(steps) == 4


class Falling(Spy):
    """A proxy set whose loss falls from pass to pass, though its second batch's rises."""

    def loss(self, vector, rows=None):
        if not torch.is_grad_enabled():
            return self.inner.loss(vector, rows)
        epoch, second = divmod(len(self.seen), 2)
        self.seen.append(rows)
        return 0 * vector.sum() + (1.0 + epoch if second else 20.0 - 3 * epoch)


def test_progress_is_that_of_a_whole_pass():
    server, replies, context = merged_in_a_round()
    spy = Falling(context.proxy, [])
    law = FedLAW(epochs=5, batch=8, patience=1, guard=0)
    law.aggregate((), server, replies, replace(context, proxy=spy))
    assert len(spy.seen) == 5 * 2


@pytest.mark.parametrize("swa", [False, True])
def test_the_guard_keeps_gamma_while_the_mean_says_less_than_nothing(swa):
    server, replies, context = merged_in_a_round(12)
    loud = replace(replies, models=replies.models * 20)  # confident and wrong
    law = FedLAW(lr=0.03, epochs=20, swa=swa, gamma=0.9)
    kept, _ = law.aggregate((), server, loud, context)
    paper, _ = replace(law, guard=0.0).aggregate((), server, loud, context)
    assert float(kept.notes.proxy_loss_before) > math.log(3)
    assert float(kept.notes.gamma) == pytest.approx(0.9) and float(paper.notes.gamma) < 0.75
    assert not torch.allclose(kept.notes.lambdas, shares(replies.weights), rtol=1e-2)
    strict, _ = replace(law, guard=1e9).aggregate((), server, loud, context)
    assert float(strict.notes.gamma) == pytest.approx(0.9)  # kept, not raised to the lower end


@pytest.mark.parametrize("kind", ["exponential", "quadratic"])
def test_the_guard_keeps_the_update_larger_than_the_shrinking(kind):
    server, replies, context = merged_in_a_round(12)
    good = trained(server, context)
    sure = replies_of(3 * good + 0.1 * (replies.models - server))  # right but far too sure
    law = FedLAW("gamma", lr=0.1, parameterisation=kind)
    ratios = {}
    for guard in (0.0, 5.0, 40.0, math.inf):
        notes = replace(law, guard=guard).aggregate((), good, sure, context)[0].notes
        assert float(notes.proxy_loss_before) < math.log(3)
        ratios[guard] = float(notes.ratio), float(notes.gamma)
    assert ratios[0.0][0] < 5 < ratios[0.0][0] * 4
    assert ratios[5.0][0] == pytest.approx(5.0) and ratios[40.0][0] == pytest.approx(40.0)
    assert ratios[0.0][1] < ratios[5.0][1] < ratios[40.0][1] < ratios[math.inf][1] == 1.0


@pytest.mark.parametrize("kind", ["exponential", "quadratic"])
def test_the_guard_holds_at_the_last_lambda_as_well(kind):
    """Weights move towards clients with short updates, at which the first bound is too low."""
    server, replies, context = merged_in_a_round(12)
    good = trained(server, context)
    steps = replies.models - server
    scale = torch.linspace(0.02, 1.0, len(steps), dtype=steps.dtype)[:, None]
    sure = replies_of(3 * good + scale * steps)
    for growth in (False, True):
        law = FedLAW("both", lr=0.1, parameterisation=kind, guard=5.0, guard_growth=growth)
        notes = law.aggregate((), 3 * good, sure, context)[0].notes
        assert not torch.allclose(notes.lambdas, shares(sure.weights), atol=0.05)
        assert float(notes.gamma) < 1 and float(notes.ratio) == pytest.approx(5.0, rel=1e-4)


@pytest.mark.parametrize("kind", ["exponential", "quadratic"])
def test_the_guard_lets_a_model_grow_unless_told_and_bears_a_server_of_zeros(kind):
    server, replies, context = merged_in_a_round(12)
    good = trained(server, context)
    shy = replies_of(0.3 * good + 0.01 * (replies.models - server))
    law = FedLAW("gamma", parameterisation=kind)
    grown, _ = law.aggregate((), 0.2 * good, shy, context)
    held, _ = replace(law, guard_growth=True).aggregate((), 0.2 * good, shy, context)
    assert float(grown.notes.gamma) > 1.2 > float(held.notes.gamma) > 1.0
    assert float(grown.notes.ratio) < float(held.notes.ratio) == pytest.approx(5.0)
    zeros = torch.zeros_like(server)  # any step is longer than this server: nothing to hold
    for growth in (False, True):
        fast = replace(law, guard_growth=growth, lr=0.1)
        first, _ = fast.aggregate((), zeros, shy, context)
        assert bool(torch.isfinite(first.send).all()) and float(first.notes.gamma) > 2.5


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.norm, self.head = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.hidden(x))))


@dataclass(frozen=True)
class Watching(FedAvg):
    """Keeps the statistics its proxy set was given."""

    def aggregate(self, state, server, replies, context):
        STATISTICS.append(context.proxy.buffers.clone())
        return super().aggregate(state, server, replies, context)


STATISTICS: list = []


@pytest.mark.parametrize("policy", ["mean", "keep"])
def test_the_proxy_loss_uses_the_statistics_that_go_with_the_merged_model(policy):
    STATISTICS.clear()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Normalised()
    federation = toy_federation(Watching(), module=module, participation="count(clients=2)")
    federation = replace(federation, buffers=policy, eligible=np.arange(3))  # no batch of one row
    trainer = replace(federation.trainer, batch=16)
    executor = replace(federation.executor, trainer=trainer)
    federation = replace(federation, trainer=trainer, executor=executor)
    server, states = federation.begin()
    for after, _ in federation.rounds_from(server, states):
        assert torch.equal(STATISTICS[-1], after.buffers)
    moved = not torch.equal(after.buffers, server.buffers)
    assert moved == (policy == "mean") and len(STATISTICS) == 4


@pytest.mark.parametrize(
    ("composed", "plain"),
    [
        ("wima(fedlaw(epochs=5), window=1)", "fedlaw(epochs=5)"),
        ("ima(fedlaw(epochs=5), window=1, decay='none')", "fedlaw(epochs=5)"),
        ("fedlaw(epochs=0, local=prox(mu=0.1))", "fedavg(local=prox(mu=0.1))"),
        ("fedlaw(epochs=5, local=prox(mu=0.0))", "fedlaw(epochs=5)"),
    ],
)
def test_compositions_at_a_neutral_setting(composed, plain):
    pairs = zip(trajectory(parse(composed)), trajectory(parse(plain)), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours.send, theirs.send, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(ours.score, theirs.score, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "expression",
    [
        "wima(fedlaw(epochs=5), window=3)",
        "ima(fedlaw(epochs=5), window=2, start=0.25)",
        "fedlaw(epochs=5, local=prox(mu=0.5))",
    ],
)
def test_compositions_do_something(expression):
    plain = trajectory(FedLAW(epochs=5))[-1]
    assert not torch.allclose(trajectory(parse(expression))[-1].score, plain.score, rtol=1e-6)


def test_wima_over_fedlaw_scores_the_mean_of_its_models():
    ours = trajectory(parse("wima(fedlaw(epochs=5), window=3)"))
    base = trajectory(FedLAW(epochs=5))
    torch.testing.assert_close(ours[-1].send, base[-1].send)
    torch.testing.assert_close(
        ours[-1].score, torch.stack([s.send for s in base[-3:]]).mean(0), rtol=1e-12, atol=1e-14
    )


def test_the_record_holds_gamma_lambda_and_the_losses():
    federation = toy_federation(FedLAW("lambda", epochs=2), rounds=1)
    server, states = federation.begin()
    ((_, record),) = federation.rounds_from(server, states)
    line = json.loads(record.line())
    assert len(line["note_lambdas"]) == 3 and line["note_gamma"] == 1.0
    assert line["note_ratio"] is None  # infinite: nothing shrinks
    assert line["note_proxy_loss_after"] < line["note_proxy_loss_before"]
    assert line["note_gradient_norm"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gamma": 0.0}, "gamma must be above 0, got 0.0"),
        ({"lr": -1.0}, "lr must be above 0"),
        ({"server_lr": math.inf}, "server_lr must be above 0"),
        ({"guard": -0.5}, "guard must be at least 0, got -0.5"),
        ({"guard": math.nan}, "guard must be at least 0"),
        ({"epochs": -1}, "epochs must be at least 0"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"patience": -1}, "patience must be at least 0"),
        ({"stop_round": -2}, "stop_round must be at least 0"),
        ({"learn": "gamma", "swa": True}, "swa averages lambda"),
        ({"learn": "none", "swa": True}, "swa averages lambda: learn is 'none'"),
    ],
)
def test_bad_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        FedLAW(**arguments)


def test_a_missing_proxy_set_is_named():
    server, replies, context = merged_in_a_round()
    with pytest.raises(
        ValueError, match=r"fedlaw needs labelled rows on the server: set data\.proxy_per_class"
    ):
        FedLAW().aggregate((), server, replies, replace(context, proxy=None))
    assert models(linear_federation(FedLAW(epochs=1), rounds=1))


@pytest.mark.parametrize("law", [FedLAW("none", gamma=0.9), FedLAW(epochs=0, gamma=0.9)], ids=str)
def test_what_learns_nothing_needs_no_proxy_set(law):
    server, replies, context = merged_in_a_round(7)
    with_it, _ = law.aggregate((), server, replies, context)
    without, _ = law.aggregate((), server, replies, replace(context, proxy=None))
    assert torch.equal(without.send, with_it.send)
    losses = ("proxy_loss_before", "proxy_loss_after")
    assert all(math.isnan(getattr(without.notes, name)) for name in losses)
    assert all(math.isfinite(getattr(with_it.notes, name)) for name in losses)
    assert needs_of(law) == needs_of(parse(f"wima({law})")) == set()


@pytest.mark.parametrize("learn", ["both", "gamma", "lambda"])
def test_what_learns_needs_a_proxy_set(learn):
    assert needs_of(FedLAW(learn)) == needs_of(parse(f"wima({FedLAW(learn)})")) == {"proxy"}
    assert needs_of(FedLAW(learn, local=Prox())) == {"proxy"}
