import html
import json
import re
import shlex
from hashlib import sha256
from html.parser import HTMLParser
from importlib import resources
from statistics import fmean, stdev

import pytest
from counting import calls_in
from report.making import HOSTILE, SETTINGS, add_analysis, every_kind, make_run

from fedbasin.core.record import RunFolder
from fedbasin.core.settings import flatten
from fedbasin.report.page import recipes, render, say_bytes, write_page
from fedbasin.report.runs import find_runs, read_runs


class Reader(HTMLParser):
    """What a browser would make of a page: tags with attributes, tables, and text by place."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.tables, self.scripts = [], {}, []
        self._inside, self._table = None, None
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "table":
            self._table = self.tables.setdefault(dict(attributes).get("id", len(self.tables)), [])
        elif tag == "tr" and self._table is not None:
            self._table.append([])
        elif tag in ("td", "th") and self._table is not None:
            self._table[-1].append("")
            self._inside = tag
        elif tag == "script":
            self.scripts.append([dict(attributes), ""])
            self._inside = tag

    def handle_endtag(self, tag):
        if tag == self._inside:
            self._inside = None
        if tag == "table":
            self._table = None

    def handle_data(self, data):
        if self._inside in ("td", "th"):
            self._table[-1][-1] += data
        elif self._inside == "script":
            self.scripts[-1][1] += data

    @property
    def data(self):
        (found,) = [text for attributes, text in self.scripts if attributes.get("id") == "data"]
        return json.loads(found)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    out = tmp_path_factory.mktemp("compared")
    for method in ("fedavg", "wima(window=5)", "scaffold"):
        for seed in (0, 1, 2):
            folder = make_run(out / method[:4] / str(seed), method, seed, notes={"gamma": 0.5})
    add_analysis(folder, every_kind())
    return out


@pytest.fixture(scope="module")
def page(compared):
    return render(read_runs(find_runs([compared])), target=0.5, baseline="fedavg")


def test_the_table_says_what_the_summaries_say(compared, page):
    tables = Reader(page).tables
    runs = {(row[0], int(row[1])): row for row in tables["runs"][1:]}
    folders = [RunFolder(path) for path in find_runs([compared])]
    assert len(runs) == len(folders) == 9
    scores = {}
    for folder in folders:
        summary = json.loads(folder.summary.read_text())
        row = runs[summary["method"], summary["seed"]]
        assert row[2] == f"{100 * summary['accuracy_mean_last10']:.2f}"
        assert row[3] == f"{100 * summary['accuracy_last']:.2f}"
        assert float(row[4]) == pytest.approx(summary["loss_last"], rel=1e-3)
        assert row[5:7] == [str(summary["rounds"]), f"{summary['seconds']:.1f}"]
        assert row[7:9] == [say_bytes(summary["bytes_down"]), say_bytes(summary["bytes_up"])]
        assert row[9:] == ["finished", str(folder.path)]
        scores.setdefault(summary["method"], []).append(summary["accuracy_mean_last10"])
    for row in tables["methods"][1:]:
        assert row[1] == f"{100 * fmean(scores[row[0]]):.2f} ± {100 * stdev(scores[row[0]]):.2f}"
        assert row[-1] == "3" and row[-3] == "4.0"


def test_the_curves_are_the_records(compared, page):
    methods = {method["label"]: method for method in Reader(page).data["methods"]}
    assert set(methods) == {"fedavg", "wima(window=5)", "scaffold"}
    for run in read_runs(find_runs([compared])):
        (drawn,) = [r for r in methods[run.label]["runs"] if r["seed"] == run.seed]
        assert drawn["round"] == [record.round for record in run.records]
        accuracies = [100 * record.metric("accuracy") for record in run.records]
        assert drawn["values"]["accuracy"] == pytest.approx(accuracies, rel=1e-5)
        assert drawn["values"]["note_gamma"] == [0.5] * 12
        assert drawn["seconds"][-1] == 3.0
        assert drawn["bytes"][-1] == sum(r.bytes_down + r.bytes_up for r in run.records)
        assert "accuracy_send" not in drawn["values"]


def test_a_run_holds_only_the_measures_it_has(tmp_path):
    make_run(tmp_path / "a", "fedavg")
    make_run(tmp_path / "b", "fedlaw", notes={"gamma": 0.5, "weights": [0.5, 0.5]})
    data = Reader(render(read_runs(find_runs([tmp_path])), target=0.5, baseline="fedavg")).data
    having = {m["label"]: set(m["runs"][0]["values"]) for m in data["methods"]}
    common = {"accuracy", "loss", "train_loss"}
    assert having == {"fedavg": common, "fedlaw": common | {"note_gamma"}}
    assert set(data["measures"]) == common | {"note_gamma"}


def test_the_page_asks_nothing_of_the_network(page):
    reader = Reader(page)
    for tag, attributes in reader.tags:
        for name in ("src", "href", "action", "data", "srcset"):
            target = attributes.get(name) or ""
            assert not target or target.startswith(("#", "data:")), (tag, target)
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL)[1]
    assert "url(" not in style and "@import" not in style
    (policy,) = [a["content"] for t, a in reader.tags if t == "meta" and "http-equiv" in a]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-inline" not in policy.split(";")[1]


def test_the_charting_code_is_what_its_note_says():
    assets = resources.files("fedbasin.report") / "assets"
    note = (assets / "README.md").read_text(encoding="utf-8")
    told = dict(re.findall(r"\| `([\w.-]+\.js)` .* `([0-9a-f]{64})` \|", note))
    found = {file.name: sha256(file.read_bytes()).hexdigest() for file in assets.iterdir()}
    assert len(told) == 2 and told.items() <= found.items()


def test_hostile_text_is_text(tmp_path):
    folder = make_run(
        tmp_path / 'a"><svg onload=alert(3)>', HOSTILE, notes={HOSTILE: 0.5},
        data__name=HOSTILE, model=HOSTILE, local__lr=HOSTILE,
    )  # fmt: skip
    add_analysis(folder, every_kind(HOSTILE))
    folder.analysis.joinpath("<b>.json").write_text("{}")
    folder.partition.write_text('client,rows,"</script><b>",b\n0,3,1,2\n', encoding="utf-8")
    summary = json.loads(folder.summary.read_text())
    hostile_facts = {"status": HOSTILE, "reason": HOSTILE, "device": HOSTILE, "commit": HOSTILE}
    folder.write_summary(summary | hostile_facts | {"versions": {HOSTILE: HOSTILE}})
    make_run(tmp_path / "b", "fedavg")
    page = render(read_runs(find_runs([tmp_path])), target=0.8, baseline=HOSTILE)
    reader = Reader(page)
    harmless = Reader(render(read_runs([tmp_path / "b"]), target=0.8, baseline="fedavg"))
    assert {tag for tag, _ in reader.tags} - {tag for tag, _ in harmless.tags} <= {
        "li", "ul", "h3", "wbr"
    }  # fmt: skip
    names = {name for _, attributes in reader.tags for name in attributes}
    assert not [name for name in names if name.startswith("on")]
    assert [text for attributes, text in reader.scripts if not attributes] == [
        text for attributes, text in harmless.scripts if not attributes
    ]
    data = reader.data
    label = read_runs(find_runs([tmp_path]))[0].label
    assert data["methods"][0]["label"] == label and label.startswith(HOSTILE)
    assert data["holdings"][0]["classes"] == ["</script><b>", "b"]
    assert data["analyses"][0][4]["rows"][1][0] == HOSTILE
    assert label in [row[0] for row in reader.tables["methods"]]
    assert "49" not in html.unescape(reader.tables["methods"][1][0])


def test_numbers_that_do_not_exist_leave_a_page_that_opens(tmp_path):
    folder = make_run(tmp_path / "a", accuracies=[None] * 3)
    folder.rounds.write_text(
        folder.rounds.read_text().replace('"loss": 2.0', '"loss": NaN'), encoding="utf-8"
    )
    bare = RunFolder(tmp_path / "b")
    bare.path.mkdir()
    bare.summary.write_text('{"method": "ima", "accuracy_last": null, "bytes_up": "many"}')
    reader = Reader(render(read_runs(find_runs([tmp_path])), target=0.8, baseline="fedavg"))
    assert reader.data["methods"][0]["runs"][0]["values"]["loss"][0] is None
    assert reader.data["methods"][1]["runs"][0]["round"] == []
    assert reader.tables["methods"][2][1] == "-"


def test_what_three_seeds_can_say_is_said(compared, page):
    text = " ".join(html.unescape(re.sub("<[^>]+>", "", page.split("<script")[0])).split())
    assert "paired t-test on 3 pairs" in text and "corrected for testing 2 methods (Holm" in text
    assert "p = 0.25 with 3 pairs" in text
    assert "with 3 pairs, the mean must be 2.5 times" in text  # 4.303 / sqrt(3), from any t table
    rows = {row[0]: row for row in Reader(page).tables["methods"]}
    assert rows["fedavg"][2:5] == ["", "", ""]
    for method in ("scaffold", "wima(window=5)"):
        number = "[+\N{MINUS SIGN}]\\d+\\.\\d\\d"
        assert re.fullmatch(rf"{number} \[{number}, {number}\]", rows[method][2])
        assert re.fullmatch(r"[01]\.\d{2,3}|< 0\.001", rows[method][3])
        assert re.fullmatch(r"[0-3] of 3", rows[method][4])


def test_one_seed_has_no_test_and_no_baseline_no_difference(tmp_path):
    make_run(tmp_path / "a", "fedavg", accuracies=[0.5] * 12)
    make_run(tmp_path / "b", "ima", accuracies=[0.75] * 12)
    runs = read_runs(find_runs([tmp_path]))
    page = render(runs, target=0.8, baseline="fedavg")
    assert "One pair says nothing about luck" in page
    assert Reader(page).tables["methods"][2][2:5] == ["+25.00", "", "1 of 1"]
    without = render(runs, target=0.8, baseline="scaffold")
    assert "no run of scaffold" in without and "t-test" not in without


def test_settings_that_differ_stand_side_by_side(tmp_path):
    make_run(tmp_path / "a", "fedavg", local__lr=0.1)
    make_run(tmp_path / "b", "fedavg", local__lr=0.2)
    make_run(tmp_path / "c", "ima", local__lr=0.2, local__clip=1.0)
    table = Reader(render(read_runs(find_runs([tmp_path])), target=0.8, baseline="fedavg")).tables
    heads, *rows = table["differing"]
    assert heads == ["method", "local.lr", "local.clip"]
    assert [row[1:] for row in rows] == [["0.1", "not set"], ["0.2", "not set"], ["0.2", "1.0"]]
    assert [row[0].split(",")[0] for row in rows] == ["fedavg", "fedavg", "ima"]


def test_the_commands_make_every_run_again_and_no_other(tmp_path):
    import tomllib

    made = [("fedavg", 0, 0.1), ("fedavg", 1, 0.1), ("wima(fedavg, window=2)", 0, 0.1),
            ("wima(fedavg, window=2)", 1, 0.1), ("ima", 0, 0.1), ("ima", 0, 0.2)]  # fmt: skip
    for number, (method, seed, lr) in enumerate(made):
        make_run(tmp_path / str(number), method, seed, local__lr=lr)
    found = recipes(read_runs(find_runs([tmp_path])))
    again = []
    for recipe in found:
        settings = flatten(tomllib.loads(recipe.settings))
        assert settings["partition.seed"] == -1 and "seed" not in settings
        assert {k: v for k, v in settings.items() if k in SETTINGS and k != "local.lr"} == {
            k: v for k, v in SETTINGS.items() if k != "local.lr"
        }
        for command in recipe.commands:
            words = shlex.split(command)
            assert words[:2] == ["fedbasin", "compare"] and words[-2:] == ["--config", recipe.file]
            at = words.index("--seeds")
            again += [
                (method, int(seed), settings["local.lr"])
                for method in words[2:at]
                for seed in words[at + 1].split(",")
            ]
    assert sorted(again) == sorted(made)
    assert [len(recipe.commands) for recipe in found] == [2, 1]
    assert len({recipe.file for recipe in found}) == 2


def test_a_fixed_partition_seed_is_kept(tmp_path):
    make_run(tmp_path / "a", seed=0, partition__seed=0)
    make_run(tmp_path / "b", seed=1, partition__seed=0)
    (recipe,) = recipes(read_runs(find_runs([tmp_path])))
    assert "[partition]" in recipe.settings and "\nseed = 0\n" in recipe.settings
    assert recipe.commands == ("fedbasin compare fedavg --seeds 0,1 --config settings.toml",)


def runs_of(folder, rounds):
    """Ten runs with a number in every field."""
    for seed in range(10):
        made = make_run(folder / str(seed), seed=seed, rounds=rounds, notes={"gamma": 1 / 3})
        empty = r'("(?:accuracy_send|update_norm|model_norm)": )null'
        full, count = re.subn(empty, rf"\g<1>{1 / 7}", made.rounds.read_text())
        assert count == 3 * rounds
        made.rounds.write_text(full)
    return read_runs(find_runs([folder]))


def test_a_page_of_ten_runs_of_400_rounds_is_small_and_a_round_takes_few_calls(tmp_path):
    path = tmp_path / "deep" / "report.html"
    short = runs_of(tmp_path / "short", 200)
    long = runs_of(tmp_path / "long", 400)
    write_page(short, path)  # what is made once is made by now
    calls = [calls_in(lambda runs=runs: write_page(runs, path)) for runs in (short, long)]
    assert path.stat().st_size < 1_500_000
    assert calls[1] - calls[0] < 10 * 200 * 200  # 10 runs, 200 rounds more, 200 calls for each


@pytest.mark.parametrize(
    ("amount", "said"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.6, "1 kB"),
        (15_400_000, "15.4 MB"),
        (2.5e13, "25 TB"),
        (None, "-"),
    ],
)
def test_amounts_of_data_have_three_digits(amount, said):
    assert say_bytes(amount) == said


def test_private_runs_are_shown_against_epsilon(tmp_path):
    def shown():
        return render(read_runs(find_runs([tmp_path])), target=0.5, baseline="fedavg")

    make_run(tmp_path / "plain", "fedavg", 0)
    assert 'value="epsilon"' not in shown()
    make_run(tmp_path / "private", "dp", 0, notes={"epsilon": 1.25, "clip": 0.5})
    page = shown()
    assert '<option value="epsilon">' in page
    drawn = {each["label"]: each["runs"][0] for each in Reader(page).data["methods"]}
    assert set(drawn["dp"]["epsilon"]) == {1.25} and "epsilon" not in drawn["fedavg"]
