"""FedDF, FedBE and Server-FT: what the server learns from rows of its own."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from methods.numpy_clients import linear_federation
from methods.numpy_network import one_hot, softmax

from fedbasin.core.expressions import ExpressionError, parse
from fedbasin.core.method import Served
from fedbasin.core.rng import normal, root
from fedbasin.core.vectors import Layout
from fedbasin.experiment import ConfigError, Experiment, build
from fedbasin.experiment.config import DataConfig, PartitionConfig
from fedbasin.local.batches import epoch_order
from fedbasin.methods import WIMA, FedAvg, FedBE, FedDF, Scaffold, ServerFT
from fedbasin.methods.fedbe import gaussian
from fedbasin.methods.parts.refine import Refinement, distillation, shifted
from fedbasin.testing import LAWS, check_method, replies_of, trajectory

REFINERS = [FedDF(), FedBE(), ServerFT()]


# --- an independent server in NumPy: softmax regression, its own optimisers ---------------------


def logits_of(vector, inputs):
    return inputs @ vector[:12].reshape(3, 4).T + vector[12:]


def slope_to_gradient(slope, inputs):
    return np.concatenate([(slope.T @ inputs).reshape(-1), slope.sum(0)])


def numpy_descent(method, vector, gradient, rows, key):
    """`gradient(v, rows)` along the method's own optimiser, in its keyed order of rows."""
    first, second, velocity = 0.0, 0.0, 0.0
    shuffled = epoch_order(key.fold("rows").tensor(), 0, rows).numpy()
    steps = int(np.ceil(rows / method.batch))
    count, kept = 0, []
    for epoch in range(method.epochs):
        order = np.arange(rows)
        if rows > method.batch:
            order = epoch_order(key.fold("order").tensor(), epoch, rows).numpy()
        for begin in range(0, rows, method.batch):
            g = gradient(vector, shuffled[order[begin : begin + method.batch]])
            if getattr(method, "clip", 0):
                g = g * min(1, method.clip / (np.linalg.norm(g) + 1e-6))
            lr = method.lr
            if getattr(method, "cosine", False):
                lr *= (1 + np.cos(np.pi * count / (method.epochs * steps))) / 2
            count += 1
            if method.optimiser == "adam":
                b1, b2 = method.betas
                first, second = b1 * first + (1 - b1) * g, b2 * second + (1 - b2) * g * g
                size = np.sqrt(second / (1 - b2**count)) + 1e-8
                vector = vector - lr * first / (1 - b1**count) / size
            else:
                g = g + method.weight_decay * vector
                velocity = method.betas[0] * velocity + g
                vector = vector - lr * velocity
            every = getattr(method, "average_every", 0)
            if (
                every
                and count >= method.average_from
                and (count - method.average_from) % every == 0
            ):
                kept.append(vector)
    return np.mean(kept, axis=0) if kept else vector


def numpy_target(method, teachers, inputs):
    logits = np.stack([logits_of(t, inputs) for t in teachers])
    if getattr(method, "mix", "logits") == "logits":
        return softmax(logits.mean(0) / getattr(method, "temperature", 1.0))
    sharp = softmax(logits).mean(0) ** (1 / method.temperature)
    return sharp / sharp.sum(1, keepdims=True)


def numpy_draws(method, base, models, key):
    """Draws around the model that was sent: weights (12) and biases (3) apart."""
    for number in range(method.samples):
        noise = normal(key.fold(number).tensor(), torch.arange(15)).double().numpy()
        sample = base.copy()
        for part in (slice(0, 12), slice(12, 15)):
            moved = np.array([m[part] - base[part] for m in models])
            lengths = np.linalg.norm(moved, axis=1)
            units = moved / lengths[:, None]
            spread = np.sqrt(np.maximum(units.var(0), 1e-5))
            sample[part] += lengths.mean() * (units.mean(0) + method.scale * spread * noise[part])
        yield sample


def case(method, seed=0):
    """A cohort's replies on the linear federation, with its context and the proxy rows."""
    federation = linear_federation(method, seed=seed)
    context = federation.context.at(2, 0.1)
    rng = np.random.default_rng(seed)
    server = federation.net.initial()[0]
    models = server + 0.5 * torch.from_numpy(rng.normal(size=(4, 15)))
    replies = replies_of(models, weights=[3.0, 1.0, 0.0, 5.0], clients=[4, 0, 2, 1])
    proxy = context.proxy
    return context, server, models, replies, proxy.inputs.numpy() / 255, proxy.labels.numpy()


@pytest.mark.parametrize(
    "method",
    [
        ServerFT(epochs=5, lr=0.05),
        ServerFT(epochs=3, lr=0.1, optimiser="sgd", betas=(0.9, 0.999), batch=4),
        ServerFT(epochs=3, lr=0.1, optimiser="sgd", batch=4, weight_decay=0.3),
        FedDF(epochs=6, lr=0.03, batch=6),
        FedDF(epochs=4, lr=0.3, optimiser="sgd", cosine=False, clip=0.01),
        FedDF(
            epochs=4, lr=0.3, optimiser="sgd", cosine=False, weight_decay=0.3, keep_momentum=True
        ),
        FedDF(epochs=5, lr=0.02, betas=(0.5, 0.999), cosine=False, clip=0.0),
        FedBE(samples=0, epochs=4, lr=0.3),
        FedBE(samples=0, epochs=4, lr=0.3, weight_decay=0.3),
        FedBE(samples=0, with_mean=False, mix="logits", temperature=2.0, epochs=3, lr=0.2),
        FedBE(samples=0, epochs=6, lr=0.3, average_from=2, average_every=3),
        FedBE(samples=2, scale=0.5, epochs=3, lr=0.3),
        FedBE(samples=2, with_mean=False, with_clients=False, epochs=3, lr=0.3),
        FedBE(samples=0, epochs=4, lr=0.3, cosine=True, clip=0.01),
    ],
    ids=lambda m: str(m)[:60],
)
def test_each_refiner_equals_a_plain_numpy_server(method):
    context, server, models, replies, inputs, labels = case(method)
    served, _ = method.aggregate(method.init(server, context), server, replies, context)
    mean = np.average(models.numpy(), axis=0, weights=[3, 1, 0, 5])
    clients = [models[i].numpy() for i in (0, 1, 3)]  # the one without a sample does not teach
    key = context.key.fold(type(method).__name__.lower())
    teachers = clients if getattr(method, "with_clients", True) else []
    if isinstance(method, FedBE):
        means = [mean] if method.with_mean else []
        teachers = [*teachers, *means, *numpy_draws(method, server.numpy(), clients, key)]
    target = one_hot(labels)
    if not isinstance(method, ServerFT):
        target = numpy_target(method, teachers, inputs)

    def gradient(v, rows):
        slope = (softmax(logits_of(v, inputs[rows])) - target[rows]) / len(rows)
        return slope_to_gradient(slope, inputs[rows])

    expected = numpy_descent(method, mean, gradient, len(labels), key)
    np.testing.assert_allclose(served.send.numpy(), expected, rtol=1e-8, atol=1e-10)
    assert not np.allclose(expected, mean)


CODED = {"optimiser": "sgd", "lr": 0.2, "betas": (0.9, 0.999), "weight_decay": 0.1}


@pytest.mark.parametrize(
    "method",
    [
        ServerFT(epochs=2, keep_momentum=True, **CODED),
        FedDF(epochs=2, cosine=False, clip=0.0, keep_momentum=True, **CODED),
        FedBE(samples=0, epochs=2, mix="logits", average_every=0, keep_momentum=True, **CODED),
    ],
    ids=lambda m: type(m).__name__,
)
def test_kept_momentum_is_one_optimiser_that_lives_through_the_run(method):
    """torch's own SGD, made once, steps through two rounds; its model is set to each merged one."""
    context, server, _, replies, *_ = case(method)
    proxy = context.proxy
    plain = replace(method, epochs=0)
    leaf = torch.nn.Parameter(server.clone())
    optimiser = torch.optim.SGD([leaf], lr=0.2, momentum=0.9, weight_decay=0.1)
    state = method.init(server, context)
    for number in range(2):
        here = replace(context, round=number)
        served, state = method.aggregate(state, server, replies, here)
        merged, _ = plain.aggregate(plain.init(server, here), server, replies, here)
        key = here.key.fold(type(method).__name__.lower())
        loss = method.loss(server, merged, replies, here, key)
        leaf.data.copy_(merged.send)
        assert proxy.size <= method.batch  # all rows are one batch
        for _ in range(2):
            optimiser.zero_grad()
            loss(leaf, torch.arange(proxy.size)).backward()
            optimiser.step()
        torch.testing.assert_close(served.send, leaf.data, rtol=1e-10, atol=1e-12)
        server = served.send
    anew, _ = replace(method, keep_momentum=False).aggregate(
        replace(method, keep_momentum=False).init(server, context), server, replies, context
    )
    assert not torch.allclose(anew.send, method.aggregate(state, server, replies, context)[0].send)


def test_what_is_of_sgd_is_refused_of_adam():
    for name, value in (("weight_decay", 0.1), ("keep_momentum", True)):
        for refiner in (FedDF, FedBE, ServerFT):
            with pytest.raises(ValueError, match=f"{name} is of SGD: set optimiser='sgd'"):
                refiner(optimiser="adam", **{name: value})
    with pytest.raises(ValueError, match="weight_decay"):
        ServerFT(optimiser="sgd", weight_decay=-0.1)


def test_one_teacher_equal_to_the_student_has_loss_and_gradient_zero():
    context, server, *_ = case(FedDF())
    target = torch.softmax(context.proxy.logits(server), 1)
    leaf = server.clone().requires_grad_()
    value = distillation(context.proxy, target)(leaf, torch.arange(context.proxy.size))
    (slope,) = torch.autograd.grad(value, leaf)
    assert abs(value.item()) < 1e-12 and slope.abs().max() < 1e-12
    alone = replies_of(server[None] + 0.1, weights=[3.0])
    method = FedDF(epochs=10, optimiser="sgd", lr=1.0)
    served, _ = method.aggregate(method.init(server, context), server, alone, context)
    torch.testing.assert_close(served.send, server + 0.1, rtol=0, atol=1e-12)


def test_a_row_counts_by_the_sum_over_classes_not_their_mean():
    context, server, models, *_ = case(FedDF())
    target = torch.softmax(context.proxy.logits(models[0]), 1)
    rows = torch.arange(context.proxy.size)
    found = distillation(context.proxy, target)(server, rows)
    student = torch.log_softmax(context.proxy.logits(server), 1)
    expected = torch.nn.functional.kl_div(student, target, reduction="batchmean")
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("method", REFINERS, ids=lambda m: type(m).__name__)
def test_a_learning_rate_of_zero_is_the_inner_method(method):
    for ours, plain in zip(
        trajectory(replace(method, lr=0.0, epochs=2)), trajectory(FedAvg()), strict=True
    ):
        torch.testing.assert_close(ours.send, plain.send, rtol=1e-14, atol=0)


# --- rows kept aside -----------------------------------------------------------------------------


@dataclass
class Recorder:
    """A proxy of 20 rows whose loss on rows kept aside is least at 1; remembers what is asked."""

    asked: list
    size: int = 20

    def logits(self, vector, rows=None):
        raise AssertionError("not used here")

    def loss(self, vector, rows=None):
        self.asked.append(rows.tolist())
        return (vector - 1).square().sum()


def towards_two(trained):
    def loss(vector, rows):
        trained.extend(rows.tolist())
        return 0.5 * (vector - 2).square().sum()

    return loss


def test_the_best_model_on_rows_kept_aside_is_returned_and_they_are_never_trained_on():
    proxy, trained = Recorder([]), []
    plain = Refinement("sgd", 0.1, (0.0, 0.9), epochs=40, batch=8, holdout=0.25)
    start = torch.zeros(1, dtype=torch.float64)
    found, _ = plain.run(start, towards_two(trained), proxy, root(0))
    path = [2 - 2 * 0.9**k for k in range(0, 81, 2)]  # two steps an epoch
    assert float(found) == pytest.approx(min(path, key=lambda v: (v - 1) ** 2))
    held = set(proxy.asked[0])
    assert len(held) == 5 and set(trained) == set(range(20)) - held
    assert all(set(rows) == held for rows in proxy.asked) and len(proxy.asked) == 41


@pytest.mark.parametrize(("holdout", "held"), [(0.01, 1), (0.26, 6), (0.99, 19)])
def test_rows_kept_aside_are_rounded_up_and_one_is_left_to_train_on(holdout, held):
    proxy, trained = Recorder([]), []
    once = Refinement("sgd", 0.1, (0.0, 0.9), holdout=holdout)
    once.run(torch.zeros(1).double(), towards_two(trained), proxy, root(0))
    assert len(proxy.asked[0]) == held and len(trained) == 20 - held


def test_patience_ends_the_descent():
    proxy, trained = Recorder([]), []
    short = Refinement("sgd", 0.1, (0.0, 0.9), epochs=40, batch=8, holdout=0.25, patience=3)
    found, _ = short.run(torch.zeros(1).double(), towards_two(trained), proxy, root(0))
    assert float(found) == pytest.approx(2 - 2 * 0.9**6)  # 0.937; after it 1.139, 1.303, ...
    assert len(proxy.asked) == 1 + 3 + 3
    assert len(trained) == 15 * 6


@pytest.mark.parametrize(("falls_every", "passes"), [(1, 12), (2, 12), (3, 2)])
def test_patience_counts_passes_in_a_row_and_an_equal_loss_is_no_progress(falls_every, passes):
    class Stairs(Recorder):
        def loss(self, vector, rows=None):
            self.asked.append(rows.tolist())
            return torch.tensor(100.0 - (len(self.asked) - 1) // falls_every)

    proxy = Stairs([])
    Refinement("sgd", 0.1, (0.0, 0.9), epochs=12, batch=8, holdout=0.25, patience=2).run(
        torch.zeros(1).double(), towards_two([]), proxy, root(0)
    )
    assert len(proxy.asked) == 1 + passes


@pytest.mark.parametrize("method", [FedDF(epochs=2), FedBE(epochs=2), ServerFT()], ids=str)
def test_a_refiner_over_a_look_ahead_shifts_what_is_scored(method):
    inner = parse("fedacg")
    base = trajectory(inner, rounds=1)[0]
    found = trajectory(replace(method, inner=inner), rounds=1)[0]
    moved = found.send - base.send
    assert moved.norm() > 1e-4 and not torch.equal(base.send, base.score)
    torch.testing.assert_close(found.score, base.score + moved, rtol=1e-12, atol=1e-14)


def test_a_model_that_is_scored_apart_moves_by_the_same_shift():
    send, score = torch.tensor([1.0, 2.0]), torch.tensor([5.0, 5.0])
    both = shifted(Served(send, send), send + 1)
    assert both.send is both.score
    apart = shifted(Served(send, score), send + 1)
    assert apart.send.tolist() == [2, 3] and apart.score.tolist() == [6, 6]


# --- FedBE's draws -------------------------------------------------------------------------------

LAYOUT = Layout(("a", "b", "c"), ((2, 2), (3,), (2,)))


def drawn(method, models, base):
    return torch.stack(list(method._drawn(base, models, LAYOUT, root(4))))


def some_models(lengths=None):
    rng = np.random.default_rng(2)
    base = torch.from_numpy(rng.normal(size=9))
    moved = torch.from_numpy(rng.normal(size=(4, 9)))
    if lengths is not None:
        for part in LAYOUT.slices.values():
            moved[:, part] *= lengths / moved[:, part].norm(dim=1, keepdim=True)
    return base, base + moved


def test_the_centre_and_spread_are_the_stated_ones_part_by_part():
    base, models = some_models()
    centre, spread = gaussian(base, models, LAYOUT)
    for part in LAYOUT.slices.values():
        b, y = base[part].numpy(), models[:, part].numpy()
        lengths = [np.linalg.norm(v - b) for v in y]
        units = np.array([(v - b) / n for v, n in zip(y, lengths, strict=True)])
        variance = np.maximum((units**2).mean(0) - units.mean(0) ** 2, 1e-5)
        expected = b + np.mean(lengths) * units.mean(0)
        np.testing.assert_allclose(centre[part].numpy(), expected)
        np.testing.assert_allclose(spread[part].numpy(), np.mean(lengths) * np.sqrt(variance))


def test_without_spread_every_draw_is_the_centre_and_equal_lengths_make_it_the_mean():
    base, models = some_models()
    still = drawn(FedBE(samples=3, scale=0.0), models, base)
    centre, _ = gaussian(base, models, LAYOUT)
    assert all(torch.equal(row, centre) for row in still)
    assert not torch.allclose(centre, models.mean(0))  # lengths differ
    even_base, even = some_models(lengths=0.7)
    torch.testing.assert_close(gaussian(even_base, even, LAYOUT)[0], even.mean(0))


def test_draws_differ_and_have_the_spread_that_scale_asks_for():
    base, models = some_models()
    centre, spread = gaussian(base, models, LAYOUT)
    many = drawn(FedBE(samples=1000, scale=0.3), models, base)
    torch.testing.assert_close(many.mean(0), centre, rtol=0, atol=0.06)
    torch.testing.assert_close(many.std(0), 0.3 * spread, rtol=0.1, atol=0)


def test_a_part_nobody_moved_stays_and_a_single_direction_keeps_the_floor():
    base, models = some_models()
    models[:, LAYOUT.slices["b"]] = base[LAYOUT.slices["b"]]
    one = models[:1].expand(3, -1)
    for cohort in (models, one):
        centre, spread = gaussian(base, cohort, LAYOUT)
        assert torch.isfinite(centre).all() and torch.isfinite(spread).all()
        assert torch.equal(centre[4:7], base[4:7]) and spread[4:7].abs().max() == 0
    length = (one[0] - base)[:4].norm()
    torch.testing.assert_close(spread[:4], (length * 1e-5**0.5).expand(4))


def test_dirichlet_draws_are_convex_combinations_of_clients():
    base, models = some_models()
    found = drawn(FedBE(samples=50, mode="dirichlet"), models, base)
    weights = torch.linalg.lstsq(models.T, found.T).solution
    torch.testing.assert_close(models.T @ weights, found.T)
    assert (weights > -1e-9).all() and len(weights.T.unique(dim=0)) == 50
    torch.testing.assert_close(weights.sum(0), torch.ones(50).double())


def test_all_convex_combinations_are_equally_likely():
    """A weight out of four then has the mean 1/4 and the variance 3/80."""
    base, models = some_models()
    found = drawn(FedBE(samples=2000, mode="dirichlet"), models, base)
    weights = torch.linalg.lstsq(models.T, found.T).solution
    torch.testing.assert_close(weights.mean(1), torch.full((4,), 0.25).double(), rtol=0, atol=0.02)
    torch.testing.assert_close(weights.var(1), torch.full((4,), 0.0375).double(), rtol=0.1, atol=0)


def test_the_order_of_replies_does_not_decide_what_is_drawn():
    method = FedBE(samples=2, mode="dirichlet", with_clients=False, epochs=2, lr=0.3)
    context, server, _, replies, _, _ = case(method)
    state = method.init(server, context)
    one, other = (
        method.aggregate(state, server, replies.take(torch.tensor(order)), context)[0].send
        for order in ([0, 1, 2, 3], [3, 2, 0, 1])
    )
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_fedbe_without_draws_and_mean_is_feddf():
    same = {"epochs": 4, "lr": 0.02, "optimiser": "adam", "batch": 6}
    ours = FedBE(samples=0, with_mean=False, mix="logits", temperature=1.0, average_every=0, **same)
    theirs = FedDF(**same, cosine=False, clip=0.0)
    # The order of proxy rows is keyed by the method's name; one batch of all rows has none.
    ours, theirs = replace(ours, batch=128), replace(theirs, batch=128)
    for a, b in zip(trajectory(ours), trajectory(theirs), strict=True):
        torch.testing.assert_close(a.send, b.send, rtol=1e-10, atol=1e-12)


def test_draws_teach_and_the_target_is_sharpened():
    runs = [
        trajectory(m, rounds=2)[-1].send
        for m in (
            FedBE(lr=0.1),
            FedBE(lr=0.1, samples=0),
            FedBE(lr=0.1, temperature=1.0),
            FedBE(lr=0.1, with_clients=False),
        )
    ]
    assert all(not torch.allclose(runs[0], run) for run in runs[1:])
    target = FedBE(temperature=0.5)._target(torch.tensor([[[0.0, 1.0, 2.0]]]))
    p = torch.softmax(torch.tensor([0.0, 1.0, 2.0]), 0)
    torch.testing.assert_close(target[0], p**2 / (p**2).sum())


# --- how they are put together -------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "feddf(scaffold, epochs=2)",
        "serverft(fedcm(local=focal))",
        "fedbe(wima(fedprox, window=2), epochs=2)",
        "wima(feddf(epochs=2), window=2)",
        "ima(serverft, window=2)",
        "serverft(fedfa)",
        "serverft(optimiser='sgd', weight_decay=0.01, keep_momentum=True)",
        "wima(feddf(epochs=2, optimiser='sgd', keep_momentum=True), window=2)",
        "feddf(creff(epochs=2, match=2), epochs=2)",
    ],
)
def test_refiners_compose_with_other_methods(text):
    method = parse(text, "method")
    quick = ("differs", "cohort", "text", "resume")
    check_method(method, [law for law in LAWS if any(word in law.__name__ for word in quick)])


def test_the_inner_methods_state_and_rules_are_passed_on():
    inner = Scaffold()
    refined, plain = trajectory(FedDF(inner, epochs=0)), trajectory(inner)
    assert torch.equal(refined[-1].state.inner.control, plain[-1].state.control)
    assert FedDF(inner).rules() == inner.rules()
    wrapped = trajectory(ServerFT(WIMA(window=3)))[-1]
    assert not torch.equal(wrapped.send, wrapped.score)


@pytest.mark.parametrize("method", REFINERS, ids=lambda m: type(m).__name__)
def test_a_context_without_rows_says_what_is_missing(method):
    context, server, _, replies, *_ = case(method)
    context = replace(context, proxy=None)
    with pytest.raises(ValueError, match=r"^\w+(\(.*\))? needs labelled rows on the server"):
        method.aggregate(method.init(server, context), server, replies, context)
    experiment = Experiment(
        method=str(method), data=DataConfig("digits"), partition=PartitionConfig("iid", clients=4)
    )
    with pytest.raises(ConfigError, match=r"data\.proxy_per_class"):
        build(experiment)


@pytest.mark.parametrize("source", ["train", "test"])
def test_the_rows_the_server_learns_from_are_neither_trained_on_nor_scored(source):
    parts = {}
    for rows in (0, 3):
        experiment = Experiment(
            method="fedavg",
            data=DataConfig("digits", proxy_per_class=rows, proxy_from=source),
            partition=PartitionConfig("iid", clients=4),
        )
        federation = build(experiment)
        parts[rows] = (
            len(federation.population.labels),
            0 if federation.context.proxy is None else federation.context.proxy.size,
            federation.evaluator.size,
        )
    trained, none, scored = parts[0]
    assert none == 0
    moved = (30, 30, 0) if source == "train" else (0, 30, 30)
    assert parts[3] == (trained - moved[0], moved[1], scored - moved[2])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("feddf(lr=-1)", "lr must be at least 0"),
        ("feddf(batch=0)", "batch must be at least 1"),
        ("feddf(betas=(1.0, 0.9))", r"betas must be in \[0, 1\)"),
        ("feddf(holdout=1.0)", "holdout"),
        ("feddf(patience=3)", "set holdout"),
        ("serverft(epochs=-1)", "epochs must be at least 0"),
        ("fedbe(samples=-1)", "samples"),
        ("fedbe(scale=-0.1)", "scale"),
        ("fedbe(temperature=0)", "temperature must be above 0"),
        ("fedbe(samples=0, with_mean=False, with_clients=False)", "there is no teacher"),
    ],
)
def test_bad_settings_are_refused(text, message):
    with pytest.raises(ExpressionError, match=message):
        parse(text, "method")
