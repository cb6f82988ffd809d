import io
import json
import math

import pandas
import pytest

from fedbasin.core.figure_data import (
    Analysis,
    Bars,
    BarSeries,
    FigureDataError,
    Grid,
    Line,
    Lines,
    Mark,
    Table,
)

NAN = math.nan
EVERY_KIND = Analysis(
    name="plane",
    title="Loss <b>around</b> three models",
    source="Zhou et al., Figure 1",
    runs=("runs/a", "runs/b"),
    panels=(
        Lines(
            "curves", "round", "error",
            (Line("a", (0.0, 1.0), (0.5, 0.25), (0.4, 0.2), (0.6, 0.3)), Line("b", (2.0,), (NAN,))),
            (Mark("start", 0.0, 0.5),),
            log_y=True,
        ),
        Grid(
            "loss", "u", "v", "loss", (0.0, 1.0, 2.0), (5.0, 6.0),
            ((1.0, 2.0, 3.0), (4.0, NAN, 0.125)),
            (Mark("w1", 0.0, 5.0),), (Line("path", (0.0, 1.0), (5.0, 6.0)),),
        ),
        Bars("classes", "class", "accuracy", ("cat", "dog"), (BarSeries("run", (0.1, 0.9)),)),
        Table("numbers", ("run", "rounds", "auc"), (("a", 3, 0.5), ("b", None, 0.25))),
    ),
    notes=("a subsample of 10 rows",),
)  # fmt: skip


def same(a, b):
    return repr(a) == repr(b)  # NaN equals itself in text


def test_every_kind_goes_to_json_and_back():
    text = EVERY_KIND.to_json()
    assert same(Analysis.from_json(text), EVERY_KIND)
    found = json.loads(text)
    assert found["form"] == 1
    assert [panel["kind"] for panel in found["panels"]] == ["lines", "grid", "bars", "table"]
    assert found["panels"][1]["values"][1][1] is None


def test_json_keeps_seven_digits_and_csv_all():
    third = 1 / 3
    one = Analysis("n", "t", "s", (), (Lines("p", "x", "y", (Line("l", (third,), (third,)),)),))
    assert json.loads(one.to_json())["panels"][0]["series"][0]["y"] == [0.3333333]
    assert pandas.read_csv(io.StringIO(one.to_csv()))["value"].tolist() == [third]


def test_pandas_opens_the_csv_with_every_number():
    table = pandas.read_csv(io.StringIO(EVERY_KIND.to_csv()))
    assert list(table.columns) == ["panel", "series", "x", "y", "value"]
    grid = table[(table.panel == "loss") & (table.series == "loss")]
    assert grid[["x", "y"]].astype(float).values.tolist()[3] == [0.0, 6.0]
    assert grid["value"].astype(float).sum() == 10.125
    cell = table[(table.panel == "numbers") & (table.series == "a") & (table.x == "auc")]
    assert float(cell["value"].iloc[0]) == 0.5


def broken(change):
    found = json.loads(EVERY_KIND.to_json())
    change(found)
    return json.dumps(found)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: f.update(form=2), "form 1"),
        (lambda f: f.pop("notes"), "analysis must be an object with"),
        (lambda f: f.update(extra=1), "no more"),
        (lambda f: f.update(title=3), "analysis.title"),
        (lambda f: f["panels"][0].update(kind="pie"), r"panels\[0\].kind is 'pie'"),
        (lambda f: f["panels"].append(7), r"panels\[4\].kind"),
        (lambda f: f["panels"][0].update(log_y=1), "log_y"),
        (lambda f: f["panels"][0]["series"][0]["y"].pop(), "unequal lengths: x 2, y 1"),
        (lambda f: f["panels"][0]["series"][0]["low"].pop(), "unequal lengths: x 2, low 1"),
        (lambda f: f["panels"][0]["series"][0]["y"].__setitem__(0, "1"), r"y\[0\]"),
        (lambda f: f["panels"][0]["series"][0]["y"].__setitem__(0, True), r"y\[0\]"),
        (lambda f: f["panels"][1]["values"].pop(), "y 2, rows 1"),
        (lambda f: f["panels"][1]["values"][0].pop(), "x 3, columns 2"),
        (lambda f: f["panels"][2]["categories"].pop(), "categories 1, values 2"),
        (lambda f: f["panels"][3]["rows"][0].pop(), "columns 3, cells 2"),
        (lambda f: f["panels"][3]["rows"][0].__setitem__(0, [1]), r"rows\[0\]\[0\]"),
        (lambda f: f["panels"][3]["rows"][0].__setitem__(0, True), r"rows\[0\]\[0\]"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_its_place(change, words):
    with pytest.raises(FigureDataError, match=words):
        Analysis.from_json(broken(change))


def test_text_that_is_no_analysis_is_refused():
    with pytest.raises(FigureDataError, match="a missing number is null"):
        Analysis.from_json(EVERY_KIND.to_json().replace("null", "NaN", 1))
    for text in ("", "[]", "{", "null", '{"form": 1, "name": NaN}', "[" * 100_000):
        with pytest.raises(FigureDataError):
            Analysis.from_json(text)
