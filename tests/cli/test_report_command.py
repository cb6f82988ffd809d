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


def test_a_folder_without_runs_is_one_line(tmp_path, monkeypatch, capsys):
    import pytest

    from fedbasin.cli import main

    monkeypatch.setattr("sys.argv", ["fedbasin", "report", str(tmp_path)])
    with pytest.raises(SystemExit):
        main()
    assert "no summary.json" in capsys.readouterr().err
