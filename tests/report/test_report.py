import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from report.making import HOSTILE, make_run
from scipy import stats

from fedbasin.core.holdings import Holdings
from fedbasin.core.record import RecordError, RoundRecord, RunFolder
from fedbasin.report.chart_data import chart_data
from fedbasin.report.curves import draw_curves, write_figures
from fedbasin.report.paired import paired_difference
from fedbasin.report.runs import Run, find_runs, read_runs, shared_holdings
from fedbasin.report.table import by_label, cells, differences, summarise


def curve(method, seed, accuracies, status="finished"):
    records = tuple(
        RoundRecord(round=n, metrics={"accuracy": a}, bytes_down=10 * seed, bytes_up=1)
        for n, a in enumerate(accuracies, start=1)
    )
    return Run(method, seed, records, seconds=seed + 1.0, status=status, method=method)


CURVES = [
    curve("fedavg", 0, [0.1] * 5 + [0.5] * 10),
    curve("fedavg", 1, [0.1] * 5 + [0.7] * 10),
    curve("ima", 0, [0.9] * 15),
    curve("ima", 1, [0.2, None, 0.4], status="diverged"),
    curve("never", 0, [None, None]),
]


def test_rows_are_means_over_seeds_of_the_last_rounds():
    fedavg, ima, never = summarise(CURVES, target=0.6)
    assert fedavg.score == pytest.approx(0.6) and fedavg.spread == pytest.approx(0.1414, abs=1e-4)
    assert (
        fedavg.rounds == 6 and fedavg.reached == 1 and fedavg.seconds == 1.5 and fedavg.seeds == 2
    )
    assert fedavg.bytes_moved == (15 * 1 + 15 * 11) / 2
    assert ima.score == pytest.approx((0.9 + 0.3) / 2) and ima.diverged == 1 and ima.rounds == 1
    assert never.score is None and never.rounds is None


def test_rows_are_written_for_people():
    fedavg, ima, never = (cells(row) for row in summarise(CURVES, target=0.6))
    assert fedavg == ("fedavg", "60.00 ± 14.14", "6 (1 of 2 seeds)", "1.5", "2")
    assert ima[1] == "60.00 ± 42.43 (1 diverged)"
    assert never == ("never", "-", "not reached", "1.0", "1")


def test_a_target_that_every_seed_reached_needs_no_count():
    (row,) = summarise(CURVES[:2], target=0.5)
    assert (row.reached, row.rounds) == (2, 6) and cells(row)[2] == "6"


def test_runs_are_gathered_by_label_and_their_seeds_stand_in_order():
    runs = [curve(method, seed, [0.5]) for method, seed in (("b", 2), ("a", 0), ("b", 0), ("b", 1))]
    found = by_label(runs)
    assert [(label, [run.seed for run in members]) for label, members in found.items()] == [
        ("b", [0, 1, 2]),
        ("a", [0]),
    ]


@pytest.mark.parametrize("lines", [[0, 1, 1, 2], [0, 2], [2, 1, 0], [0, 1, 2, 3], []])
def test_rounds_that_are_missing_or_doubled_are_a_problem(tmp_path, lines):
    folder = make_run(tmp_path / "r", rounds=4)
    whole = folder.rounds.read_text().splitlines(keepends=True)
    folder.rounds.write_text("".join(whole[i] for i in lines))
    (run,) = read_runs([folder.path])
    assert bool(run.problems) == (lines != [0, 1, 2, 3])
    assert all(str(folder.rounds) in problem for problem in run.problems)


def test_a_run_that_can_go_on_is_marked_and_not_tested_against_others():
    runs = [*CURVES[:2], curve("ima", 0, [0.9] * 15), curve("ima", 1, [0.1], status="stopped")]
    fedavg, ima = summarise(runs, target=0.6)
    assert (ima.stopped, fedavg.stopped) == (1, 0)
    assert cells(ima)[1].endswith("(1 stopped)")
    assert differences(runs, "fedavg")["ima"] == differences(runs[:3], "fedavg")["ima"]


def test_a_paired_difference_is_that_of_scipy_on_the_common_seeds():
    rng = np.random.default_rng(0)
    ours = {seed: float(rng.normal(0.8, 0.02)) for seed in (0, 1, 2, 5, 9)}
    theirs = {seed: float(rng.normal(0.7, 0.02)) for seed in (9, 2, 1, 0, 7)}
    found, seeds = paired_difference(ours, theirs), [0, 1, 2, 9]
    a, b = [ours[s] for s in seeds], [theirs[s] for s in seeds]
    test = stats.ttest_rel(a, b)
    assert found.pairs == 4 and found.mean == pytest.approx(np.mean(a) - np.mean(b))
    assert found.p == pytest.approx(test.pvalue)
    low, high = test.confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((low, high))
    assert found.better == sum(x > y for x, y in zip(a, b, strict=True))
    assert paired_difference(theirs, ours).mean == pytest.approx(-found.mean)


def test_two_seeds_are_enough_for_a_test():
    found = paired_difference({0: 0.8, 1: 0.9}, {0: 0.7, 1: 0.7})
    assert found.p == pytest.approx(stats.ttest_rel([0.8, 0.9], [0.7, 0.7]).pvalue)


def test_without_a_spread_there_is_no_test():
    assert paired_difference({0: 1.0}, {1: 1.0}) is None
    one = paired_difference({0: 0.9}, {0: 0.5})
    assert one.pairs == 1 and one.mean == pytest.approx(0.4) and one.p is None and one.low is None
    same = paired_difference({0: 0.4, 1: 0.9}, {0: 0.3, 1: 0.8})  # equal but for rounding
    assert same.mean == pytest.approx(0.1) and same.p is None and same.better == 2
    equal = paired_difference({0: 0.3, 1: 0.5}, {0: 0.3, 1: 0.5})
    assert equal.mean == 0 and equal.better == 0 and equal.p is None


def test_methods_are_compared_with_the_baseline_of_their_own_settings(tmp_path):
    for lr, base, gain in ((0.1, 0.5, 0.1), (0.2, 0.6, 0.2)):
        for seed, jitter in ((0, 0.0), (1, 0.01), (2, 0.05)):
            make_run(
                tmp_path / f"f{lr}{seed}", "fedavg", seed, accuracies=[base] * 12, local__lr=lr
            )
            accuracies = [base + gain + jitter] * 12
            make_run(tmp_path / f"i{lr}{seed}", "ima", seed, accuracies=accuracies, local__lr=lr)
    found = differences(read_runs(find_runs([tmp_path])), "fedavg")
    assert set(found) == {f"{m}, local.lr = {lr}" for m in ("fedavg", "ima") for lr in (0.1, 0.2)}
    assert found["fedavg, local.lr = 0.1"] is None
    assert found["ima, local.lr = 0.1"].mean == pytest.approx(0.12)
    assert found["ima, local.lr = 0.2"].mean == pytest.approx(0.22)


def test_no_method_is_compared_with_a_baseline_that_is_not_there(tmp_path):
    make_run(tmp_path / "a", "ima")
    assert differences(read_runs([tmp_path / "a"]), "fedavg") == {"ima": None}


def test_folders_are_read_and_an_unfinished_one_is_named(tmp_path):
    folder = RunFolder(tmp_path)
    folder.append(RoundRecord(round=1, metrics={"accuracy": 0.5}))
    with pytest.raises(RecordError, match="fedbasin resume"):
        read_runs([tmp_path])
    folder.write_summary({"method": "wima", "seed": 3, "seconds": 2.0})
    (found,) = read_runs([tmp_path])
    assert (found.label, found.seed, found.seconds) == ("wima", 3, 2.0)
    assert found.records[0].metric("accuracy") == 0.5
    folder.write_summary({"method": "wima", "seed": "3", "seconds": 2.0})
    with pytest.raises(RecordError, match="seed"):
        read_runs([tmp_path])


def test_runs_are_found_below_folders_each_once(tmp_path):
    made = [tmp_path / "c" / m / "seed0" for m in ("a", "b")]
    for path in made:
        make_run(path, path.parent.name)
    assert find_runs([made[1], tmp_path]) == [made[1], made[0]]
    (tmp_path / "empty").mkdir()
    with pytest.raises(RecordError, match=r"empty .*no summary\.json"):
        find_runs([tmp_path / "empty"])


def test_what_changes_no_result_tells_no_runs_apart(tmp_path):
    make_run(
        tmp_path / "a",
        seed=0,
        snapshots__every=1,
        sim__checkpoint_every=5,
        sim__evaluate_train=True,
    )
    make_run(tmp_path / "b", seed=1, snapshots__every=0, sim__checkpoint_every=9)
    assert [run.label for run in read_runs(find_runs([tmp_path]))] == ["fedavg", "fedavg"]
    make_run(tmp_path / "c", seed=2, partition__seed=0)
    labels = [run.label for run in read_runs(find_runs([tmp_path]))]
    assert labels == [f"fedavg, partition.seed = {seed}" for seed in (0, 1, 0)]


def test_the_same_seed_twice_is_refused(tmp_path):
    make_run(tmp_path / "a")
    make_run(tmp_path / "b")
    with pytest.raises(RecordError, match=r"a and .*b are both fedavg with seed 0"):
        read_runs(find_runs([tmp_path]))


def test_files_that_cannot_be_read_are_told_and_the_rest_is_kept(tmp_path):
    folder = make_run(tmp_path / "a")
    folder.config.write_text("method = ")
    folder.partition.write_text("x")
    folder.analysis.mkdir()
    (folder.analysis / "bad.json").write_text("{}")
    (run,) = read_runs([folder.path])
    assert len(run.records) == 12 and run.holdings is None and run.analyses == ()
    told = " ".join(run.problems)
    assert len(run.problems) == 3
    assert "config.toml" in told and "partition.csv" in told and "bad.json" in told


def test_runs_that_share_clients_share_their_picture(tmp_path):
    for method in ("fedavg", "ima"):
        for seed in (0, 1):
            make_run(tmp_path / f"{method}{seed}", method, seed)
    found = shared_holdings(read_runs(find_runs([tmp_path])))
    assert [title for title, _ in found] == ["seed 0", "seed 1"]


def test_a_picture_says_how_many_clients_are_corrupted(tmp_path):
    for name, corrupted in (("a", frozenset()), ("b", frozenset({1, 2}))):
        folder = make_run(tmp_path / name, local__lr=0.1 + len(corrupted))
        held = Holdings.read(folder.partition)
        folder.partition.write_text(replace(held, corrupted=corrupted).to_csv())
    found = shared_holdings(read_runs(find_runs([tmp_path])))
    assert [title for title, _ in found] == ["seed 0", "seed 0, 2 corrupted"]
    assert [held.corrupted for _, held in found] == [frozenset(), {1, 2}]


def test_runs_without_classes_show_who_holds_how_much(tmp_path):
    sizes = {"a": [5, 2, 9], "b": [5, 2, 8], "c": [5, 2, 9]}
    for name, rows in sizes.items():
        folder = make_run(tmp_path / name, local__lr=0.1 + ord(name))
        nothing = np.zeros((3, 0), np.int64)
        folder.partition.write_text(Holdings((), nothing, rows=np.array(rows)).to_csv())
    runs = read_runs(find_runs([tmp_path]))
    assert [held.sizes.tolist() for _, held in shared_holdings(runs)] == [[5, 2, 9], [5, 2, 8]]
    drawn = chart_data(runs, [], [])["holdings"]
    assert [each["counts"] for each in drawn] == [[[5], [2], [9]], [[5], [2], [8]]]
    assert drawn[0]["classes"] == () and drawn[0]["total"] == 3
    written = write_figures(runs, tmp_path / "out" / "report", "png")
    assert [path.name for path in written[-2:]] == ["report-clients1.png", "report-clients2.png"]


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_figures_are_drawn_whatever_broke_off(tmp_path, ending):
    path = draw_curves(CURVES, tmp_path / "deep" / f"figure.{ending}", title="a < b & [c]")
    assert path.stat().st_size > 5000


def test_paper_figures_hold_their_text_as_text(tmp_path):
    make_run(tmp_path / "a", "_fed$avg$", notes={"gamma": 0.5})
    runs = read_runs([tmp_path / "a"])
    written = write_figures(runs, tmp_path / "out" / "report", "svg")
    names = [path.name for path in written]
    assert names == [
        "report-accuracy-by-round.svg", "report-accuracy-by-seconds.svg",
        "report-accuracy-by-bytes.svg", "report-loss-by-round.svg", "report-clients1.svg",
    ]  # fmt: skip
    for path, axis in zip(
        written, ("round", "seconds", "megabytes", "round", "client"), strict=True
    ):
        text = path.read_text(encoding="utf-8")
        assert f">{axis}" in text and "digits, dirichlet(alpha=0.1)" in text
    assert "_fed$avg$</text>" in written[0].read_text(encoding="utf-8")


def test_hostile_names_are_drawn_as_text(tmp_path):
    make_run(tmp_path / "a", HOSTILE)
    path = draw_curves(read_runs([tmp_path / "a"]), tmp_path / "figure.svg", title="$\\frac{")
    assert path.stat().st_size > 5000


def test_seconds_and_bytes_add_up_on_the_axis(tmp_path):
    from fedbasin.report.curves import _AXES, _band

    runs = [make_run(tmp_path / str(s), seed=s, accuracies=[0.1, None, 0.3]) for s in (0, 1)]
    found = read_runs([run.path for run in runs])
    x, low, mean, high = _band(found, "accuracy", _AXES["bytes"][1])
    assert x.tolist() == pytest.approx([1501 / 1e6, (1501 + 1502 + 1503) / 1e6])
    assert low.tolist() == mean.tolist() == high.tolist() == pytest.approx([0.1, 0.3])
    assert _band(found, "accuracy", _AXES["seconds"][1])[0].tolist() == [0.25, 0.75]
    assert _band(found, "accuracy", _AXES["round"][1])[0].tolist() == [1, 3]


def test_the_band_is_from_the_worst_to_the_best_seed_where_all_were_scored():
    from fedbasin.report.curves import _AXES, _band

    runs = [curve("a", 0, [0.1, 0.2, None, 0.4]), curve("a", 1, [0.3, None, 0.5, 0.8])]
    x, low, mean, high = _band(runs, "accuracy", _AXES["bytes"][1])
    assert x.tolist() == pytest.approx([(1 + 11) / 2e6, (4 + 44) / 2e6])
    assert (low.tolist(), high.tolist()) == ([0.1, 0.4], [0.3, 0.8])
    assert mean.tolist() == pytest.approx([0.2, 0.6])


def test_curves_are_in_percent_and_told_apart(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *given, **how: drawn.append(figure))
    runs = [curve(f"method {n}", 0, [0.01 * n, 0.5]) for n in range(9)]
    draw_curves([*runs, curve("never", 0, [None])], tmp_path / "figure.png")
    lines = drawn[0].axes[0].lines
    for n, line in enumerate(lines):
        assert line.get_ydata().tolist() == pytest.approx([n, 50])
    assert [line.get_label() for line in lines] == [run.label for run in runs]
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 9


def test_reading_runs_needs_no_torch():
    code = "import sys, fedbasin.report.page; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
