"""The runner on small real runs: it stores, skips, goes on, and survives a cell that fails."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from fedbasin.cli import app
from fedbasin.core.lock import alone_in
from fedbasin.core.record import RoundRecord, RunFolder
from fedbasin.experiment import run
from fedbasin.experiment.comparison import run_cell
from fedbasin.experiment.runs import Branch
from fedbasin.papers import cell_runs_of, load_table, table_names
from fedbasin.papers.grid import runs_of
from fedbasin.papers.results import append, read, result_of
from fedbasin.papers.run import Grid, over
from fedbasin.papers.tables import read_table

TOML = """
title = "a table"
seeds = [0]
[score]
last = 2
[setup]
rounds = 4
model = "mlp(widths=(8,))"
[setup.data]
name = "digits"
[setup.partition]
how = "iid"
clients = 6
[setup.local]
batch = 64
[setup.sim]
participation = "fraction(rate=0.5)"
[[rows]]
name = "fedavg"
method = "wima(window=2)"
score = { kind = "accuracy_send", last = 2 }
[[rows]]
name = "fedavg+wima"
method = "wima(window=2)"
over = "fedavg"
[[rows]]
name = "law"
method = "fedlaw"
[[rows]]
name = "unknown"
method = "fedzzz"
[[columns]]
name = "digits"
[[columns]]
name = "elsewhere"
cannot = "no such machine"
[published]
fedavg = [50.0, "figure"]
"""
TABLE = read_table(TOML, "x/table1")


@pytest.fixture
def invoke(monkeypatch, tmp_path):
    monkeypatch.setattr("fedbasin.papers.load_table", lambda name: TABLE)
    monkeypatch.setattr(sys.modules["fedbasin.cli.paper"].console, "width", 220)
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    return lambda *arguments: runner.invoke(app, ["paper", *arguments], catch_exceptions=True)


def test_equal_cells_run_once_and_each_has_its_line(invoke, tmp_path):
    done = invoke("run", "x/table1", "--rows", "fedavg*", "--columns", "digits", "--jobs", "1")
    assert done.exit_code == 0, done.output
    assert "2 results asked for, 1 runs to do" in done.output
    plain, averaged = read(tmp_path / "runs/papers/results.jsonl")
    assert (plain.row, averaged.row) == ("fedavg", "fedavg+wima")
    assert plain.config == averaged.config and plain.seconds > 0
    assert plain.command == ("fedbasin paper run x/table1 --rows fedavg --columns digits --seeds 0")
    assert {"torch", "numpy", "python"} <= set(plain.versions) and plain.device.startswith("cpu")
    assert plain.data_share == 1 and not plain.reduced
    records = RunFolder(tmp_path / "runs/papers" / plain.config).read_rounds()[-2:]
    assert plain.score == pytest.approx(
        50 * sum(r.metric("accuracy_send") for r in records), abs=1e-4
    )
    assert averaged.score == pytest.approx(
        50 * sum(r.metric("accuracy") for r in records), abs=1e-4
    )
    assert f"{plain.score:.2f} (1 seed)" in done.output
    every = RunFolder(tmp_path / "runs/papers" / plain.config).read_rounds()
    for result, name in ((plain, "accuracy_send"), (averaged, "accuracy")):
        scored = {
            str(r.round): 100 * r.metric(name) for r in every if r.metric("accuracy") is not None
        }
        assert result.accuracies == pytest.approx(scored, abs=1e-4)
        late = [result.accuracies[str(r.round)] for r in every[-2:]]  # a line checks itself
        assert result.score == pytest.approx(sum(late) / 2, abs=1e-4)

    again = invoke("run", "x/table1", "--rows", "fedavg*", "--columns", "digits")
    assert "0 runs to do" in again.output
    assert len(read(tmp_path / "runs/papers/results.jsonl")) == 2

    folder = tmp_path / "runs/papers" / plain.config
    folder.rename(tmp_path / "elsewhere")  # what has its line is not run again
    again = invoke("run", "x/table1", "--rows", "fedavg*", "--columns", "digits")
    assert "0 runs to do" in again.output and f"{plain.score:.2f} (1 seed)" in again.output
    again = invoke("run", "x/table1", "--rows", "fedavg", "--columns", "digits", "--rounds", "0.5")
    assert "1 runs to do" in again.output  # another length is another line
    (tmp_path / "elsewhere").rename(folder)

    (tmp_path / "runs/papers/results.jsonl").unlink()  # lines come from the runs that are over
    invoke("run", "x/table1", "--rows", "fedavg*", "--columns", "digits")
    assert read(tmp_path / "runs/papers/results.jsonl") == [plain, averaged]


def test_a_run_that_was_stopped_goes_on_as_it_was_begun(invoke, tmp_path, monkeypatch):
    (cell_run,), _ = cell_runs_of(TABLE, TABLE.rows[:1], TABLE.columns[:1], [0])
    path = cell_run.folder(tmp_path / "runs/papers")

    class Crash(BaseException):
        pass

    def crash(record):
        if record.round == 3:
            raise Crash

    every = replace(cell_run.experiment.sim, checkpoint_every=2, device="cpu")
    with pytest.raises(Crash):
        run(replace(cell_run.experiment, sim=every), path, on_round=crash)
    done = invoke("run", "x/table1", "--rows", "fedavg", "--columns", "digits", "--jobs", "1")
    assert done.exit_code == 0, done.output
    whole = tmp_path / "whole"
    run(cell_run.experiment, whole)
    resumed, straight = (
        [r.metric("accuracy") for r in RunFolder(each).read_rounds()] for each in (path, whole)
    )
    assert resumed == straight and len(resumed) == 4


def test_a_cell_that_fails_does_not_stop_the_others(invoke, tmp_path):
    done = invoke("run", "x/table1", "--rows", "law,fedavg", "--columns", "digits", "--jobs", "1")
    assert done.exit_code == 1
    told = str(done.exception)
    assert "1 cells failed" in told and "--rows law" in told and "data.proxy_per_class" in told
    assert [r.row for r in read(tmp_path / "runs/papers/results.jsonl")] == ["fedavg"]


def test_what_cannot_run_is_said_with_its_reason(invoke):
    done = invoke("run", "x/table1", "--rows", "unknown,fedavg", "--rounds", "0.5", "--jobs", "1")
    assert "cannot run fedavg | elsewhere, unknown | elsewhere: no such machine" in done.output
    assert "cannot run unknown | digits: no method is called 'fedzzz'" in done.output
    assert "reduced: 2 of 4 rounds" in done.output
    nothing = invoke("run", "x/table1", "--columns", "elsewhere")
    assert nothing.exit_code == 1 and "none of the cells" in str(nothing.exception)


def test_show_reads_results_of_one_s_own(invoke, tmp_path):
    invoke("run", "x/table1", "--rows", "fedavg", "--columns", "digits", "--jobs", "1")
    shown = invoke("show", "x/table1")
    (line,) = read(tmp_path / "runs/papers/results.jsonl")
    assert f"{line.score:.2f} (1 seed)" in shown.output and "figure" in shown.output
    assert "fedavg+wima" not in invoke("show", "x/table1", "--ours").output
    elsewhere = invoke("show", "x/table1", "--results", "no.jsonl")
    assert elsewhere.exit_code == 1 and "no.jsonl does not exist" in str(elsewhere.exception)


def test_show_says_why_a_cell_is_missed_and_nothing_of_one_that_is_not():
    cells = ["paper", "show", "fedcda/table1", "--rows", "fedprox", "--columns"]
    near = CliRunner().invoke(app, [*cells, "fmnist shards4"]).output
    assert "near" in near and "why" not in near
    missed = CliRunner().invoke(app, [*cells, "fmnist shards4,fmnist shards8"]).output
    assert missed.count("why (") == 1 and "dir0.5; argued): It is mu, which" in missed


def test_show_opens_with_verdicts_and_explains_marks():
    def show(*cells):
        done = CliRunner().invoke(app, ["paper", "show", *cells], env={"COLUMNS": "250"})
        return done.output

    output = show("fedwcm/table1")
    judged = [
        any(verdict in line for verdict in (" near ", " gain ", " missed"))
        for line in output.splitlines()
        if line.startswith("│")
    ]
    assert True in judged and False in judged and judged == sorted(judged, reverse=True)
    assert "unreadable" not in output
    lost = show("ima/table1", "--columns", "fmnist cnn shards2")
    assert lost.count("unreadable: printed, but lost in our copy of the paper") == 1


def test_markdown_is_of_the_cells_that_were_asked_for(invoke, tmp_path):
    invoke("run", "x/table1", "--rows", "fedavg*", "--columns", "digits", "--jobs", "1")
    averaged, plain = sorted(
        read(tmp_path / "runs/papers/results.jsonl"), key=lambda x: -len(x.row)
    )
    both = invoke("show", "x/table1", "--markdown").output
    assert both.startswith("### x/table1\n")
    for line in (plain, averaged):
        assert f"| {line.row} | digits |" in both and f"| {line.score:.2f} (1 seed) |" in both
    one = invoke("show", "x/table1", "--markdown", "--rows", "fedavg").output
    assert "| fedavg | digits |" in one and "| fedavg+wima |" not in one
    for option in (("--rows", "fedavg"), ("--ours",), ("--results", "mine.jsonl")):
        whole = invoke("show", "--markdown", *option)
        assert whole.exit_code == 1 and "name a table" in str(whole.exception)


def test_a_cell_is_a_config_file_that_runs_as_the_cell_does(invoke, tmp_path):
    invoke("run", "x/table1", "--rows", "fedavg+wima", "--columns", "digits", "--jobs", "1")
    (line,) = read(tmp_path / "runs/papers/results.jsonl")
    printed = invoke("config", "x/table1", "--row", "fedavg+wima", "--column", "digits")
    (tmp_path / "cell.toml").write_text(printed.output)
    done = CliRunner().invoke(app, ["run", "cell.toml", "--out", "alone"], catch_exceptions=False)
    assert done.exit_code == 0
    scores = [
        record.metric("accuracy") for record in RunFolder(tmp_path / "alone").read_rounds()[-2:]
    ]
    assert 100 * sum(scores) / 2 == pytest.approx(line.score, abs=1e-3)
    short = ("--seed", "3", "--rounds", "0.5")
    printed = invoke("config", "x/table1", "--row", "law", "--column", "digits", *short).output
    assert "seed = 3" in printed and "rounds = 2\n" in printed and 'method = "fedlaw"' in printed


@pytest.mark.parametrize(
    ("row", "column", "told"),
    [
        ("fedavg*", "digits", "--row names fedavg, fedavg+wima: name one"),
        ("fedavg", "*", "--column names digits, elsewhere: name one"),
        ("fedavgg", "digits", "--row: nothing is called 'fedavgg'"),
        ("fedavg", "elsewhere", "that cell cannot be run: no such machine"),
    ],
)
def test_a_config_file_is_of_one_cell_that_can_run(invoke, row, column, told):
    done = invoke("config", "x/table1", "--row", row, "--column", column)
    assert done.exit_code == 1 and told in str(done.exception)


def test_list_names_tables_methods_and_reasons(invoke, monkeypatch):
    one = invoke("list", "x/table1")
    assert "wima(window=2)" in one.output and "no such machine" in one.output
    monkeypatch.setattr("fedbasin.papers.load_table", load_table)
    every = invoke("list").output
    assert all(name in every for name in table_names())
    assert "Landmarks-User-160k is not among" in every


def shared_rows():
    table = load_table("wima/table2")
    return [row for row in table.rows if row.score is not None]


@pytest.mark.parametrize("row", shared_rows(), ids=lambda row: row.name)
def test_a_row_read_off_the_broadcast_model_is_its_method_without_wima(row, tmp_path):
    """WIMA's table takes a method's own score from the run with WIMA; both must be one."""
    inner = "fedavg" if row.method == "wima" else row.method.removeprefix("wima(")[:-1]
    scores = {}
    for method in (inner, f"wima({inner}, window=3)"):
        table = read_table(TOML.replace("fedlaw", method), "x/table1")
        (cell_run,), _ = cell_runs_of(table, table.rows[2:3], table.columns[:1], [0])
        run(cell_run.experiment, tmp_path / str(len(scores)))
        records = RunFolder(tmp_path / str(len(scores))).read_rounds()
        scores[method] = [
            r.metric("accuracy") if method == inner else r.metric("accuracy_send") for r in records
        ]
    # In the first round the window holds one model, which is the broadcast one.
    plain, sent = (each[1:] for each in scores.values())
    assert plain == sent and len(plain) == 3


def test_every_trial_changes_its_row_and_can_run():
    trials = 0
    for name in table_names():
        table = load_table(name)
        rows = {row.name: row for row in table.rows}
        for row, column in table.trial_cells():
            ((changed,), reasons) = runs_of(table, [(row, column)], [table.seeds[0]])
            ((plain,), _) = runs_of(table, [(rows[row.trial_of], column)], [table.seeds[0]])
            assert not reasons and changed.config != plain.config, (name, row.name)
            assert changed.experiment.data.name == plain.experiment.data.name
            assert f"--trials {shlex.quote(row.name)}" in changed.command
            trials += 1
    assert trials > 40


ALIKE = read_table(
    TOML.split("[[rows]]")[0]
    + """
[[rows]]
name = "plain"
method = "fedavg"
[[rows]]
name = "late"
method = "ima(window=1, start=0.5)"
[[rows]]
name = "later"
method = "ima(window=2, start=0.75)"
[[rows]]
name = "early"
method = "ima(window=2, start=0.0)"
[[columns]]
name = "digits"
[published]
""",
    "x/table1",
)


def first_seconds(out, lines):
    """The seconds of each row's second round: equal only where the round was taken over."""
    return {line.row: RunFolder(out / line.config).read_rounds()[1].seconds for line in lines}


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_cells_that_begin_alike_share_their_first_rounds(jobs, invoke, tmp_path, monkeypatch):
    monkeypatch.setattr("fedbasin.papers.load_table", lambda name: ALIKE)
    out = tmp_path / "runs/papers"
    rows = "late,plain,later,early"  # not in the order that they can run in
    done = invoke("run", "x/table1", "--rows", rows, "--jobs", jobs)
    assert done.exit_code == 0, done.output
    assert "4 results asked for, 4 runs to do" in done.output
    lines = read(out / "results.jsonl")
    assert {line.row: line.shared_rounds for line in lines} == {
        "plain": 0,
        "late": 2,
        "later": 2,
        "early": 0,
    }
    spent = first_seconds(out, lines)
    assert spent["late"] == spent["later"] == spent["plain"] != spent["early"]
    for line in lines:
        assert line.rounds == 4 and line.status == "finished" and line.score is not None
        assert len(RunFolder(out / line.config).read_rounds()) == 4
    assert "0 runs to do" in invoke("run", "x/table1").output


def test_a_cell_alone_runs_whole_and_later_ones_go_on_from_what_is_there(
    invoke, tmp_path, monkeypatch
):
    monkeypatch.setattr("fedbasin.papers.load_table", lambda name: ALIKE)
    out = tmp_path / "runs/papers"
    assert invoke("run", "x/table1", "--rows", "late").exit_code == 0
    assert [line.shared_rounds for line in read(out / "results.jsonl")] == [0]
    (out / "results.jsonl").unlink()
    assert invoke("run", "x/table1", "--rows", "plain,later").exit_code == 0
    assert [line.shared_rounds for line in read(out / "results.jsonl")] == [0, 2]


def test_a_branch_whose_trunk_fails_runs_whole(invoke, tmp_path, monkeypatch):
    monkeypatch.setattr("fedbasin.papers.load_table", lambda name: ALIKE)
    from fedbasin.experiment import comparison

    opening = comparison.open_cell

    def fail_plain(cell, *arguments, **options):
        if cell.experiment.method == "fedavg":
            raise ValueError("no luck")
        return opening(cell, *arguments, **options)

    monkeypatch.setattr(comparison, "open_cell", fail_plain)
    done = invoke("run", "x/table1", "--rows", "plain,late", "--jobs", "1")
    assert done.exit_code == 1 and "no luck" in str(done.exception)
    (line,) = read(tmp_path / "runs/papers/results.jsonl")
    assert (line.row, line.shared_rounds, line.status) == ("late", 0, "finished")


def test_a_branch_waits_for_its_trunk_alone(tmp_path):
    cell_runs, _ = cell_runs_of(ALIKE, ALIKE.rows, ALIKE.columns, [0], device="cpu")
    folder = {cell_run.row.name: cell_run.folder(tmp_path) for cell_run in cell_runs}
    grid = Grid(tuple(cell_runs), tmp_path, tmp_path / "results.jsonl")
    first = {cell.path: cell for cell in grid.waiting()}
    assert set(first) == {folder["plain"], folder["early"]}
    assert first[folder["plain"]].branching == (2,) and first[folder["early"]].branching == ()
    run_cell(first[folder["early"]])
    assert grid.waiting() == []  # the prefix has begun, and is not over
    run_cell(first[folder["plain"]])
    then = {cell.path: cell for cell in grid.waiting()}
    assert set(then) == {folder["late"], folder["later"]}
    assert {cell.branch for cell in then.values()} == {Branch(folder["plain"], 2)}
    assert grid.waiting() == []


def test_a_branch_does_without_a_trunk_that_failed(tmp_path):
    cell_runs, _ = cell_runs_of(ALIKE, ALIKE.rows[:2], ALIKE.columns, [0], device="cpu")
    grid = Grid(tuple(cell_runs), tmp_path, tmp_path / "results.jsonl")
    (plain,) = grid.waiting()
    grid.ended(plain, ValueError("no luck"))
    (late,) = grid.waiting()
    assert late.path == cell_runs[1].folder(tmp_path) and late.branch is None
    assert grid.waiting() == [] and len(grid.failures) == 1


def test_a_cell_that_another_process_runs_is_left_to_it(invoke, tmp_path, caplog):
    cell_runs, _ = cell_runs_of(TABLE, TABLE.rows[:1], TABLE.columns[:1], [0])
    taken = cell_runs[0].folder(tmp_path / "runs/papers")
    taken.mkdir(parents=True)
    command = ("run", "x/table1", "--rows", "fedavg", "--columns", "digits", "--jobs", "1")
    with alone_in(taken):
        done = invoke(*command)
    assert done.exit_code == 0, done.exception
    assert re.search(r"skipped: another process \(id \d+\) is running", caplog.text)
    assert not (tmp_path / "runs/papers/results.jsonl").exists()
    assert invoke(*command).exit_code == 0
    assert len(read(tmp_path / "runs/papers/results.jsonl")) == 1


def test_a_cell_that_ends_costs_no_look_at_the_settings_of_all(tmp_path, monkeypatch):
    cell_runs, _ = cell_runs_of(ALIKE, ALIKE.rows, ALIKE.columns, [0, 1], device="cpu")
    grid = Grid(tuple(cell_runs), tmp_path, tmp_path / "results.jsonl")
    first, *_ = grid.waiting()
    hashed = []
    for module in ("grid", "run"):
        module = f"fedbasin.papers.{module}.fingerprint"
        monkeypatch.setattr(module, lambda experiment: hashed.append(experiment) or "")
    grid.ended(first, ValueError("no luck"))
    assert grid.waiting() and grid.unfinished() and grid.lines() == []
    grid.collect()
    assert hashed == []


def test_a_run_is_done_while_a_line_of_it_is_missing_and_its_lines_come_from_its_folder(tmp_path):
    cell_runs, _ = cell_runs_of(TABLE, TABLE.rows[:2], TABLE.columns[:1], [0])
    path, written = cell_runs[0].folder(tmp_path), tmp_path / "results.jsonl"
    grid = Grid(tuple(cell_runs), tmp_path, written)
    assert grid.unfinished() == {path: cell_runs[0].experiment}
    grid.collect()  # nothing is over
    assert grid.lines() == [] and not written.exists()

    path.mkdir()
    folder = RunFolder(path)
    folder.append(RoundRecord(1, {"accuracy": 0.5, "accuracy_send": 0.25}))
    folder.write_summary({"status": "diverged"})
    first = result_of(cell_runs[0], path)
    append(written, first)
    assert grid.unfinished() == {}
    grid.collect()
    assert [(line.row, line.score) for line in grid.lines()] == [
        ("fedavg", 25.0),
        ("fedavg+wima", 50.0),
    ]
    assert [line.row for line in Grid((cell_runs[1],), tmp_path, written).lines()] == [
        "fedavg+wima"
    ]

    folder.summary.unlink()
    assert grid.unfinished() == {}  # all of it is written
    written.unlink()
    append(written, first)
    assert list(grid.unfinished()) == [path]


@pytest.mark.parametrize(("status", "done"), [("diverged", True), ("stopped", False)])
def test_a_run_is_over_when_it_has_a_model_or_has_diverged(status, done, tmp_path):
    folder = RunFolder(tmp_path)
    assert not over(tmp_path)
    folder.write_summary({"status": status})
    assert over(tmp_path) is done
    folder.model.touch()
    assert over(tmp_path)
