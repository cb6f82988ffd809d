"""The papers' queue: what is stored is not run, the cheapest comes first, a cut run resumes."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedbasin.core.record import RunFolder
from fedbasin.experiment import run
from fedbasin.experiment.comparison import Cell, run_cell
from fedbasin.papers import PaperError
from fedbasin.papers.grid import runs_of
from fedbasin.papers.results import append, read, result_of
from fedbasin.papers.tables import read_table

FOLDER = Path(__file__).parents[2] / "benchmarks" / "evidence"


def loaded(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


queue = loaded("papers_queue")
carry_data = loaded("carry_data")

TOML = """
title = "a table"
seeds = [0]
[score]
last = 2
[setup]
rounds = 6
model = "mlp(widths=(8,))"
[setup.data]
name = "digits"
[setup.partition]
how = "iid"
clients = 6
[setup.sim]
participation = "fraction(rate=0.5)"
[[rows]]
name = "scaffold"
method = "scaffold"
[[rows]]
name = "alike"
method = "scaffold"
[[rows]]
name = "prox"
method = "fedprox"
[[rows]]
name = "unknown"
method = "fedzzz"
[[columns]]
name = "digits"
"""
TABLE = read_table(TOML, "x/table1")


def entry(rows, *, minutes=1.0, seeds=(0,), lane="cpu"):
    return queue.Entry("x/table1", lane, minutes, "a test", seeds, rows)


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setattr(queue, "load_table", lambda name: TABLE)


@pytest.fixture
def lines(tmp_path):
    folder = tmp_path / "lines"
    folder.mkdir()
    return folder


@pytest.fixture
def fedbasin(monkeypatch, tmp_path):
    """The command line, in processes of its own, with the toy table."""
    path = tmp_path / "launcher.py"
    path.write_text(
        "import fedbasin.papers\n"
        "from fedbasin.cli import app\n"
        "from fedbasin.papers.tables import read_table\n"
        f"fedbasin.papers.load_table = lambda name: read_table({TOML!r}, name)\n"
        "if __name__ == '__main__':\n    app()\n"
    )
    monkeypatch.setattr(queue, "FEDBASIN", (sys.executable, str(path)))


OBEDIENT = """
import os, signal, sys, time
from pathlib import Path
from types import SimpleNamespace

def say(what):
    with Path(__file__).with_name("told").open("a") as file:
        file.write(f"{rows} {what}\\n")

def stop(*_):
    say("stopped")
    sys.exit(1)

Path(__file__).with_name("nice").write_text(str(os.nice(0)))
rows = sys.argv[sys.argv.index("--rows") + 1]
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, lambda *_: say("interrupted"))
say(os.environ["OMP_NUM_THREADS"])
while rows == "prox":
    time.sleep(0.01)
"""


@pytest.fixture
def obedient(monkeypatch, tmp_path):
    """A command that writes down its row and its threads; for prox it waits until it is stopped."""
    path = tmp_path / "obedient.py"
    path.write_text(OBEDIENT)
    monkeypatch.setattr(queue, "FEDBASIN", (sys.executable, str(path)))
    return tmp_path / "told"


def stored_line(rows, lines, tmp_path, seed=0):
    run_of_it = entry(rows, seeds=(seed,)).runs()[0]
    folder = run_of_it.folder(tmp_path / "stored")
    if not folder.exists():
        run(run_of_it.experiment, folder)
    append(lines / "x.jsonl", result_of(run_of_it, folder))


def test_what_is_stored_is_not_run_again_and_the_cheapest_comes_first(lines, tmp_path):
    entries = [entry("scaffold,prox", minutes=9, seeds=(0, 1)), entry("prox", minutes=5)]
    left = queue.left_of(entries, lines)
    assert [(each.cells, each.minutes) for each in left] == [(4, 9), (1, 5)]  # a cell: 2.25, 5
    stored_line("prox", lines, tmp_path)
    left = queue.left_of(entries, lines)
    assert [(each.entry, each.cells, each.minutes) for each in left] == [(entries[0], 3, 6.75)]
    (both,) = queue.left_of([entry("scaffold,alike", minutes=4)], lines)
    assert (both.cells, both.runs, both.minutes) == (2, 1, 4)
    # Equal settings of another row are the same run.
    stored_line("scaffold", lines, tmp_path)
    assert queue.left_of([entry("alike"), entry("scaffold")], lines) == []
    assert len(queue.left_of([entry("alike,prox", seeds=(1,))], lines)) == 1


def test_an_entry_that_cannot_run_is_refused(lines):
    with pytest.raises(PaperError, match="x/table1: the queue names cells that cannot be run"):
        queue.left_of([entry("unknown")], lines)


def test_a_cut_run_that_travelled_resumes_to_the_same_bits(fedbasin, lines, tmp_path, monkeypatch):
    monkeypatch.setitem(queue.DEVICES, "gpu", "cpu")
    table_cells = [(TABLE.rows[0], TABLE.columns[0])]
    (wanted,), _ = runs_of(TABLE, table_cells, [0], device="cpu")
    whole = tmp_path / "whole"
    run(wanted.experiment, whole)
    away = wanted.folder(tmp_path / "away")
    run_cell(Cell(wanted.experiment, away, until=3))
    here = wanted.folder(tmp_path / "here")
    shutil.copytree(away, here)
    begun = RunFolder(here).read_rounds()
    assert len(begun) == 3

    left = queue.left_of([entry("scaffold", lane="gpu")], lines)
    queue.work(left, 5.0, 1, tmp_path / "here", lines)
    (line,) = read(lines / "x.jsonl")
    assert line.row == "scaffold" and line.status == "finished"
    assert RunFolder(here).model.read_bytes() == RunFolder(whole).model.read_bytes()
    assert RunFolder(here).read_rounds()[:3] == begun  # not run again
    assert queue.left_of([entry("scaffold", lane="gpu")], lines) == []


def test_entries_run_in_their_order_with_one_thread_each(obedient, lines, tmp_path):
    left = queue.left_of([entry("scaffold", minutes=2), entry("alike", minutes=1)], lines)
    queue.work(left, 5.0, 1, tmp_path, lines)
    assert obedient.read_text() == "alike 1\nscaffold 1\n"


def test_when_the_time_is_over_what_runs_is_stopped_and_nothing_more_begins(
    obedient, lines, tmp_path, monkeypatch
):
    left = queue.left_of([entry("prox", minutes=1), entry("scaffold", minutes=2)], lines)

    def over():  # as soon as the command has said that it waits
        return 100.0 if "prox 1" in _read(obedient) else 0.0

    clock = SimpleNamespace(monotonic=over, sleep=time.sleep, strftime=time.strftime)
    monkeypatch.setattr(queue, "time", clock)
    queue.work(left, 1.0, 1, tmp_path, lines)
    assert obedient.read_text() == "prox 1\nprox stopped\n"


def _read(path):
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_a_signal_stops_the_command_once(number, obedient, lines, tmp_path):
    listed = tmp_path / "queue.toml"
    listed.write_text(
        '[[entries]]\ntable = "x/table1"\nlane = "cpu"\nminutes = 1\nwhy = "a test"\nseeds = [0]\n'
        'rows = "prox"\n'
    )
    script = tmp_path / "start.py"
    script.write_text(
        "import signal, sys\n"
        # Where the tests were started in the background, their children ignore Ctrl-C.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"sys.path.insert(0, {str(FOLDER)!r})\n"
        "import papers_queue as queue\n"
        "from fedbasin.papers.tables import read_table\n"
        f"queue.load_table = lambda name: read_table({TOML!r}, name)\n"
        f"queue.FEDBASIN = {queue.FEDBASIN!r}\n"
        "queue.main()\n"
    )
    places = ["--queue", listed, "--lines", lines, "--out", tmp_path / "runs"]
    process = subprocess.Popen(
        [sys.executable, script, "--lane", "cpu", *places],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while "prox 1" not in _read(obedient):
        assert process.poll() is None
        time.sleep(0.01)
    assert (tmp_path / "nice").read_text() == "19"
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # a terminal sends Ctrl-C to all that runs in it
    else:
        process.send_signal(number)
    _, error = process.communicate()
    assert process.returncode == 1 and "resumes with the same command" in error
    assert obedient.read_text() == "prox 1\nprox stopped\n"


def test_lines_of_another_machine_are_added_once(lines, tmp_path):
    away = tmp_path / "away"
    away.mkdir()
    stored_line("prox", away, tmp_path)
    for _ in range(2):
        queue.take([away / "x.jsonl"], lines)
    assert (lines / "x.jsonl").read_bytes() == (away / "x.jsonl").read_bytes()


def test_the_list_names_cells_that_can_run_and_no_long_run_on_a_cpu(monkeypatch):
    monkeypatch.undo()
    entries = queue.read_entries(FOLDER / "papers_queue.toml")
    assert {each.lane for each in entries} == {"cpu", "gpu"}
    seen = {}
    for each in entries:
        assert each.why and each.seeds and each.minutes > 0
        assert each.lane == "gpu" or each.minutes <= 60, each
        for wanted in each.runs():
            key = (each.table, wanted.row.name, wanted.column.name, wanted.seed)
            assert key not in seen, f"{key}: both {seen[key]} and {each}"
            seen[key] = each


def test_a_wrong_entry_is_named(tmp_path):
    path = tmp_path / "list.toml"
    path.write_text('[[entries]]\ntable = "x/table1"\nlane = "tpu"\n')
    with pytest.raises(PaperError, match=r"list\.toml: entries\[0\]\.lane"):
        queue.read_entries(path)


def test_data_are_packed_into_pieces_that_give_them_back(tmp_path):
    folder = tmp_path / "data" / "owner" / "name"
    folder.mkdir(parents=True)
    (folder / "train.parquet").write_bytes(bytes(range(256)) * 100)
    whole = carry_data.packed(tmp_path / "data", ["owner/name"])
    pieces = carry_data.cut(whole, 9_000)
    assert b"".join(pieces) == whole and all(len(piece) <= 9_000 for piece in pieces)
    joined = tmp_path / "joined.tar"
    joined.write_bytes(b"".join(pieces))
    shutil.unpack_archive(joined, tmp_path / "back", filter="data")
    back = tmp_path / "back" / "owner" / "name" / "train.parquet"
    assert back.read_bytes() == bytes(range(256)) * 100
    with pytest.raises(SystemExit, match="owner/other is not a folder"):
        carry_data.packed(tmp_path / "data", ["owner/other"])
