"""Ours beside theirs for eyes and for pandas."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import pandas
import pytest
from typer.testing import CliRunner

from fedbasin.cli.app import app
from fedbasin.papers import compare, load_table, picture, table_names
from fedbasin.papers.beside import Ours
from fedbasin.papers.page import counts_of, sheet
from fedbasin.papers.results import shipped
from fedbasin.papers.tables import paper_names


def cells_of(*names):
    tables = [load_table(name) for name in names]
    return [cell for t in tables for cell in compare(t, shipped(), t.rows, t.columns)]


def picked(cells, row, column):
    return next(c for c in cells if (c.row.name, c.column.name) == (row, column))


@pytest.fixture
def drawn(monkeypatch):
    """What would be written, by the path."""
    figures = {}
    monkeypatch.setattr(picture, "_saved", lambda figure, path: figures.setdefault(path, figure))
    return figures


def dots(axes, mark):
    """The points of one mark as (x, y, colour)."""
    lines = [line for line in axes.lines if line.get_marker() == mark]
    return {
        (float(x), float(y), line.get_color())
        for line in lines
        for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
    }


def test_a_table_has_a_panel_for_each_column_that_was_run(drawn):
    table = load_table("ima/table1")
    cells = cells_of(table.name)
    picture.draw_table(table, cells, "path")
    panels = {a.get_title(loc="left"): a for a in drawn["path"].axes if a.axison}
    ran = [column.name for column in table.columns if any(
        c.ours for c in cells if c.column == column)]  # fmt: skip
    assert list(panels) == ran and len(ran) == 4
    axes = panels["cifar10 cnn dir0.1"]
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == [row.name for row in table.rows]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # the first row is at the top
    theirs, mine = dots(axes, "D"), dots(axes, "o")
    colours = {"near": "#0072B2", "gain": "#56B4E9", "missed": "#D55E00"}
    for place, name in enumerate(names):
        cell = picked(cells, name, "cifar10 cnn dir0.1")
        assert (cell.published.value, place, colours[cell.verdict]) in theirs
        assert (cell.ours.mean, place, colours[cell.verdict]) in mine
    seeds = picked(cells, "fednova", "cifar10 cnn dir0.1").ours.scores.values()
    at = names.index("fednova")
    assert {x for x, y, _ in dots(axes, "|") if y == at} == set(seeds) and len(seeds) == 2
    grey = dots(panels["fmnist cnn dir0.1"], "o")  # the paper's number is lost: no verdict
    assert {colour for _, y, colour in grey if y == 0} == {"#777777"}
    assert {y for _, y, _ in dots(panels["fmnist cnn dir0.1"], "D")} == {14, 15}  # FedGMA's


def test_a_miss_without_a_reason_is_a_miss(drawn):
    table = load_table("ima/table1")
    missed = replace(
        picked(cells_of(table.name), "fedgma", "cifar10 cnn dir0.1"),
        basis="open",
    )
    picture.draw_table(table, [missed], "path")
    assert {colour for *_, colour in dots(drawn["path"].axes[0], "o")} == {"#D55E00"}


def test_a_table_without_a_score_is_not_drawn(drawn):
    table = load_table("fedcda/figure4")
    with pytest.raises(ValueError, match="fedcda/figure4: nothing of what was asked for"):
        picture.draw_table(table, cells_of(table.name), "path")


def test_at_a_glance_every_cell_with_a_verdict_is_one_dot(drawn):
    cells = cells_of(*table_names())
    picture.draw_all(cells, "path")
    accuracy, gain = drawn["path"].axes
    judged = [
        c for c in cells
        if c.verdict in ("near", "gain", "missed") and c.score.kind != "rounds_to_target"
    ]  # fmt: skip
    for axes, pairs in (
        (accuracy, [(c.published.value, c.ours.mean) for c in judged]),
        (gain, [(c.gain_paper, c.gain_ours) for c in judged]),
    ):
        both = [pair for pair in pairs if None not in pair]
        marked = [line for line in axes.lines if line.get_marker() != "None"]
        shown = [p for line in marked for p in zip(*line.get_data(), strict=True)]
        assert sorted(map(tuple, shown)) == sorted(both) and len(both) > 100
        (low, high), others = axes.get_xlim(), axes.get_ylim()
        assert others == (low, high)
        assert low <= min(map(min, both)) and max(map(max, both)) <= high
    near, half = (
        lambda x, y, axes=axes: any(
            path.contains_point((x, y)) for grey in axes.collections for path in grey.get_paths()
        )
        for axes in (accuracy, gain)
    )
    assert near(50, 52.9) and near(50, 47.1) and not near(50, 53.1) and not near(50, 46.9)
    assert half(4, 2.1) and half(4, 9) and not half(4, 1.9)
    assert half(-4, -2.1) and half(-4, -7.9) and not half(-4, -1.9) and not half(-4, -8.1)
    labels = [text.get_text() for text in accuracy.get_legend().get_texts()]
    assert [label.split(",")[0] for label in labels] == paper_names()
    counted = sum(int(label.split()[1]) for label in labels)
    told = drawn["path"].get_supxlabel()
    n = counts_of(shipped())
    assert counted == n["near"] + n["gain"] + n["missed"]
    assert told.startswith(f"{counted} cells: {n['near']} near")
    assert f"{n['of these confirmed']} confirmed, {n['not confirmed']} not" in told
    assert f"Not drawn: {counted - len(judged)} rounds to a target" in told
    hollow = [line for line in gain.lines if line.get_fillstyle() == "none"]
    opposite = [pair for line in hollow for pair in zip(*line.get_data(), strict=True)]
    assert opposite and all(x * y < 0 for x, y in opposite)


def test_what_has_no_verdict_is_not_at_a_glance(drawn):
    reduced = [c for c in cells_of("wima/table2") if c.ours]
    assert reduced and all(c.verdict == "reduced" for c in reduced)
    with pytest.raises(ValueError, match="has a verdict to draw"):
        picture.draw_all(reduced, "path")
    near = picked(cells_of("ima/table1"), "fedavg", "cifar10 cnn dir0.1")
    picture.draw_all([*reduced, near], "path")  # a gain of nobody: an empty panel
    shown = [line for a in drawn["path"].axes for line in a.lines if line.get_marker() != "None"]
    assert [line.get_xdata().tolist() for line in shown] == [[61.0]]


def test_the_sheet_has_every_digit_and_pandas_opens_it():
    cells = cells_of("ima/table1")
    frame = pandas.read_csv(io.StringIO(sheet(cells, only_ours=False)))
    assert len(frame) == len(cells)
    frame = pandas.read_csv(io.StringIO(sheet(cells, only_ours=True)))
    assert len(frame) == sum(c.ours is not None for c in cells)
    cell = picked(cells, "fednova+ima", "cifar10 cnn dir0.1")
    (found,) = frame[(frame.row == "fednova+ima") & (frame.column == "cifar10 cnn dir0.1")].to_dict(
        "records"
    )
    for empty in ("paper_mark", "paper_spread", "reason"):
        assert math.isnan(found.pop(empty))
    assert found == {
        "table": "ima/table1",
        "row": "fednova+ima",
        "column": "cifar10 cnn dir0.1",
        "score": "accuracy (%), mean of the last 10 rounds",
        "paper": 60.09,
        "paper_doubted": False,
        "ours": cell.ours.mean,
        "ours_spread": cell.ours.spread,
        "seeds": 2,
        "seeds_scored": 2,
        "difference": cell.ours.mean - 60.09,
        "gain_paper": pytest.approx(60.09 - 55.11),
        "gain_ours": cell.gain_ours,
        "gain_spread": cell.gain_spread,
        "direction": "confirmed",
        "verdict": "near",
        "rounds": 400,
        "full_rounds": 400,
        "data_share": 1.0,
    }
    lost = frame[(frame.row == "fedavg") & (frame.column == "fmnist cnn dir0.1")].iloc[0]
    assert lost.paper_mark == "unreadable" and math.isnan(lost.paper)
    assert pandas.isna(lost.verdict)


def test_a_seed_that_diverged_is_counted_and_has_no_score():
    cell = picked(cells_of("fedlaw/table1"), "simplecnn noniid", "gamma 1")
    assert (cell.values["seeds"], cell.values["seeds_scored"]) == (2, 1)


def test_rounds_are_shown_whole():
    cell = picked(cells_of("ima/table2"), "fedavg", "ts150")
    assert cell.line.cells[2:4] == ("318", "344 (1 seed)")


def test_the_share_of_the_data_is_that_of_the_run_with_the_least():
    (some,) = [c for c in cells_of("ima/table1") if c.ours and len(c.ours.results) > 1][:1]
    whole, half = some.ours.results
    mixed = Ours((whole, replace(half, data_share=0.5)))
    assert mixed.data_share == 0.5


@pytest.mark.parametrize(
    ("arguments", "file"),
    [
        (["fedlaw/table8"], "fedlaw-table8.png"),
        (["fedlaw/table8", "--out", "deep/x.svg"], "deep/x.svg"),
        ([], "papers.png"),
    ],
)
def test_plot_writes_a_picture(arguments, file, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["paper", "plot", *arguments])
    assert done.exit_code == 0 and file in done.output
    begin = (tmp_path / file).read_bytes()[:8]
    assert begin.startswith(b"<?xml" if file.endswith("svg") else b"\x89PNG")


def test_plot_and_show_say_what_they_cannot_do(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for arguments, why in (
        (["plot", "--out", "x.gif"], "--out is 'x.gif'"),
        (["plot", "--results", "no.jsonl"], "no.jsonl does not exist"),
        (["show", "--csv", "--markdown"], "give one of them"),
    ):
        done = CliRunner().invoke(app, ["paper", *arguments])
        assert done.exit_code == 1 and why in str(done.exception)
    assert not list(tmp_path.iterdir())


def test_show_as_csv_is_of_the_cells_that_were_asked_for():
    arguments = ["paper", "show", "ima/table2", "--rows", "fedavg,fedfa", "--columns", "ts*"]
    frame = pandas.read_csv(io.StringIO(CliRunner().invoke(app, [*arguments, "--csv"]).output))
    assert len(frame) == 8 and set(frame.row) == {"fedavg", "fedfa"}
    assert frame.gain_ours.notna().all()
