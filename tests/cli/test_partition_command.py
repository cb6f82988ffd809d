import re

import numpy as np
import pandas as pd
import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

import fedbasin.cli.partition as command
from fedbasin.core.expressions import parse
from fedbasin.core.rng import root
from fedbasin.data import Dataset, Rows, load
from fedbasin.partition import Pool, dirichlet, longtail, natural
from fedbasin.report.partition_figure import partition_figure

app = typer.Typer()
app.command()(command.partition)


def run(*arguments, width=80):
    return CliRunner(env={"COLUMNS": str(width)}).invoke(app, [str(a) for a in arguments])


def toy(classes, rows=240, groups=None):
    labels = np.arange(rows) % len(classes)
    train = Rows(np.zeros((rows, 1, 2, 2), np.uint8), labels, groups)
    return Dataset("toy", "image", train, train, tuple(classes))


@pytest.fixture
def toy_data(monkeypatch):
    """Let the command load the dataset a test hands it, and remember what it asked for."""
    asked = {}

    def use(dataset):
        def load_toy(name, *, data_dir=None):
            asked.update(name=name, data_dir=data_dir)
            return dataset

        monkeypatch.setattr(command, "load", load_toy)
        return asked

    return use


def test_digits_end_to_end(tmp_path):
    result = run("digits", "dirichlet(alpha=0.1)", "--clients", 50, "--seed", 3, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    dataset = load("digits")
    pool = Pool(dataset.train.labels, 10)
    split = dirichlet(pool, 50, root(3).fold("partition").numpy(), alpha=0.1)
    table = pd.read_csv(tmp_path / "partition.csv")
    assert list(table.columns) == ["client", "rows", *dataset.classes]
    assert table["client"].tolist() == list(range(50))
    assert table["rows"].tolist() == split.sizes().tolist()
    assert table.iloc[:, 2:].to_numpy().tolist() == split.counts(pool.labels, 10).tolist()
    assert "digits, dirichlet(alpha=0.1), 50 clients, seed 3" in result.output
    assert f"{pool.rows:,} of {pool.rows:,} rows held" in result.output.splitlines()
    marks = [f"{mark:.0f}" for mark in np.quantile(split.sizes(), [0, 0.1, 0.5, 0.9, 1])]
    mean = f"{split.sizes().mean():.2f}"
    assert ["rows", *marks, mean] in [line.split() for line in result.output.splitlines()]
    with Image.open(tmp_path / "partition.png") as picture:
        assert picture.format == "PNG" and min(picture.size) > 600


def test_the_split_is_the_one_a_run_uses(tmp_path):
    from fedbasin.experiment import DataConfig, Experiment, PartitionConfig
    from fedbasin.experiment.rows import cut_rows

    run("digits", "client_dirichlet(0.2)", "--clients", 9, "--imbalance", 0.1, "--out", tmp_path)
    shown = pd.read_csv(tmp_path / "partition.csv").iloc[:, 2:].to_numpy()
    experiment = Experiment(
        data=DataConfig(name="digits", imbalance=0.1),
        partition=PartitionConfig(how="client_dirichlet(0.2)", clients=9, seed=0),
    )
    rows = cut_rows(experiment, load("digits"))
    assert shown.tolist() == rows.parts.counts(rows.splits.train.labels, 10).tolist()


def test_a_few_clients_are_listed_one_by_one(toy_data, tmp_path):
    asked = toy_data(toy(["ankle boot", "bag", "coat"], 240))
    result = run(
        "toy", "shards(1)", "--clients", 3, "--data-dir", tmp_path, "--out", tmp_path / "o"
    )
    assert asked == {"name": "toy", "data_dir": tmp_path}
    lines = [line.split() for line in result.output.splitlines()]
    assert ["client", "rows", "ankle", "boot", "bag", "coat"] in lines
    listed = sorted(line[1:] for line in lines if len(line) == 5 and line[0] in "012")
    assert listed == [["80", "80", "·", "·"], ["80", "·", "80", "·"], ["80", "·", "·", "80"]]


def test_class_names_give_way_and_counts_do_not(toy_data, tmp_path):
    toy_data(toy([f"[b]class number {i}" for i in range(12)], 120_000))
    result = run("toy", "iid", "--clients", 1, "--out", tmp_path, width=110)
    assert "…" not in result.output
    assert result.output.count(" 10000") == 12 and result.output.count("[b]cl ") == 12
    narrow = run("toy", "iid", "--clients", 1, "--out", tmp_path, width=90)
    assert "holds most of" in narrow.output and "[b]class number 0 10000," in narrow.output


def test_many_classes_are_listed_by_the_largest(toy_data, tmp_path):
    toy_data(toy([f"c{i}" for i in range(30)]))
    result = run("toy", "quantity_skew(labels=5)", "--clients", 6, "--out", tmp_path)
    table = pd.read_csv(tmp_path / "partition.csv")
    line = next(line.split() for line in result.output.splitlines() if line.split()[:1] == ["0"])
    assert line[1:3] == [str(table["rows"][0]), "5"]
    largest = table.iloc[0, 2:].sort_values(ascending=False, kind="stable")
    assert line[3:5] == [largest.index[0], f"{largest.iloc[0]},"]
    assert len(line) == 3 + 2 * 4


def test_many_clients_are_summarised(toy_data, tmp_path):
    toy_data(toy(["a", "b", "c"], 300))
    result = run("toy", "client_dirichlet(alpha=0)", "--clients", 30, "--out", tmp_path)
    lines = [line.split() for line in result.output.splitlines()]
    assert ["rows", "10", "10", "10", "10", "10", "10.00"] in lines
    assert ["classes", "held", "1", "1", "1", "1", "1", "1.00"] in lines
    assert ["effective", "classes", *["1.00"] * 6] in lines
    assert ["distance", "from", "global", *["0.667"] * 5, "0.67"] in lines


def test_what_is_thinned_dropped_and_empty_is_said(toy_data, tmp_path):
    toy_data(toy(["a", "b", "c"], 300))
    thinned = run("toy", "shards(1)", "--clients", 20, "--imbalance", 0.1, "--out", tmp_path)
    assert "imbalance 0.1" in thinned.output
    assert "140 of 300 rows held, 159 thinned out, 1 dropped by the split" in thinned.output
    empty = run("toy", "iid", "--clients", 1000, "--out", tmp_path)
    assert "300 of 300 rows held, 700 clients without rows" in empty.output
    assert "nan" not in empty.output
    refilled = "client_dirichlet(alpha=0.1, refill=True)"
    again = run("toy", refilled, "--clients", 20, "--imbalance", 0.1, "--out", tmp_path)
    found = re.search(r"(\d+) of 300 rows held, (\d+) held again", again.output)
    assert sum(map(int, found.groups())) == 140 and int(found[1]) < 140


def test_groups_reach_the_partition(toy_data, tmp_path):
    toy_data(toy(["a", "b"], 60, groups=np.repeat(np.arange(4), [10, 20, 25, 5])))
    run("toy", "natural", "--clients", 4, "--out", tmp_path)
    assert pd.read_csv(tmp_path / "partition.csv")["rows"].tolist() == [10, 20, 25, 5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dirichle(alpha=0.1)"], "no partition is called 'dirichle'; did you mean dirichlet"),
        (["fedavg"], "fedavg"),
        (["dirichlet(alpha=-1)"], "alpha is -1.0: give a finite number above 0"),
        (["iid", "--clients", "0"], "clients is 0: give a whole number, at least 1"),
        (["iid", "--imbalance", "50"], "a factor of 50 is written 0.02"),
        (["natural"], "groups is None: natural needs"),
    ],
)
def test_mistakes_are_one_sentence_and_leave_nothing_behind(toy_data, tmp_path, arguments, message):
    toy_data(toy(["a", "b"]))
    result = run("toy", *arguments, "--out", tmp_path / "out")
    assert isinstance(result.exception, ValueError)  # the command line prints it as one line
    assert message in str(result.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("clients", [4, 30])
def test_without_classes_sizes_are_shown(tmp_path, clients):
    how = "quantiles(dirichlet(alpha=0.2, minimum=1))"
    result = run("diabetes", how, "--clients", clients, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    table = pd.read_csv(tmp_path / "partition.csv")
    assert list(table.columns) == ["client", "rows"]
    assert table["rows"].sum() == 354 and len(table) == clients
    assert "354 of 354 rows held" in result.output and "effective" not in result.output
    lines = [line.split() for line in result.output.splitlines()]
    target = load("diabetes").train.labels
    rng = root(0).fold("partition").numpy()
    split = parse(how)(Pool(target), clients, rng)
    means = [target[mine].astype(float).mean() for mine in split.clients]
    if clients == 4:
        assert ["3", str(table["rows"][3]), f"{means[3]:.4g}"] in lines
    else:
        marks = [f"{mark:.4g}" for mark in np.quantile(means, [0, 0.1, 0.5, 0.9, 1])]
        assert ["mean", "target", *marks, f"{np.mean(means):.2f}"] in lines
        assert any(line[:1] == ["rows"] and line[1] == str(table["rows"].min()) for line in lines)
    assert has_colour(tmp_path / "partition.png", "#332288")


@pytest.mark.parametrize("clients", [3, 25])
def test_every_target_has_a_mean_and_clients_without_rows_none(toy_data, tmp_path, clients):
    targets = np.arange(4, dtype=np.float32).reshape(2, 2)
    rows = Rows(np.zeros((2, 1), np.float32), targets)
    toy_data(Dataset("toy", "table", rows, rows, ()))
    result = run("toy", "iid", "--clients", clients, "--out", tmp_path)
    lines = [line.split() for line in result.output.splitlines()]
    if clients == 3:
        assert ["client", "rows", "mean", "of", "0", "mean", "of", "1"] in lines
        assert ["2", "0", "·", "·"] in lines
        shown = sorted(line[2:] for line in lines if line[:2] in (["0", "1"], ["1", "1"]))
        assert shown == [["0", "1"], ["2", "3"]]
    else:
        assert ["mean", "of", "1", "1", "1.2", "2", "2.8", "3", "2.00"] in lines
    assert "nan" not in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dirichlet(alpha=0.1)"], "dirichlet needs classes, and the targets have none: write"),
        (["iid", "--imbalance", "0.5"], "the targets of diabetes have no classes: leave it out"),
    ],
)
def test_what_needs_classes_says_so(tmp_path, arguments, message):
    result = run("diabetes", *arguments, "--out", tmp_path / "out")
    assert message in str(result.exception) and not (tmp_path / "out").exists()


def pixels(path):
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB")).reshape(-1, 3)


def has_colour(path, code):
    wanted = [int(code[i : i + 2], 16) for i in (1, 3, 5)]
    return bool((pixels(path) == wanted).all(axis=1).any())


def test_figure_shows_the_classes_that_are_held(tmp_path):
    counts = np.array([[5, 0, 0], [0, 0, 7]])
    path = partition_figure(counts, ["a", "b", "c"], tmp_path / "deep" / "x.png")
    assert path == tmp_path / "deep" / "x.png"
    held = [int((pixels(path) == rgb).all(axis=1).sum()) for rgb in ((51, 34, 136), (68, 170, 153))]
    absent = int((pixels(path) == (136, 204, 238)).all(axis=1).sum())
    assert min(held) > 20 * absent > 0  # class b is in the legend alone


@pytest.mark.parametrize(
    ("clients", "classes"), [(1, 1), (10, 10), (60, 11), (61, 10), (61, 1), (500, 100), (2000, 10)]
)
def test_figure_of_any_size_is_drawn(tmp_path, clients, classes):
    counts = np.random.default_rng(0).integers(0, 3, (clients, classes))
    counts[clients // 2] = 0
    path = partition_figure(counts, [f"c{i}" for i in range(classes)], tmp_path / "x.png", "t")
    with Image.open(path) as picture:
        assert picture.size[1] == 900 and 1000 <= picture.size[0] <= 2000
    colours = np.unique(pixels(path).astype(np.int64) @ [1 << 16, 1 << 8, 1])
    assert len(colours) > classes


@pytest.mark.parametrize("clients", [1, 40, 700])
def test_figure_without_classes_is_one_bar_a_client(tmp_path, clients):
    counts = np.arange(clients)[:, None]
    path = partition_figure(counts, (), tmp_path / "x.png")
    assert has_colour(path, "#332288") == (clients > 1)
    assert not has_colour(path, "#88CCEE")


def test_figure_orders_many_clients_by_class_with_empty_ones_last():
    from fedbasin.report.partition_figure import order_of_clients

    counts = np.zeros((63, 3), np.int64)
    counts[np.arange(62), np.arange(62) % 3] = 5
    counts[3] = [6, 2, 0]
    counts[62] = 0
    order = order_of_clients(counts)
    assert order[-1] == 62 and sorted(order.tolist()) == list(range(63))
    assert (np.diff(counts[order[:-1]].argmax(axis=1)) >= 0).all()
    assert order[20] == 3  # the least pure of its block comes last in it
    assert len(order_of_clients(np.ones((1200, 2), np.int64))) == 500
    assert order_of_clients(counts[:60]).tolist() == list(range(60))


def test_long_tail_and_split_use_their_own_streams(toy_data, tmp_path):
    writers = np.random.default_rng(0).integers(0, 9, 300)
    dataset = toy(["a", "b", "c"], 300, writers)
    toy_data(dataset)
    run("toy", "natural", "--clients", 4, "--imbalance", 0.2, "--out", tmp_path)
    kept = longtail(dataset.train.labels, 3, 0.2, root(0).fold("longtail").numpy())
    pool = Pool(dataset.train.labels[kept], 3, writers[kept])
    split = natural(pool, 4, root(0).fold("partition").numpy())
    shown = pd.read_csv(tmp_path / "partition.csv").iloc[:, 2:].to_numpy()
    assert shown.tolist() == split.counts(pool.labels, 3).tolist()
