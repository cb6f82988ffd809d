"""Metrics against scikit-learn, lifelines and plain loops; whole, by group, and undefined."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk
from torch import nn

from fedbasin.core.catalogue import CATALOGUE, cards, entry
from fedbasin.core.evaluator import Evaluator
from fedbasin.core.expressions import ExpressionError, parse
from fedbasin.core.metric import MetricError, WholeLoss, metrics_of
from fedbasin.core.net import Net
from fedbasin.core.rng import root

DRAWS = np.random.default_rng(3)
MORE = {
    "classification": (
        "balanced_accuracy", "macro_f1", "auroc", "average_precision", "brier", "ece", "perplexity",
        "accuracy_per_class",
    ),
    "binary": ("balanced_accuracy", "macro_f1", "brier", "ece", "accuracy_per_class"),
    "regression": (),
    "survival": (),
    "multilabel": ("accuracy", "auroc", "accuracy_per_class"),
}  # fmt: skip


def evaluator(task, rows=120, width=4, outputs=4, targets=None):
    """Rows of a linear network in float64, scored in chunks of 50."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        net = Net(nn.Linear(width, outputs), dtype=torch.float64)
    inputs = torch.from_numpy(DRAWS.normal(size=(rows, width)))
    name = task.partition("(")[0]
    return Evaluator(
        net, inputs, torch.from_numpy(targets), lambda raw, key: raw, parse(task, "task"),
        MORE.get(name, ()), rows_at_once=50,
    )  # fmt: skip


def scored(found):
    """Scores of one model, its outputs and targets."""
    vector = found.net.initial()[0]
    with torch.no_grad():
        outputs = found.net(vector, found.inputs).logits.numpy()
    return found.score(vector, last=True), outputs, found.labels.numpy()


def softmax(z):
    shares = np.exp(z - z.max(1, keepdims=True))
    return shares / shares.sum(1, keepdims=True)


def test_metrics_of_classes_are_those_of_scikit_learn():
    score, z, y = scored(evaluator("classification", targets=DRAWS.integers(0, 4, 120)))
    p, guess = softmax(z), z.argmax(1)
    assert score["accuracy"] == pytest.approx(sk.accuracy_score(y, guess))
    assert score["loss"] == pytest.approx(sk.log_loss(y, p))
    assert score["balanced_accuracy"] == pytest.approx(sk.balanced_accuracy_score(y, guess))
    assert score["macro_f1"] == pytest.approx(sk.f1_score(y, guess, average="macro"))
    assert score["auroc"] == pytest.approx(sk.roc_auc_score(y, p, multi_class="ovr"))
    truth = np.eye(4)[y]
    assert score["average_precision"] == pytest.approx(sk.average_precision_score(truth, p))
    assert score["brier"] == pytest.approx(((p - truth) ** 2).sum(1).mean())
    assert score["perplexity"] == pytest.approx(math.exp(sk.log_loss(y, p)))
    wanted = sk.recall_score(y, guess, average=None)
    assert score["accuracy_per_class"] == pytest.approx(wanted.tolist())
    gaps = 0.0
    for low in np.arange(15) / 15:
        held = (p.max(1) > low) & (p.max(1) <= low + 1 / 15)
        gaps += abs((p.max(1) - (guess == y))[held].sum())
    assert score["ece"] == pytest.approx(gaps / 120)


def test_metrics_of_two_classes_are_those_of_scikit_learn():
    score, z, y = scored(evaluator("binary", outputs=1, targets=DRAWS.integers(0, 2, 120)))
    p, guess = 1 / (1 + np.exp(-z[:, 0])), (z[:, 0] > 0).astype(int)
    assert next(iter(score)) == "auroc"
    assert score["auroc"] == pytest.approx(sk.roc_auc_score(y, p))
    assert score["accuracy"] == pytest.approx(sk.accuracy_score(y, guess))
    assert score["average_precision"] == pytest.approx(sk.average_precision_score(y, p))
    assert score["loss"] == pytest.approx(sk.log_loss(y, p))
    assert score["brier"] == pytest.approx(sk.brier_score_loss(y, p))
    assert score["macro_f1"] == pytest.approx(sk.f1_score(y, guess, average="macro"))
    assert score["balanced_accuracy"] == pytest.approx(sk.balanced_accuracy_score(y, guess))


@pytest.mark.parametrize("columns", [1, 3])
def test_metrics_of_numbers_are_those_of_scikit_learn(columns):
    targets = DRAWS.normal(size=120 if columns == 1 else (120, columns))
    score, z, y = scored(evaluator("regression", outputs=columns, targets=targets))
    y = y.reshape(z.shape)
    assert score["rmse"] == pytest.approx(math.sqrt(sk.mean_squared_error(y, z)))
    assert score["mae"] == pytest.approx(sk.mean_absolute_error(y, z))
    assert score["r2"] == pytest.approx(sk.r2_score(y, z))
    assert score["loss"] == pytest.approx(sk.mean_squared_error(y, z))


def test_metrics_of_labels_are_those_of_scikit_learn():
    targets = DRAWS.integers(0, 2, (120, 3))
    score, z, y = scored(evaluator("multilabel", outputs=3, targets=targets))
    guess = (z > 0).astype(int)
    assert score["average_precision"] == pytest.approx(sk.average_precision_score(y, z))
    assert score["auroc"] == pytest.approx(sk.roc_auc_score(y, z))
    assert score["macro_f1"] == pytest.approx(sk.f1_score(y, guess, average="macro"))
    assert score["accuracy"] == pytest.approx(sk.accuracy_score(y, guess))


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.booleans(), st.integers(-2, 2)), min_size=1, max_size=12
    )
)
@settings(max_examples=60, deadline=None)
def test_the_concordance_index_is_that_of_all_pairs(rows):
    time, event, risk = (np.array(column) for column in zip(*rows, strict=True))
    right = pairs = 0.0
    for i in range(len(rows)):
        for j in range(len(rows)):
            later = time[j] > time[i] or (time[j] == time[i] and not event[j])
            if event[i] and later:
                pairs += 1
                right += (risk[i] > risk[j]) + 0.5 * (risk[i] == risk[j])
    task = parse("survival", "task")
    metric = metrics_of(task)[0]
    outputs = torch.from_numpy(risk[:, None].astype(float))
    targets = torch.from_numpy(np.stack([time, event], 1).astype(float))
    found = metric.of_rows(task, outputs, targets)
    assert math.isnan(found) if not pairs else found == pytest.approx(right / pairs)


def test_the_concordance_index_is_that_of_lifelines():
    lifelines = pytest.importorskip("lifelines", reason="lifelines is in the dev extra")
    targets = np.stack([DRAWS.integers(1, 40, 700), DRAWS.integers(0, 2, 700)], 1).astype(float)
    score, z, y = scored(evaluator("survival", rows=700, outputs=1, targets=targets))
    wanted = lifelines.utils.concordance_index(y[:, 0], -z[:, 0], y[:, 1])
    assert score["c_index"] == pytest.approx(wanted)
    assert score["loss"] > 0


@pytest.mark.parametrize("task", ["classification", "binary", "regression", "survival"])
def test_one_pass_by_group_equals_a_loop_over_groups(task):
    groups = torch.from_numpy(DRAWS.integers(0, 6, 120))
    groups[groups == 4] = 5  # a group without rows
    targets = {
        "classification": DRAWS.integers(0, 4, 120),
        "binary": DRAWS.integers(0, 2, 120),
        "regression": DRAWS.normal(size=120),
        "survival": np.stack([DRAWS.random(120), DRAWS.integers(0, 2, 120)], 1),
    }[task]
    whole = evaluator(task, outputs=4 if task == "classification" else 1, targets=targets)
    vector = whole.net.initial()[0]
    found = whole.scores_by(vector, groups, 6)
    assert list(found) == [metric.name for metric in whole.metrics]
    for group in range(6):
        held = groups == group
        if not held.any():
            assert all(math.isnan(values[group]) for values in found.values())
            continue
        rows = {"inputs": whole.inputs[held], "labels": whole.labels[held]}
        alone = Evaluator(whole.net, *rows.values(), whole.transform, whole.task, whole.more).score(
            vector
        )
        for name, value in alone.items():
            assert float(found[name][group]) == pytest.approx(value, rel=1e-9, nan_ok=True), name


def test_a_mean_over_groups_counts_each_group_once():
    groups = np.repeat([0, 1, 3], [90, 20, 10])  # no rows in group 2
    time, event = DRAWS.random(120), DRAWS.integers(0, 2, 120)
    event[groups == 1] = 0  # no comparable pair in group 1
    for task, metric, targets in (
        ("survival", "c_index", np.stack([time, event], 1)),
        ("binary", "accuracy", event),
    ):
        plain = evaluator(task, outputs=1, targets=targets)
        more = (f"group_mean({metric})", f"by_group({metric})")
        found = Evaluator(
            plain.net, plain.inputs, plain.labels, plain.transform, plain.task, more,
            rows_at_once=50, groups=torch.from_numpy(groups),
        )  # fmt: skip
        vector = plain.net.initial()[0]
        by_group = plain.scores_by(vector, torch.from_numpy(groups), 4)[metric].numpy()
        score = found.score(vector, last=True)
        assert score[f"{metric}_by_group"] == pytest.approx(by_group.tolist(), nan_ok=True)
        assert math.isnan(by_group[2]) and math.isnan(by_group[1]) == (task == "survival")
        mean = float(np.nanmean(by_group))
        assert score[f"{metric}_group_mean"] == pytest.approx(mean)
        assert abs(mean - score[metric]) > 1e-4
        assert f"{metric}_by_group" not in found.score(vector)  # lists: in the last round
        # rows without groups are one group
        alone = found.on(found.inputs, found.labels).score(vector, last=True)
        assert alone[f"{metric}_by_group"] == [pytest.approx(alone[metric])]
        some, rows = found.sample(40, root(1))
        assert torch.equal(some.groups, torch.from_numpy(groups)[rows])


def test_a_mean_over_groups_has_the_direction_and_unit_of_what_it_averages():
    task = parse("regression(headline='group_mean(rmse)')", "task")
    assert metrics_of(task)[0].headline == ("rmse_group_mean", False, "")
    (*_, accuracy) = metrics_of(parse("binary", "task"), ("group_mean",))
    assert accuracy.headline == ("accuracy_group_mean", True, "%")
    (*_, loss) = metrics_of(parse("survival", "task"), ("group_mean(loss)",))
    assert isinstance(loss.inner, WholeLoss) and not loss.headline.higher_is_better
    with pytest.raises(MetricError, match="c_index does not fit the task binary"):
        metrics_of(parse("binary", "task"), ("group_mean(c_index)",))
    for nested in ("accuracy_per_class", "group_mean(accuracy)"):
        with pytest.raises(ExpressionError, match="of must be a metric that is one number"):
            parse(f"group_mean({nested})", "metric")


def test_many_models_at_once_are_measured_as_one_by_one():
    whole = evaluator("classification", targets=DRAWS.integers(0, 4, 120))
    start = whole.net.initial()[0]
    models = start + torch.from_numpy(DRAWS.normal(size=(9, len(start))))
    found = whole.measure(torch.eye(9), models)
    for number, model in enumerate(models):
        score = whole.score(model)
        assert float(found.loss[number]) == pytest.approx(score["loss"])
        assert float(found.error[number]) == pytest.approx(1 - score["accuracy"])
    numbers = evaluator("regression", outputs=1, targets=DRAWS.normal(size=120))
    vector = numbers.net.initial()[0]
    error = numbers.measure(torch.ones(1, 1), vector[None]).error
    assert float(error[0]) == pytest.approx(numbers.score(vector)["mae"])
    survival = evaluator("survival", outputs=1, targets=np.ones((120, 2)))
    with pytest.raises(MetricError, match="does not add up over rows"):
        survival.measure(torch.ones(1, 1), vector[None])


def test_what_is_undefined_is_nan_and_absent_classes_are_left_out():
    one = evaluator("binary", outputs=1, targets=np.ones(120, dtype=np.int64))
    score, _, _ = scored(one)
    assert math.isnan(score["auroc"]) and math.isnan(score["average_precision"])
    assert math.isfinite(score["accuracy"]) and math.isfinite(score["balanced_accuracy"])
    few, z, y = scored(evaluator("classification", targets=DRAWS.integers(0, 3, 120)))
    assert math.isnan(few["accuracy_per_class"][3])
    guess = z.argmax(1)
    assert few["macro_f1"] == pytest.approx(sk.f1_score(y, guess, average="macro"))
    recalls = [(guess == c)[y == c].mean() for c in range(3)]
    assert few["balanced_accuracy"] == pytest.approx(np.mean(recalls))
    censored = evaluator(
        "survival", outputs=1, targets=np.stack([np.arange(120.0), np.zeros(120)], 1)
    )
    assert math.isnan(scored(censored)[0]["c_index"])


def test_a_metric_of_ones_own_is_three_lines():
    @entry("metric")
    def within_one(outputs, targets):
        return (outputs[:, 0] - targets).abs() < 1

    try:
        targets = DRAWS.normal(size=120)
        whole = evaluator("regression", outputs=1, targets=targets)
        own = Evaluator(
            whole.net, whole.inputs, whole.labels, whole.transform, whole.task, ("within_one",)
        )
        score, z, y = scored(own)
        assert score["within_one"] == pytest.approx(np.mean(np.abs(z[:, 0] - y) < 1))
        assert "within_one" in own.unscored()

        @entry("metric", name="wrong_shape")
        def wrong(outputs, targets):
            return outputs.mean()

        bad = Evaluator(
            whole.net, whole.inputs, whole.labels, whole.transform, whole.task, ("wrong_shape",)
        )
        with pytest.raises(ValueError, match="one number a row"):
            bad.score(whole.net.initial()[0])
    finally:
        CATALOGUE.pop("within_one", None)
        CATALOGUE.pop("wrong_shape", None)


def test_metrics_that_do_not_fit_are_refused_and_those_that_do_are_named():
    with pytest.raises(MetricError, match=r"rmse does not fit the task classification.*macro_f1"):
        metrics_of(parse("classification", "task"), ("rmse",))
    with pytest.raises(MetricError, match=r"auroc does not fit the task regression.*r2"):
        metrics_of(parse("regression(headline='auroc')", "task"))

    @entry("metric", name="seconds")
    def seconds(outputs, targets):
        return targets

    try:
        with pytest.raises(MetricError, match="column of the records"):
            metrics_of(parse("regression", "task"), ("seconds",))
    finally:
        CATALOGUE.pop("seconds")


def test_directions_and_units():
    down = {"loss", "brier", "ece", "mae", "rmse", "perplexity"}
    for card in cards("metric"):
        metric = card.make()
        assert metric.higher_is_better == (card.name not in down), card.name
    task = parse("classification", "task")
    (accuracy, _) = metrics_of(task)
    assert accuracy.headline == ("accuracy", True, "%")
    assert accuracy.headline.shown(0.5) == "50.00"
    rmse = metrics_of(parse("regression", "task"))[0].headline
    assert not rmse.higher_is_better and rmse.reached(0.4, 0.5) and not rmse.reached(0.6, 0.5)


def test_a_confidence_at_the_edge_of_a_bin_belongs_to_the_bin_below():
    """One row with confidence 1/2 and a right answer, one near 1 with a wrong one."""
    task = parse("binary", "task")
    metric = parse("ece(bins=2)", "metric")
    outputs = torch.tensor([[0.0], [40.0]], dtype=torch.float64)
    targets = torch.tensor([0, 0])
    sums = metric.addends(task, outputs, targets).sum(0)
    assert sums.tolist() == pytest.approx([-0.5, 1.0])
    assert float(metric.value(sums, torch.tensor(2.0))) == pytest.approx(0.75)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.booleans()), min_size=1))
def test_areas_by_group_are_those_of_scikit_learn_with_ties(rows):
    """Few values of the score, so that ties are common; groups of one class are undefined."""
    group, score, truth = (np.array(column) for column in zip(*rows, strict=True))
    outputs = torch.from_numpy(score.astype(np.float64))[:, None]
    task = parse("binary", "task")
    found = parse("auroc", "metric").by_group(
        task, outputs, torch.from_numpy(truth.astype(np.int64)), torch.from_numpy(group), 5
    )
    for number in range(5):
        mine = group == number
        if 0 < truth[mine].sum() < mine.sum():
            assert float(found[number]) == pytest.approx(sk.roc_auc_score(truth[mine], score[mine]))
        else:
            assert math.isnan(float(found[number]))


def test_a_group_with_an_output_that_is_not_finite_has_no_area():
    outputs = torch.tensor([[0.1], [0.9], [math.nan], [0.5]], dtype=torch.float64)
    labels, group = torch.tensor([0, 1, 0, 1]), torch.tensor([0, 0, 1, 1])
    found = parse("auroc", "metric").by_group(parse("binary", "task"), outputs, labels, group, 2)
    assert found[0] == 1 and math.isnan(found[1])
