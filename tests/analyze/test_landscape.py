import numpy as np
import pytest
import torch
from torch import nn

from fedbasin.analyze.following import follow, full_gradient
from fedbasin.analyze.hessian import hessian_product, slice_along, top_eigenvalues
from fedbasin.analyze.landscape import line, plane, plane_axes, weight_plane
from fedbasin.analyze.show_server import settled, way_left
from fedbasin.analyze.shrinking import histogram, pulls, rescale
from fedbasin.core.evaluator import Evaluator, Measured, mix
from fedbasin.core.net import Net
from fedbasin.core.rng import root, torch_draws_from
from fedbasin.core.task import Classification

KEY = root(5)
DRAWS = KEY.fold("tests").numpy()


def normal(*shape):
    return torch.from_numpy(DRAWS.standard_normal(shape))


class Bowl:
    """A landscape whose loss is the squared distance from a centre."""

    def __init__(self, centre):
        self.centre, self.seen = centre, 0

    def measure(self, weights, models, tick=lambda count: None):
        points = weights.double() @ models.double()
        tick(len(points))
        loss = (points - self.centre).square().sum(1)
        return Measured(loss, loss / 100)


def small_ground(dtype=torch.float64, rows=60, **settings):
    with torch_draws_from(KEY):
        module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    net = Net(module, dtype=dtype)
    inputs, labels = normal(rows, 4), torch.from_numpy(DRAWS.integers(0, 3, rows))
    return Evaluator(
        net, inputs, labels, lambda raw, key: raw.to(dtype), Classification(), **settings
    )


def numpy_scores(vector, inputs, labels):
    """Loss and error of the small network, written without torch."""
    v = vector.double().numpy()
    w1, b1, w2, b2 = v[:20].reshape(5, 4), v[20:25], v[25:40].reshape(3, 5), v[40:]
    logits = np.tanh(inputs @ w1.T + b1) @ w2.T + b2
    log_sum = np.log(np.exp(logits).sum(1))
    loss = (log_sum - logits[np.arange(len(labels)), labels]).mean()
    return loss, (logits.argmax(1) != labels).mean()


@pytest.mark.parametrize("models_at_once", [1, 4, 0])
def test_many_models_at_once_equal_numpy_one_by_one(models_at_once):
    ground = small_ground(rows_at_once=25, models_at_once=models_at_once)
    models, weights, ticks = normal(3, 43), normal(10, 3), []
    found = ground.measure(weights, models, ticks.append)
    for number, vector in enumerate(weights @ models):
        loss, error = numpy_scores(vector, ground.inputs.numpy(), ground.labels.numpy())
        assert found.loss[number].item() == pytest.approx(loss, rel=1e-9)
        assert found.error[number].item() == pytest.approx(error)
    assert sum(ticks) == 10
    logits = ground.outputs(weights @ models)
    assert logits.shape == (10, 60, 3)
    wrong = (logits.argmax(2) != ground.labels).double().mean(1)
    torch.testing.assert_close(wrong, found.error)


def test_statistics_of_batchnorm_are_those_given():
    with torch_draws_from(KEY):
        net = Net(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), dtype=torch.float64)
    vector, buffers = net.initial()
    labels = torch.from_numpy(DRAWS.integers(0, 3, 20))
    other = buffers + torch.linspace(0.1, 1, len(buffers))
    losses = []
    for statistics in (None, other):
        ground = Evaluator(
            net, normal(20, 4), labels, lambda r, k: r, Classification(), (), statistics, 7, 2
        )
        found = ground.measure(torch.ones(3, 1), vector[None])
        logits = net(vector, ground.inputs, statistics).logits
        wanted = nn.functional.cross_entropy(logits, labels)
        torch.testing.assert_close(found.loss, wanted.detach().expand(3))
        losses.append(float(wanted))
    assert losses[0] != losses[1]


def test_a_sample_is_a_keyed_subset_of_the_rows():
    ground = small_ground()
    few, rows = ground.sample(50, KEY)
    assert len(few) == 50 and len(set(rows.tolist())) == 50
    for count in (0, 60, 99):
        assert ground.sample(count, KEY)[0] is ground
        assert ground.sample(count, KEY)[1].tolist() == list(range(60))
    assert torch.equal(ground.inputs[rows], few.inputs)
    assert torch.equal(ground.labels[rows], few.labels)
    assert torch.equal(rows, ground.sample(50, KEY)[1])
    assert not torch.equal(rows, ground.sample(50, root(6))[1])


def test_mixing_is_the_matrix_product():
    weights, models = normal(4, 3), normal(3, 7)
    torch.testing.assert_close(mix(weights, models), weights @ models)


def test_the_line_through_a_bowl_is_a_parabola():
    first, second = torch.zeros(5, dtype=torch.float64), torch.ones(5, dtype=torch.float64)
    positions = torch.linspace(-0.5, 1.5, 5)
    found = line(Bowl(first), first, second, positions)
    torch.testing.assert_close(found.loss, 5 * positions.double() ** 2)
    torch.testing.assert_close(found.error, found.loss / 100)


def test_the_plane_has_orthonormal_axes_on_which_distances_are_true():
    three, others = normal(3, 50), normal(2, 50)
    axes = plane_axes(three)
    assert float(axes.across @ axes.up) == pytest.approx(0, abs=1e-12)
    assert float(axes.across.norm()) == pytest.approx(1) and float(axes.up.norm()) == pytest.approx(
        1
    )
    places, off = axes.place(three)
    assert off.abs().max() < 1e-9
    torch.testing.assert_close(torch.cdist(places, places), torch.cdist(three, three))
    assert places[0].tolist() == [0, 0] and abs(places[1, 1]) < 1e-9 and places[2, 1] > 0
    places, off = axes.place(others)
    for other, place, away in zip(others, places, off, strict=True):
        on_plane = axes.origin + place[0] * axes.across + place[1] * axes.up
        assert float((other - on_plane).norm()) == pytest.approx(float(away))


def test_the_plane_through_a_bowl_is_a_round_bowl():
    three = normal(3, 50)
    bowl = Bowl(three[1])
    found = plane(bowl, three, three.mean(0)[None], points=7, margin=0.25)
    wanted = found.y[:, None].double() ** 2 + (found.x.double() - found.corners[1, 0]) ** 2
    torch.testing.assert_close(found.loss, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.others[0], found.corners.mean(0))
    spread = found.corners[:, 0].max() - found.corners[:, 0].min()
    low = found.corners[:, 0].min() - 0.25 * spread
    assert float(found.x[0]) == pytest.approx(float(low), rel=1e-5)
    assert float(found.y[-1]) == pytest.approx(1.25 * float(found.corners[:, 1].max()), rel=1e-5)
    far = three[0] + 3 * (three[1] - three[0])
    wide = plane(bowl, three, far[None], points=7, margin=0)
    assert float(wide.x[-1]) == pytest.approx(3 * float(wide.corners[1, 0]))


def test_models_without_a_plane_are_refused():
    one, two = normal(2, 9)
    for three in ([one, one, two], [one, two, one], [one, two, (one + two) / 2], [one] * 3):
        with pytest.raises(ValueError, match="three models"):
            plane_axes(torch.stack(three))


def test_the_best_weights_of_three_clients_are_found_on_the_simplex():
    three = normal(3, 20)
    wanted = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    found = weight_plane(Bowl(wanted @ three), three, points=11)
    torch.testing.assert_close(found.best, wanted)
    assert float(found.loss[5, 2]) == pytest.approx(0, abs=1e-20)  # [lambda_2, lambda_1]
    assert int(found.loss.isfinite().sum()) == 66 and found.loss[10, 1].isnan()
    corner = weight_plane(Bowl(three[2] - (three[0] - three[2])), three, points=3)
    assert corner.best.tolist() == [0, 0, 1]
    with pytest.raises(ValueError, match="points"):
        weight_plane(Bowl(three[0]), three, points=1)


def test_lanczos_finds_the_eigenvalues_of_the_exact_hessian():
    ground = small_ground(rows_at_once=25)
    model = normal(43)
    whole = slice(0, len(ground))
    hessian = torch.autograd.functional.hessian(lambda v: ground.summed_loss(v, whole) / 60, model)
    product = hessian_product(ground, model)
    direction = normal(43)
    torch.testing.assert_close(product(direction), hessian @ direction)
    found = top_eigenvalues(product, model, KEY, count=5, tolerance=1e-10)
    values, vectors = torch.linalg.eigh(hessian)
    torch.testing.assert_close(found.values, values.flip(0)[:5])
    assert float((found.vectors[0] @ vectors[:, -1]).abs()) == pytest.approx(1)
    assert found.residual < 1e-8 and found.products > 5
    assert found.ratio == pytest.approx(float(values[-1] / values[-5]))
    with pytest.raises(ValueError, match="from 1 to 42"):
        top_eigenvalues(product, model, KEY, count=43)


def test_the_slice_along_the_top_eigenvector_curves_by_its_eigenvalue():
    ground = small_ground()
    model = normal(43)
    found = top_eigenvalues(hessian_product(ground, model), model, KEY, count=2, tolerance=1e-10)
    steps = torch.tensor([-1e-3, 0.0, 1e-3], dtype=torch.float64)
    cut = slice_along(ground, model, found.vectors[0], steps)
    curvature = (cut.loss[0] - 2 * cut.loss[1] + cut.loss[2]) / 1e-6
    assert float(curvature) == pytest.approx(float(found.values[0]), rel=1e-3)


def test_rescaling_a_network_without_biases_changes_no_answer():
    with torch_draws_from(KEY):
        module = nn.Sequential(nn.Linear(4, 5, bias=False), nn.ReLU(), nn.Linear(5, 3, bias=False))
    net = Net(module, dtype=torch.float64)
    labels = torch.from_numpy(DRAWS.integers(0, 3, 30))
    ground = Evaluator(net, normal(30, 4), labels, lambda raw, key: raw, Classification())
    found = rescale(ground, net.initial()[0], torch.linspace(0.5, 2, 7))
    assert len(set(found.error.tolist())) == 1 and len(set(found.loss.tolist())) == 7
    bowl = rescale(Bowl(torch.zeros(4)), torch.ones(4), torch.tensor([0.9, 1.1]))
    torch.testing.assert_close(bowl.loss, torch.tensor([3.24, 4.84], dtype=torch.float64))


def test_the_two_pulls_of_a_shrunk_step_add_up_to_it():
    w, g, gamma = normal(30), normal(30), 0.9
    found = pulls(torch.tensor(gamma), g.norm(), w.norm())
    step, pull = gamma * g, (1 - gamma) * w
    torch.testing.assert_close(gamma * (w - g), w - step - pull)
    assert float(found.step) == pytest.approx(float(step.norm()))
    assert float(found.pull) == pytest.approx(float(pull.norm()))
    assert float(found.ratio) == pytest.approx(float(step.norm() / pull.norm()))
    assert pulls(torch.ones(1), torch.ones(1), torch.ones(1)).ratio.isinf().all()


def test_the_histogram_counts_every_parameter_once():
    found = histogram(torch.tensor([-2.0, 0.0, 0.001, 1.9]), bins=4)
    assert found.edges.tolist() == [-2, -1, 0, 1, 2]
    assert found.share.tolist() == [0.25, 0, 0.5, 0.25]
    assert found.near_zero == 0.5
    assert found.norm == pytest.approx(np.sqrt(4 + 1e-6 + 1.9**2))
    assert histogram(torch.tensor([1.0, 3.0]), bins=1, reach=2.0).share.tolist() == [0.5]


def test_a_step_follows_the_gradient_as_well_as_its_best_length_allows():
    ground = small_ground(rows_at_once=25)
    model = normal(43)
    whole = slice(0, len(ground))
    (wanted,) = torch.autograd.functional.jacobian(
        lambda v: ground.summed_loss(v, whole)[None] / 60, model
    )
    slope = full_gradient(ground, model)
    torch.testing.assert_close(slope, wanted)
    for step in (normal(43) - 3 * slope / slope.norm(), -0.01 * slope, 5 * slope, normal(43)):
        found = follow(slope, step)
        lengths = torch.linspace(0, float(slope.norm() / step.norm()), 10_001).double()
        gaps = (slope + lengths[:, None] * step).square().sum(1) / slope.square().sum()
        assert found.error == pytest.approx(float(gaps.min()), abs=1e-5)
    assert follow(slope, -slope).cosine == pytest.approx(1)
    assert follow(slope, slope) == pytest.approx((-1, 1))
    assert all(np.isnan(follow(slope, 0 * slope)))


def test_the_way_that_is_left_of_a_fit():
    path = torch.tensor([[0.0, 4.0], [3.0, 3.0], [2.1, 2.0], [1.9, 2.0], [2.0, 2.0]]).double()
    left = way_left(path)
    assert left.tolist() == pytest.approx([1, 0.5, 0.025, 0.025, 0])
    assert settled(left) == 2 and settled(left[2:]) == 0
    assert way_left(path[[1, 0, 1]]).isnan().all() and settled(way_left(path[[1, 1]])) is None
