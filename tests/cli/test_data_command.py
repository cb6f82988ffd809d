import numpy as np
import pytest
from data.making import usps
from typer.testing import CliRunner

from fedbasin.cli import data as command
from fedbasin.data import hub, load


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A mirror and a cache, and a terminal wide enough for every column."""
    monkeypatch.delenv("FEDBASIN_DATA", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("FEDBASIN_CACHE", str(tmp_path / "cache"))
    usps(tmp_path / "mirror", np.random.default_rng(0), train=300)
    return tmp_path


@pytest.fixture
def run(place):
    def call(*words, mirror=True):
        options = ["--data-dir", str(place / "mirror")] if mirror else []
        return CliRunner().invoke(command.app, [*words, *options])

    return call


def line(result, name):
    return next(row for row in result.stdout.splitlines() if row.strip().startswith(name)).split()


def test_list_shows_every_dataset_and_what_is_at_hand(run):
    result = run("list")
    assert result.exit_code == 0
    assert " ".join(line(result, "usps")) == "usps 7,291/2,007 10 1x16x16 - Digit-Five in folder"
    assert " ".join(line(result, "femnist")).endswith("1x28x28 writer WIMA no")
    assert "814,277 + held out" in result.stdout
    run("fetch", "usps")
    assert " ".join(line(run("list"), "usps")) == "usps 300/10 10 1x6x5 - Digit-Five decoded"
    assert line(run("list", mirror=False), "usps")[-2:] == ["on", "hub"]


def test_list_keeps_names_whole_on_a_narrow_terminal(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = run("list").stdout
    assert "synthetic-digits" in shown and "203,549/48,040" in shown and "Digit-Five" in shown
    assert "…" not in shown


def test_fetch_decodes_once_and_says_where(run, place):
    first, second = run("fetch", "usps"), run("fetch", "usps")
    (entry,) = (place / "cache").iterdir()
    assert first.exit_code == second.exit_code == 0
    assert first.stdout == f"usps: 300 train and 10 test rows, decoded into {entry}\n"
    assert second.stdout == f"usps: 300 train and 10 test rows, already in {entry}\n"


def test_the_cache_option_is_heeded(run, place):
    assert (
        str(place / "elsewhere") in run("fetch", "usps", "--cache-dir", place / "elsewhere").stdout
    )
    assert (place / "elsewhere").is_dir() and not (place / "cache").exists()


def test_info_shows_source_sizes_and_class_counts(run, place):
    result = run("info", "usps")
    assert result.exit_code == 0
    (entry,) = (place / "cache").iterdir()
    for fact in (
        "300 train, 10 test",
        "image, 1x6x5",
        str(entry),
        "flwrlabs/usps/data/train-00000-of-00001.parquet, sha256 ",
        "(0.0,), (1.0,)",
    ):
        assert fact in result.stdout
    rows = [row.split() for row in result.stdout.splitlines() if row.count("│") == 5]
    assert [[cell for cell in row if cell != "│"] for row in rows] == [
        [str(c), str(c), "30", "1"] for c in range(10)
    ]


def test_digits_need_no_fetching(run):
    assert "nothing to fetch" in run("fetch", "digits", mirror=False).stdout
    assert "1,442 train, 355 test" in run("info", "digits", mirror=False).stdout


def test_targets_without_classes_are_shown_by_their_range(run):
    listed = line(run("list"), "diabetes")
    assert listed[:4] == ["diabetes", "354/88", "-", "10"]
    shown = run("info", "diabetes", mirror=False).stdout
    assert "354 train, 88 test" in shown and "none" in line(run("info", "diabetes"), "classes")
    target = load("diabetes").test.labels
    numbers = [f"{n:.4g}" for n in (target.min(), target.mean(), target.max(), target.std())]
    rows = [[cell for cell in row.split() if cell != "│"] for row in shown.splitlines()]
    assert ["0", "test", *numbers] in rows


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("fetch", "cifar"), "unknown dataset 'cifar': did you mean cifar10 or cifar100"),
        (("info", "femnist"), "femnist is not in the data folder"),
        (("fetch", "hf:[bold]"), "'hf:[bold]' is not of the form hf:OWNER/NAME[/CONFIG]"),
    ],
)
def test_a_mistake_is_one_red_line_and_status_one(run, words, message, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")  # long lines must not be broken
    monkeypatch.setenv("FORCE_COLOR", "1")
    result = run(*words)
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("\x1b[31merror:\x1b[0m ") and message in result.stderr
    assert isinstance(result.exception, SystemExit)


def test_a_wrong_folder_is_told_by_list_too(place):
    result = CliRunner().invoke(command.app, ["list", "--data-dir", str(place / "nowhere")])
    assert result.exit_code == 1 and "nowhere does not exist" in result.stderr


def test_info_does_not_download(run, monkeypatch):
    monkeypatch.setattr(hub, "_api", lambda: pytest.fail("asked the hub"))
    for name in ("usps", "hf:me/birds"):
        result = run("info", name, mirror=False)
        assert result.exit_code == 1
        assert f"run: fedbasin data fetch {name}" in result.stderr


@pytest.mark.parametrize("words", [(), ("list",), ("info",), ("fetch",)])
def test_help_teaches(words):
    result = CliRunner().invoke(command.app, [*words, "--help"])
    assert result.exit_code == 0
    assert ("FEDBASIN_DATA" in result.stdout) and ("hub" in result.stdout)


def test_progress_is_reported_on_the_side(run, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "decoding usps" in run("fetch", "usps").stderr
    assert "decoding" not in run("fetch", "usps").stderr
