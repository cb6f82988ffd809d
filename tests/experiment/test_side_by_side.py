"""Runs beside one another: two processes at one folder, and processes that are killed."""

from __future__ import annotations

import os
import signal
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

import pytest

from fedbasin import Experiment, compare, resume, run
from fedbasin.core.lock import Busy, alone_in
from fedbasin.core.record import RecordError, RunFolder
from fedbasin.experiment import runs
from fedbasin.experiment.config import PartitionConfig, SimConfig
from fedbasin.experiment.pool import _Seat, outcomes
from fedbasin.experiment.runs import Cell, cells, run_cells

SMALL = Experiment(
    model="mlp(widths=(8,))",
    rounds=2,
    partition=PartitionConfig(how="iid", clients=6),
    sim=SimConfig(participation="fraction(rate=0.5)", device="cpu"),
)


class Crash(BaseException):
    pass


def test_a_folder_that_another_process_runs_is_refused_and_can_be_read(tmp_path):
    def second(record):
        with pytest.raises(Busy, match=f"another process is running {tmp_path / 'r'}"):
            resume(tmp_path / "r")
        assert len(RunFolder(tmp_path / "r").read_rounds()) == record.round
        if record.round == 2:
            raise Crash

    with pytest.raises(Crash):
        run(SMALL, tmp_path / "r", on_round=second)
    assert resume(tmp_path / "r")["status"] == "finished"
    assert [r.round for r in RunFolder(tmp_path / "r").read_rounds()] == [1, 2]


def test_a_run_begun_while_the_data_was_read_is_refused(tmp_path, monkeypatch):
    built = runs.build

    def slow(*arguments, **options):
        monkeypatch.setattr(runs, "build", built)
        run(SMALL, tmp_path / "r")
        return built(*arguments, **options)

    monkeypatch.setattr(runs, "build", slow)
    with pytest.raises(RecordError, match="holds a run already"):
        run(replace(SMALL, seed=1), tmp_path / "r")
    assert RunFolder(tmp_path / "r").read_summary()["seed"] == 0


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_comparison_does_the_other_cells_and_says_which_is_not_its_own(jobs, tmp_path):
    taken, other = (cell.path for cell in cells(SMALL, ["fedavg"], [0, 1], tmp_path))
    taken.mkdir(parents=True)
    with alone_in(taken), pytest.raises(Busy, match=f"another process is running {taken}"):
        compare(SMALL, ["fedavg"], [0, 1], tmp_path, jobs=jobs)
    assert RunFolder(other).read_summary()["status"] == "finished"


def _fatal(cell):
    """Kill the process at some cells: always, or the first time."""
    cell.path.mkdir(exist_ok=True)
    marks = len(list(cell.path.iterdir()))
    (cell.path / str(marks)).touch()
    if cell.path.name == "always" or (cell.path.name == "once" and not marks):
        os.kill(os.getpid(), signal.SIGKILL)
    return {"tries": marks + 1}


def test_a_killed_process_is_replaced_and_its_cell_begun_again_once(tmp_path):
    names = ["once", "always", "a", "b", "c"]
    layout = [Cell(SMALL, tmp_path / name) for name in names]
    found = {cell.path.name: end for cell, end in outcomes(_fatal, layout, 2, list, tmp_path)}
    failed = found.pop("always")
    assert isinstance(failed, RuntimeError) and "killed twice" in str(failed)
    assert str(tmp_path / "always") in str(failed)
    tries = {"once": 2, "a": 1, "b": 1, "c": 1}
    assert found == {name: {"tries": count} for name, count in tries.items()}


def test_cells_are_told_of_one_by_one(tmp_path):
    told = []
    layout = cells(SMALL, ["fedavg", "fedprox"], [0], tmp_path)
    run_cells(layout, jobs=2, on_cell=lambda cell, end: told.append((cell.path, end["status"])))
    assert sorted(told) == sorted((cell.path, "finished") for cell in layout)


def _never(cell):
    raise AssertionError("a process that was stopped while it started takes up no work")


def test_a_process_stopped_while_it_starts_goes_without_a_traceback(tmp_path, capfd):
    seat = _Seat(tmp_path)
    future = seat.submit(_never, Cell(SMALL, tmp_path))
    (process,) = seat.pool._processes.values()
    os.kill(process.pid, signal.SIGINT)
    assert isinstance(future.exception(), BrokenProcessPool)
    seat.pool.shutdown()
    assert process.exitcode == 130 and not capfd.readouterr().err
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
