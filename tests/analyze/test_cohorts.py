import numpy as np
import pytest
import torch
from torch import nn

from fedbasin.analyze.classes import accuracy_by_class, collapse, thirds
from fedbasin.analyze.coherence import (
    accumulate,
    correlate_weights,
    critical_round,
    gradient_coherence,
    group_coherence,
    heterogeneity_coherence,
)
from fedbasin.analyze.decomposition import (
    cka_matrix,
    decompose,
    ensemble_by_count,
    ensemble_gap,
    error_by_count,
    linear_cka,
    locality,
    mean_of_pairs,
    squared_error,
)
from fedbasin.analyze.neurons import (
    class_concentration,
    mass_concentration,
    neuron_concentration,
)
from fedbasin.core.evaluator import Evaluator, Measured
from fedbasin.core.net import Net
from fedbasin.core.rng import root, torch_draws_from
from fedbasin.core.task import Classification

KEY = root(11)
DRAWS = KEY.fold("tests").numpy()


def normal(*shape):
    return torch.from_numpy(DRAWS.standard_normal(shape))


def small_net(*layers):
    with torch_draws_from(KEY):
        return Net(nn.Sequential(*(layer() for layer in layers)), dtype=torch.float64)


def decomposition_case(draws=4, clients=3, rows=25, classes=5):
    outputs = normal(draws, clients, rows, classes).softmax(-1)
    labels = torch.from_numpy(DRAWS.integers(0, classes, rows))
    owner = torch.from_numpy(DRAWS.integers(0, clients + 1, rows))  # some rows belong to no one
    own = owner == torch.arange(clients)[:, None]
    return outputs, labels, torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), own


def test_the_five_factors_are_the_ensembles_loss_exactly():
    """Theorem 1 is an identity for the ensemble: to the last bits of float64."""
    for draws in (1, 2, 7):
        outputs, labels, share, own = decomposition_case(draws)
        found = decompose(outputs, labels, share, own)
        parts = (found.train_bias, found.heter_bias, found.cross, found.variance, found.covariance)
        assert sum(parts) == pytest.approx(found.ensemble_loss, rel=1e-13)
        assert decompose(outputs, labels, 40 * share, own) == pytest.approx(found)
        if draws == 1:
            assert found.variance == 0 and found.covariance == 0
        else:
            assert found.variance > 0 and found.covariance != 0


def test_each_factor_equals_numpy_loops():
    outputs, labels, share, own = decomposition_case()
    found = decompose(outputs, labels, share, own)
    f, pi, mine = outputs.numpy(), share.double().numpy(), own.numpy()
    draws, clients, rows, classes = f.shape
    train = heter = cross = variance = covariance = loss = 0.0
    bound = 0.0
    own_rows, other_rows = np.zeros(clients), np.zeros(clients)
    for x in range(rows):
        spread = f[:, :, x] - f[:, :, x].mean(0)
        pairs = [np.mean([d[j] @ d[k] for d in spread]) for j in range(clients) for k in range(j)]
        bound += (clients - 1) / clients * min(pairs) / rows
        y = np.eye(classes)[int(labels[x])]
        bias = [y - f[:, k, x].mean(0) for k in range(clients)]
        t = sum(pi[k] * bias[k] * mine[k, x] for k in range(clients))
        h = sum(pi[k] * bias[k] * (not mine[k, x]) for k in range(clients))
        train, heter, cross = train + t @ t, heter + h @ h, cross + 2 * t @ h
        for k in range(clients):
            size = np.sqrt(bias[k] @ bias[k])
            own_rows[k] += size * mine[k, x] / mine[k].sum()
            other_rows[k] += size * (not mine[k, x]) / (~mine[k]).sum()
            for j in range(clients):
                a, b = f[:, k, x] - f[:, k, x].mean(0), f[:, j, x] - f[:, j, x].mean(0)
                term = pi[k] * pi[j] * np.mean([a[d] @ b[d] for d in range(draws)])
                variance, covariance = variance + term * (k == j), covariance + term * (k != j)
        wrong = [y - sum(pi[k] * f[d, k, x] for k in range(clients)) for d in range(draws)]
        loss += np.mean([e @ e for e in wrong])
    wanted = [v / rows for v in (train, heter, cross, variance, covariance, loss)]
    np.testing.assert_allclose([*found[:5], found.ensemble_loss], wanted, rtol=1e-10)
    np.testing.assert_allclose(found[-2:], [pi @ own_rows, pi @ other_rows], rtol=1e-10)
    assert found.covariance_bound == pytest.approx(bound)
    even = decompose(outputs, labels, torch.ones(clients), own)
    assert even.covariance_bound <= even.covariance
    one = decompose(outputs[:1, :1], labels, torch.ones(1), own[:1])
    assert squared_error(outputs[0, 0], labels) == pytest.approx(one.ensemble_loss)


def test_a_client_without_rows_has_no_bias_on_its_own():
    outputs, labels, share, own = decomposition_case()
    own[2] = False
    held = decompose(outputs[:, :2], labels, torch.tensor([0.625, 0.375]), own[:2]).own_rows
    assert decompose(outputs, labels, share, own).own_rows == pytest.approx(held)
    nobody = decompose(outputs, labels, share, torch.zeros_like(own))
    assert np.isnan(nobody.own_rows) and nobody.train_bias == 0


def test_ensemble_and_average_differ_by_the_square_of_the_distance():
    net = small_net(lambda: nn.Linear(4, 6), nn.Tanh, lambda: nn.Linear(6, 3))
    ground = Evaluator(net, normal(40, 4), torch.zeros(40, dtype=torch.int64), lambda r, k: r, 3)
    models = net.initial()[0] + 0.5 * normal(5, net.layout.size)
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    found = ensemble_gap(ground, models, weights, halvings=6)
    assert found.order == pytest.approx(2, abs=0.05)
    assert (found.gap[:-1] > found.gap[1:]).all() and found.scale[0] == 1
    mean = (weights / 15).double() @ models
    assert float(found.distance[0]) == pytest.approx(float((models - mean).norm(dim=1).max()))
    assert float(found.distance[1]) == pytest.approx(float(found.distance[0]) / 2)
    same = ensemble_gap(ground, models[:1].expand(3, -1), torch.ones(3))
    assert same.gap.max() < 1e-12


class Far:
    """A landscape whose error is the distance from zero."""

    def measure(self, weights, models, tick=lambda count: None):
        points = weights.double() @ models.double()
        return Measured(points.norm(dim=1), points.norm(dim=1))


def test_averaging_more_orthogonal_models_shrinks_their_mean_as_one_over_root_k():
    models = torch.eye(6, dtype=torch.float64)
    found = error_by_count(Far(), models, torch.ones(6), KEY, subsets=4)
    torch.testing.assert_close(found.mean, 1 / torch.arange(1, 7).double().sqrt())
    assert found.averaged.tolist() == [1, 2, 3, 4, 5, 6]
    uneven = error_by_count(Far(), models, torch.arange(1.0, 7.0), KEY, subsets=4)
    assert float(uneven.mean[5]) == pytest.approx(np.sqrt(91) / 21)  # one subset: all, by samples
    assert (uneven.low <= uneven.mean).all() and (uneven.mean <= uneven.high).all()
    assert uneven.low[1] < uneven.high[1]


def test_an_ensemble_averages_what_the_subsets_of_the_averages_say():
    net = small_net(lambda: nn.Linear(4, 3))
    labels = torch.from_numpy(DRAWS.integers(0, 3, 40))
    ground, models = (
        Evaluator(net, normal(40, 4), labels, lambda r, k: r, Classification()),
        normal(4, 15),
    )
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0])
    found = ensemble_by_count(ground, models, weights, KEY, subsets=5)
    said = torch.softmax(ground.outputs(models), 2).numpy()
    draws, wanted = KEY.fold("subsets").numpy(), []
    for count in range(1, 5):
        for _ in range(5):
            chosen = draws.permutation(4)[:count]
            mean = np.average(said[chosen], axis=0, weights=weights.numpy()[chosen])
            wanted.append((mean.argmax(1) != ground.labels.numpy()).mean())
    wanted = np.array(wanted).reshape(4, 5)
    np.testing.assert_allclose(found.mean, wanted.mean(1))
    np.testing.assert_allclose(found.low, wanted.min(1))
    np.testing.assert_allclose(found.high, wanted.max(1))
    assert found.averaged.tolist() == [1, 2, 3, 4]
    alone = error_by_count(ground, models, weights, KEY, subsets=5)
    assert float(alone.mean[0]) == pytest.approx(float(found.mean[0]))  # of one model both are it


def test_cka_is_one_for_rotations_and_what_gram_matrices_say_otherwise():
    x, y = normal(30, 4), normal(30, 6)
    turn = torch.linalg.qr(normal(4, 4))[0]
    assert float(linear_cka(x, 3 * x @ turn + 7)) == pytest.approx(1)
    centre = np.eye(30) - 1 / 30
    k, m = (centre @ (a @ a.T).numpy() @ centre for a in (x, y))
    wanted = (k * m).sum() / np.sqrt((k * k).sum() * (m * m).sum())
    assert float(linear_cka(x, y)) == pytest.approx(wanted)
    outputs = normal(3, 30, 4)
    matrix = cka_matrix(outputs)
    assert float(matrix[0, 2]) == pytest.approx(float(linear_cka(outputs[0], outputs[2])))
    torch.testing.assert_close(matrix.diagonal(), torch.ones(3, dtype=torch.float64))
    off = [float(matrix[i, j]) for i in range(3) for j in range(3) if i != j]
    assert mean_of_pairs(matrix) == pytest.approx(np.mean(off))
    assert np.isnan(mean_of_pairs(matrix[:1, :1]))


def test_locality_and_divergence_of_a_cohort():
    models = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    found = locality(models, torch.zeros(2), torch.tensor([1.0, 3.0]))
    assert found.farthest == 5 and found.mean == 3
    mean = np.array([0.75, 1.75])
    wanted = 0.25 * ((models[0].numpy() - mean) ** 2).sum()
    wanted += 0.75 * ((models[1].numpy() - mean) ** 2).sum()
    assert found.divergence == pytest.approx(wanted)


def test_coherence_of_known_updates():
    start = torch.ones(3)
    models = start - torch.tensor([[1.0, 0, 0], [2.0, 0, 0], [0, 1.0, 0], [-1.0, 0, 0]])
    share = torch.tensor([0.1, 0.2, 0.3, 0.4])
    found = gradient_coherence(start, models, share)
    wanted = torch.tensor([[1, 1, 0, -1], [1, 1, 0, -1], [0, 0, 1, 0], [-1, -1, 0, 1.0]])
    torch.testing.assert_close(found.pairs, wanted.double())
    # Pairs: (0,1) +, (0,3) -, (1,3) -; each counted twice, over m = 4.
    assert found.cohort == pytest.approx(2 * (0.02 - 0.04 - 0.08) / 4, rel=1e-6)
    assert found.mean == pytest.approx(-2 / 12)
    still = gradient_coherence(start, torch.stack([start, models[0]]), torch.ones(2) / 2)
    assert still.cohort == 0  # a client that did not move agrees with no one


def test_groups_of_clients_and_the_critical_round():
    pairs = torch.tensor([[1, 0.5, 0.1], [0.5, 1, 0.3], [0.1, 0.3, 1]])
    found = group_coherence(pairs, [7, 8, 9], [frozenset({7, 8}), frozenset({9, 4})])
    assert found[0, 0] == pytest.approx(0.5) and found[0, 1] == pytest.approx(0.2)
    assert np.isnan(found[1, 1])
    assert critical_round([1, 5, 9], [0.3, 0.0, -0.1]) == 5
    assert critical_round([1, 5], [0.3, 0.1]) is None


def test_a_cohort_that_holds_what_all_hold_has_full_overlap():
    counts = torch.tensor([[10, 0], [0, 10], [5, 5]])
    both = heterogeneity_coherence(counts, torch.tensor([0, 1]), torch.tensor([0.5, 0.5]))
    assert both == pytest.approx((1, 1))
    one = heterogeneity_coherence(counts, torch.tensor([0]), torch.ones(1))
    assert one.one_minus_tv == pytest.approx(0.5) and one.cosine == pytest.approx(np.sqrt(0.5))
    uneven = heterogeneity_coherence(counts, torch.tensor([0, 2]), torch.tensor([0.2, 0.8]))
    assert uneven.one_minus_tv == pytest.approx(0.9)


def test_weights_are_summed_by_client_and_correlated():
    cohorts = [np.array([0, 2]), np.array([2, 3])]
    assert accumulate(5, cohorts, [[0.25, 0.75], [0.5, 0.5]]).tolist() == [0.25, 0, 1.25, 0.5, 0]
    with pytest.raises(ValueError, match="round 2 has 1 weights for 2 clients"):
        accumulate(5, cohorts, [[0.25, 0.75], [0.5]])
    counts = DRAWS.integers(1, 50, (12, 4))
    sizes, spread = counts.sum(1), (counts / counts.sum(1, keepdims=True)).var(1)
    found = correlate_weights(3.0 * sizes, counts)
    assert found.size == pytest.approx(1) and found.clients == 12
    assert found.balance == pytest.approx(np.corrcoef(sizes, 1 / spread)[0, 1])
    assert found.product == pytest.approx(np.corrcoef(sizes, sizes / spread)[0, 1])
    weights = 3.0 * sizes
    weights[0] = 0  # never took part
    counts[1] = 9  # perfectly balanced: 1 / var is infinite
    assert correlate_weights(weights, counts).clients == 10
    assert np.isnan(correlate_weights(np.ones(12), counts).size)
    with pytest.raises(ValueError, match="at least 3"):
        correlate_weights(weights[:3], counts[:3])


def test_thirds_and_accuracy_by_class():
    counts = torch.tensor([5, 50, 500, 5000])
    assert [part.tolist() for part in thirds(counts)] == [[3, 2], [1], [0]]
    labels = torch.tensor([0, 0, 1, 1, 2, 2, 2, 2])
    answers = torch.tensor([0, 1, 1, 1, 2, 0, 0, 0])
    found = accuracy_by_class(answers, labels, counts)
    assert found.accuracy[:3].tolist() == [0.5, 1, 0.25] and found.accuracy[3].isnan()
    assert found.thirds.tolist() == [0.25, 1, 0.5]  # the class without rows is left out


def test_a_perfect_simplex_has_no_collapse_and_merged_tail_rows_have():
    classes = 6
    simplex = torch.eye(classes, dtype=torch.float64) - 1 / classes
    labels = torch.arange(classes).repeat(3)
    counts = torch.arange(classes, 0, -1)
    found = collapse(2 * simplex, 5 * simplex[labels] + 3, labels, counts)
    wanted = torch.full((3,), -1 / (classes - 1), dtype=torch.float64)
    torch.testing.assert_close(found.rows, wanted)
    torch.testing.assert_close(found.align, torch.ones(3, dtype=torch.float64))
    assert found.spread == pytest.approx(0, abs=1e-9)
    assert found.within == pytest.approx(0, abs=1e-12)
    merged = simplex.clone()
    merged[5] = merged[4]
    assert float(collapse(merged, simplex[labels], labels, counts).rows[2]) == pytest.approx(1)
    noise = normal(len(labels), classes)
    loose = collapse(simplex, simplex[labels] + noise, labels, counts)
    h = (simplex[labels] + noise).numpy()
    means = np.stack([h[labels.numpy() == c].mean(0) for c in range(classes)])
    inside = ((h - means[labels.numpy()]) ** 2).sum(1).mean()
    between = ((means - means.mean(0)) ** 2).sum(1).mean()
    assert loose.within == pytest.approx(inside / between) and loose.spread > 0
    with pytest.raises(ValueError, match="class 0"):
        collapse(simplex, simplex[1:], labels[1:6], counts)


def test_concentration_of_known_activity():
    assert class_concentration(torch.eye(4)) == pytest.approx(1)
    assert class_concentration(torch.ones(4, 7)) == pytest.approx(0, abs=1e-12)
    half = torch.tensor([[1.0, 0], [1.0, 0], [0, 0], [0, 0]])  # a neuron of two classes, a dead one
    assert class_concentration(half) == pytest.approx(0.5)
    assert np.isnan(class_concentration(torch.zeros(4, 2)))
    assert mass_concentration(torch.ones(5)) == pytest.approx(0, abs=1e-12)
    assert mass_concentration(torch.tensor([0, 0, 0, 0, 3.0])) == pytest.approx(0.8)
    a = np.abs(DRAWS.standard_normal(9))
    gini = np.abs(a[:, None] - a).sum() / (2 * len(a) ** 2 * a.mean())
    assert mass_concentration(torch.from_numpy(a)) == pytest.approx(gini)
    assert np.isnan(mass_concentration(torch.zeros(3)))


def test_concentration_reads_every_layer_and_counts_classes_alike():
    net = small_net(lambda: nn.Linear(3, 3, bias=False), nn.ReLU, lambda: nn.Linear(3, 3))
    ones = torch.eye(3, dtype=torch.float64)
    model = net.layout.flat({"0.weight": ones, "2.weight": ones, "2.bias": torch.zeros(3)})
    labels = torch.tensor([0, 1, 2, 2, 2])
    ground = Evaluator(
        net, 2 * ones[labels], labels, lambda r, k: r, Classification(), rows_at_once=2
    )
    found = neuron_concentration(ground, model)
    assert found.layers == ("1",)
    assert found.by_class.tolist() == pytest.approx([1])
    # Neuron 2 fires in three rows of five, but each class counts once.
    assert found.by_mass.tolist() == pytest.approx([0], abs=1e-9)


def test_activations_of_a_convolution_of_a_reused_layer_and_of_none():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.act = nn.Conv2d(1, 2, 3), nn.ReLU()
            self.head = nn.Linear(2, 2)

        def forward(self, x):
            x = self.act(self.conv(x))
            return self.head(self.act(x.mean((2, 3))))

    with torch_draws_from(KEY):
        net = Net(Twice(), dtype=torch.float64)
    images = normal(4, 1, 5, 5)
    vector = net.initial()[0]
    found = net.activations(vector, images)
    assert {n: tuple(t.shape) for n, t in found.items()} == {"act": (4, 2, 3, 3), "act 2": (4, 2)}
    torch.testing.assert_close(found["act 2"], found["act"].mean((2, 3)))
    seen = dict(found)
    net(2 * vector, images)
    assert all(found[name] is seen[name] for name in found)  # no hook goes on writing
    assert len(found) == 2
    ground = Evaluator(net, images, torch.tensor([0, 1, 0, 1]), lambda r, k: r, Classification())
    found = neuron_concentration(ground, vector)
    per_neuron = net.activations(vector, images)["act"].abs().mean((2, 3))
    by_class = torch.stack([per_neuron[[0, 2]].mean(0), per_neuron[[1, 3]].mean(0)])
    assert found.layers == ("act", "act 2")
    assert float(found.by_mass[0]) == pytest.approx(mass_concentration(by_class.mean(0)))
    assert float(found.by_class[0]) == pytest.approx(class_concentration(by_class))
    plain = small_net(lambda: nn.Linear(3, 4), nn.Flatten, lambda: nn.Linear(4, 2))
    assert list(plain.activations(plain.initial()[0], normal(2, 3))) == ["0", "2"]
    texts = normal(2, 7, 3)  # seven places: the last axis holds the neurons
    wide = small_net(lambda: nn.Linear(3, 4), nn.Tanh)
    ground = Evaluator(wide, texts, torch.tensor([0, 1]), lambda r, k: r, Classification())
    found = neuron_concentration(ground, wide.initial()[0])
    spoken = wide.activations(wide.initial()[0], texts)["1"].abs().mean(1)
    assert float(found.by_class[0]) == pytest.approx(class_concentration(spoken))
