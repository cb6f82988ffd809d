"""Tasks: losses against independent formulas, gradients, padding, `vmap`, and bad targets."""

import numpy as np
import pytest
import torch
from scipy.special import logsumexp

from fedbasin.core.catalogue import cards
from fedbasin.core.expressions import parse, text
from fedbasin.core.task import RowTask, Targets

DRAWS = np.random.default_rng(7)


def case(name):
    """A task with outputs and targets of nine rows."""
    numbers = DRAWS.normal(size=9)
    times = DRAWS.integers(1, 5, 9)  # with ties
    events = np.array([1, 0, 1, 1, 0, 0, 1, 1, 0])
    tokens = DRAWS.integers(-1, 5, (9, 4))
    tokens[:, 0] = 2
    targets = {
        "classification": DRAWS.integers(0, 4, 9),
        "binary": DRAWS.integers(0, 2, 9),
        "regression": numbers,
        "survival": np.stack([times, events], 1).astype(float),
        "multilabel": DRAWS.integers(0, 2, (9, 3)),
        "tokens": tokens,
    }[name]
    shape = {
        "classification": (9, 4), "binary": (9, 1), "regression": (9, 1), "survival": (9, 1),
        "multilabel": (9, 3), "tokens": (9, 4, 5),
    }[name]  # fmt: skip
    task = parse("tokens(vocabulary=5)" if name == "tokens" else name, "task")
    return task, torch.from_numpy(DRAWS.normal(size=shape)), torch.from_numpy(targets)


NAMES = ["classification", "binary", "regression", "survival", "multilabel", "tokens"]


def test_every_task_of_the_catalogue_is_tested_here():
    assert sorted(card.name for card in cards("task")) == sorted(NAMES)


def expected(name, outputs, targets):
    """The mean loss by NumPy, row by row."""
    rows = []
    for i in range(len(outputs)):
        z, y = outputs[i], targets[i]
        if name == "classification":
            rows.append(logsumexp(z) - z[y])
        elif name == "binary":
            p = 1 / (1 + np.exp(-z[0]))
            rows.append(-np.log(p if y else 1 - p))
        elif name == "regression":
            rows.append((z[0] - y) ** 2)
        elif name == "multilabel":
            p = 1 / (1 + np.exp(-z))
            rows.append(-np.mean(np.where(y == 1, np.log(p), np.log(1 - p))))
        elif name == "tokens":
            rows.append(np.mean([logsumexp(z[t]) - z[t][y[t]] for t in range(4) if y[t] >= 0]))
        else:
            at_risk = targets[:, 0] >= y[0]
            rows.append(y[1] * (logsumexp(outputs[at_risk, 0]) - z[0]))
    return np.mean(rows)


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_is_the_stated_formula_with_and_without_padding(name):
    task, outputs, targets = case(name)
    wanted = expected(name, outputs.numpy(), targets.numpy())
    assert task.batch_loss(outputs, targets).item() == pytest.approx(wanted, rel=1e-12)
    padded = torch.cat([outputs, outputs[:3] * 50])
    repeated = torch.cat([targets, targets[:3]])
    weight = torch.cat([torch.ones(9), torch.zeros(3)]).double()
    assert task.batch_loss(padded, repeated, weight).item() == pytest.approx(wanted, rel=1e-12)
    assert task.batch_loss(padded, repeated, 0 * weight).item() == 0


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_is_the_numerical_one_and_padding_has_none(name):
    task, outputs, targets = case(name)
    weight = torch.ones(9, dtype=torch.float64)
    weight[-2:] = 0
    leaf = outputs.clone().requires_grad_()

    def loss(said):
        return task.batch_loss(said, targets, weight)

    assert torch.autograd.gradcheck(loss, (leaf,))
    (slope,) = torch.autograd.grad(loss(leaf), leaf)
    assert not slope[-2:].any() and slope[:-2].any()


@pytest.mark.parametrize("name", NAMES)
def test_a_cohort_has_the_losses_of_its_clients(name):
    task, outputs, targets = case(name)
    weight = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    clients = outputs.unflatten(0, (3, 3)), targets.unflatten(0, (3, 3)), weight.expand(3, 3)
    together = torch.func.vmap(task.batch_loss)(*clients)
    alone = [task.batch_loss(*(part[i] for part in clients)) for i in range(3)]
    torch.testing.assert_close(together, torch.stack(alone))


@pytest.mark.parametrize("loss", ["mse", "mae", "huber", "quantile"])
def test_losses_of_numbers_are_those_of_torch_and_scikit_learn(loss):
    from sklearn.metrics import mean_pinball_loss

    task = parse(f"regression(loss={loss!r}, delta=0.7, quantile=0.3)", "task")
    outputs, targets = torch.from_numpy(DRAWS.normal(size=(2, 40, 3)))
    found = task.batch_loss(outputs, targets).item()
    wanted = {
        "mse": lambda: torch.nn.functional.mse_loss(outputs, targets).item(),
        "mae": lambda: torch.nn.functional.l1_loss(outputs, targets).item(),
        "huber": lambda: torch.nn.functional.huber_loss(outputs, targets, delta=0.7).item(),
        "quantile": lambda: mean_pinball_loss(targets, outputs, alpha=0.3),
    }[loss]()
    assert found == pytest.approx(wanted, rel=1e-12)


@pytest.mark.filterwarnings("ignore::Warning:lifelines")
@pytest.mark.filterwarnings("ignore:Starting with pandas")
def test_cox_is_the_partial_likelihood_of_lifelines():
    """At lifelines' own optimum, without ties, the two log-likelihoods agree and have no slope."""
    lifelines = pytest.importorskip("lifelines", reason="lifelines is in the dev extra")
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(DRAWS.normal(size=(60, 2)), columns=["a", "b"])
    frame["time"] = DRAWS.permutation(60) + 1.0
    frame["event"] = DRAWS.integers(0, 2, 60)
    fitted = lifelines.CoxPHFitter().fit(frame, "time", "event")
    weights = torch.tensor(fitted.params_.to_numpy(), requires_grad=True)
    inputs = torch.tensor(frame[["a", "b"]].to_numpy())
    targets = torch.tensor(frame[["time", "event"]].to_numpy())
    loss = parse("survival", "task").batch_loss((inputs @ weights)[:, None], targets)
    assert -60 * loss.item() == pytest.approx(fitted.log_likelihood_, rel=1e-6)
    (slope,) = torch.autograd.grad(loss, weights)
    assert slope.abs().max() < 1e-5


def test_a_batch_without_an_event_has_no_loss_and_no_slope():
    task = parse("survival", "task")
    outputs = torch.randn(4, 1, generator=torch.Generator().manual_seed(0), requires_grad=True)
    targets = torch.tensor([[1.0, 0], [2, 0], [3, 0], [4, 0]])
    loss = task.batch_loss(outputs, targets)
    loss.backward()
    assert loss.item() == 0 and not outputs.grad.any()
    far = task.batch_loss(outputs * 1e4, targets + torch.tensor([0.0, 1.0]))
    assert far.isfinite()  # no overflow for scores in the thousands


@pytest.mark.parametrize(
    ("task", "targets", "said"),
    [
        ("classification", Targets(0, 1, False), "'regression', or make the data with classes=Tr"),
        ("classification", Targets(0, 3, True), "'multilabel'"),
        ("binary", Targets(3), "'classification'"),
        ("binary", Targets(0, 1, False), "'regression', or make the data with classes=True"),
        ("regression", Targets(3, 1, True), "'classification', or make the data with classes=Fa"),
        ("survival", Targets(2), "time and event"),
        ("multilabel", Targets(2), "'classification'"),
        ("tokens(vocabulary=9)", Targets(0, 3, False), "whole numbers"),
    ],
)
def test_targets_of_another_kind_are_refused_and_the_fitting_task_is_named(task, targets, said):
    with pytest.raises(ValueError, match=said):
        parse(task, "task").outputs(targets)


def test_outputs_follow_the_targets():
    assert parse("classification", "task").outputs(Targets(7)) == 7
    assert parse("binary", "task").outputs(Targets(2)) == 1
    assert parse("regression", "task").outputs(Targets(0, 3, False)) == 3
    assert parse("survival", "task").outputs(Targets(0, 2, False)) == 1
    assert parse("multilabel", "task").outputs(Targets(0, 14)) == 14
    assert parse("tokens(vocabulary=80)", "task").outputs(Targets(0, 20)) == 80


def test_settings_are_checked_and_expressions_come_back():
    for wrong in ("regression(delta=0.0)", "regression(quantile=1.0)", "tokens(vocabulary=1)"):
        with pytest.raises(ValueError):
            parse(wrong, "task")
    huber = parse("regression(loss='huber', headline='mae')", "task")
    assert parse(text(huber), "task") == huber and huber.metrics[0] == "mae"
    assert parse("regression", "task").metrics[0] == "rmse"
    assert len(set(huber.metrics)) == len(huber.metrics)


def test_which_tasks_have_losses_of_single_rows():
    rows = {name for name in NAMES if isinstance(case(name)[0], RowTask)}
    assert rows == set(NAMES) - {"survival"}
    assert all(("row_losses" in case(name)[0].provides) == (name in rows) for name in NAMES)
