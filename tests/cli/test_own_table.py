"""From a CSV to a comparison in one command."""

import csv
import json

import numpy as np
import pytest
from typer.testing import CliRunner

import fedbasin as fb
from fedbasin.cli import app

runner = CliRunner()
SMALL = ["--rounds", "2", "--seeds", "0", "--jobs", "1"]


@pytest.fixture(scope="module")
def patients(tmp_path_factory):
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("table") / "patients.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["age", "sex", "pressure", "hospital", "died", "days"])
        for i in range(240):
            age = int(rng.integers(20, 90))
            pressure = "" if i % 17 == 0 else round(float(rng.normal(120, 15)), 1)
            died = int(age + rng.normal(0, 15) > 60)
            sex = ["f", "m"][i % 2]
            writer.writerow([age, sex, pressure, f"H{i % 4}", died, 100 - age / 2])
    return path


def invoke(*arguments):
    return runner.invoke(app, [str(each) for each in arguments], env={"COLUMNS": "200"})


def test_one_command_compares_methods_on_a_table(patients, tmp_path):
    said = invoke(
        "compare", "fedavg", "scaffold", "--data", patients, "--target", "died",
        "--client", "hospital", "--task", "binary", "--model", "mlp(widths=(8,))",
        "--set", 'table.drop=["days"]', *SMALL, "--out", tmp_path / "r",
    )  # fmt: skip
    assert said.exit_code == 0, said.output
    assert "patients.csv, natural, 2 rounds" in said.output and "auroc" in said.output
    assert "Highest mean " in said.output
    run = tmp_path / "r" / "fedavg" / "seed0"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["clients"] == 4 and summary["task"] == "binary"
    encoding = json.loads((run / "encoding.json").read_text())
    assert [column["name"] for column in encoding["columns"]] == ["age", "sex", "pressure"]
    told = fb.predict(run, [{"age": 80, "sex": "f", "pressure": None}], probabilities=True)
    assert told.shape == (1, 2) and np.isclose(told.sum(), 1)


def test_the_table_is_the_one_of_python(patients, tmp_path):
    said = invoke(
        "run", "--data", patients, "--target", "days", "--client", "hospital", "--task",
        "regression", "--rounds", "2", "--out", tmp_path / "a", "--set", "local.lr=0.0001",
    )  # fmt: skip
    assert said.exit_code == 0, said.output
    data = fb.data.from_table(patients, "days", "hospital", classes=False)
    run = fb.run(
        data, tmp_path / "b", task="regression", rounds=2, local={"lr": 0.0001}, progress=False
    )
    one = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert one["rmse_last"] == run["rmse_last"]
    with patients.open() as file:
        rows = list(csv.DictReader(file))
    told = run.predict([{key: _value(row[key]) for key in row} for row in rows[:5]])
    assert told.shape == (5,) and np.isfinite(told).all()


def _value(text):
    try:
        return float(text)
    except ValueError:
        return text or None


def test_a_stopped_run_on_a_table_resumes_from_its_file(patients, tmp_path):
    out = tmp_path / "r"
    base = ("run", "--data", patients, "--target", "died", "--rounds", "2")
    more = ("--set", "partition.clients=4", "--set", "partition.how=iid")
    whole = tmp_path / "whole"
    assert invoke(*base, *more, "--out", whole).exit_code == 0
    assert invoke(*base, *more, "--out", out).exit_code == 0
    for name in ("model.safetensors", "summary.json", "checkpoint.safetensors", "rounds.jsonl"):
        (out / name).unlink()
    assert invoke("resume", out).exit_code == 0
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "die"], "target 'die' is no column; did you mean died?"),
        ([], "say which column to predict with --target COLUMN"),
        (["--target", "died", "--client", "clinic"], "'clinic'"),
        (["--target", "died", "--task", "regression(loss='x')"], "task: regression"),
    ],
)
def test_mistakes_are_one_line(patients, tmp_path, arguments, message):
    said = invoke("compare", "fedavg", "--data", patients, *arguments, *SMALL, "--out", tmp_path)
    assert said.exit_code != 0
    assert message in str(said.exception)


def test_info_of_a_table(patients, tmp_path):
    said = invoke("data", "info", patients, "--target", "died", "--client", "hospital")
    assert said.exit_code == 0, said.output
    lines = [[cell.strip() for cell in line.split("│")] for line in said.output.splitlines()]
    told = {line[1]: line[2:-1] for line in lines if len(line) > 3}
    assert "patients.csv: 240 rows, 6 columns" in said.output
    assert told["pressure"][1:3] == ["numbers", "15 (6.2%)"]
    assert told["died"][0] == "target" and told["hospital"][0] == "client"
    assert told["sex"][-1] == "2: f, m"
    data = fb.data.from_table(patients, "died", "hospital")
    for number, name in enumerate(data.group_names):
        own = data.train.labels[data.train.groups == number]
        assert told[name] == [str(len(own)), str((own == 0).sum()), str((own == 1).sum())]
    days = invoke("data", "info", patients, "--target", "days")
    assert "mean of days" in days.output and "all rows" in days.output
    assert "--target COLUMN" in invoke("data", "info", patients).output


def test_info_says_what_is_wrong_with_a_table(patients, tmp_path):
    said = invoke("data", "info", patients, "--target", "die")
    assert said.exit_code == 1 and "'die' is no column; did you mean died?" in said.output
    said = invoke("data", "info", tmp_path / "none.csv", "--target", "died")
    assert said.exit_code == 1 and "there is no file" in said.output
    said = invoke("data", "info", "digits", "--target", "died")
    assert said.exit_code == 1 and "digits is no file" in said.output


def test_columns_without_a_table_are_refused(tmp_path):
    for arguments, message in (
        (["--target", "died"], "--target died names a column: give the table with --data"),
        (["--client", "hospital"], "--client hospital names a column: give the table with --data"),
        (["--data", tmp_path / "none.csv", "--target", "died"], "none.csv does not exist"),
    ):
        said = invoke("compare", "fedavg", *arguments, "--out", tmp_path / "r")
        assert message in str(said.exception)
