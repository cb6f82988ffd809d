"""Every analysis on real runs: what it says equals what the records and models say."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread
from typer.testing import CliRunner

from fedbasin import Experiment, LocalConfig, PartitionConfig, SimConfig, SnapshotConfig, build, run
from fedbasin.analyze import CATALOGUE, AnalysisError, Options, find
from fedbasin.analyze.coherence import gradient_coherence
from fedbasin.analyze.draw import _draw_lines, _looks, _name_places, draw
from fedbasin.analyze.show_model import _bounds
from fedbasin.analyze.subject import label, resolve
from fedbasin.cli import app, main
from fedbasin.cli.analyze import read_groups
from fedbasin.core.figure_data import (
    Analysis,
    Bars,
    BarSeries,
    Grid,
    Line,
    Lines,
    Mark,
    Table,
)
from fedbasin.core.snapshot import Snapshots
from fedbasin.core.vectors import shares
from fedbasin.experiment.config import ConfigError, DataConfig
from fedbasin.experiment.subjects import open_subject

BASE = Experiment(
    model="mlp(widths=(8,))",
    rounds=4,
    data=DataConfig(proxy_per_class=3, imbalance=0.3),
    partition=PartitionConfig(how="dirichlet(alpha=0.5, minimum=2)", clients=6),
    local=LocalConfig(lr=0.2, batch=32),
    sim=SimConfig(participation="fraction(rate=1)"),
    snapshots=SnapshotConfig(every=2, clients=True),
)
METHODS = {
    "fedavg": "fedavg",
    "fedlaw": "fedlaw(epochs=5)",
    "fedcda": "fedcda(warmup=1)",
    "wima": "wima(fedavg, window=2)",
    "traced": "fedlaw(epochs=7, guard=0, trace=True)",
}
RUNS_OF = {
    "selection": ["fedcda"],
    "pearson": ["fedlaw"],
    "lambdas": ["fedlaw", "few"],
    "fit": ["traced"],
    "shrinking": ["fedavg", "fedlaw"],
    "decomposition": ["fedavg", "again"],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    home = tmp_path_factory.mktemp("runs")
    for name, method in METHODS.items():
        run(replace(BASE, method=method), home / name)
    fixed = replace(BASE.partition, seed=0)
    run(replace(BASE, seed=1, partition=fixed), home / "again")
    few = replace(BASE.sim, participation="count(clients=5)", dropout=0.5)
    run(replace(BASE, method="fedlaw(epochs=2)", sim=few), home / "few")
    run(replace(BASE, method="fedcda(warmup=0, merge=fedlaw(epochs=2))", sim=few), home / "picks")
    run(replace(BASE, snapshots=SnapshotConfig()), home / "bare")
    return home


def subjects(home, *names):
    return [open_subject(home / name) for name in names]


def panel(found, title):
    return next(p for p in found.panels if p.title == title)


def series(found, title, name):
    return next(s for s in panel(found, title).series if s.name == name)


@pytest.mark.parametrize("name", sorted(CATALOGUE))
def test_every_analysis_runs_and_goes_through_json(name, runs):
    chosen = subjects(runs, *RUNS_OF.get(name, ["fedavg", "fedlaw"]))
    ticks = []
    entry = find(name)
    options = Options(points=5, rows=50 if "rows" in entry.uses and name != "collapse" else None)
    found = entry(chosen, options, lambda what, total: ticks.append)
    assert found.panels and found.name == name and len(found.runs) == len(chosen)
    again = Analysis.from_json(found.to_json())
    assert again.to_json() == found.to_json()
    lines = [s for p in found.panels if p.kind == "lines" for s in p.series]
    assert all(len(line.x) for line in lines)
    assert all(np.isfinite(line.x).all() for line in lines)


def test_a_run_that_is_given_twice_has_two_lines_in_each_panel(runs):
    once = find("locality")(subjects(runs, "fedavg"))
    twice = find("locality")(subjects(runs, "fedavg", "fedavg"))
    for one, two in zip(once.panels, twice.panels, strict=True):
        assert [(s.x, s.y) for s in two.series] == 2 * [(s.x, s.y) for s in one.series]


def test_every_analysis_is_documented_and_named_in_the_listing():
    page = (Path(__file__).parents[2] / "docs" / "analyses.md").read_text()
    for name, entry in CATALOGUE.items():
        assert f"`{name}`" in page, f"docs/analyses.md does not speak of {name}"
        assert set(entry.uses) <= set(Options.__dataclass_fields__)


def test_the_ends_of_a_line_score_what_the_records_say(runs):
    """At 0 and 1 the line is at models whose accuracy and loss the run has recorded."""
    (subject,) = subjects(runs, "fedavg")
    found = find("line")([subject], Options(points=3, margin=0, rows=0))
    loss = series(found, "test loss", "score:2 to score:4")
    error = series(found, "test error", "score:2 to score:4")
    assert [mark.y for mark in panel(found, "test loss").marks] == pytest.approx(
        [loss.y[0], loss.y[2]]
    )
    for place, number in ((0, 2), (2, 4)):
        record = subject.records[number - 1]
        assert loss.y[place] == pytest.approx(record.metric("loss"), rel=1e-5)
        assert error.y[place] == pytest.approx(1 - record.metric("accuracy"))


def test_two_runs_make_a_line_between_their_last_models(runs):
    three = subjects(runs, "fedavg", "bare", "fedlaw")
    found = find("line")(three, Options(points=2, margin=0, rows=0))
    same, other = found.panels[0].series
    assert same.name == "fedavg, fedavg score:last to fedavg, bare final"
    assert same.y[0] == pytest.approx(same.y[1])  # the same run, with and without snapshots
    assert "the two models are identical" in found.notes[1]
    assert (
        other.name.endswith("to fedlaw(epochs=5) score:last") and " apart, least" in found.notes[2]
    )
    score = three[2].records[3].metric("loss")
    assert found.panels[0].marks[3].y == pytest.approx(score, rel=1e-5)
    with pytest.raises(AnalysisError, match="a line needs two"):
        find("line")(subjects(runs, "bare"))
    with pytest.raises(AnalysisError, match="in pairs, got 1"):
        find("line")(subjects(runs, "fedavg"), Options(models=("final",)))


def test_a_plane_marks_clients_their_mean_and_others_where_they_are(runs):
    (subject,) = subjects(runs, "fedavg")
    found = find("plane")([subject], Options(points=4, rows=30))
    assert [p.title for p in found.panels][::2] == ["round 2: test loss", "round 4: test loss"]
    grid = panel(found, "round 4: test loss")
    three = ["client0:4", "client1:4", "client2:4"]
    assert [m.name for m in grid.marks] == [*three, "mean:4", "mean of the three", "smallest loss"]
    values = np.array(grid.values)
    row, column = np.unravel_index(values.argmin(), values.shape)
    assert (grid.marks[-1].x, grid.marks[-1].y) == pytest.approx((grid.x[column], grid.y[row]))
    middle = grid.marks[-2]
    corners = [(m.x, m.y) for m in grid.marks[:3]]
    assert (middle.x, middle.y) == pytest.approx(np.mean(corners, 0).tolist(), abs=1e-5)
    shot = subject.snapshots.get(4)
    apart = float((shot.models[0] - shot.models[1]).norm())
    assert (grid.marks[0].x, grid.marks[0].y) == pytest.approx((0, 0))
    assert (grid.marks[1].x, grid.marks[1].y) == pytest.approx((apart, 0), abs=1e-5)
    (averaged,) = subjects(runs, "wima")
    found = find("plane")([averaged], Options(points=2, rows=30))
    marks = panel(found, "round 4: test loss").marks
    assert [m.name for m in marks][-4:-1] == ["mean:4", "score:4", "mean of the three"]
    named = Options(models=("client0:4", "client1:4", "client2:4"), points=3, rows=0)
    (told,) = [n for n in find("plane")([subject], named).notes if "their mean has" in n]
    scorer = build(BASE).evaluator
    own = scorer.score(shot.models[:3].mean(0))["loss"]
    assert f"their mean has {own:.4g} and lies" in told
    corner = scorer.score(shot.models[0])["loss"]
    assert f"losses {corner:.4g}, " in told
    with pytest.raises(AnalysisError, match="at least three"):
        find("plane")([subject], Options(models=("score:2", "score:4")))
    with pytest.raises(AnalysisError, match="keeps models of 0 rounds"):
        find("plane")(subjects(runs, "bare"))


def test_names_of_models_mean_what_they_say(runs):
    both = subjects(runs, "fedavg", "wima")
    shot = Snapshots(runs / "wima" / "snapshots").get(4)
    assert torch.equal(resolve(both, "2/score:4").vector, shot.score)
    assert torch.equal(resolve(both, "2/send:last").vector, shot.send)
    assert torch.equal(resolve(both, "2/start:4").vector, shot.start)
    assert torch.equal(resolve(both, "2/client3:4").vector, shot.models[3])
    share = (shot.weights / shot.weights.sum()).float()
    torch.testing.assert_close(resolve(both, "2/mean:4").vector, share @ shot.models)
    torch.testing.assert_close(resolve(both, "2/final").vector, shot.score)
    for wrong, words in {
        "score": "cannot read",
        "score:3": "keeps rounds 2, 4",
        "3/score:4": "2 runs",
        "0/final": "2 runs",
        "client9:4": r"\[0, 1, 2, 3, 4, 5\]",
    }.items():
        with pytest.raises(AnalysisError, match=words):
            resolve(both, wrong)
    with pytest.raises(AnalysisError, match="keeps no models"):
        resolve(subjects(runs, "bare"), "score:4")


def test_decomposition_adds_up_and_names_its_draws(runs):
    both = subjects(runs, "fedavg", "again")
    found = find("decomposition")(both, Options(rows=60))
    title = "factors of the squared error"
    parts = ("train bias", "heter bias", "cross", "variance", "covariance")
    total = np.sum([series(found, title, part).y for part in parts], axis=0)
    np.testing.assert_allclose(total, series(found, title, "ensemble loss").y, rtol=1e-12)
    assert series(found, title, "train bias").x == (2, 4)
    assert min(series(found, title, "variance").y) > 0 and "2 draws" in found.notes[1]
    own = series(found, "bias of client models", "fedavg, own rows (TrainBias)").y
    others = series(found, "bias of client models", "fedavg, others' rows (HeterBias)").y
    assert max(own) < min(others)  # label skew: clients know their own rows best
    alone = find("decomposition")(both[:1], Options(rows=60))
    assert max(series(alone, title, "variance").y) == 0 and "one draw" in alone.notes[1]
    late = find("decomposition")(both[:1], Options(rows=60, draws=2))
    assert series(late, title, "variance").x == (4,)
    with pytest.raises(AnalysisError, match="same clients"):
        alike = [replace(s, setting="one") for s in subjects(runs, "fedavg", "few")]
        find("decomposition")(alike, Options(rows=60))


def test_runs_of_different_settings_are_not_draws_of_one_another(runs):
    fedavg, again, other = subjects(runs, "fedavg", "again", "fedlaw")
    assert fedavg.setting == again.setting != other.setting
    found = find("decomposition")([fedavg, other, again], Options(rows=60))
    titles = [p.title for p in found.panels if p.title.startswith("factors")]
    assert titles == [
        "factors of the squared error: fedavg",
        "factors of the squared error: fedlaw(epochs=5)",
    ]
    assert (
        max(series(found, titles[1], "variance").y)
        == 0
        < min(series(found, titles[0], "variance").y)
    )
    score = series(found, "test accuracy", "fedavg")
    assert score.y == pytest.approx(
        [r.metric("accuracy") for r in fedavg.records if r.metric("accuracy")]
    )
    bound = series(found, "covariance and its lower bound", "fedavg, least pair").y
    assert all(b <= c for b, c in zip(bound, series(found, titles[0], "covariance").y, strict=True))


def test_averaging_and_cka_show_every_round_or_run_they_speak_of(runs):
    both = subjects(runs, "fedavg", "wima")
    found = find("averaging")(both[:1], Options(rows=60, count=2))
    names = ["fedavg, round 2", "fedavg, round 4"]
    mean = panel(found, "averaged model").series
    ensemble = panel(found, "ensemble of the same models").series
    assert [s.name for s in mean] == [s.name for s in ensemble] == names
    for one, other in zip(mean, ensemble, strict=True):  # one model is its own mean
        assert one.y[0] == pytest.approx(other.y[0])
    assert [one.y for one in mean] != [other.y for other in ensemble]
    gap = series(found, "Lemma 1", "fedavg, round 4")
    slope = (gap.y[0] - gap.y[-1]) / (gap.x[0] - gap.x[-1])
    assert 1.5 < slope < 2.5  # on log-log the gap falls by about two a decade
    straight = series(found, "Lemma 1", "slope 2")
    assert straight.y[-1] == gap.y[-1]
    assert (straight.y[0] - straight.y[-1]) == pytest.approx(2 * (gap.x[0] - gap.x[-1]))
    grids = [p.title for p in find("cka")(both, Options(rows=60)).panels if p.kind == "grid"]
    assert grids == [f"linear CKA at round 4, {s.method}" for s in both]


def test_lambdas_are_those_of_the_records(runs):
    (subject,) = subjects(runs, "fedlaw")
    found = find("lambdas")([subject])
    assert series(found, "gamma", "fedlaw(epochs=5)").y == pytest.approx(
        [r.notes["gamma"] for r in subject.records]
    )
    own = series(found, "lambda of each client: fedlaw(epochs=5)", "client 3").y
    assert own == pytest.approx([r.notes["lambdas"][3] for r in subject.records])
    groups = Options(groups=(frozenset({0, 1}), frozenset({5})))
    first, second = find("lambdas")([subject], groups).panels[1].series
    assert first.y == pytest.approx([np.mean(r.notes["lambdas"][:2]) for r in subject.records])
    assert second.y == pytest.approx([r.notes["lambdas"][5] for r in subject.records])
    (few,) = subjects(runs, "few")  # who did not take part has no weight in that round
    drawn = find("lambdas")([few]).panels[1].series
    assert any(np.isnan(line.y).any() for line in drawn)


def test_a_fit_starts_at_the_sizes_and_ends_at_what_the_round_used(runs):
    (subject,) = subjects(runs, "traced")
    found = find("fit")([subject], Options())
    record = subject.records[-1]
    at = f"{subject.method}, round 4"
    assert [s.name for s in panel(found, "gamma").series] == [
        f"{subject.method}, round {round}" for round in (1, 3, 4)
    ]
    gamma = series(found, "gamma", at)
    assert gamma.x == tuple(range(8)) and gamma.y[0] == 1
    assert gamma.y[-1] == pytest.approx(record.notes["gamma"])
    cohort = subject.data.cohort(4).tolist()
    sizes = shares(subject.data.counts.sum(1)[cohort].double())
    learnt = panel(found, f"lambda: {at}").series
    assert [line.name for line in learnt] == [f"client {client}" for client in cohort]
    assert [line.y[0] for line in learnt] == pytest.approx(sizes.tolist())
    assert [line.y[-1] for line in learnt] == pytest.approx(record.notes["lambdas"])
    groups = (frozenset({0, 3}), frozenset({77}))
    (one,) = panel(find("fit")([subject], Options(groups=groups)), f"lambda: {at}").series
    pair = [line.y[-1] for line in learnt if line.name in ("client 0", "client 3")]
    assert one.name == "group 1" and one.y[-1] == pytest.approx(sum(pair) / 2)
    for what in ("gamma", "lambda"):
        left = series(found, "share of the way left", f"{at}, {what}").y
        assert left[0] == 1 and left[-1] == 0
    with pytest.raises(AnalysisError, match="trace=True"):
        find("fit")(subjects(runs, "fedlaw"), Options())


def test_the_gradient_of_a_round_is_that_of_all_rows_at_its_start(runs):
    """For FedLAW the step is no plain mean; for both runs the numbers are those of the models."""
    chosen = subjects(runs, "fedavg", "fedlaw")
    found = find("gradient")(chosen, Options(rows=0))
    for subject in chosen:
        snapshot = subject.snapshots.get(4)
        train = subject.data.train
        start = snapshot.start.clone().requires_grad_()
        loss = train.summed_loss(start, slice(0, len(train))) / len(train)
        slope = torch.autograd.grad(loss, start)[0].double()
        step = (snapshot.start - snapshot.sent).double()
        wanted = float(slope @ step / slope.norm() / step.norm())
        name = label(subject, chosen)
        cosine = series(found, "cosine of step and steepest descent", name)
        assert cosine.x == (2, 4) and cosine.y[-1] == pytest.approx(wanted, rel=1e-4)
        drift = series(found, "last term of U_r", name).y[-1]
        moved = (snapshot.models - snapshot.start).double()
        assert drift == pytest.approx(float(moved.square().sum(1).mean()))
        alike = series(found, "cosine of step and steepest descent", f"{name}, clients alike")
        mean = -moved.mean(0)
        assert alike.y[-1] == pytest.approx(float(slope @ mean / slope.norm() / mean.norm()), 1e-4)
        errors = panel(found, "epsilon_r / |grad f|^2, least over gamma").series
        taken, even = (e.y for e in errors if e.name in (name, f"{name}, clients alike"))
        closer = sum(a < b - 1e-6 for a, b in zip(taken, even, strict=True))
        assert any(f"{name}: " in n and f"closer in {closer} of 2 rounds" in n for n in found.notes)
        assert taken[-1] == pytest.approx(1 - max(wanted, 0) ** 2, rel=1e-4)


def test_lines_of_one_run_have_one_colour_and_a_style_each():
    def looks(*names):
        return _looks(Lines("", "round", "", tuple(Line(n, (1.0,), (1.0,)) for n in names)))

    a, b, c, d = looks(
        "fedlaw(lr=1, guard=0), head", "fedlaw(lr=1, guard=0), tail", "x, head", "x, tail"
    )
    assert a[0] == b[0] != c[0] == d[0] and a[1] == c[1] != b[1] == d[1]
    assert len({look for look in looks("fedlaw(lr=1, guard=0)", "fedavg", "x")}) == 3
    assert len({look for look in looks("x, head", "x, middle", "x, tail")}) == 3


def test_the_guard_binds_where_the_ratio_is_at_its_least_again_and_again():
    ratios = (5.0, 5.001, float("inf"), 5.2, 9.0)
    told = _bounds((0.9, 0.95, 1.0, 1.1, 0.99), ratios)
    assert told.startswith("gamma is 1 in 1 of 5 rounds")
    assert "the guard binds in 2, where r is 5; above 1 in 1" in told
    assert "binds" not in _bounds((0.9, 0.95), (5.0, 5.2))


def test_the_ratio_of_divergences_is_that_of_the_records(runs):
    (subject,) = subjects(runs, "fedcda")
    found = find("selection")([subject])
    ratio = series(found, "V of the picked over V of the newest", subject.method)
    notes = [record.notes for record in subject.records]
    wanted = [one["divergence"] / one["divergence_newest"] for one in notes]
    assert ratio.y == pytest.approx(wanted) and min(ratio.y) < 1 == max(ratio.y)


@pytest.mark.parametrize(
    ("names", "beside"),
    [
        ("ab", False),
        ("abcdef", True),
        (["short", "fedlaw(" + "epochs=20, " * 5 + "), group 1"], True),
    ],
)
def test_a_legend_that_would_cover_the_lines_stands_beside_them(names, beside):
    figure = Figure()
    axes = figure.add_subplot()
    _draw_lines(axes, Lines("", "round", "", tuple(Line(n, (1.0, 2.0), (1.0, 2.0)) for n in names)))
    FigureCanvasAgg(figure).draw()
    edge = axes.get_window_extent().x1
    assert (axes.get_legend().get_window_extent().x0 >= edge) == beside


def test_a_long_legend_takes_no_room_from_its_panel(tmp_path):
    name = "fedlaw(learn='gamma', guard=0.0, epochs=20), group 1 with 2"
    both = (Line(name, (1.0,), (1.0,)), Line("fedavg", (1.0,), (1.0,)))
    one = Lines("one", "round", "", both)
    plain = Lines("two", "round", "", both[1:])
    widths = []
    for panel in (one, plain):
        picture = draw(Analysis("a", "a", "", (), (panel, panel), ()), tmp_path / "a.png")
        widths.append(imread(picture).shape[1])
    assert widths[0] - widths[1] > 2 * 130 * 3  # three inches a legend


def test_names_of_marks_that_lie_close_do_not_cover_each_other():
    marks = (Mark("a", 0.5, 0.5), Mark("b", 0.6, 0.52), Mark("c", 0.55, 0.5), Mark("d", 0.5, 0.9))
    places = _name_places(Grid("", "", "", "", (0.0, 1.0), (0.0, 1.0), ((1.0,) * 2,) * 2, marks))
    assert len(set(places[:3])) == 3 and places[3] == places[0]


def test_the_two_pulls_have_the_ratio_that_fedlaw_recorded(runs):
    (subject,) = subjects(runs, "fedlaw")
    found = find("shrinking")([subject])
    step = np.array(series(found, "the two pulls", "fedlaw(epochs=5), |gamma g|").y)
    pull = np.array(series(found, "the two pulls", "fedlaw(epochs=5), |(1 - gamma) w|").y)
    recorded = np.array(series(found, "ratio r", "fedlaw(epochs=5)").y)
    known = np.isfinite(recorded) & np.isfinite(pull)
    assert known.sum() >= 2 and np.isnan(pull[0])  # the initial model's norm is not recorded
    np.testing.assert_allclose((step / pull)[known], recorded[known], rtol=1e-3)
    gammas = [r.notes["gamma"] for r in subject.records]
    assert f"above 1 in {sum(g > 1 for g in gammas)}" in found.notes[-1]
    assert f"gamma is 1 in {sum(g == 1 for g in gammas)} of 4 rounds" in found.notes[-1]
    shares = panel(found, "parameters").series[0].y
    assert sum(shares) == pytest.approx(1)


def test_learnt_weights_are_matched_with_the_cohorts_that_sent_them(runs):
    """With clients that drop out, the ids are those of snapshots, drawn again from the seed."""
    (subject,) = subjects(runs, "few")
    for round in (2, 4):
        kept = subject.snapshots.get(round)
        if kept.clients is not None:
            assert subject.data.cohort(round).tolist() == kept.clients.tolist()
    assert any(subject.snapshots.get(round).clients is not None for round in (2, 4))
    assert sum(record.dropped for record in subject.records) > 0
    for record in subject.records:
        assert len(subject.data.cohort(record.round)) == record.replies
    (full,) = subjects(runs, "fedlaw")
    ((_, size, _, _, clients),) = find("pearson")([full]).panels[0].rows
    lambdas = sum(np.array(r.notes["lambdas"]) for r in full.records)
    sizes = full.data.counts.sum(1).numpy()
    assert clients == 6 and size == pytest.approx(np.corrcoef(lambdas, sizes)[0, 1])


def test_coherence_weighs_by_learnt_lambdas_where_there_are_some(runs):
    (subject,) = subjects(runs, "fedlaw")
    found = find("coherence")([subject], Options(groups=(frozenset({0, 1}), frozenset({2}))))
    shot, lambdas = subject.snapshots.get(4), subject.records[3].notes["lambdas"]
    g = (shot.start - shot.models).double().numpy()
    total = 0.0
    for i in range(6):
        for j in range(6):
            if i != j:
                cosine = g[i] @ g[j] / np.linalg.norm(g[i]) / np.linalg.norm(g[j])
                total += lambdas[i] * lambdas[j] * cosine / 6
    assert found.panels[0].series[0].y[-1] == pytest.approx(total)
    (mix, by_samples, everyone) = panel(found, "class mix of the last cohort").series
    counts = subject.data.counts.double().numpy()
    mixes = counts / counts.sum(1, keepdims=True)
    assert mix.values == pytest.approx((np.array(lambdas) @ mixes).tolist())
    share = counts.sum(1) / counts.sum()
    assert by_samples.values == pytest.approx((share @ mixes).tolist())
    assert everyone.values == pytest.approx((counts.sum(0) / counts.sum()).tolist())
    for mark in found.panels[0].marks:
        assert mark.y == found.panels[0].series[0].y[found.panels[0].series[0].x.index(mark.x)]
    names = [s.name.removeprefix("fedlaw(epochs=5), ") for s in panel(found, "groups").series]
    assert names == ["group 1", "group 1 with 2", "group 2"]


def test_weights_of_clients_beyond_the_cohort_are_not_taken_for_the_cohorts(runs):
    """fedcda(merge=fedlaw) weighs a model of every client seen."""
    (subject,) = subjects(runs, "picks")
    shot, lambdas = subject.snapshots.get(4), subject.records[3].notes["lambdas"]
    assert len(lambdas) > len(shot.clients)
    found = find("coherence")([subject])
    by_samples = gradient_coherence(shot.start, shot.models, shares(shot.weights))
    assert found.panels[0].series[0].y[-1] == pytest.approx(by_samples.cohort)
    with pytest.raises(ValueError, match=r"clients beyond the cohort, as of fedcda\(merge="):
        find("pearson")([subject])


def test_classes_agree_with_the_summary(runs):
    (subject,) = subjects(runs, "bare")
    found = find("classes")([subject])
    recorded = subject.records[-1].metrics["accuracy_per_class"]
    assert found.panels[0].series[0].values == pytest.approx(recorded)
    assert found.panels[0].categories == tuple(str(d) for d in range(10))
    ((_, head, _, tail),) = found.panels[2].rows
    counts = subject.data.counts.sum(0).numpy()
    order = np.argsort(-counts, kind="stable")
    assert head == pytest.approx(np.mean([recorded[c] for c in order[:4]]))
    assert tail == pytest.approx(np.mean([recorded[c] for c in order[7:]]))


def test_weights_stay_on_three_clients_that_took_part(runs):
    (subject,) = subjects(runs, "fedavg")
    options = Options(points=3, rows=0, models=("client5", "client1", "client2"))
    found = find("weights")([subject], options)
    assert "client 5" in found.panels[0].x_label
    best = [s.y for s in panel(found, "best weights").series]
    assert np.sum(best, axis=0) == pytest.approx([1, 1])
    shot = subject.snapshots.get(4)
    share = shot.weights[[5, 1, 2]] / shot.weights[[5, 1, 2]].sum()
    alone = build(BASE).evaluator.score(shot.models[5])["loss"]  # all the weight on client 5
    assert found.panels[0].values[0][2] == pytest.approx(alone, rel=1e-5)
    mark = found.panels[0].marks[0]
    assert (mark.x, mark.y) == pytest.approx((float(share[0]), float(share[1])))
    with pytest.raises(AnalysisError, match="no round in which clients"):
        find("weights")([subject], Options(models=("client0", "client1", "client9")))
    with pytest.raises(AnalysisError, match="weights takes clients"):
        find("weights")([subject], Options(models=("score:2",)))


def test_participation_is_compared_with_the_first_methods_runs(runs):
    chosen = subjects(runs, "fedavg", "fedlaw", "bare")
    few = [replace(r, replies=3, dropped=0) for r in chosen[2].records]
    low = [
        replace(r, metrics=r.metrics | {"accuracy": 0.0}) if r.metric("accuracy") is not None else r
        for r in few
    ]
    chosen[2] = replace(chosen[2], records=tuple(low))
    equal = panel(find("curves")(chosen, Options(target=0.1)), "participation that ends as well")
    assert equal.rows[0][:2] == ("fedlaw(epochs=5)", 6.0)
    without = find("curves")(subjects(runs, "fedavg", "fedlaw"))
    assert [p.title for p in without.panels][-1] == "learning curves"


def test_runs_that_lack_what_is_needed_are_told_what_to_set(runs):
    for name, words in {
        "coherence": "snapshots.clients=true",
        "locality": "snapshots.every=10",
        "selection": "records no divergence",
        "pearson": "records no lambdas",
    }.items():
        with pytest.raises(AnalysisError, match=words):
            find(name)(subjects(runs, "bare"))
    with pytest.raises(AnalysisError, match="plane"):
        find("plain")
    with pytest.raises(AnalysisError, match="--points must be at least 2"):
        Options(points=1)


def test_labels_tell_runs_apart(runs):
    one = subjects(runs, "fedavg", "again", "fedlaw")
    assert [label(s, one) for s in one] == ["fedavg, seed 0", "fedavg, seed 1", "fedlaw(epochs=5)"]
    same = subjects(runs, "fedavg", "bare")
    assert label(same[1], same).endswith("bare")


def test_the_command_writes_four_files_that_open(runs, tmp_path):
    runner = CliRunner()
    line = ["analyze", "curves", str(runs / "fedavg"), str(runs / "wima"), "--out", str(tmp_path)]
    result = runner.invoke(app, [*line, "--target", "0.3", "--tag", "a_1"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "roughness" in result.output and "curves-a_1.json" in result.output
    names = {f"curves-a_1.{ending}" for ending in ("json", "csv", "png", "svg")}
    assert {path.name for path in tmp_path.iterdir()} == names
    found = Analysis.from_json((tmp_path / "curves-a_1.json").read_text())
    assert found.runs == (str(runs / "fedavg"), str(runs / "wima"))
    table = pandas.read_csv(tmp_path / "curves-a_1.csv")
    recorded = pandas.read_json(runs / "fedavg" / "rounds.jsonl", lines=True)["accuracy"]
    mine = table[(table.panel == "test accuracy") & (table.series == "fedavg")]
    assert mine["value"].astype(float).tolist() == pytest.approx(recorded.tolist())
    assert (tmp_path / "curves-a_1.png").read_bytes()[:4] == b"\x89PNG"
    assert "<svg" in (tmp_path / "curves-a_1.svg").read_text()
    listing = runner.invoke(app, ["analyze"], env={"COLUMNS": "200"})
    assert all(name in listing.output for name in CATALOGUE)


def test_odd_panels_are_drawn_as_they_are(tmp_path):
    """Text that looks like a formula, numbers that do not exist, and nothing at all."""
    odd, nan = "a $\\frac{$ <b>", float("nan")
    panels = (
        Lines(
            odd, odd, odd, (Line(odd, (1.0, 2.0), (nan, -1.0), (0.0, nan), (1.0, 1.0)),), (), True
        ),
        Lines("empty", "round", "y", ()),
        Grid(
            "flat",
            "x",
            "y",
            "v",
            (0.0, 1.0, 2.0),
            (0.0, 1.0, 2.0),
            ((1.0,) * 3,) * 3,
            (Mark(odd, 0.0, 0.0),),
            (Line("p", (0.0,), (1.0,)),),
        ),
        Grid(
            "void",
            "x",
            "y",
            "v",
            (0.0, 1.0, 2.0),
            (0.0, 1.0, 2.0),
            ((nan,) * 3,) * 3,
            (Mark("m", 0.0, 0.0),),
        ),
        Bars(odd, "c", "y", tuple(map(str, range(50))), (BarSeries(odd, (nan,) * 50),)),
        Table("none", ("a", "b"), ()),
        Table(odd, (odd, "b"), ((odd, None), ("x", 0.5))),
    )
    for count in range(1, len(panels) + 1):
        found = Analysis("n", odd, "s", (), panels[:count])
        assert draw(found, tmp_path / "deep" / f"{count}.png").stat().st_size > 500


def test_results_lie_in_the_first_runs_folder(runs):
    line = ["analyze", "plane", str(runs / "fedlaw"), "--points", "3", "--rows", "20"]
    result = CliRunner().invoke(app, line, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    found = json.loads((runs / "fedlaw" / "analysis" / "plane.json").read_text())
    assert len(found["panels"][0]["x"]) == 3 and "20 of" in found["notes"][0]
    names = {path.name for path in (runs / "fedlaw" / "analysis").iterdir()}
    assert names == {"plane.json", "plane.csv", "plane.png", "plane.svg"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plain", "RUN"], "plane"),
        (["plane"], "run folder"),
        (["plane", "nowhere"], "nowhere holds no run"),
        (["plane", "RUN", "--target", "0.5"], "does not use --target; it takes --models"),
        (["locality", "RUN", "--rows", "5"], "none of these options"),
        (["plane", "RUN", "--tag", "../x"], "--tag"),
        (["coherence", "RUN", "--groups", "a-b"], "0-9,10-19"),
        (["plane", "RUN", "--points", "1"], "--points must be at least 2"),
    ],
)
def test_mistakes_are_one_line(arguments, words, runs, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    given = [str(runs / "bare") if word == "RUN" else word for word in arguments]
    monkeypatch.setattr("sys.argv", ["fedbasin", "analyze", *given])
    with pytest.raises(SystemExit) as stop:
        main()
    message = capsys.readouterr().err
    assert stop.value.code == 1 and message.startswith("error:")
    assert re.search(words, message.replace("\n", " "))
    assert not (runs / "bare" / "analysis").exists() and not list(tmp_path.iterdir())


def test_groups_of_clients_are_read():
    assert read_groups("0-2,7") == (frozenset({0, 1, 2}), frozenset({7}))
    assert read_groups("0+3+5-6") == (frozenset({0, 3, 5, 6}),)


def test_models_are_measured_where_one_asks_and_all_else_is_the_run_s(runs):
    (as_run,) = subjects(runs, "few")
    here = open_subject(runs / "few", device="cpu")
    assert [len(here.data.cohort(n)) for n in range(1, 5)] == [r.replies for r in as_run.records]
    with pytest.raises(ConfigError, match="'nowhere' is not a device"):
        _ = open_subject(runs / "few", device="nowhere").data


def test_a_run_without_a_final_model_is_to_be_finished(runs, tmp_path):
    (tmp_path / "config.toml").write_text((runs / "bare" / "config.toml").read_text())
    with pytest.raises(AnalysisError, match=f"finish it with fedbasin resume {tmp_path}"):
        open_subject(tmp_path).data.final()


def test_training_rows_belong_to_the_clients_that_hold_them(runs):
    (subject,) = subjects(runs, "fedavg")
    population = build(BASE).population
    held = subject.data.train.labels[subject.data.owner == 2]
    assert torch.equal(held, population.shard(2).labels)
    assert torch.equal(subject.data.counts, population.class_counts(10))
