"""Scores, result lines, and ours beside theirs, against numbers worked out by hand."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import asdict, replace
from pathlib import Path
from statistics import stdev
from types import SimpleNamespace

import pytest

from fedbasin.core.record import RoundRecord, RunFolder
from fedbasin.experiment import Experiment
from fedbasin.papers import (
    PaperError,
    Result,
    compare,
    lines_of,
    load_table,
    results,
    table_names,
)
from fedbasin.papers.beside import basis
from fedbasin.papers.grid import (
    CellConfigs,
    cell_runs_of,
    experiment_of,
    fingerprint,
    runs_of,
)
from fedbasin.papers.page import page, section
from fedbasin.papers.results import (
    append,
    data_share,
    fresh,
    parse,
    read,
    result_of,
    score_of,
    served,
    shipped,
)
from fedbasin.papers.tables import Finding, Score, read_table

DOCS = Path(__file__).parents[2] / "docs"
TOML = """
title = "a table"
seeds = [0]
[setup]
rounds = 100
[[rows]]
name = "fedavg"
method = "fedavg"
[[rows]]
name = "scaffold"
method = "scaffold"
over = "fedavg"
[[columns]]
name = "a"
[[columns]]
name = "b"
[[findings]]
text = "another split"
rows = ["scaf*"]
columns = ["b"]
[published]
fedavg = [50.0, 50.0]
scaffold = [60.0, 60.0]
"""
TABLE = read_table(TOML, "x/table1")


def line(row, column, seed, score, rounds=100, table=TABLE, **more):
    axes = [next(a for a in kind if a.name == n) for kind, n in
            ((table.rows, row), (table.columns, column))]  # fmt: skip
    experiment = replace(experiment_of(table, *axes, seed=seed), rounds=rounds)
    given = {
        "table": table.name, "row": row, "column": column, "seed": seed, "score": score,
        "measure": table.score_of(*axes).text, "rounds": rounds, "full_rounds": 100,
        "shared_rounds": 0, "status": "finished", "data_share": 1.0,
        "config": fingerprint(experiment),
        "command": "fedbasin", "commit": None, "device": "cpu", "versions": {"torch": "2"},
        "seconds": 1.0,
    }  # fmt: skip
    return Result(**(given | more))


def shown(*results, row="scaffold", column="a"):
    (found,) = [
        found for found in lines_of(TABLE, results, TABLE.rows, TABLE.columns)
        if (found.row, found.column) == (row, column)
    ]  # fmt: skip
    return found


def test_scores_are_what_the_papers_average():
    records = [
        RoundRecord(
            n,
            {"accuracy": n / 100, "accuracy_send": n / 200, "accuracy_train": n / 50},
            notes={"gamma": float(n), "count": n, "kind": "odd"},
        )
        for n in range(1, 21)
    ]
    assert score_of(Score(last=10), records) == pytest.approx(15.5)
    assert score_of(Score("accuracy_send", last=2), records) == pytest.approx(9.75)
    assert score_of(Score("accuracy_train", last=2), records) == pytest.approx(39)
    assert score_of(Score("accuracy_train"), [RoundRecord(1, {"accuracy": 0.5})]) is None
    assert score_of(Score("rounds_to_target", last=1, target=12.1), records) == 13
    assert score_of(Score("rounds_to_target", last=4, target=12.5), records) == 14  # 11 to 14
    assert score_of(Score("rounds_to_target", last=10, target=5.5), records) == 10  # not before
    assert score_of(Score("rounds_to_target", last=1, target=21.0), records) is None
    falling = [RoundRecord(1, {"accuracy": 0.9}), RoundRecord(2, {"accuracy": 0.1})]
    assert score_of(Score("rounds_to_target", last=2, target=40), falling) == 2
    assert score_of(Score("note", note="gamma", between=(3, 5)), records) == 4
    assert score_of(Score("note", note="gamma", between=(90, 110)), records) is None
    assert score_of(Score("note", note="count", between=(3, 5)), records) == 4
    for name in ("other", "kind"):
        assert score_of(Score("note", note=name, between=(3, 5)), records) is None
    assert score_of(Score(), []) is None


def test_another_metric_is_a_score_times_100():
    records = [RoundRecord(n, {"accuracy": 0.1, "c_index_group_mean": n / 10}) for n in range(1, 6)]
    last = Score("metric", metric="c_index_group_mean", last=1)
    assert score_of(last, records) == pytest.approx(50)
    assert score_of(replace(last, last=2), records) == pytest.approx(45)
    assert score_of(replace(last, metric="auroc"), records) is None
    assert last.text == "c index group mean (x 100), last round"
    assert replace(last, last=2).text == "c index group mean (x 100), mean of the last 2 rounds"


def test_rounds_that_were_not_scored_do_not_count():
    records = [RoundRecord(1, {"accuracy": 0.5}), RoundRecord(2), RoundRecord(3, {"accuracy": 0.7})]
    assert score_of(Score(last=3), records) == pytest.approx(60)
    assert score_of(Score("accuracy_send", last=1), records) == pytest.approx(70)  # one model


def test_a_line_shows_mean_spread_difference_and_paired_gains():
    scores = {0: 55.0, 1: 57.0, 2: 62.0}
    ours = [line("scaffold", "a", seed, score) for seed, score in scores.items()]
    base = [line("fedavg", "a", seed, score) for seed, score in ((1, 50.0), (2, 51.0), (3, 0.0))]
    found = shown(*ours, *base)
    assert found.paper == "60.00"
    assert found.ours == f"58.00 ± {stdev(scores.values()):.2f} (3 seeds)"
    assert found.difference == "-2.00"
    assert found.gain_paper == "+10.00"
    assert found.gain_ours == f"+9.00 ± {stdev([7, 11]):.2f}"  # of seeds 1 and 2
    assert (found.verdict, found.direction) == ("near", "confirmed")


@pytest.mark.parametrize(
    ("score", "base", "verdict"),
    [
        (57.0, 56.9, "near"),
        (56.9, 51.9, "gain"),
        (56.9, 52.0, "missed, reason open"),
        (45.0, 46.0, "missed, reason open"),
        (70.0, 40.0, "gain"),
        (40.0, 56.0, "missed, reason open"),
        (63.1, None, "missed, reason open"),
    ],
)
def test_the_bar(score, base, verdict):
    results = [line("scaffold", "a", 0, score)]
    results += [] if base is None else [line("fedavg", "a", 0, base)]
    assert shown(*results).verdict == verdict


@pytest.mark.parametrize(
    ("gains", "direction"),
    [
        ((0.1,), "confirmed"),  # one seed: the sign alone
        ((-0.1,), "not confirmed"),
        ((0.0,), "too small to tell"),
        ((1.0, 3.0), "confirmed"),  # 2 ± 1.41
        ((0.0, 2.0), "too small to tell"),  # 1 ± 1.41
        ((-3.0, -1.0), "not confirmed"),
        ((-2.0, 0.0), "too small to tell"),
    ],
)
def test_a_near_number_does_not_settle_the_direction(gains, direction):
    ours = [line("scaffold", "a", seed, 60.0) for seed, _ in enumerate(gains)]
    base = [line("fedavg", "a", seed, 60.0 - gain) for seed, gain in enumerate(gains)]
    found = shown(*ours, *base)
    assert (found.verdict, found.direction) == ("near", direction)
    alone = shown(*ours)
    assert (alone.verdict, alone.direction) == ("near", "-")  # no baseline of ours


def test_a_printed_gain_of_nothing_has_no_direction():
    table = read_table(TOML.replace("[50.0, 50.0]", "[60.0, 60.0]"), "x/table1")
    results = [
        line("scaffold", "a", 0, 61.0, table=table),
        line("fedavg", "a", 0, 60.0, table=table),
    ]
    (found,) = lines_of(table, results, table.rows[1:], table.columns[:1])
    assert (found.verdict, found.direction) == ("near", "too small to tell")


@pytest.mark.parametrize("score", [57.0, 56.9])  # near, and a gain, had they finished
def test_what_diverged_reaches_no_bar(score):
    base = line("fedavg", "a", 0, 40.0)
    assert shown(line("scaffold", "a", 0, score, status="diverged"), base).verdict.startswith(
        "miss"
    )
    both = [
        line("scaffold", "a", seed, score, status=s)
        for seed, s in ((0, "finished"), (1, "diverged"))
    ]
    assert shown(*both, base).verdict.startswith("miss")
    alone = shown(line("fedavg", "a", 0, 50.0, status="diverged"), row="fedavg")
    assert (alone.ours, alone.verdict) == ("no score (1 seed), 1 diverged", "missed, reason open")


LOSS = ("fedavg = [50.0, 50.0]", "fedavg = [70.0, 70.0]")  # scaffold has 10 less
COUNTED_TOML = TOML.replace("[setup]", '[score]\nkind = "rounds_to_target"\ntarget = 61.0\n[setup]')
COUNTED = read_table(COUNTED_TOML, "x/table1")
SAVING = read_table(COUNTED_TOML.replace(*LOSS), "x/table1")
LOSING = read_table(TOML.replace(*LOSS), "x/table1")


@pytest.mark.parametrize(
    ("score", "base", "verdict"),
    [
        (61.0, 51.0, "gain"),  # the paper has 60 over 50
        (56.0, 51.0, "gain"),
        (55.9, 51.0, "missed, reason open"),  # less than half
        (60.0, None, "missed, reason open"),  # equal to the paper's, but rounds are no points
        (None, 51.0, "missed, reason open"),  # never got there
        (45.0, 51.0, "missed, reason open"),  # the other way
    ],
)
def test_rounds_to_a_target_are_judged_by_the_gain_alone(score, base, verdict):
    results = [line("scaffold", "a", 0, score, table=COUNTED)]
    results += [] if base is None else [line("fedavg", "a", 0, base, table=COUNTED)]
    lines = {
        (found.row, found.column): found.verdict
        for found in lines_of(COUNTED, results, COUNTED.rows, COUNTED.columns)
    }
    assert lines["scaffold", "a"] == verdict
    assert lines["fedavg", "a"] == "-"  # a baseline has nothing to save


@pytest.mark.parametrize(
    ("score", "verdict"),
    [
        (50.1, "missed, reason open"),  # less than half of the loss
        (50.0, "gain"),
        (35.0, "gain"),
        (34.9, "missed, reason open"),  # a collapse
    ],
)
def test_a_loss_is_reproduced_from_half_to_double(score, verdict):
    results = [line("scaffold", "a", 0, score, table=LOSING)]
    results += [line("fedavg", "a", 0, 55.0, table=LOSING)]
    (found,) = lines_of(LOSING, results, LOSING.rows[1:], LOSING.columns[:1])
    assert found.verdict == verdict


@pytest.mark.parametrize(
    ("table", "score", "base", "verdict"),
    [
        (SAVING, 30.0, 95.0, "gain"),
        (COUNTED, 95.0, 30.0, "missed, reason open"),
        (COUNTED, 50.0, 30.0, "gain"),
    ],
)
def test_fewer_rounds_are_never_too_few(table, score, base, verdict):
    results = [line("scaffold", "a", 0, score, table=table)]
    results += [line("fedavg", "a", 0, base, table=table)]
    (found,) = lines_of(table, results, table.rows[1:], table.columns[:1])
    assert found.verdict == verdict


def test_a_miss_with_a_finding_says_so_on_its_cell_alone():
    results = [line(row, column, 0, 10.0) for row in ("fedavg", "scaffold") for column in "ab"]
    assert shown(*results, column="b").verdict == "missed, reason argued"
    assert shown(*results, column="a").verdict == "missed, reason open"
    assert shown(*results, row="fedavg", column="b").verdict == "missed, reason open"


def test_a_reason_is_shown_by_lines_of_all_that_it_names_in_its_columns():
    finding = Finding(text="because", columns=("b",), shown_by=("fedavg", "scaffold"))
    assert basis(finding, [("fedavg", "b"), ("scaffold", "b")]) == "shown"
    assert basis(finding, [("fedavg", "b"), ("scaffold", "a")]) == "argued"
    assert basis(finding, [("fedavg", "b")]) == "argued"
    assert basis(replace(finding, shown_by=()), [("fedavg", "b")]) == "argued"
    assert basis(replace(finding, basis="open"), [("fedavg", "b")]) == "open"


def test_reduced_runs_are_marked_and_never_judged():
    found = shown(line("scaffold", "a", 0, 60.0, rounds=10))
    assert found.ours == "60.00 (1 seed), reduced: 10 of 100 rounds"
    assert found.verdict == "reduced"


def test_a_part_of_the_data_is_marked_and_never_judged():
    found = shown(line("scaffold", "a", 0, 60.0, data_share=0.5))
    assert (found.ours, found.verdict) == ("60.00 (1 seed), on 50% of the data", "other data")


def test_the_share_of_the_data_is_what_the_run_had_of_what_was_published(monkeypatch, tmp_path):
    folder = RunFolder(tmp_path)
    half = SimpleNamespace(train=range(25_000), test=range(5_000))
    monkeypatch.setattr("fedbasin.data.load", lambda name, data_dir: half)
    assert data_share("cifar100", folder) == 0.5  # a run from before that was recorded
    (tmp_path / "data.json").write_text('{"rows": 10000, "hash": ""}')
    assert data_share("cifar100", folder) == 0.1667
    assert data_share("hf:some/images", folder) == 1  # nothing is known of it
    sources = [SimpleNamespace(rows=rows) for rows in ((10_000, 0), (50_000, 10_000), None)]
    monkeypatch.setitem(results.SOURCES, "in parts", sources)
    assert data_share("in parts", folder) == 0.1667  # of the largest
    monkeypatch.setitem(results.SOURCES, "uncounted", sources[2:])
    assert data_share("uncounted", folder) == 1


def test_full_length_runs_stand_before_reduced_ones():
    found = shown(line("scaffold", "a", 0, 60.0), line("scaffold", "a", 1, 10.0, rounds=10))
    assert found.ours == "60.00 (1 seed)"
    assert shown(
        line("scaffold", "a", 0, 60.0), line("fedavg", "a", 0, 10.0, rounds=10)
    ).gain_ours == "-"  # a gain is between runs of one length  # fmt: skip


def test_a_run_that_diverged_or_never_got_there_is_counted():
    found = shown(
        line("scaffold", "a", 0, 60.0),
        line("scaffold", "a", 1, 20.0, status="diverged"),  # scored before it did
        line("scaffold", "a", 2, None),
        line("scaffold", "a", 3, None, status="diverged"),
    )
    assert found.ours == "60.00 (4 seeds), 2 diverged, 1 without a score"
    assert shown(line("scaffold", "a", 0, None)).ours == "no score (1 seed)"


def test_the_last_line_of_a_seed_counts():
    found = shown(line("scaffold", "a", 0, 40.0), line("scaffold", "a", 0, 60.0))
    assert found.ours == "60.00 (1 seed)"


def test_the_smallest_part_of_the_data_is_told():
    shares = (0.5, 0.25, 1.0)
    found = shown(*(line("scaffold", "a", n, 60.0, data_share=s) for n, s in enumerate(shares)))
    assert found.ours == "60.00 ± 0.00 (3 seeds), on 25% of the data"
    assert found.verdict == "other data"


def test_nearly_all_of_the_data_is_all_of_it():
    assert shown(line("scaffold", "a", 0, 60.0, data_share=0.99)).verdict == "near"


def test_lines_go_down_one_column_after_another():
    lines = lines_of(TABLE, [], TABLE.rows, TABLE.columns)
    assert [(found.column, found.row) for found in lines] == [
        (column, row) for column in "ab" for row in ("fedavg", "scaffold")
    ]


@pytest.mark.parametrize(
    ("base", "verdict"),
    [
        (39.2, "gain"),  # 0.8, as the paper has
        (39.7, "missed, reason open"),
        (38.0, "gain"),  # a gain may be more than double
        (40.5, "missed, reason open"),
    ],
)
def test_a_gain_of_less_than_a_point_is_a_gain(base, verdict):
    table = read_table(TOML.replace("[50.0, 50.0]", "[59.2, 59.2]"), "x/table1")
    results = [
        line("scaffold", "a", 0, 40.0, table=table),
        line("fedavg", "a", 0, base, table=table),
    ]
    (found,) = lines_of(table, results, table.rows[1:], table.columns[:1])
    assert (found.gain_paper, found.verdict) == ("+0.80", verdict)


def test_where_the_paper_prints_no_baseline_there_is_no_gain_to_share():
    table = read_table(TOML.replace("[50.0, 50.0]", '["figure", 50.0]'), "x/table1")
    results = [line(row, "a", 0, 40.0, table=table) for row in ("fedavg", "scaffold")]
    (found,) = lines_of(table, results, table.rows[1:], table.columns[:1])
    assert (found.gain_paper, found.gain_ours) == ("-", "+0.00")
    assert found.verdict == "missed, reason open"


def test_a_finding_speaks_of_cells_that_match_any_of_its_patterns():
    table = read_table(TOML.replace('["scaf*"]', '["fedavg", "scaf*"]'), "x/table1")
    (found,) = lines_of(
        table, [line("scaffold", "b", 0, 10.0, table=table)], table.rows[1:], table.columns[1:]
    )
    assert found.verdict == "missed, reason argued"


def test_a_finding_that_names_no_cell_speaks_of_all():
    table = read_table(TOML.replace('rows = ["scaf*"]\ncolumns = ["b"]\n', ""), "x/table1")
    results = [line(row, "a", 0, 10.0, table=table) for row in ("fedavg", "scaffold")]
    lines = lines_of(table, results, table.rows, table.columns[:1])
    assert [found.verdict for found in lines] == ["missed, reason argued"] * 2


def test_rounds_have_no_digits_and_a_printed_spread_is_shown():
    spread = "[spread]\nscaffold = [1.26, 0.5]\n[published]"
    table = read_table(COUNTED_TOML.replace("[published]", spread), "x/table1")
    results = [line("scaffold", "a", seed, 50.0 + 2 * seed, table=table) for seed in (0, 1)]
    (found,) = lines_of(table, results, table.rows[1:], table.columns[:1])
    assert (found.paper, found.ours, found.difference) == ("60 ± 1", "51 ± 1 (2 seeds)", "-9")
    points = read_table(TOML.replace("[published]", spread), "x/table1")
    (found,) = lines_of(points, [], points.rows[1:], points.columns[:1])
    assert found.paper == "60.00 ± 1.26"


def test_a_line_says_what_its_run_folder_says(tmp_path):
    table = read_table(TOML.replace("[setup]", '[setup]\ndata.name = "cifar100"'), "x/table1")
    (cell_run,), _ = cell_runs_of(table, table.rows[1:], table.columns[:1], [4], share=0.5)
    folder, made = RunFolder(tmp_path), {"commit": "c0ffee", "device": "a GPU"}
    folder.write_summary(made | {"status": "finished", "versions": {"torch": "2"}, "python": "3.11",
                                 "seconds": 12.34567})  # fmt: skip
    folder.branch.write_text('{"rounds": 20}')
    (tmp_path / "data.json").write_text('{"rows": 30000}')
    folder.append(RoundRecord(1, {"accuracy": 0.123456789}))
    folder.append(RoundRecord(2))
    given = {
        "table": "x/table1", "row": "scaffold", "column": "a", "seed": 4, "score": 12.3457,
        "measure": "accuracy (%), mean of the last 10 rounds", "rounds": 50, "full_rounds": 100,
        "shared_rounds": 20, "data_share": 0.5, "status": "finished", "config": cell_run.config,
        "command": cell_run.command, "versions": {"torch": "2", "python": "3.11"}, "seconds": 12.35,
        "accuracies": {"1": 12.3457},
    }  # fmt: skip
    assert result_of(cell_run, tmp_path) == Result(**given, **made)
    folder.rounds.unlink()  # it diverged in its first round
    folder.branch.unlink()
    bare = result_of(cell_run, tmp_path)
    assert (bare.score, bare.shared_rounds, bare.accuracies) == (None, 0, {})


def test_the_score_of_a_row_stands_before_that_of_its_column(tmp_path):
    toml = TOML.replace('name = "a"', 'name = "a"\nscore = { kind = "accuracy_send", last = 3 }')
    score = 'score = { kind = "note", note = "gamma", between = [1, 5], last = 7 }'
    table = read_table(toml.replace('over = "fedavg"', score), "x/table1")
    (cell_run,), _ = cell_runs_of(table, table.rows[1:], table.columns[:1], [0])
    assert cell_run.experiment.sim.evaluate_last == 7
    folder = RunFolder(tmp_path)
    folder.append(RoundRecord(1, {"accuracy_send": 0.5}, notes={"gamma": 0.25}))
    folder.write_summary({"status": "finished"})
    written = result_of(cell_run, tmp_path)
    assert (written.score, written.measure) == (0.25, "gamma, mean of rounds 1 to 5")
    assert written.key == cell_run.key and fresh(table, [written]) == [written]
    (found,) = lines_of(table, [written], table.rows[1:], table.columns[:1])
    assert (found.ours, found.verdict) == ("0.2500 (1 seed)", "-")


def test_notes_have_four_digits_and_no_verdict():
    score = '[score]\nkind = "note"\nnote = "gamma"\nbetween = [1, 5]\n[setup]'
    table = read_table(TOML.replace("[setup]", score), "x/table1")
    results = [line(row, "a", 0, 0.12345, table=table) for row in ("fedavg", "scaffold")]
    _, found = lines_of(table, results, table.rows, table.columns[:1])
    assert (found.ours, found.paper) == ("0.1235 (1 seed)", "60.0000")
    assert (found.gain_ours, found.verdict) == ("+0.0000", "-")


def test_what_the_paper_does_not_print_is_not_judged():
    table = read_table(TOML.replace("[60.0, 60.0]", '["figure", 60.0]'), "x/table1")
    (found,) = lines_of(
        table, [line("scaffold", "a", 0, 10.0, table=table)], table.rows[1:], table.columns[:1]
    )
    assert (found.paper, found.difference, found.verdict) == ("figure", "-", "-")


def test_results_of_other_settings_are_left_out():
    old = line("scaffold", "a", 0, 60.0)
    changed = read_table(
        TOML.replace("rounds = 100", "rounds = 100\nmodel = 'logistic'"), "x/table1"
    )
    assert fresh(TABLE, [old]) == [old]
    assert fresh(changed, [old]) == []
    for gone in ({"row": "gone"}, {"column": "gone"}, {"table": "x/table2"}):
        assert fresh(TABLE, [replace(old, **gone)]) == []


@pytest.mark.parametrize("score", ['kind = "accuracy_send"', "last = 3"])
def test_results_of_another_score_are_left_out_and_its_line_is_added(score, tmp_path):
    old = line("scaffold", "a", 0, 60.0)
    changed = read_table(TOML.replace("[setup]", f"[score]\n{score}\n[setup]"), "x/table1")
    new = line("scaffold", "a", 0, 50.0, table=changed)
    assert fresh(changed, [replace(new, measure=old.measure), new]) == [new]
    for result in (old, replace(old, measure=new.measure)):
        append(tmp_path / "results.jsonl", result)
    assert len(read(tmp_path / "results.jsonl")) == 2
    cell_runs, _ = cell_runs_of(changed, changed.rows[1:], changed.columns[:1], [0])
    assert cell_runs[0].key == new.key


def test_two_commands_that_add_lines_at_once_keep_both(tmp_path, monkeypatch):
    """A second command adds its line while the first one looks at what is there."""
    path, parsed = tmp_path / "results.jsonl", results.parse
    append(path, line("fedavg", "a", 0, 50.0))
    second = threading.Thread(target=append, args=(path, line("fedavg", "a", 2, 52.0)))

    def slow(*arguments):
        if not second.ident:
            second.start()
            second.join(0.3)  # over by then where nothing makes it wait
        return parsed(*arguments)

    monkeypatch.setattr(results, "parse", slow)
    append(path, line("fedavg", "a", 1, 51.0))
    second.join()
    assert [result.seed for result in read(path)] == [0, 1, 2]


def test_lines_are_written_once_and_read_back(tmp_path):
    path = tmp_path / "far" / "deep" / "results.jsonl"
    first, second = line("fedavg", "a", 0, 50.0), line("fedavg", "a", 1, None)
    for result in (first, second, first):
        append(path, result)
    assert read(path) == [first, second]


def test_lines_without_a_word_are_skipped():
    written = json.dumps(asdict(line("fedavg", "a", 0, 50.0)))
    assert len(parse(f"\n{written}\n  \n{written}\n", "f.jsonl")) == 2


def test_a_line_is_whole_on_disk_when_it_is_added(tmp_path, monkeypatch):
    path, held = tmp_path / "results.jsonl", []
    monkeypatch.setattr(results.os, "fsync", lambda file: held.append(read(path)))
    append(path, line("fedavg", "a", 0, 50.0))
    assert held == [read(path)] != [[]]


def test_a_line_cut_short_by_a_crash_is_left_behind(tmp_path):
    path = tmp_path / "results.jsonl"
    first, second = line("fedavg", "a", 0, 50.0), line("fedavg", "a", 1, 51.0)
    append(path, first)
    path.write_text(path.read_text() + json.dumps(asdict(second))[:40])
    assert read(path) == [first]
    append(path, second)
    assert read(path) == [first, second]


@pytest.mark.parametrize(
    ("change", "told"),
    [({"seed": "0"}, "seed is '0'"), ({"versions": 3}, "versions is 3"), ({"extra": 1}, "fields")],
)
def test_a_bad_line_is_refused_by_file_line_and_field(change, told):
    good = asdict(line("fedavg", "a", 0, 50.0))
    text = json.dumps(good) + "\n" + json.dumps(good | change) + "\n"
    with pytest.raises(PaperError, match=r"f\.jsonl, line 2") as refused:
        parse(text, "f.jsonl")
    assert told in str(refused.value)
    with pytest.raises(PaperError, match="line 2: the fields must be table, row"):
        parse("\n3\n", "f.jsonl")
    with pytest.raises(PaperError, match="line 1 is not JSON"):
        parse("{\n{}\n", "f.jsonl")


FREE = [  # where, how fast and what to keep
    ("sim", {"executor": "ray", "address": "head:10001", "workers": 2}),
    ("sim", {"executor": "cohort", "chunk": 3, "compile": "off", "memory": 5.0}),
    ("sim", {"checkpoint_every": 7, "client_memory": 1.0}),
    ("snapshots", {"clients": True, "every": 5, "rounds": (1,)}),
]


def test_the_hash_is_of_what_can_change_a_result():
    table = load_table("ima/table1")
    cell = table.rows[0], table.columns[0]
    here = experiment_of(table, *cell, seed=0)
    assert fingerprint(here) == fingerprint(experiment_of(table, *cell, seed=0, device="cpu"))
    for name, free in FREE:
        changed = replace(getattr(here, name), **free)
        assert fingerprint(here) == fingerprint(replace(here, **{name: changed})), free
    other = replace(here, local=replace(here.local, lr=0.02))
    assert len({fingerprint(e) for e in (here, other, replace(here, seed=1))}) == 3
    assert fingerprint(here) != fingerprint(replace(here, sim=replace(here.sim, precision="fp64")))


def test_a_setting_that_does_not_exist_yet_will_change_no_hash():
    """Only what differs from the defaults is hashed, in canonical form."""
    written = json.dumps({"partition.seed": 0, "sim.participation": "fraction"})
    by_hand = hashlib.blake2b(written.encode(), digest_size=8).hexdigest()
    assert fingerprint(Experiment()) == by_hand


def test_cells_that_are_one_experiment_share_its_run():
    def config(name, row, column):
        table = load_table(name)
        axes = [next(a for a in kind if a.name == n) for kind, n in
                ((table.rows, row), (table.columns, column))]  # fmt: skip
        return fingerprint(experiment_of(table, *axes, seed=0))

    same = [
        config("ima/table1", "fedavg+ima", "cifar10 cnn dir0.1"),
        config("ima/table2", "fedavg", "ts300"),
        config("ima/table3", "fedavg", "exponential"),
        config("ima/figure6", "fedavg+ima", "alpha 0.1"),
        config("ima/figure7", "fedavg", "start 300"),
    ]
    assert len(set(same)) == 1
    assert config("wima/table2", "scaffold", "cifar10 a0") == config(
        "wima/table2", "scaffold+wima", "cifar10 a0"
    )


def test_a_share_of_the_rounds_is_never_none_of_them():
    table = load_table("ima/table1")
    (cell_run,), _ = cell_runs_of(table, table.rows[:1], table.columns[:1], [0], share=0.001)
    assert (cell_run.experiment.rounds, cell_run.full_rounds) == (1, 300)
    assert cell_run.command == (
        "fedbasin paper run ima/table1 --rows fedavg --columns 'fmnist cnn shards2' --seeds 0 "
        "--rounds 0.001"
    )
    for share in (1.5, 0.0, -0.5):
        with pytest.raises(PaperError, match=rf"--rounds is {share}: .* in \(0, 1\]"):
            cell_runs_of(table, table.rows, table.columns, [0], share=share)


def test_the_results_that_ship_belong_to_the_tables_as_they_are():
    stored = shipped()
    assert {result.table for result in stored} <= set(table_names())
    for name in {result.table for result in stored}:
        mine = [result for result in stored if result.table == name]
        assert fresh(load_table(name), mine) == mine, f"{name}: results of older settings"
    assert len({result.key for result in stored}) == len(stored)


def test_docs_papers_is_what_the_results_say(whole_page):
    written = (DOCS / "papers.md").read_text(encoding="utf-8")
    assert written == whole_page, "run: fedbasin paper show --markdown > docs/papers.md"


def test_the_readme_counts_as_the_page_does(whole_page):
    head, counts = (
        [part.strip() for part in re.findall(pattern, whole_page)[0].split("|")]
        for pattern in (r"\| table \| cells \|(.+)\|", r"\*\*all\*\* \| \d+ \|(.+)\|")
    )
    n = dict(zip(head, map(int, counts), strict=True))
    alone = n["near"] - n["of these confirmed"] - n["not confirmed"] - n["too small"]
    assert n["missed"] == n["of these shown"] + n["argued"] + n["open"]
    told = (
        f"Of {n['near'] + n['gain'] + n['missed']} cells run at full length that the paper's "
        f"numbers can judge, {n['near']} are within 3 points, {n['gain']} more bring the gain, "
        f"{n['missed']} are missed. Of the {n['near']}, {n['of these confirmed']} confirm the "
        f"direction of the paper's gain, {n['not confirmed']} do not, {n['too small']} are too "
        f"small to tell and {alone} have no gain to compare. Of the {n['missed']} misses the "
        f"reason is shown by result lines for {n['of these shown']}, argued for {n['argued']} and "
        f"open for {n['open']}"
    )
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    assert told in " ".join(readme.split()), told


@pytest.fixture(scope="module")
def whole_page():
    return page(shipped())


def test_a_line_serves_every_cell_of_its_paper_with_the_same_run():
    figure = load_table("ima/figure6")
    lines = served(figure, shipped())
    assert not [result for result in shipped() if result.table == figure.name]
    assert len(lines) == 48
    cell = next(
        c for c in compare(figure, shipped(), figure.rows[1:2], figure.columns)
        if c.column.name == "rate 0.1"
    )  # fmt: skip
    assert cell.borrowed == "ima/table1" and cell.line.ours == "64.21 (1 seed), run of ima/table1"
    own = line("scaffold", "a", 0, 60.0)
    other = replace(own, table="x/table2", row="another", column="name", score=50.0)
    a_cell = {("scaffold", column): [other] for column in "ab"}  # both columns are one run
    assert served(TABLE, [other]) == a_cell
    assert served(TABLE, [other, own])["scaffold", "a"] == [own]  # its own goes first
    for changed in (
        replace(other, table="y/table2"),  # another paper
        replace(other, measure="accuracy of something else"),
        replace(other, config="0" * 16),
        replace(other, seed=1),
        replace(other, rounds=50),
    ):
        assert served(TABLE, [changed]) == {}


@pytest.mark.parametrize("name", ["ima/table1", "wima/table2", "flamby/heart-disease"])
def test_a_cell_s_configs_are_the_fingerprints_of_its_experiments(name):
    table = load_table(name)
    for row, column in [(table.rows[0], table.columns[0]), (table.rows[-1], table.columns[-1])]:
        configs = CellConfigs(table, row, column)
        for seed, rounds in ((0, 100), (3, 7), (42, 400)):
            made = replace(experiment_of(table, row, column, seed=seed), rounds=rounds)
            assert configs.config(seed, rounds) == fingerprint(made)
    fixed = read_table(TOML.replace("[setup]", "[setup]\npartition.seed = 5"), "x/table1")
    made = replace(experiment_of(fixed, fixed.rows[0], fixed.columns[0], seed=3), rounds=9)
    assert CellConfigs(fixed, fixed.rows[0], fixed.columns[0]).config(3, 9) == fingerprint(made)


TRIED = TOML.replace('columns = ["b"]\n', 'columns = ["b"]\nshown_by = ["slow"]\n').replace(
    "[published]",
    '[[trials]]\nname = "slow"\nrow = "scaffold"\ncolumns = ["b"]\n'
    "setup = { local = { lr = 0.01 } }\n[published]",
)


def test_a_reason_is_shown_by_the_line_of_its_trial_and_not_without():
    table = read_table(TRIED, "x/table1")
    missed = line("scaffold", "b", 0, 10.0, table=table)
    ((row, column),) = table.trial_cells()
    ((trial,), _) = runs_of(table, [(row, column)], [0])
    assert trial.command == "fedbasin paper run x/table1 --trials slow --columns b --seeds 0"
    tried = replace(missed, row="slow", score=58.0, config=trial.config)
    for lines, state in (([missed], "argued"), ([missed, tried], "shown")):
        (found,) = lines_of(table, lines, table.rows[1:], table.columns[1:])
        assert found.verdict == f"missed, reason {state}"
        text = section(table, lines, table.rows, table.columns)
        assert f"- Found (`scaf*; b`; {state}): another split" in text
        shown = "| slow | scaffold | b | 60.00 | 58.00 (1 seed) | -2.00 |" in text
        assert shown == (state == "shown")
    assert not compare(table, [missed, tried], table.rows[:1], table.columns)[1].ours


def test_a_number_in_doubt_is_marked():
    doubt = '[[doubts]]\nrows = ["scaffold"]\ncolumns = ["a"]\ntext = "smudged"\n[published]'
    table = read_table(TOML.replace("[published]", doubt), "x/table1")
    lines = lines_of(table, [], table.rows, table.columns)
    assert [found.paper for found in lines] == ["50.00", "60.00 (in doubt)", "50.00", "60.00"]
    text = section(table, [], table.rows, table.columns)
    assert "- In doubt (`scaffold; a`): smudged" in text
    ima = load_table("ima/table1")
    cells = [ima.printed(row, column) for row in ima.rows for column in ima.columns]
    assert sum(cell.doubted for cell in cells) == 42
    wima = load_table("wima/table2")
    cells = [wima.printed(row, column) for row in wima.rows for column in wima.columns]
    assert sum(cell.doubted for cell in cells) == 20  # FedDyn's pair is N/A


def test_no_printed_row_is_counted_twice():
    for name in table_names():
        table = load_table(name)
        rows = [str(table.published[row.name]) for row in table.rows if row.name in table.published]
        numbers = [row for row in rows if re.search(r"\d", row)]
        alike = {row for row in numbers if numbers.count(row) > 1}
        assert not alike or name.startswith("flamby/"), name  # 16 test rows: equal means


def test_what_another_command_measures_stands_beside_the_paper(whole_page):
    assert "### fedwcm/table2" in whole_page
    text = whole_page.split("### fedwcm/table2")[1].split("###")[0]
    assert "Score: bytes of one client's message." in text
    assert "`fedbasin private-counts`" in text and "| plaintext | classes 100 | 856 | 856 |" in text
    assert "Nothing of it has been run" not in text
    text = whole_page.split("### fedlaw/table11")[1].split("##")[0]
    assert "Score: Pearson correlation" in text


def test_the_page_shows_a_result_with_its_device_and_reason(monkeypatch):
    text = TOML.replace('name = "b"\n', 'name = "b"\n[[columns]]\nname = "c"\ncannot = "no data"\n')
    table = read_table(text.replace("50.0]", "50.0, 1]").replace("60.0]", "60.0, 1]"), "ima/t")
    monkeypatch.setattr("fedbasin.papers.page.table_names", lambda: ("ima/t", "ima/t"))
    monkeypatch.setattr("fedbasin.papers.page.load_table", lambda name: table)
    mine = [
        line("scaffold", "b", 0, 10.0, table=table, device="a GPU"),
        line("fedavg", "a", 0, 50.0, table=table, rounds=10),
    ]
    text = page(mine)
    missed = "| scaffold | b | 60.00 | 10.00 (1 seed) | -50.00 | +10.00 | - | - |"
    assert f"{missed} missed, reason argued |" in text
    assert "- Found (`scaf*; b`; argued): another split" in text and "Run on a GPU, cpu." in text
    assert "50.00 (1 seed), reduced: 10 of 100 rounds" in text
    # cells, can run, at full length, near (and its directions), gain, missed (and why), reduced
    # columns a and b are one run, so both rows have two cells each
    one = "| ima/t | 6 | 4 | 2 | 0 | 0 | 0 | 0 | 0 | 2 | 0 | 1 | 1 | 2 |\n"
    assert one + "| **all** | 12 | 8 | 4 | 0 | 0 | 0 | 0 | 0 | 4 | 0 | 2 | 2 | 4 |" in text


def test_a_section_of_some_cells_speaks_of_these_alone():
    mine = [line("scaffold", "b", 0, 10.0, device="a GPU"), line("fedavg", "a", 0, 10.0)]
    text = section(TABLE, mine, TABLE.rows[:1], TABLE.columns)
    assert "Run on cpu." in text and "Found" not in text
    assert "Found" in section(TABLE, mine, TABLE.rows[1:], TABLE.columns)


def test_the_reasons_why_cells_cannot_run_are_in_one_order():
    more = "".join(f'[[columns]]\nname = "{name}"\ncannot = "{name}"\n' for name in "ihgfedc")
    toml = TOML.split("[published]")[0].replace("[[findings]]", f"{more}[[findings]]")
    table = read_table(toml, "x/table1")
    text = section(table, [], table.rows, table.columns)
    told = "".join(f"- Cannot be run: {name}.\n" for name in "cdefghi")
    assert told in text and text.endswith("\nNothing of it has been run yet.\n")
