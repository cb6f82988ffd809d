"""Tuned comparisons: equal budgets, no look at test rows, halving that trains nothing twice."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from tune.asking import ROWS, base, planted, request

from fedbasin.core.expressions import parse
from fedbasin.core.record import Headline, RunFolder
from fedbasin.experiment import build
from fedbasin.experiment.config import (
    read_experiment,
)
from fedbasin.sim.rounds import Simulation
from fedbasin.tuning import TuneError, read_over, tune
from fedbasin.tuning.arguments import arguments_of, with_values
from fedbasin.tuning.points import settings, sobol
from fedbasin.tuning.result import (
    expected_best,
    table_lines,
    trial_lines,
    tuned_rows,
    verdict_of,
    write_report,
)
from fedbasin.tuning.search import Trial
from fedbasin.tuning.search import _ordered as ordered
from fedbasin.tuning.search import _score as score_of


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return tune(request(), tmp_path_factory.mktemp("plain"))


def row_numbers(inputs) -> set[int]:
    return set(np.rint(1e6 * inputs[:, 0].cpu().numpy().astype(np.float64)).astype(int).tolist())


def test_tuning_sees_no_test_row_and_final_runs_are_scored_on_test_rows_alone(plain):
    asked = plain.request
    cell = asked.tuning_cell(plain.out, "fedavg", 0, (0.05,), 0)
    federation = build(cell.experiment)
    trained, scored = (
        row_numbers(rows.inputs) for rows in (federation.population, federation.evaluator)
    )
    assert trained | scored == set(range(ROWS)) and not trained & scored
    assert len(scored) == 4 * int(0.2 * ROWS / 4)
    summary = RunFolder(cell.path).read_summary()
    assert (summary["scored_on"], summary["scored_rows"]) == ("held_out", len(scored))
    final = build(asked.final_cell(plain.out, "fedavg", 0, (0.05,), 0).experiment)
    assert row_numbers(final.evaluator.inputs) == set(range(1000, 1000 + ROWS))
    assert row_numbers(final.population.inputs) == set(range(ROWS))
    tuning_seeds = {RunFolder(p).read_summary()["seed"] for p in plain.out.glob("tuning/*/*/*")}
    final_seeds = {RunFolder(p).read_summary()["seed"] for p in plain.out.glob("final/*/*/*")}
    assert not tuning_seeds & final_seeds and final_seeds == {0, 1}


def test_test_rows_with_wrong_labels_change_no_choice(plain, tmp_path):
    other = tune(request(planted(flipped=True)), tmp_path)
    assert trial_lines(other) == trial_lines(plain)
    # The best setting on held-out rows is then the worst on test rows, and is chosen still.
    assert all(row.row.score < 0.5 for row in tuned_rows(other))
    assert all(row.row.score > 0.5 for row in tuned_rows(plain))


def test_every_method_gets_the_same_settings_and_client_rounds(plain):
    rates = [[t.values["local.lr"] for t in plain.of(m)] for m in plain.request.methods]
    assert rates[0] == rates[1] and len(set(rates[0])) == 4
    assert rates[0][0] == 0.05 and plain.of("fedprox")[0].values["fedprox.mu"] == 0.01
    assert len({t.values["fedprox.mu"] for t in plain.of("fedprox")}) == 4
    costs = {row.client_rounds for row in tuned_rows(plain)}
    assert costs == {4 * 1 * 6 * 2}  # settings x seeds x rounds x clients


def test_the_best_mean_validation_score_is_chosen(plain):
    for method in plain.request.methods:
        scores = [trial.score for trial in plain.of(method)]
        assert plain.chosen[method].number == int(np.argmax(scores))
        file = next(plain.out.glob(f"chosen/{method}.toml"))
        chosen = read_experiment(file)
        assert chosen.local.lr == plain.chosen[method].values["local.lr"]
        assert chosen.sim.score_on == "test" and chosen.partition.hold_out == 0


def test_the_same_request_again_trains_nothing_and_a_larger_one_only_what_is_new(
    tmp_path, monkeypatch
):
    trained = []
    launch = Simulation.launch

    def counted(self):
        trained.append(self.server.round)
        return launch(self)

    monkeypatch.setattr(Simulation, "launch", counted)
    asked = request(methods=("fedavg",), budget=3, final_seeds=1)
    first = tune(asked, tmp_path)
    assert len(trained) == (3 + 1) * 6
    trained.clear()
    assert trial_lines(tune(asked, tmp_path)) == trial_lines(first) and not trained
    more = tune(replace(asked, budget=4), tmp_path)
    again = 0 if more.chosen["fedavg"] == first.chosen["fedavg"] else 1
    assert len(trained) == (1 + again) * 6


def test_halving_goes_on_from_checkpoints_and_drops_the_worst(plain, tmp_path, monkeypatch):
    trained = []
    launch = Simulation.launch

    def counted(self):
        trained.append(self.server.round)
        return launch(self)

    monkeypatch.setattr(Simulation, "launch", counted)
    asked = request(halving=2, final_seeds=1)
    assert asked.rungs() == [(4, 2), (2, 3), (1, 6)]
    halved = tune(asked, tmp_path)
    assert len(trained) == 2 * (4 * 2 + 2 * 1 + 1 * 3 + 6)
    for method in asked.methods:
        assert sorted(t.rounds for t in halved.of(method)) == [2, 2, 3, 6]
        (last,) = [t for t in halved.of(method) if t.rounds == 6]
        assert halved.chosen[method] == last
        # What went on equals the same setting run in one go.
        assert last.score == plain.of(method)[last.number].score
    assert len({row.client_rounds for row in tuned_rows(halved)}) == 1
    trained.clear()
    assert trial_lines(tune(asked, tmp_path)) == trial_lines(halved) and not trained


def test_a_score_at_an_early_round_forgets_the_rounds_after_it(plain):
    cell = plain.request.tuning_cell(plain.out, "fedavg", 0, (0.05,), 0)
    curve = [record.metric("accuracy") for record in RunFolder(cell.path).read_rounds()]
    assert score_of(cell.path, 2) == pytest.approx(np.mean(curve[:2]))
    assert score_of(cell.path, 6) == pytest.approx(np.mean(curve)) != score_of(cell.path, 2)
    assert score_of(cell.path, 7) is None


def test_a_setting_that_ran_longer_is_chosen_before_one_that_was_stopped_with_a_better_score():
    stopped = Trial("fedavg", 0, {}, 2, (0.9,))
    ended = Trial("fedavg", 1, {}, 6, (0.8,))
    diverged = Trial("fedavg", 2, {}, 6, (None,))
    assert ordered([diverged, stopped, ended], Headline()) == [ended, stopped, diverged]


def test_every_rung_ends_with_a_scored_round():
    usual = base(rounds=20)
    sparse = replace(usual, sim=replace(usual.sim, evaluate_every=4))
    asked = replace(request(halving=2), base=sparse)
    assert asked.rungs() == [(4, 4), (2, 8), (1, 20)]


def test_a_whole_argument_gets_whole_values_from_any_range():
    (window,) = arguments_of("ima(start=0.5)", base(), read_over(["ima.window=2.0..9.0:linear"]))
    assert window.space.whole and window.space.at(0.4) == 5
    assert isinstance(window.space.at(0.4), int)


def test_a_method_that_always_diverges_is_reported_and_others_go_on(tmp_path):
    asked = request(
        methods=("fedavg", "fedavgm(lr=1e40, momentum=0.0)"), budget=2, final_seeds=2,
        over=["local.lr=0.1..1"],
    )  # fmt: skip
    found = tune(asked, tmp_path)
    assert found.diverged == ["fedavgm(lr=1e+40, momentum=0.0)"]
    assert "Diverged for every setting: fedavgm" in verdict_of(found)
    good, bad = table_lines(found)
    assert good["score"] > 0.5 and bad["score"] is None and bad["diverged"] == 2
    assert write_report(found, tmp_path / "page.html").exists()


def test_the_table_has_paired_tests_and_the_page_a_section(plain):
    fedavg, fedprox = table_lines(plain)
    assert fedavg["difference"] is None and fedprox["seeds"] == 2
    assert {fedavg["rank"], fedprox["rank"]} <= {1.0, 1.5, 2.0}
    page = write_report(plain, plain.out / "report.html").read_text()
    assert '<section id="tuning">' in page and "Expected best validation score" in page
    assert "fedprox: fedprox.mu" in page and "Chosen settings" in page


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"over": ["local.lr=1..0.01"]}, "reversed"),
        ({"over": ["local.lr=0.1..0.1"]}, "empty"),
        ({"over": ["local.lr=.."]}, "missing"),
        ({"over": ["local.lr"]}, "write a range"),
        ({"over": ["local.lr=0.1..1", "local.lr=0.1..2"]}, "twice"),
        ({"over": ["local.lr=0..1:log"]}, "above 0"),
        ({"over": ["local.lr=a..b"]}, "no number"),
        ({"over": ["local.lr=0.1..1:cubic"]}, "log or linear"),
        ({"over": ["local.rate=0.1..1"]}, "local.lr|did you mean"),
        ({"over": ["local.epochs=0.5,1.5"]}, "whole number"),
        ({"over": ["fedprox.nu=0.1..1"]}, "no argument 'nu'"),
        ({"over": ["scaffold.server_lr=0.1..1"]}, "not among the methods"),
        ({"over": ["data.imbalance=0.1..1"]}, "setting of clients"),
        ({"budget": 0}, "budget must be at least 1, got 0"),
        ({"final_seeds": 0}, "final_seeds must be at least 1, got 0"),
        ({"halving": 1}, "2 or more"),
        ({"halving": -1}, "halving must be at least 0, got -1"),
        ({"tuning_seeds": 0}, "tuning_seeds must be at least 1, got 0"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"validation": 0.0}, "it must be above 0 and below 1, got 0.0"),
        ({"validation": 1.0}, "below 1"),
        ({"methods": ()}, "at least one method"),
        ({"methods": ("fedprox", "fedprox(mu=0.01)")}, "listed twice"),
        ({"methods": ("fedprx",)}, "fedprox"),
        ({"methods": ("fedlaw",)}, "proxy"),
        ({"baseline": "scaffold"}, "not among the methods"),
        ({"over": ["local.epochs=1,2"], "halving": 2}, "client-steps"),
        ({"sampler": "tpe", "halving": 2}, "cannot be combined"),
    ],
)
def test_bad_input_is_one_clear_line(options, says):
    with pytest.raises(ValueError, match=says) as error:
        request(**options)
    assert "\n" not in str(error.value)


def test_wrappers_tune_what_is_inside_and_written_arguments_stay():
    usual = base()
    over = read_over(["local.lr=0.01..1", "ima.window=3..9:linear"])
    found = arguments_of("ima(fedadam(fedprox, tau=0.01))", usual, over)
    assert [argument.name for argument in found] == [
        "local.lr", "ima.window", "ima.start", "fedadam.lr", "fedprox.mu",
    ]  # fmt: skip
    made = with_values(usual, "ima(fedadam(fedprox, tau=0.01))", found, (0.3, 7, 0.5, 0.2, 0.1))
    expected = "ima(fedadam(fedprox(mu=0.1), lr=0.2, tau=0.01), window=7, start=0.5)"
    assert parse(made.method) == parse(expected) and made.local.lr == 0.3


def test_points_fill_the_space_and_do_not_depend_on_the_budget():
    few, many = sobol(5, 3), sobol(32, 3)
    assert (few == many[:5]).all() and not (sobol(5, 4) == few).any()
    for column in many[:, :8].T:  # each of 32 equal parts of an axis holds one of 32 points
        assert (np.sort((column * 32).astype(int)) == np.arange(32)).all()
    arguments = arguments_of("fedavg", base(), {})
    assert settings(arguments, 16, 0) == [()]


def test_expected_best_is_that_of_drawn_settings():
    scores = [0.3, 0.1, None, 0.7, 0.5]
    rng = np.random.default_rng(0)
    filled = np.array([0.3, 0.1, 0.1, 0.7, 0.5])
    for count, value in enumerate(expected_best(scores, higher_is_better=True), start=1):
        draws = [rng.permutation(filled)[:count].max() for _ in range(4000)]
        assert abs(value - np.mean(draws)) < 4 * np.std(draws) / np.sqrt(4000) + 1e-12
    low = expected_best(scores, higher_is_better=False)
    assert low[-1] == pytest.approx(0.1) and low[0] == pytest.approx(
        (0.3 + 0.1 + 0.7 * 2 + 0.5) / 5
    )


def test_holm_against_another_implementation():
    from fedbasin.report.paired import Difference, corrected

    ps = {"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005}
    gaps = {name: Difference(5, 0.0, 0, p=p) for name, p in ps.items()} | {"e": None}
    ours = {name: gap.holm for name, gap in corrected(gaps).items() if gap}
    # By hand: 4 x 0.005, 3 x 0.01, 2 x 0.03, then no smaller than that.
    assert ours == pytest.approx({"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})
    assert stats.false_discovery_control(list(ps.values())).max() <= max(ours.values())


def test_tune_errors_are_value_errors():
    assert issubclass(TuneError, ValueError)
