import html
import json
import re
import shlex

from typer.testing import CliRunner

from fedbasin.cli import app

TINY = [
    "--set", "rounds=3", "--set", "partition.clients=6", "--set", "model=mlp(widths=(4,))",
    "--set", "local.epochs=1", "--set", "sim.evaluate_every=2", "--set", "snapshots.every=0",
]  # fmt: skip


def invoke(*arguments):
    result = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.output


def accuracies(folder):
    found = {}
    for path in folder.rglob("summary.json"):
        summary = json.loads(path.read_text())
        found[summary["method"], summary["seed"]] = (summary["accuracy_last"], summary["loss_last"])
    return found


def test_the_command_on_the_page_makes_the_same_runs_again(tmp_path, monkeypatch):
    first, second = tmp_path / "first", tmp_path / "second"
    invoke(
        "compare", "fedavg", "wima(scaffold(server_lr=0.5), window=2)", "--seeds", "3,1",
        "--preset", "demo", "--jobs", 1, "--out", first, *TINY,
    )  # fmt: skip
    page = (first / "report.html").read_text(encoding="utf-8")
    (settings,) = re.findall(r'<pre class="settings">(.*?)</pre>', page, re.DOTALL)
    (command,) = re.findall(r'<pre class="command">(.*?)</pre>', page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "settings.toml").write_text(html.unescape(settings), encoding="utf-8")
    words = shlex.split(html.unescape(command))
    assert words[0] == "fedbasin"
    invoke(*words[1:], "--jobs", 1, "--out", second)
    assert accuracies(second) == accuracies(first) and len(accuracies(first)) == 4


def test_report_writes_a_page_and_figures_and_names_them(tmp_path):
    runs = tmp_path / "runs"
    invoke("compare", "fedavg", "--seeds", 0, "--preset", "demo", "--jobs", 1, "--out", runs, *TINY)
    out = tmp_path / "deep" / "about.html"
    said = invoke("report", runs, "--out", out, "--png", "--svg", "--target", 0.123)
    written = sorted(path for path in out.parent.iterdir())
    assert [path for path in written if str(path) not in said] == []
    assert {path.suffix for path in written} == {".html", ".png", ".svg"} and len(written) == 11
    assert "rounds to 12.3 %" in out.read_text(encoding="utf-8")
    arguments = ["report", str(runs), "--baseline", "fedavgg", "--out", str(out)]
    refused = CliRunner().invoke(app, arguments).exception
    assert str(refused) == "--baseline: no run is of 'fedavgg'; did you mean fedavg?"


def test_a_page_lies_in_its_folder_and_replaces_no_other_file(tmp_path, monkeypatch):
    runs = tmp_path / "runs"
    settings = ["--preset", "demo", "--jobs", 1, *TINY]
    invoke("compare", "fedavg", "--seeds", 0, "--out", runs / "one", *settings)
    invoke("compare", "wima(window=2)", "--seeds", "0..2", "--out", runs / "three", *settings)
    monkeypatch.chdir(tmp_path)
    said = invoke("report", runs)  # one seed of one method, three of another
    assert f"4 runs in {runs / 'report.html'}\n" in said and "replaced" not in said
    assert "replaced the page" in invoke("report", runs)
    assert not (tmp_path / "report.html").exists()
    invoke("report", runs / "one", runs / "three")
    assert (tmp_path / "report.html").exists()
    (tmp_path / "mine.html").write_text("<p>fedbasin</p>")
    arguments = ["report", str(runs), "--out", "mine.html"]
    refused = CliRunner().invoke(app, arguments).exception
    assert "mine.html exists and is no page of fedbasin" in str(refused)
    assert (tmp_path / "mine.html").read_text() == "<p>fedbasin</p>"


def test_a_folder_without_runs_is_one_line(tmp_path, monkeypatch, capsys):
    import pytest

    from fedbasin.cli import main

    monkeypatch.setattr("sys.argv", ["fedbasin", "report", str(tmp_path)])
    with pytest.raises(SystemExit):
        main()
    assert "no summary.json" in capsys.readouterr().err


NUMBERS = [
    "--set", "data.name=diabetes", "--set", "task=regression", "--set", "partition.how=iid",
    "--set", "partition.clients=4", "--set", "model=mlp(widths=(4,))", "--rounds", "5",
    "--set", "sim.participation=fraction(rate=1)", "--jobs", "1",
]  # fmt: skip


def plain(page):
    """Return the words of a page, without its scripts."""
    body = re.sub(r"<(script|style).*?</\1>", "", page.partition("<body>")[2], flags=re.DOTALL)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", body)))


def test_a_comparison_of_regressions_speaks_of_errors(tmp_path):
    """Names, digits and directions are those of rmse, worked out from the records again."""
    said = invoke(
        "compare", "fedavg", "fedavgm", "--seeds", "0,1,2", "--target", 0.85, "--out", tmp_path,
        *NUMBERS,
    )  # fmt: skip
    curves = {}
    for path in tmp_path.rglob("rounds.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        method, seed = path.parts[-3:-1]
        curves[method, seed] = [line["rmse"] for line in lines]
    means = {key: sum(values) / len(values) for key, values in curves.items()}
    below = sum(
        means["fedavgm", seed] < means["fedavg", seed] for seed in {key[1] for key in means}
    )
    first = [
        next((i + 1 for i, value in enumerate(curves[key]) if value <= 0.85), None)
        for key in curves
        if key[0] == "fedavg"
    ]
    reached = [round for round in first if round is not None]
    assert reached, "the target must be reached for this test to say something"
    page = plain((tmp_path / "report.html").read_text(encoding="utf-8"))
    own = [value for (method, _), value in means.items() if method == "fedavg"]
    score = f"{sum(own) / 3:.4f} ± "
    assert score in said and score in page
    rounds = f"{sum(reached) / len(reached):.0f}"
    assert re.search(rf"fedavg +│ {score}\S+ │ +{rounds}", said)
    assert "rounds to rmse 0.85" in said and "rounds to rmse 0.85" in page
    assert "rmse (lower is better): mean of the last 10 rounds" in said
    assert "seeds below" in page and f" {below} of 3 " in page
    assert "first round at or below it" in page and "task regression" in page
    assert "Score: rmse (lower is better), mean of the last 10 rounds" in page
    assert "accuracy" not in page + said and "%" not in said


def test_without_a_target_there_is_no_column_for_it(tmp_path):
    """Accuracy has a usual target; an error has none."""
    said = invoke("compare", "fedavg", "--seeds", 0, "--out", tmp_path, *NUMBERS)
    page = plain((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "rounds to" not in (said + page).lower() and "not reached" not in said + page
    assert re.search(r"fedavg │ 0\.\d{4} │ +\d+\.\d │ +1 │", said)


def test_one_run_of_a_regression_ends_with_four_digits(tmp_path):
    said = invoke("run", "--out", tmp_path / "one", *NUMBERS[:-2])
    summary = json.loads((tmp_path / "one" / "summary.json").read_text())
    assert f"rmse {summary['rmse_mean_last10']:.4f} (mean of the last 5 rounds)" in said
