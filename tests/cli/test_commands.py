import json
import os
import re
import subprocess
import sys

import pytest
import typer
from rich.text import Text
from typer.testing import CliRunner

import fedbasin.experiment  # noqa: F401  (fills the catalogue)
from fedbasin.cli import app, main
from fedbasin.cli.listing import card_text, cards_markdown
from fedbasin.core.catalogue import cards
from fedbasin.core.expressions import parse
from fedbasin.core.needs import NeedError, check_task
from fedbasin.sim import Interrupted

FAST = [
    "--set", "rounds=3", "--set", "partition.clients=10", "--set", "local.epochs=1",
    "--set", "model=mlp(widths=(8,))",
]  # fmt: skip
runner = CliRunner()


def invoke(*arguments):
    return runner.invoke(app, list(arguments), env={"COLUMNS": "200"})


def test_help_teaches_every_command():
    page = invoke("--help")
    assert page.exit_code == 0
    for command in (
        "run", "compare", "resume", "methods", "data", "partition", "demo", "analyze", "report",
        "paper",
    ):  # fmt: skip
        assert command in page.output
        shown = invoke(command, "--help")
        assert shown.exit_code == 0 and len(shown.output) > 200


def test_run_writes_a_folder_and_says_where(tmp_path):
    out = tmp_path / "r"
    result = invoke(
        "run",
        "--preset",
        "demo",
        "--method",
        "fedprox(mu=0.1)",
        "--seed",
        "4",
        "--out",
        str(out),
        *FAST,
    )
    assert result.exit_code == 0, result.output
    summary = json.loads((out / "summary.json").read_text())
    assert (
        summary["method"] == "fedprox(mu=0.1)" and summary["seed"] == 4 and summary["rounds"] == 3
    )
    assert str(out) in result.output and f"{100 * summary['accuracy_last']:.2f}" in result.output


@pytest.mark.parametrize("option", [(), ("--config",)])
def test_run_reads_a_config_file_and_overrides_it(tmp_path, option):
    config = tmp_path / "c.toml"
    config.write_text('method = "scaffold"\nrounds = 50\n[local]\nlr = 0.3\n')
    out = tmp_path / "r"
    result = invoke(
        "run", *option, str(config), "--rounds", "2", "--out", str(out),
        "--set", "partition.clients=10",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    text = (out / "config.toml").read_text()
    assert 'method = "scaffold"' in text and "rounds = 2" in text and "lr = 0.3" in text


def test_a_method_asks_for_a_proxy_set_only_where_it_learns(tmp_path):
    config = tmp_path / "c.toml"
    config.write_text("rounds = 2\n[partition]\nclients = 10\n")
    fixed = ("run", str(config), "--method", "fedlaw(learn='none', gamma=0.9)", "--out")
    result = invoke(*fixed, str(tmp_path / "fixed"))
    assert result.exit_code == 0, result.output
    text = (tmp_path / "fixed" / "rounds.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["note_gamma"] for line in lines] == [0.9, 0.9]
    assert lines[0]["note_proxy_loss_before"] is None
    for method in ("fedlaw", "fedcda(merge=fedlaw)"):
        learnt = invoke("run", str(config), "--method", method, "--out", str(tmp_path / "learnt"))
        assert learnt.exit_code == 1 and "data.proxy_per_class" in str(learnt.exception)


def test_compare_prints_a_table_and_draws_a_figure(tmp_path):
    arguments = [
        "compare",
        "fedavg",
        "scaffold",
        "--seeds",
        "0,1",
        "--preset",
        "demo",
        "--out",
        str(tmp_path),
        *FAST,
    ]
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    assert "fedavg" in result.output and "scaffold" in result.output and "±" in result.output
    assert (tmp_path / "comparison.png").read_bytes()[:4] == b"\x89PNG"
    assert len(list(tmp_path.rglob("summary.json"))) == 4
    assert f"page: {tmp_path / 'report.html'}" in result.output
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    for path in tmp_path.rglob("summary.json"):
        accuracy = json.loads(path.read_text())["accuracy_mean_last10"]
        assert f'<td class="n">{100 * accuracy:.2f}</td>' in page
    again = invoke(*arguments)
    assert again.exit_code == 0 and again.output == result.output


def test_demo_runs_all_its_methods(tmp_path):
    from fedbasin.cli.app import DEMO_METHODS

    result = invoke("demo", "--seeds", "0", "--out", str(tmp_path), "--set", "rounds=2")
    assert result.exit_code == 0, result.output
    for method in DEMO_METHODS:
        assert str(parse(method)) in result.output


def test_methods_lists_shows_and_speaks_json():
    listing = invoke("methods")
    assert listing.exit_code == 0
    listed = json.loads(invoke("methods", "--json").output)
    assert {"fedavg", "fedprox", "scaffold"} <= {card["name"] for card in listed}
    for card in listed:
        assert card["name"] in listing.output
    page = invoke("methods", "scaffold").output
    assert "c_i+" in page and "server_lr = 1.0" in page and "2 models down" in page
    assert json.loads(invoke("methods", "fedprox", "--json").output)[0]["is_fedavg_when"] == {
        "mu": 0.0
    }


@pytest.mark.parametrize("card", cards("rule"), ids=lambda card: card.name)
def test_a_rule_is_shown_with_an_expression_that_runs(card):
    assert card.name in invoke("methods").output
    page = card_text(card.name)
    assert card.summary in page.replace("\n", " ") and card.paper in page
    (use,) = re.findall(r"^use +(.*), and so", page, re.MULTILINE)
    assert parse(use).local == card.make()


def test_tasks_and_metrics_are_listed_and_shown():
    listing = " ".join(invoke("methods").output.split())
    for card in (*cards("task"), *cards("metric")):
        assert card.name in listing
        page = card_text(card.name)
        assert card.summary in page.replace("\n", " ")
        (shown,) = json.loads(invoke("methods", card.name, "--json").output)
        assert shown["name"] == card.name and shown["kind"] == card.kind
    page = invoke("methods", "regression").output
    assert re.search(r"^headline +rmse$", page, re.MULTILINE)
    page = invoke("methods", "rmse").output
    assert re.search(r"^better +lower$", page, re.MULTILINE)
    assert re.search(r"^tasks +regression$", page, re.MULTILINE)
    assert re.search(r"^better +higher, in %$", card_text("accuracy"), re.MULTILINE)
    assert "task = \"tokens(vocabulary=..., headline='')\"" in card_text("tokens")


@pytest.mark.parametrize("task", cards("task"), ids=lambda card: card.name)
def test_what_a_task_s_card_calls_refused_is_what_is_refused(task):
    (line,) = re.findall(r"^refused +(.*)$", card_text(task.name), re.MULTILINE)
    chosen = parse("tokens(vocabulary=9)" if task.name == "tokens" else task.name, "task")
    refused = []
    for card in (*cards("method"), *cards("rule")):
        try:
            check_task(card.make(), chosen)
        except NeedError:
            refused.append(card.name)
    assert line == (", ".join(refused) or "nothing")
    assert ("scaffold" in refused) is False  # option = "steps" needs no losses of single rows


def test_the_methods_page_is_what_the_command_prints():
    assert invoke("methods", "--markdown").output == cards_markdown()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "--set", "locl.lr=1"], ["locl", "did you mean local?"]),
        (["run", "--set", "lr=1"], ["unknown setting 'lr'; did you mean local.lr?"]),
        (["run", "--set", "local.lrr=1"], ["'local.lrr'; did you mean local.lr?"]),
        (["run", "--set", "version=1"], ["unknown setting 'version'; available: method, model"]),
        (["compare", "ima", "ima(fedavg)", "--seeds", "3"], ["lists ima with seed 3 twice"]),
        (["run", "--set", "data.name=digitz"], ["digitz"]),
        (["run", "--method", "fedavgg"], ["fedavgg", "fedavg"]),
        (["run", "absent.toml"], ["absent.toml", "does not exist"]),
        (["run", "absent.toml", "--preset", "demo"], ["not both"]),
        (["run", "a.toml", "--config", "b.toml"], ["two config files are given, a.toml and b"]),
        (["compare", "fedavg", "--seed", "b"], ["--seeds", "'b'"]),
        (["run", "--preset", "dmo"], ["dmo", "demo"]),
        (["resume", "nowhere"], ["nowhere", "no run"]),
        (["compare", "fedavg", "--seeds", "a"], ["--seeds", "'a'"]),
        (["methods", "fedavgg"], ["fedavgg", "fedavg"]),
        (["compare", "fedavg", "fedlaw", "--out", "x"], ["fedlaw", "data.proxy_per_class"]),
        (["run", "--set", "sim.participation=count(clients=99)", "--out", "x"], ["99", "50"]),
        (["run", "--set", "partition.clients=999"], ["partition.how, dirichlet(alpha=0.1): min"]),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing_behind(
    arguments, words, monkeypatch, capsys, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["fedbasin", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 1
    message = capsys.readouterr().err
    assert message.startswith("error:") and "Traceback" not in message
    for word in words:
        assert word in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("method", ["fedavg", "fedavgm(lr=1e20)"], ids=["at once", "later"])
def test_a_run_that_diverges_says_so_and_fails(method, tmp_path, monkeypatch, capsys):
    out = tmp_path / "r"
    rate = "local.lr=1e30" if method == "fedavg" else "local.lr=0.1"
    arguments = ["run", "--preset", "demo", "--method", method, "--out", str(out), *FAST]
    monkeypatch.setattr(sys, "argv", ["fedbasin", *arguments, "--set", rate, "--set", "rounds=5"])
    for _ in range(2):
        with pytest.raises(SystemExit) as left:
            main()
        said = " ".join(capsys.readouterr().err.split())
        assert left.value.code == 1 and "Traceback" not in said
        assert re.search(r"diverged: round \d: client \d+ sent", said) and str(out) in said
        rounds = json.loads((out / "summary.json").read_text())["rounds"]
        assert rounds == 0 if method == "fedavg" else rounds > 0
        monkeypatch.setattr(sys, "argv", ["fedbasin", "resume", str(out)])


@pytest.mark.parametrize("stop", [KeyboardInterrupt, Interrupted])
def test_a_comparison_that_is_stopped_says_how_to_go_on_with_all_of_it(
    stop, tmp_path, monkeypatch, capsys
):
    def stopped(*_, **__):
        raise stop

    monkeypatch.setattr("fedbasin.experiment.comparison.run_cells", stopped)
    out = tmp_path / "r"
    arguments = ["compare", "fedavg", "scaffold", "--preset", "demo", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["fedbasin", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    said = " ".join(capsys.readouterr().err.split())
    assert left.value.code == 130 and f"Resume with the same command and --out {out}" in said


def test_a_folder_of_runs_is_told_from_one_of_none(tmp_path):
    (tmp_path / "fedavg" / "seed0").mkdir(parents=True)
    (tmp_path / "fedavg" / "seed0" / "config.toml").touch()
    assert "runs below it" in str(invoke("resume", str(tmp_path)).exception)
    assert "runs below it" not in str(invoke("resume", str(tmp_path / "none")).exception)


def test_tables_are_not_cut_off_in_a_pipe_and_are_plain_there():
    command = [sys.executable, "-m", "fedbasin", "paper", "list", "ima/table1"]
    environment = {k: v for k, v in os.environ.items() if k != "COLUMNS"}
    environment["FORCE_COLOR"] = "1"  # as a notebook's `!` and `%%bash` do
    shown = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert "…" not in shown.stdout and "fedgma+ima" in shown.stdout
    assert "\x1b" not in shown.stdout


def test_debug_shows_the_traceback(monkeypatch):
    monkeypatch.setattr("sys.argv", ["fedbasin", "resume", "nowhere"])
    monkeypatch.setenv("FEDBASIN_DEBUG", "1")
    with pytest.raises(ValueError, match="nowhere"):
        main()


def test_runs_that_use_all_workers_of_ray_are_compared_one_by_one(monkeypatch, tmp_path):
    seen = []

    def watch(layout, console, data_dir, jobs, **_):
        seen.append(jobs)
        raise RuntimeError("enough")

    monkeypatch.setattr(sys.modules["fedbasin.cli.app"], "run_with_progress", watch)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    for executor in ("ray", "loop"):
        invoke("compare", "fedavg", "--out", str(tmp_path), "--set", f"sim.executor={executor}",
               "--device", "cpu")  # fmt: skip
    assert seen == [1, 3]


def test_the_version_is_said():
    assert re.fullmatch(r"fedbasin \d+\.\d+\.\d+\S*\n", invoke("--version").output)


def test_a_command_that_is_misspelt_is_guessed_once():
    said = invoke("compar").output
    assert "No such command 'compar'" in said and said.count("compare") == 1


def test_help_fills_the_terminal():
    assert "To resume a stopped comparison, give" in invoke("compare", "--help").output
    waiting = [typer.main.get_command(app)]
    while waiting:
        command = waiting.pop()
        waiting += getattr(command, "commands", {}).values()
        assert "\n" not in (command.help or "").replace("\n\n", "")


def test_a_finished_run_says_so_and_a_damaged_config_is_named(tmp_path):
    out = tmp_path / "r"
    first = invoke("run", "--preset", "demo", "--rounds", "1", *FAST[2:], "--out", str(out))
    assert re.search(r"accuracy \d+\.\d\d % \(last\), ", first.output)
    assert f"{out} is finished: nothing is left to do" in invoke("resume", str(out)).output
    config = out / "config.toml"
    config.write_text("newer = 1\n" + config.read_text())
    stopped = invoke("resume", str(out))
    assert str(stopped.exception).startswith(f"{config}: unknown setting 'newer'")


def test_help_loses_no_word_to_markup():
    """Rich takes a [word] in brackets for a style, and drops it."""
    waiting, lost = [typer.main.get_command(app)], []
    while waiting:
        command = waiting.pop()
        waiting += getattr(command, "commands", {}).values()
        for said in (command.help, *(getattr(each, "help", None) for each in command.params)):
            plain = (said or "").replace("[bold]", "").replace("[/bold]", "")
            if Text.from_markup(plain).plain != plain:
                lost.append(plain)
    assert not lost


def test_a_run_logs_where_it_is_told(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("fedbasin.sinks.find_spec", lambda package: "there")
    monkeypatch.setattr(
        "fedbasin.experiment.comparison.run_cells",
        lambda *_, log, **__: seen.append(log) or [SUMMARY],
    )
    out = ("--out", str(tmp_path / "r"))
    for asked in (
        ("--log", "tensorboard", "--log", "mlflow"),
        ("--tensorboard",),  # what it was called before
        ("--tensorboard", "--log", "wandb"),
        (),
    ):
        assert invoke("run", *out, *asked).exit_code == 0
    assert [list(log) for log in seen] == [
        ["tensorboard", "mlflow"],
        ["tensorboard"],
        ["tensorboard", "wandb"],
        [],
    ]
    assert "--log" in invoke("run", "--help").output
    assert "--tensorboard" not in invoke("run", "--help").output


SUMMARY = {
    "status": "finished",
    "method": "fedavg",
    "rounds": 1,
    "accuracy_last": 0.5,
    "accuracy_mean_last10": 0.5,
    "seconds": 1.0,
}


def test_a_sink_that_is_unknown_or_not_installed_is_told_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr("fedbasin.sinks.find_spec", lambda package: None)
    out = tmp_path / "r"
    for command in (("run",), ("compare", "fedavg", "--seeds", "0,1", "--jobs", "2")):
        unknown = invoke(*command, "--out", str(out), "--log", "tensorbord", *FAST)
        assert unknown.exit_code == 2 and "'tensorbord' is not one of 'mlflow'" in unknown.output
        absent = invoke(*command, "--out", str(out), "--log", "mlflow", *FAST)
        assert absent.exit_code == 1
        assert "pip install 'fedbasin[mlflow]'" in str(absent.exception)
    assert not out.exists()
