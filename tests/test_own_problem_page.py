"""docs/own_problem.md runs as written: its blocks, its commands and the cells of its table."""

import re
import shlex
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

import fedbasin as fb
from fedbasin.cli import app
from fedbasin.core.catalogue import CATALOGUE

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "own_problem.md").read_text(encoding="utf-8")
WANTED = [
    "NumPy",
    "DataFrame",
    "CSV",
    "parquet",
    "HF datasets",
    "torch Dataset",
    "image folder",
    "texts",
    "files per client",
    "own module: BatchNorm",
    "own module: Dropout",
    "own module: Transformer encoder",
    "pretrained",
    "frozen",
    "LoRA",
    "own loss",
    "own metric",
    "own optimiser",
    "own schedule",
    "own partition",
    "own method",
    "own task",
]


def table():
    below = PAGE.partition("| what | how |")[2].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in below]


def how(what):
    """Return the code of a row of the table."""
    (cell,) = [row[1] for row in table() if row[0] == what]
    return re.findall(r"`([^`]+)`", cell)[0]


def patients(count=240):
    rng = np.random.default_rng(0)
    frame = pandas.DataFrame({"age": rng.normal(60, 10, count).round(1)})
    frame["pressure"] = rng.normal(120, 15, count).round(1)
    frame["weight"] = rng.normal(75, 12, count).round(1)
    frame["pulse"] = rng.normal(70, 9, count).round(1)
    frame["hospital"] = rng.choice(["north", "south", "west"], count)
    frame["died"] = np.where(frame["age"] + rng.normal(0, 5, count) > 63, "yes", "no")
    return frame


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with the files that the page speaks of."""
    monkeypatch.chdir(tmp_path)
    frame = patients()
    frame.to_csv("patients.csv", index=False)
    frame.to_parquet("patients.parquet", index=False)
    for name in ("north", "south"):
        rows = frame[frame["hospital"] == name].drop(columns="hospital")
        rows.to_csv(f"{name}.csv", index=False)
    rng = np.random.default_rng(1)
    for kind in ("cat", "dog"):
        Path("images", kind).mkdir(parents=True)
        for place in range(10):
            pixels = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(Path("images", kind, f"{place}.png"))
    before = set(CATALOGUE)
    yield tmp_path
    for name in set(CATALOGUE) - before:
        del CATALOGUE[name]


def test_the_table_has_every_thing_and_its_tests_exist():
    assert [row[0] for row in table()] == WANTED
    for what, _, lines, tested in table():
        links = re.findall(r"\]\(\.\./([^)]+)\)", tested)
        assert links and all((ROOT / link).is_file() for link in links), what
        assert int(lines) >= 1


def test_the_blocks_run_in_order(folder):
    names = {"__name__": "own_problem_page"}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "docs/own_problem.md", "exec"), names)
    result = names["result"]
    assert len(result.frame) == 4 and set(result.rounds["round"]) == {1, 2, 3, 4, 5}
    assert (folder / "report.html").is_file()
    assert set(names["result"].best.predict(names["frame"][:3])) <= {"yes", "no"}
    assert 0 <= names["run"]["sure_last"] <= 1


def test_the_commands_run(folder):
    commands = re.findall(r"^fedbasin (.*)$", PAGE, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        words = shlex.split(command)
        if words[0] == "compare":
            words += ["--rounds", "2", "--seeds", "0", "--jobs", "1", "--out", "c"]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
        assert "hospital" in result.output or "scaffold" in result.output


DATA = [row[0] for row in table() if row[1].startswith("`fb.data")]


@pytest.mark.parametrize("what", DATA)
def test_data_of_each_kind_are_taken_and_trained_on(folder, what):
    frame = patients()
    x = frame[["age", "pressure", "weight", "pulse"]].to_numpy(np.float32)
    y = (frame["died"] == "yes").to_numpy(np.int64)
    names = {"fb": fb, "frame": frame, "x": x, "y": y, "sites": frame["hospital"].to_numpy()}
    names["texts"], names["labels"] = ["ja gut", "nein schlecht"] * 20, ["good", "bad"] * 20
    if what == "torch Dataset":
        names |= {"TensorDataset": TensorDataset, "x": torch.from_numpy(x)}
        names["y"] = torch.from_numpy(y)
    if what == "HF datasets":
        datasets = pytest.importorskip("datasets", reason="needs the package datasets")
        datasets.Dataset.from_pandas(frame).save_to_disk("set")
        names["datasets"] = datasets
    data = eval(how(what), names)
    partition = {} if data.clients else {"how": "iid", "clients": 2}
    model = "logistic"
    if what == "texts":

        def model(shape, outputs):
            return nn.Sequential(nn.Embedding(4096, 4), nn.Flatten(), nn.Linear(64, outputs))

    result = fb.run(data, "r", model=model, partition=partition, rounds=1, progress=False)
    assert result["rounds"] == 1 and 0 <= result["accuracy_last"] <= 1


@pytest.mark.parametrize("what", ["own module: BatchNorm", "own module: Dropout", "LoRA"])
def test_networks_of_the_table_are_trained(folder, what):
    names = {"nn": nn}
    exec(how(what), names)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 4)).astype(np.float32)
    data = fb.data.from_arrays(x, x[:, 0])
    partition = {"how": "iid", "clients": 2}
    result = fb.run(data, "r", model=names["model"], partition=partition, rounds=2, progress=False)
    assert result["headline"] == "rmse"


def test_parts_that_are_frozen_stay(folder):
    assert "requires_grad_(False)" in next(row[1] for row in table() if row[0] == "frozen")
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    network[0].requires_grad_(False)
    start = {name: value.clone() for name, value in network.state_dict().items()}
    x = np.random.default_rng(0).normal(size=(80, 4)).astype(np.float32)
    partition = {"how": "iid", "clients": 2}
    data = fb.data.from_arrays(x, x[:, 0])
    trained = fb.run(data, "r", model=network, partition=partition, rounds=2, progress=False)
    after = trained.model().state_dict()
    same = {name: torch.equal(value, after[name]) for name, value in start.items()}
    assert same == {"0.weight": True, "0.bias": True, "2.weight": False, "2.bias": False}


def test_weights_of_a_file_are_the_start_of_any_network(folder):
    (cell,) = [row[1] for row in table() if row[0] == "pretrained"]
    (given,) = re.findall(r"`(init=[^`]+)`", cell)
    x = np.random.default_rng(0).normal(size=(80, 4)).astype(np.float32)
    data = fb.data.from_arrays(x, x[:, 0])
    weights = {"weight": torch.full((1, 4), 2.0), "bias": torch.zeros(1)}
    save_file(weights, "weights.safetensors")
    settings = eval(f"dict({given})")
    partition = {"how": "iid", "clients": 2}
    run = fb.run(
        data, "r", model=nn.Linear(4, 1), partition=partition, rounds=1, local={"lr": 1e-9},
        progress=False, **settings,
    )  # fmt: skip
    torch.testing.assert_close(run.model().weight, weights["weight"], rtol=1e-4, atol=1e-4)
