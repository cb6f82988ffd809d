"""Runs beside one another: two processes at one folder, and processes that are killed."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from types import SimpleNamespace

import pytest

from fedbasin.core.lock import Busy, alone_in
from fedbasin.core.record import RecordError, RunFolder
from fedbasin.experiment import Experiment, child_process, compare, pool, resume, run, runs
from fedbasin.experiment.child_process import _OnceFilter, warn_once
from fedbasin.experiment.comparison import Cell, cells, run_cells
from fedbasin.experiment.config import PartitionConfig, SimConfig
from fedbasin.experiment.pool import _WorkerProcess, outcomes
from fedbasin.sim.runner import Interrupted

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
        with pytest.raises(Busy, match=rf"another process \(id \d+\) is running {tmp_path / 'r'}"):
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
    with (
        alone_in(taken),
        pytest.raises(Busy, match=rf"another process \(id \d+\) is running {taken}"),
    ):
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


@pytest.fixture
def workers(monkeypatch):
    """Workers that run in this process and count how often each was shut down."""
    made = []

    class Worker:
        def __init__(self, folder, needs_main):
            self.gone = 0
            self.pool = SimpleNamespace(shutdown=self.shutdown)
            made.append(self)

        def shutdown(self, *, cancel_futures):
            self.gone += cancel_futures

        def submit(self, work, cell):
            future = Future()
            try:
                future.set_result(work(cell))
            except BaseException as error:
                future.set_exception(error)
            return future

    monkeypatch.setattr(pool, "_WorkerProcess", Worker)
    return made


@pytest.mark.parametrize("jobs", [1, 2, 3])
def test_cells_that_come_later_are_run_and_one_that_fails_stops_no_other(jobs, workers, tmp_path):
    def work(cell):
        if cell.path.name == "b":
            raise ValueError("no luck")
        return {"name": cell.path.name}

    waiting, ends = {"a": "d", "d": "ef"}, {}

    def more():
        names = "".join(waiting.pop(name) for name in ends if name in waiting)
        return [Cell(SMALL, tmp_path / name) for name in names]

    layout = [Cell(SMALL, tmp_path / name) for name in "abc"]
    for cell, end in outcomes(work, layout, jobs, more, tmp_path):
        assert cell.path.name not in ends
        ends[cell.path.name] = end
    assert str(ends.pop("b")) == "no luck"
    assert ends == {name: {"name": name} for name in "acdef"}
    assert [worker.gone for worker in workers] == ([1] * jobs if jobs > 1 else [])


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("stop", [Interrupted, KeyboardInterrupt])
def test_a_stop_begins_no_further_cell_and_shuts_down_every_worker(stop, jobs, workers, tmp_path):
    begun = []

    def work(cell):
        begun.append(cell.path.name)
        raise stop

    layout = [Cell(SMALL, tmp_path / name) for name in "abcd"]
    with pytest.raises(stop):
        list(outcomes(work, layout, jobs, list, tmp_path))
    assert begun == list("abcd")[:jobs]
    assert [worker.gone for worker in workers] == ([1] * jobs if jobs > 1 else [])


def test_a_text_passes_once_among_processes_and_always_where_they_share_no_folder(tmp_path):
    text, other = (logging.makeLogRecord({"msg": "%s", "args": (word,)}) for word in "ab")
    here = _OnceFilter(tmp_path)
    there = _OnceFilter(tmp_path)
    assert [here.filter(text), there.filter(text), there.filter(other)] == [True, False, True]
    gone = _OnceFilter(tmp_path / "gone")
    assert gone.filter(text) and gone.filter(text)


def test_a_text_is_held_back_in_its_own_comparison_alone():
    logger = logging.getLogger("fedbasin.experiment")
    before = list(logger.filters)
    text = logging.makeLogRecord({"msg": "a"})
    for _ in range(2):
        with warn_once() as folder:
            assert [bool(logger.filter(text)) for _ in range(2)] == [True, False]
            assert len(list(folder.iterdir())) == 1
        assert logger.filters == before and not folder.exists()


def test_a_process_whose_maker_went_during_a_run_goes_after_it(monkeypatch):
    left = []
    monkeypatch.setattr(child_process.os, "_exit", left.append)
    with child_process.run_in_progress():
        pass
    assert left == []  # nobody made this one
    monkeypatch.setattr(child_process, "_parent_exited", lambda timeout: timeout == 0)
    with child_process.run_in_progress():
        assert child_process._run_in_progress.is_set() and left == []
    assert left == [130] and not child_process._run_in_progress.is_set()


def test_cells_are_told_of_one_by_one(tmp_path):
    told = []
    layout = cells(SMALL, ["fedavg", "fedprox"], [0], tmp_path)
    run_cells(layout, jobs=2, on_cell=lambda cell, end: told.append((cell.path, end["status"])))
    assert sorted(told) == sorted((cell.path, "finished") for cell in layout)


def _never(cells):
    raise AssertionError("a process that was stopped while it started takes up no work")


def test_a_process_stopped_while_it_starts_goes_without_a_traceback(tmp_path, capfd):
    worker = _WorkerProcess(tmp_path, True)
    future = worker.submit(_never, [Cell(SMALL, tmp_path)])
    (process,) = worker.pool._processes.values()
    os.kill(process.pid, signal.SIGINT)
    assert isinstance(future.exception(), BrokenProcessPool)
    worker.pool.shutdown()
    assert process.exitcode == 130 and not capfd.readouterr().err
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_processes_of_a_command_that_is_ended_leave_no_warning_of_semaphores(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; "
        "from fedbasin.experiment.pool import _WorkerProcess; "
        "worker = _WorkerProcess(Path(sys.argv[1]), False); print('ready', flush=True); "
        "time.sleep(99)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.readline()
    process.terminate()
    _, said = process.communicate()  # until the tracker of semaphores has ended, too
    assert said == b""
