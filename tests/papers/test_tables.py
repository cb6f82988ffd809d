"""The papers' tables load, say what they should, and refuse what they cannot mean."""

from __future__ import annotations

import pytest

from fedbasin.core.expressions import parse
from fedbasin.papers import PaperError, load_paper, load_table, reason, table_names
from fedbasin.papers.grid import cell_runs_of, experiment_of, method_of
from fedbasin.papers.tables import MARKS, Finding, paper_names, read_table, select

TABLES = [load_table(name) for name in table_names()]
ASKED = {
    "ima": "table1 table2 table3 figure6 figure7",
    "fedlaw": " ".join(f"table{n}" for n in range(1, 12)) + " figure2 figure8 figure9",
    "wima": "table2 table3 table4 table5 figure2 figure3",
    "fedcda": "table1 table2 figure2 figure3 figure4",
    "fedwcm": "table1 table2 table3 figure2 figure8 figure9",
    "flamby": "tcga-brca heart-disease",
}
NO_ACCURACIES = ("fedlaw/table11", "fedwcm/table2")  # correlations and bytes
SMALL = """
title = "a table"
seeds = [0]
[setup]
rounds = 4
[[rows]]
name = "fedavg"
method = "fedavg"
[[rows]]
name = "fedprox"
method = "fedprox(mu={mu})"
over = "fedavg"
[[columns]]
name = "a"
values = { mu = 0.1 }
[[columns]]
name = "b"
values = { mu = 0.2 }
[published]
fedavg = [50.0, "unreadable"]
fedprox = [52.5, 60]
"""


def cells(table):
    return [(row, column) for row in table.rows for column in table.columns]


def named(axes, name):
    return next(axis for axis in axes if axis.name == name)


def printed(table, row, column):
    table = load_table(table)
    return table.printed(named(table.rows, row), named(table.columns, column)).value


def test_every_experiment_of_the_papers_is_there():
    assert set(table_names()) == {f"{p}/{n}" for p, names in ASKED.items() for n in names.split()}
    assert all(load_paper(name).differences for name in paper_names())


@pytest.mark.parametrize("table", TABLES, ids=lambda t: t.name)
def test_every_cell_names_a_method_or_a_reason(table):
    for row, column in cells(table):
        if not (table.cannot or row.cannot or column.cannot):
            parse(method_of(table, row, column), "method")
            assert not reason(table, row, column)


@pytest.mark.parametrize("table", TABLES, ids=lambda t: t.name)
def test_every_row_and_column_makes_an_experiment(table):
    for row, column in cells(table):
        at_an_edge = row is table.rows[0] or column is table.columns[0]
        if at_an_edge and not reason(table, row, column):
            experiment = experiment_of(table, row, column, seed=3)
            assert experiment.seed == experiment.partition.seed == 3
            assert experiment.sim.evaluate_last == table.score_of(row, column).last


@pytest.mark.parametrize("table", TABLES, ids=lambda t: t.name)
def test_every_printed_cell_is_a_number_or_a_known_mark(table):
    for row, column in cells(table):
        cell = table.printed(row, column)
        assert (cell.value is None) == bool(cell.mark)
        assert cell.mark in {"", *MARKS}
        accuracy = table.score_of(row, column).kind.startswith("accuracy")
        if cell.value is not None and accuracy and table.name not in NO_ACCURACIES:
            assert 1 < cell.value < 100


# The papers print some numbers twice; both transcriptions must agree with each other.
def test_ima_table_3_repeats_table_1():
    for row in load_table("ima/table3").rows:
        again = printed("ima/table1", f"{row.name}+ima", "cifar10 cnn dir0.1")
        assert printed("ima/table3", row.name, "exponential") == again


def test_ima_table_2_has_the_speed_ups_printed_in_its_brackets():
    ratios = {
        "fedavg": (1.24, 1.53, 1.51, 1.28),
        "fedprox": (1.96, 1.88, 1.52, 1.28),
        "fedfa": (1.87, 1.61, 1.32, 1.11),
        "fedadam": (2.03, 1.87, 1.51, 1.28),
        "fedyogi": (1.85, 1.71, 1.40, 1.18),
        "fedgma": (1.25, 1.63, 1.52, 1.28),
    }
    for row, expected in ratios.items():
        for start, ratio in zip((150, 200, 250, 300), expected, strict=True):
            rounds = printed("ima/table2", row, f"ts{start}")
            assert printed("ima/table2", row, "fma") / rounds == pytest.approx(ratio, abs=0.012)


def test_wima_table_2_has_the_gains_printed_in_its_brackets():
    gains = {  # of cifar10 a0, cifar10 a0.05, cifar100 a0, cifar100 a0.5; the first is misprinted
        "fedavg": (None, 4.2, 4.9, 3.2),
        "fedavgm": (2.4, 2.2, 4.5, 2.2),
        "mime sgd": (5.7, 4.0, 11.5, 13.1),
        "mime sgdm": (1.6, 2.0, 4.3, 4.7),
        "mimelite": (3.4, 2.9, 4.7, 3.6),
        "fedcm": (2.9, 6.3, 5.7, 4.0),
        "fedacg": (4.8, 3.2, 3.5, 2.7),
        "fedprox": (5.7, 4.1, 5.0, 3.0),
        "scaffold": (2.5, 1.9, 4.1, 2.8),
        "feddyn": (None, None, 2.6, 3.7),
        "adabest": (7.9, 5.9, 6.5, 6.4),
    }
    columns = ("cifar10 a0", "cifar10 a0.05", "cifar100 a0", "cifar100 a0.5")
    for row, expected in gains.items():
        for column, gain in zip(columns, expected, strict=True):
            if gain is not None:
                more = printed("wima/table2", f"{row}+wima", column)
                plain = printed("wima/table2", row, column)
                assert more - plain == pytest.approx(gain, abs=0.06), (row, column)


def test_other_numbers_that_the_texts_repeat():
    assert printed("fedcda/table1", "fedcda", "cifar10 dir0.1") == 62.46
    assert printed("fedcda/table1", "fedexp", "cifar10 dir0.1") == 60.63
    best = printed("fedcda/table2", "fedcda", "dir0.1")
    assert best - printed("fedcda/table2", "feddf", "dir0.1") == pytest.approx(6.34)
    assert printed("fedwcm/table3", "fedgrab", "if0.1 beta0.1") == 32.60
    assert printed("fedwcm/table3", "fedavg", "if0.1 beta0.1") == 67.75
    assert printed("fedwcm/table3", "fedwcm", "if0.1 beta0.1") == 72.07
    assert printed("fedwcm/table1", "fedwcm-x", "if0.1") == 62.36
    assert printed("wima/table2", "fedavg+wima", "cifar100 a0") == printed(
        "wima/table4", "window 100", "cifar100"
    )


def test_a_spread_belongs_to_its_number():
    table = load_table("fedcda/table1")
    cell = table.printed(named(table.rows, "fedlaw"), named(table.columns, "fmnist dir0.1"))
    assert (cell.value, cell.spread) == (71.93, 8.23)


def test_a_small_table_reads():
    table = read_table(SMALL, "x/table1")
    row, column = table.rows[1], table.columns[1]
    assert table.printed(row, column).value == 60
    assert table.printed(table.rows[0], column).mark == "unreadable"
    assert method_of(table, row, column) == "fedprox(mu=0.2)"
    assert table.baseline(row, column) == (table.rows[0], column)
    assert table.baseline(table.rows[0], column) is None


LAYERED = """
title = "a table"
seeds = [0]
[values]
mu = 0.1
name = "fedprox"
[setup]
rounds = 200
[setup.local]
lr = 0.5
batch = 7
[[rows]]
name = "plain"
method = "{name}(mu={mu})"
[[rows]]
name = "own"
method = "{name}(mu={mu})"
values = { mu = "{most}", most = 0.3 }
setup = { local = { lr = 0.3 } }
[[columns]]
name = "a"
[[columns]]
name = "b"
values = { mu = 0.2 }
setup = { rounds = 30, local = { lr = 0.2, momentum = 0.9 } }
[published]
"""


def test_a_row_goes_before_a_column_and_a_column_before_the_table():
    table = read_table(LAYERED, "x/table1")
    made = {
        (row.name, column.name): experiment_of(table, row, column, seed=0)
        for row in table.rows
        for column in reversed(table.columns)
    }
    settings = {cell: (e.method, e.local.lr, e.local.momentum) for cell, e in made.items()}
    assert settings == {
        ("plain", "a"): ("fedprox(mu=0.1)", 0.5, 0.0),
        ("plain", "b"): ("fedprox(mu=0.2)", 0.2, 0.9),
        ("own", "a"): ("fedprox(mu=0.3)", 0.3, 0.0),
        ("own", "b"): ("fedprox(mu=0.3)", 0.3, 0.9),
    }
    assert {e.local.batch for e in made.values()} == {7}


def test_a_stopped_run_loses_a_tenth_at_most_and_short_ones_ten_rounds():
    table = read_table(LAYERED, "x/table1")
    every = [
        experiment_of(table, table.rows[0], column, seed=0).sim.checkpoint_every
        for column in table.columns
    ]
    assert every == [20, 10]


def test_a_grid_is_laid_out_seed_by_seed_and_column_by_column():
    table = read_table(SMALL.replace('name = "a"', 'name = "a"\ncannot = "why"'), "x/table1")
    cell_runs, reasons = cell_runs_of(table, table.rows, table.columns, [3, 1])
    assert [(t.seed, t.column.name, t.row.name) for t in cell_runs] == [
        (seed, "b", row) for seed in (3, 1) for row in ("fedavg", "fedprox")
    ]
    assert reasons == {"why": ["fedavg | a", "fedprox | a"]}


def test_a_share_of_the_rounds_is_rounded_to_the_nearest():
    table = read_table(SMALL.replace("rounds = 4", "rounds = 100"), "x/table1")
    cell_runs, _ = cell_runs_of(table, table.rows[:1], table.columns[:1], [0], share=0.29)
    assert cell_runs[0].experiment.rounds == 29


def test_fractions_are_read_as_percent():
    table = read_table(SMALL.replace("seeds = [0]", 'seeds = [0]\nunit = "fraction"'), "x/table1")
    assert table.printed(table.rows[0], table.columns[0]).value == 5000


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('title = "a table"', "", ("x/table1.toml", "title", "missing")),
        ("seeds = [0]", 'seeds = ["0"]', ("x/table1.toml", "seeds", "('0',)")),
        ("seeds = [0]", "seeds = []", ("seeds is empty",)),
        ("seeds = [0]", "seed = [0]", ("unknown field 'seed'", "seeds")),
        ("seeds = [0]", 'seeds = [0]\nunit = "per mille"', ("unit", "'per mille'", "'percent'")),
        ('method = "fedavg"', "method = 3", ("rows[0]", "method is 3", "a quoted string")),
        ('name = "b"', 'name = "a"', ("columns name 'a'", "once")),
        ('name = "b"', 'name = "b, c"', ("columns name 'b, c'",)),
        ('over = "fedavg"', 'over = "fedprox"', ("rows.over is 'fedprox'",)),
        ("[52.5, 60]", "[52.5]", ("published.'fedprox'", "[52.5]", "2 cells")),
        ("[52.5, 60]", '[52.5, "lost"]', ("'lost'", "unreadable")),
        ("[52.5, 60]", "[52.5, true]", ("True", "number")),
        ("fedprox = [", "fedporx = [", ("published.'fedporx'", "not a row")),
        ("[setup]", "[score]\nlast = 0\n[setup]", ("score.last is 0",)),
        ("[setup]", '[score]\nkind = "note"\n[setup]', ("score needs note",)),
        ("[setup]", '[score]\nkind = "metric"\n[setup]', ("score.metric is ''",)),
        ("[setup]", '[score]\nmetric = "loss"\n[setup]', ("score.metric is 'loss'",)),
        ("[setup]", '[score]\nkind = "rounds_to_target"\n[setup]', ("score.target is 0.0",)),
        ('name = "a"', 'name = "a"\nmethod = "fedavg"', ("row 'fedavg'", "column 'a'", "method")),
        ("[setup]", "[setup", ("x/table1.toml is not TOML",)),
        ("[published]", '[[findings]]\ntext = "x"\nrows = ["fedadam"]\n[published]', ("fedadam",)),
    ],
)
def test_a_bad_table_is_refused_with_file_field_and_value(old, new, told):
    assert old in SMALL
    with pytest.raises(PaperError) as refused:
        read_table(SMALL.replace(old, new, 1), "x/table1")
    assert all(part in str(refused.value) for part in told), str(refused.value)


def test_a_row_s_settings_stand_over_its_column_s_and_those_over_the_table_s():
    toml = SMALL.replace("rounds = 4", "rounds = 4\nlocal = { lr = 0.1, batch = 8, epochs = 2 }")
    toml = toml.replace('name = "a"', 'name = "a"\nsetup = { local = { lr = 0.2, batch = 16 } }')
    toml = toml.replace('over = "fedavg"', "setup = { local = { lr = 0.3 } }")
    table = read_table(toml, "x/table1")
    for _ in range(2):  # and nothing is left over from one cell to the next
        found = [
            experiment_of(table, row, column, seed=0).local
            for row in table.rows
            for column in table.columns
        ]
        settings = [(local.lr, local.batch, local.epochs) for local in found]
        assert settings == [(0.2, 16, 2), (0.1, 8, 2), (0.3, 16, 2), (0.3, 8, 2)]


def test_a_cell_without_a_method_of_its_own_has_the_table_s_or_is_fedavg():
    bare = read_table(SMALL.replace('method = "fedavg"\n', ""), "x/table1")
    assert method_of(bare, bare.rows[0], bare.columns[0]) == "fedavg"
    toml = SMALL.replace('method = "fedavg"\n', "").replace("[setup]", '[setup]\nmethod = "fedcm"')
    table = read_table(toml, "x/table1")
    assert method_of(table, table.rows[0], table.columns[0]) == "fedcm"


@pytest.mark.parametrize("place", ["seeds = [0]", 'name = "fedprox"', 'name = "a"'])
def test_a_reason_may_be_the_table_s_the_row_s_or_the_column_s(place):
    table = read_table(SMALL.replace(place, f'{place}\ncannot = "why"'), "x/table1")
    assert reason(table, table.rows[1], table.columns[0]) == "why"


def test_a_value_that_is_missing_is_named():
    table = read_table(SMALL.replace("values = { mu = 0.2 }", ""), "x/table1")
    with pytest.raises(PaperError, match=r"fedprox.*'b'.*\{mu\}"):
        method_of(table, table.rows[1], table.columns[1])


def test_a_method_that_is_not_in_the_catalogue_is_a_reason():
    table = read_table(SMALL.replace('method = "fedavg"', 'method = "fedzzz"'), "x/table1")
    assert "fedzzz" in reason(table, table.rows[0], table.columns[0])
    assert not reason(table, table.rows[1], table.columns[0])


def test_names_and_patterns_select_in_the_table_s_order():
    rows = load_table("ima/table1").rows
    assert [r.name for r in select(rows, "fedavg+ima,fedavg", "--rows")] == ["fedavg", "fedavg+ima"]
    assert len(select(rows, "*+ima", "--rows")) == 8
    with pytest.raises(
        PaperError, match="--rows: nothing is called 'fedavgg'; did you mean fedavg"
    ):
        select(rows, "fedavgg", "--rows")


def test_an_unknown_table_names_the_nearest():
    with pytest.raises(PaperError, match="ima/table1"):
        load_table("ima/tabel1")


def test_a_finding_names_its_cells_as_they_are_written():
    assert Finding("why", ("fedavg", "ima*"), ("a b",)).cells == "fedavg, ima*; a b"
    assert Finding("why", (), ("a", "b")).cells == "a, b" and Finding("why").cells == "all"
