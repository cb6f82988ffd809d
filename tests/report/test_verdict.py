"""The sentence above the table, and what the page says of curves, counts and federations."""

import json

import pytest
from report.making import make_run
from scipy import stats
from typer.testing import CliRunner

from fedbasin.cli import app
from fedbasin.report.page import breakable, count, render
from fedbasin.report.runs import find_runs, read_runs
from fedbasin.report.verdict import coinciding, verdict


def runs_of(folder, scores):
    """Runs whose score is the given one: {method: [score of seed 0, seed 1, ...]}."""
    for number, (method, values) in enumerate(scores.items()):
        for seed, value in enumerate(values):
            make_run(folder / f"{number}-{seed}", method, seed, accuracies=[value] * 10)
    return read_runs(find_runs([folder]))


def test_a_lead_within_luck_is_called_so(tmp_path):
    runs = runs_of(tmp_path, {"fedavg": [0.5, 0.6, 0.4], "scaffold": [0.52, 0.58, 0.46]})
    test = stats.ttest_rel([0.52, 0.58, 0.46], [0.5, 0.6, 0.4])
    low, high = test.confidence_interval()
    assert test.pvalue > 0.05
    assert verdict(runs) == (
        f"Highest mean accuracy: scaffold, +2.00 points [{100 * low:+.2f}, {100 * high:+.2f}] "
        "against fedavg over 3 seeds. Not distinguishable from fedavg with 3 seeds: run 10."
    )


def test_a_lead_beyond_luck_is_called_so(tmp_path):
    scores = {"fedavg": [0.50, 0.60, 0.40], "scaffold": [0.70, 0.801, 0.599]}
    assert verdict(runs_of(tmp_path / "a", scores)).endswith(
        "The other method is worse (p < 0.05)."
    )
    scores["ima"] = [0.51, 0.61, 0.41]
    said = verdict(runs_of(tmp_path / "b", scores))
    assert said.endswith("All others are worse (p < 0.05, corrected by Holm).")


def test_many_methods_that_cannot_be_told_apart_are_not_listed(tmp_path):
    scores = {f"fedavg(mu={k})": [0.5 + k / 100, 0.6 - k / 90, 0.4 + k / 80] for k in range(6)}
    said = verdict(runs_of(tmp_path, scores))
    assert said.endswith("Not distinguishable from any other method with 3 seeds: run 10.")


def test_one_seed_is_no_evidence(tmp_path):
    runs = runs_of(tmp_path, {"fedavg": [0.5], "ima": [0.6]})
    assert verdict(runs) == (
        "Highest mean accuracy: ima, +10.00 points against fedavg. "
        "One seed cannot tell luck from merit: run 10."
    )


def test_one_seed_beside_three_makes_a_page(tmp_path):
    for scores in ({"fedavg": [0.5, 0.6, 0.4], "ima": [0.6]}, {"fedavg": [0.5], "ima": [0.6] * 3}):
        folder = tmp_path / str(len(scores["ima"]))
        page = render(runs_of(folder, scores), target=None, baseline="fedavg")
        assert "One pair says nothing about luck" in page
        assert page.index('class="verdict"') < page.index("<nav>")


def test_curves_that_lie_on_each_other_are_named(tmp_path):
    rising = [0.1, 0.2, 0.3, 0.4]
    for seed in (0, 1):
        make_run(tmp_path / f"a{seed}", "fedavg", seed, accuracies=rising)
        late = [*rising[: 3 - seed], 0.9, 0.9][:4]  # seed 1 parts a round earlier
        make_run(tmp_path / f"b{seed}", "ima", seed, accuracies=late)
        make_run(tmp_path / f"c{seed}", "fedma", seed, accuracies=rising)
        make_run(tmp_path / f"d{seed}", "scaffold", seed, accuracies=[0.2, 0.2, 0.3, 0.4])
    runs = read_runs(find_runs([tmp_path]))
    said = ["ima equals fedavg until round 2.", "fedma equals fedavg in every round."]
    assert coinciding(runs) == said
    page = render(runs, target=None, baseline="fedavg")
    assert all(sentence in page for sentence in said)


def test_one_is_singular_and_names_break_at_commas(tmp_path):
    assert (count(1, "run"), count("1", "round"), count(2, "run")) == ("1 run", "1 round", "2 runs")
    assert breakable("a(b, c=<i>)") == "a(<wbr>b,<wbr> c=&lt;i&gt;)"
    page = render(runs_of(tmp_path, {"fedavg": [0.5]}), target=None, baseline="fedavg")
    assert "1 method, 1 run, 4 clients" in " ".join(page.replace(",\n", ", ").split())


def test_a_federation_is_called_one(tmp_path):
    make_run(tmp_path / "a", "fedavg", 0)
    simulated = render(read_runs(find_runs([tmp_path])), target=None, baseline="fedavg")
    file = tmp_path / "a" / "summary.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"executor": "flower"}))
    page = render(read_runs(find_runs([tmp_path])), target=None, baseline="fedavg")
    assert "1 run in a real federation on Flower" in page and "waiting included" in page
    assert "simulated on the machine" not in page and "federation on Flower" not in simulated


def test_the_command_writes_into_the_folder_and_replaces_only_its_own_page(tmp_path):
    make_run(tmp_path / "runs" / "a")
    first = CliRunner().invoke(app, ["report", str(tmp_path / "runs")])
    page = tmp_path / "runs" / "report.html"
    assert first.exit_code == 0 and page.exists() and "replaced" not in first.output
    again = CliRunner().invoke(app, ["report", str(tmp_path / "runs")])
    assert again.exit_code == 0 and "replaced the page" in again.output
    page.write_text("mine")
    refused = CliRunner().invoke(app, ["report", str(tmp_path / "runs")])
    with pytest.raises(ValueError, match="is no page of fedbasin report"):
        raise refused.exception
    assert page.read_text() == "mine"
