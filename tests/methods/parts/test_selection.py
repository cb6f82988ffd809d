import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbasin.methods.parts import selection
from fedbasin.methods.parts.selection import Candidates, choose, gram


def objective(models, losses, weights, smoothness):
    """J as the paper writes it: mean loss and mean squared distance from the mean."""
    p = weights / weights.sum()
    centre = p @ models
    return p @ losses + smoothness / 2 * (p @ ((models - centre) ** 2).sum(1))


class Trial:
    """A random problem with its models at hand; J is always computed from the models."""

    def __init__(self, rng, counts, fixed=14, size=50, spread=1.0, shift=0.0, **settings):
        self.smoothness = settings.pop("smoothness", 1.0)
        loss_scale, uneven = settings.pop("loss_scale", 0.0), settings.pop("uneven", False)
        clients = len(counts)
        centres = rng.normal(size=(clients + fixed, size)) * spread + shift
        self.counts = tuple(counts)
        self.fixed = centres[clients:] + rng.normal(size=(fixed, size))
        owner = np.repeat(np.arange(clients), counts)
        self.models = centres[owner] + rng.normal(size=(len(owner), size))
        self.losses = rng.random(len(owner)) * loss_scale
        self.fixed_losses = rng.random(fixed) * loss_scale
        self.weights = rng.integers(1, 9, clients) / 1.0 if uneven else np.ones(clients)
        self.fixed_weights = rng.integers(1, 9, fixed) / 1.0 if uneven else np.ones(fixed)
        self.server = rng.normal(size=size) + shift
        self.first = np.concatenate([[0], np.cumsum(counts)[:-1]])

    def candidates(self):
        centre = torch.from_numpy(self.server)
        apart = self.fixed_weights @ (self.fixed - self.server)
        rows = [torch.from_numpy(m) for m in self.models]
        return Candidates(
            gram(rows, centre, torch.from_numpy(apart)),
            self.losses,
            self.weights,
            self.counts,
            self.fixed_weights.sum(),
            self.smoothness,
        )

    def objective(self, rows, clients=None):
        clients = list(range(len(self.counts))) if clients is None else clients
        return objective(
            np.concatenate([self.fixed, self.models[rows]]),
            np.concatenate([self.fixed_losses, self.losses[rows]]),
            np.concatenate([self.fixed_weights, self.weights[clients]]),
            self.smoothness,
        )

    def brute_force(self, batches):
        """The paper's eq. 8 by trying everything, with later batches left out."""
        rows, clients = [], []
        for batch in batches:
            ways = itertools.product(*(range(self.counts[n]) for n in batch))
            options = [
                [int(self.first[n]) + k for n, k in zip(batch, w, strict=True)] for w in ways
            ]
            joined = clients + list(batch)
            rows += min(options, key=lambda o: self.objective(rows + o, joined))
            clients = joined
        return np.array(rows)[np.argsort(clients)]


def whole(trial):
    return [np.arange(len(trial.counts))]


@given(
    seed=st.integers(0, 10**6),
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    fixed=st.integers(0, 4),
    cuts=st.integers(1, 5),
    smoothness=st.sampled_from([0.0, 0.1, 1.0, 7.0]),
    loss_scale=st.sampled_from([0.0, 1.0, 50.0]),
    uneven=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_batch_after_batch_is_brute_force(
    seed, counts, fixed, cuts, smoothness, loss_scale, uneven
):
    rng = np.random.default_rng(seed)
    trial = Trial(
        rng, counts, fixed, size=5, smoothness=smoothness, loss_scale=loss_scale, uneven=uneven
    )
    batches = np.array_split(rng.permutation(len(counts)), min(cuts, len(counts)))
    ours, theirs = choose(trial.candidates(), batches), trial.brute_force(batches)
    if fixed + len(counts) > 1 and (smoothness or loss_scale):  # else all are equal
        assert ours.tolist() == theirs.tolist()
    optimal = choose(trial.candidates(), whole(trial))
    assert trial.objective(optimal) <= trial.objective(ours) + 1e-9


def test_the_three_forms_of_the_divergence_agree_and_a_shift_changes_nothing():
    rng = np.random.default_rng(0)
    models, zeros, ones = rng.normal(size=(7, 9)), np.zeros(7), np.ones(7)
    first = 2 * objective(models, zeros, ones, 1.0)
    mean = models.mean(0)
    pairs = sum(((a - b) ** 2).sum() for a, b in itertools.combinations(models, 2))
    assert first == pytest.approx((models**2).sum(1).mean() - mean @ mean)
    assert first == pytest.approx(pairs / 49)
    for seed in range(5):
        still = Trial(np.random.default_rng(seed), [3] * 6)
        expected = still.brute_force(whole(still)).tolist()
        for shift in (0.0, 3.0, 1e4):
            trial = Trial(np.random.default_rng(seed), [3] * 6, shift=shift)
            assert choose(trial.candidates(), whole(trial)).tolist() == expected


@pytest.mark.parametrize("cuts", [2, 3, 6])
def test_greedy_is_mostly_optimal_and_polishing_makes_it_so(cuts):
    """The spec's random trials: 6 of 20 clients, 3 models each; the newest are far off."""
    rng = np.random.default_rng(0)
    greedy, polished, newest, blind = [], [], [], []
    for _ in range(40):
        trial = Trial(rng, [3] * 6)
        candidates = trial.candidates()
        least = trial.objective(choose(candidates, whole(trial)))
        batches = np.array_split(rng.permutation(6), cuts)
        greedy.append(trial.objective(choose(candidates, batches)) / least - 1)
        polished.append(trial.objective(choose(candidates, batches, polish=True)) / least - 1)
        newest.append(trial.objective(trial.first) / least - 1)
        blind.append(trial.objective(trial.first + rng.integers(0, 3, 6)) / least - 1)
    assert min(greedy + newest + blind) > -1e-12
    assert 0.7 <= np.mean(np.array(greedy) < 1e-9) < 1 and np.mean(greedy) < 1e-3
    assert max(polished) < 1e-9
    assert np.mean(newest) > 0.02 and np.mean(blind) > 0.02


def test_polish_never_hurts_and_ends_where_no_single_change_helps():
    rng = np.random.default_rng(1)
    for _ in range(20):
        trial = Trial(rng, [4] * 8, fixed=2, spread=0.2, loss_scale=3.0, uneven=True)
        candidates, batches = trial.candidates(), [np.array([n]) for n in range(8)]
        rows = choose(candidates, batches, polish=True)
        least = trial.objective(rows)
        assert least <= trial.objective(choose(candidates, batches)) + 1e-12
        for client, row in itertools.product(range(8), range(4)):
            other = rows.copy()
            other[client] = trial.first[client] + row
            assert trial.objective(other) >= least - 1e-9


@pytest.mark.parametrize("block", [selection._BLOCK, 1])
@pytest.mark.parametrize("polish", [False, True])
def test_a_gain_of_no_more_than_rounding_is_a_tie(monkeypatch, block, polish):
    monkeypatch.setattr(selection, "_BLOCK", block)
    for older, picked in ((1 - 1e-15, [0, 2]), (1 - 1e-9, [1, 3])):
        squares = np.diag([1.0, older, 1.0, older, 0.0])  # two clients, the newest model first
        candidates = Candidates(squares, np.zeros(4), np.ones(2), (2, 2), fixed_weight=1.0)
        assert choose(candidates, [np.arange(2)], polish=polish).tolist() == picked


def test_as_many_combinations_as_may_be_tried_are_allowed():
    selection.check_combinations([2, selection.MOST_COMBINATIONS // 2])
    with pytest.raises(ValueError, match="more than 20,000,000"):
        selection.check_combinations([selection.MOST_COMBINATIONS + 1])


def test_ties_take_the_newest():
    rng = np.random.default_rng(2)
    trial = Trial(rng, [3, 2, 3, 3], fixed=5, size=1000)
    trial.models = trial.models[trial.first][np.repeat(np.arange(4), trial.counts)]
    for cuts in (1, 2, 4):
        batches = np.array_split(np.arange(4), cuts)
        for polish in (False, True):
            chosen = choose(trial.candidates(), batches, polish=polish)
            assert chosen.tolist() == trial.first.tolist()
    for _ in range(10):  # a tie that rounding has disturbed is a tie
        noisy = trial.candidates()
        noisy.gram[:] *= 1 + 1e-15 * rng.normal(size=noisy.gram.shape)
        assert choose(noisy, whole(trial)).tolist() == trial.first.tolist()
    trial.models[5] += 100.0  # client 2's newest is now far off, its other two are still tied
    assert choose(trial.candidates(), whole(trial)).tolist() == [0, 3, 6, 8]


def test_small_blocks_change_nothing(monkeypatch):
    trial = Trial(np.random.default_rng(3), [3] * 7, loss_scale=5.0)
    expected = trial.brute_force(whole(trial))
    product = trial.candidates().gram
    monkeypatch.setattr(selection, "_BLOCK", 50)
    np.testing.assert_allclose(trial.candidates().gram, product, rtol=1e-12)
    assert choose(trial.candidates(), whole(trial)).tolist() == expected.tolist()
    tied = Trial(np.random.default_rng(3), [3] * 7)
    tied.models[:] = tied.models[0]
    assert choose(tied.candidates(), whole(tied)).tolist() == tied.first.tolist()


def test_the_gram_matrix_keeps_small_differences_of_large_float32_vectors():
    rng = np.random.default_rng(4)
    centre = (1000 + rng.normal(size=4001)).astype(np.float32)
    rows = (centre + 0.01 * rng.normal(size=(5, 4001))).astype(np.float32)
    fixed = rng.normal(size=4001)
    exact = np.concatenate([rows.astype(np.float64) - centre.astype(np.float64), fixed[None]])
    found = gram([torch.from_numpy(r) for r in rows], torch.from_numpy(centre), torch.tensor(fixed))
    np.testing.assert_allclose(found, exact @ exact.T, rtol=1e-11, atol=1e-11)


def test_a_cohort_of_single_models_needs_no_search():
    trial = Trial(np.random.default_rng(5), [1] * 150 + [2], fixed=1, size=4)
    assert (
        choose(trial.candidates(), whole(trial)).tolist()
        == trial.brute_force(whole(trial)).tolist()
    )


@pytest.mark.parametrize(("clients", "power"), [(16, 8), (2000, 954)])
def test_too_many_combinations_are_refused_with_what_to_change(clients, power):
    with pytest.raises(ValueError, match=rf"{clients} clients .* 10\^{power} .* `batches`"):
        selection.check_combinations([3] * clients)
    selection.check_combinations([3] * 15)


@given(seed=st.integers(0, 10**6), epsilon=st.sampled_from([0.01, 0.3, 2.0]))
@settings(max_examples=25, deadline=None)
def test_theorem_1_on_quadratics(seed, epsilon):
    """Leaving gradients out of the objective costs at most 4 L eps^2 + 2 L D eps of loss."""
    rng, clients, size, smoothness = np.random.default_rng(seed), 4, 3, 2.0
    optima = rng.normal(size=(clients, size))
    bases = np.linalg.qr(rng.normal(size=(clients, size, size)))[0]
    curves = bases @ (rng.uniform(0, smoothness, (clients, size, 1)) * bases.transpose(0, 2, 1))
    steps = rng.normal(size=(clients, 3, size))
    steps *= epsilon * rng.random((clients, 3, 1)) / np.linalg.norm(steps, axis=-1, keepdims=True)
    cached = optima[:, None] + steps

    def loss(n, w):
        return (w - optima[n]) @ curves[n] @ (w - optima[n]) / 2

    def global_loss(w):
        return np.mean([loss(n, w) for n in range(clients)])

    def bound(models):  # eq. 3 at the w of eq. 4
        slopes = np.array([curves[n] @ (models[n] - optima[n]) for n in range(clients)])
        w = models.mean(0) - slopes.mean(0) / smoothness
        gaps = w - models
        own = [loss(n, models[n]) for n in range(clients)]
        return np.mean(own + (slopes * gaps).sum(1) + smoothness / 2 * (gaps**2).sum(1))

    ways = [cached[range(clients), list(w)] for w in itertools.product(range(3), repeat=clients)]
    exact = min(ways, key=bound).mean(0)
    trial = Trial(rng, [3] * clients, fixed=0, size=size, smoothness=smoothness)
    trial.models = cached.reshape(-1, size)
    trial.losses = np.array([loss(n, w) for n in range(clients) for w in cached[n]])
    ours = trial.models[choose(trial.candidates(), whole(trial))].mean(0)
    apart = max(np.linalg.norm(a - b) for a in optima for b in optima)
    limit = 4 * smoothness * epsilon**2 + 2 * smoothness * apart * epsilon
    assert global_loss(ours) - global_loss(exact) <= limit


def test_equation_4_with_zero_gradients_is_the_plain_mean():
    """Of all points w, the mean has the least mean squared distance to the picked models."""
    rng = np.random.default_rng(6)
    trial = Trial(rng, [3] * 5, fixed=3, size=4)
    models = np.concatenate([trial.fixed, trial.models[choose(trial.candidates(), whole(trial))]])

    def spread(w):
        return ((models - w) ** 2).sum(1).mean()

    assert spread(models.mean(0)) == pytest.approx(
        2 * objective(models, 0 * models[:, 0], np.ones(8), 1.0)
    )
    assert all(
        spread(models.mean(0)) < spread(models.mean(0) + step) for step in rng.normal(size=(50, 4))
    )
