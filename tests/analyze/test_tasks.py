"""Analyses of runs of other tasks: right for them, or refused in one sentence."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedbasin import (
    DataConfig,
    Experiment,
    LocalConfig,
    PartitionConfig,
    SimConfig,
    SnapshotConfig,
    run,
)
from fedbasin.analyze import CATALOGUE, AnalysisError, Options, find
from fedbasin.analyze.learning import participation_equivalent
from fedbasin.cli import app
from fedbasin.core.expressions import parse
from fedbasin.core.task import Survival
from fedbasin.experiment.subjects import open_subject

NUMBERS = Experiment(
    model="mlp(widths=(8,))",
    task="regression",
    rounds=4,
    data=DataConfig(name="diabetes"),
    partition=PartitionConfig(how="iid", clients=5),
    local=LocalConfig(lr=0.05, batch=32),
    sim=SimConfig(participation="fraction(rate=1)"),
    snapshots=SnapshotConfig(every=2, clients=True),
)
YES_OR_NO = replace(
    NUMBERS,
    task="binary",
    data=DataConfig(name="breast-cancer"),
    partition=PartitionConfig(how="dirichlet(alpha=1)", clients=5),
)
FOR_CLASSES = ("averaging", "cka", "collapse", "decomposition")
FOR_LABELS = ("classes", "neurons", "pearson")
FOR_ROWS = ("gradient", "hessian", "line", "plane", "rescaling", "weights")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    home = tmp_path_factory.mktemp("tasks")
    run(NUMBERS, home / "numbers")
    run(YES_OR_NO, home / "binary")
    return home


def test_what_each_analysis_is_for():
    needing = {
        "classes": FOR_CLASSES,
        "class_labels": FOR_LABELS,
        "row_losses": FOR_ROWS,
    }
    for need, names in needing.items():
        assert sorted(n for n, e in CATALOGUE.items() if need in e.needs) == sorted(names)
    free = {name for name, entry in CATALOGUE.items() if not entry.needs}
    assert free == {"locality", "selection", "coherence", "shrinking", "curves", "lambdas", "fit"}


@pytest.mark.parametrize("name", [*FOR_ROWS, "locality", "coherence", "shrinking", "curves"])
def test_an_analysis_runs_on_a_regression(name, runs):
    found = find(name)([open_subject(runs / "numbers")], Options(points=4))
    assert found.panels
    for panel in found.panels:
        assert "error" not in panel.title and "accuracy" not in panel.title
        if panel.kind == "lines":
            assert all(np.isfinite(line.y).all() for line in panel.series), panel.title


@pytest.mark.parametrize("name", ["line", "coherence", "classes", "neurons", "curves"])
def test_an_analysis_runs_on_yes_or_no(name, runs):
    assert find(name)([open_subject(runs / "binary")], Options(points=4)).panels


def test_the_ends_of_a_line_score_what_a_regression_recorded(runs):
    subject = open_subject(runs / "numbers")
    found = find("line")([subject], Options(points=2, margin=0, rows=0))
    loss, error = found.panels
    assert (loss.y_label, error.y_label) == ("test loss", "test mae")
    for place, number in ((0, 2), (1, 4)):
        record = subject.records[number - 1]
        assert loss.series[0].y[place] == pytest.approx(record.metric("loss"), rel=1e-5)
        assert error.series[0].y[place] == pytest.approx(record.metric("mae"), rel=1e-5)


def test_accuracy_by_class_of_yes_or_no_is_that_of_the_sign(runs):
    """The network has one output: its largest is always the first."""
    subject = open_subject(runs / "binary")
    evaluator = subject.data.test
    said = evaluator.logits(subject.last_model().vector.to(evaluator.net.dtype))[:, 0] > 0
    right = said == (evaluator.labels == 1)
    expected = [float(right[evaluator.labels == c].double().mean()) for c in (0, 1)]
    bars = find("classes")([subject]).panels[0]
    assert bars.series[0].values == pytest.approx(expected)
    assert 0 < sum(said) < len(said)


def test_coherence_without_classes_has_no_panel_of_class_mixes(runs):
    titles = {
        name: [p.title for p in find("coherence")([open_subject(runs / name)]).panels]
        for name in ("numbers", "binary")
    }
    assert "heterogeneity coherence" in titles["binary"]
    assert "heterogeneity coherence" not in titles["numbers"]


@pytest.mark.parametrize("name", [*FOR_CLASSES, *FOR_LABELS])
def test_what_needs_classes_is_refused_for_a_regression(name, runs):
    """Softmax of one output is 1 for every model: nothing would be wrong to look at."""
    with pytest.raises(AnalysisError) as refused:
        find(name)([open_subject(runs / "numbers")])
    said = str(refused.value)
    assert said.startswith(f"{name} needs ") and "is a run of the task regression" in said
    assert "analyses for it: " in said
    others = said.rpartition("analyses for it: ")[2].split(", ")
    assert {"line", "curves"} <= set(others) and name not in others


@pytest.mark.parametrize("name", FOR_CLASSES)
def test_what_needs_a_probability_for_each_class_is_refused_for_one_output(name, runs):
    with pytest.raises(AnalysisError, match=r"needs class probabilities, and .* the task binary"):
        find(name)([open_subject(runs / "binary")])


@pytest.mark.parametrize("name", FOR_ROWS)
def test_landscapes_are_refused_where_the_loss_does_not_add_up(name, runs):
    """Refused before data are loaded."""

    def load():
        raise AssertionError("data were loaded")

    subject = replace(open_subject(runs / "numbers"), task=Survival(), load=load)
    with pytest.raises(AnalysisError, match=f"{name} needs a loss that adds up over rows, and"):
        find(name)([subject])
    others = [n for n, e in CATALOGUE.items() if e.fits(subject.task)]
    assert others and not set(others) & {*FOR_ROWS, *FOR_CLASSES, *FOR_LABELS}


def test_the_listing_says_which_tasks(monkeypatch):
    listing = CliRunner().invoke(app, ["analyze"], env={"COLUMNS": "220"}).output
    lines = {line.split()[1]: line for line in listing.splitlines() if line.startswith("│")}
    assert "all but survival" in lines["line"]
    assert "classification, binary" in lines["classes"]
    assert " all " in lines["curves"]
    assert "classification" in lines["cka"] and "binary" not in lines["cka"]


def test_a_target_and_participation_of_errors_go_downwards(runs):
    subject = open_subject(runs / "numbers")
    values = [r.metric("rmse") for r in subject.records]
    target = sorted(values)[1] + 1e-9
    first = next(r.round for r in subject.records if r.metric("rmse") <= target)
    table = find("curves")([subject], Options(target=target)).panels[-1]
    assert table.rows[0][2] == first and table.columns[4] == "largest rise"
    without = find("curves")([subject]).panels[-1]
    assert without.columns[2] == "rounds to target" and without.rows[0][2] is None
    errors = [0.9, 0.7, 0.6]
    down = participation_equivalent([5, 10, 20], errors, 0.65, higher_is_better=False)
    assert down == pytest.approx(15)
    assert participation_equivalent([5, 10, 20], errors, 1.0, higher_is_better=False) == 5
    assert participation_equivalent([5, 10, 20], errors, 0.5, higher_is_better=False) is None


def test_a_line_of_a_task_without_an_error_draws_the_loss_alone(runs):
    subject = open_subject(runs / "numbers")
    plain = replace(subject.data.test, task=Plain())
    data = replace(subject.data, test=plain)
    found = find("line")([replace(subject, task=Plain(), load=lambda: data)], Options(points=2))
    assert [p.title for p in found.panels] == ["test loss"]


class Plain(type(parse("regression", "task"))):
    """A task of a kind that no metric but the loss fits."""

    kind = "own"


def test_a_hessian_is_of_the_task_s_loss(runs):
    """For a linear network the Hessian of the squared loss is 2 X'X / n of inputs and a one."""
    from fedbasin.analyze.hessian import hessian_product

    line = replace(NUMBERS, model="mlp(widths=())", snapshots=SnapshotConfig())
    run(line, runs / "linear")
    subject = open_subject(runs / "linear")
    rows = subject.data.train
    vector = subject.last_model().vector
    product = hessian_product(rows, vector)
    inputs = rows.transform(rows.inputs, None).double()
    design = torch.cat([inputs, torch.ones(len(inputs), 1, dtype=torch.float64)], 1)
    expected = 2 * design.T @ design / len(design)
    found = torch.stack([product(one) for one in torch.eye(len(vector))]).double()
    assert torch.allclose(found, expected, atol=1e-4)
