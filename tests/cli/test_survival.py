"""Real processes, killed for real: nothing is lost, and resuming ends in the same bits."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROUNDS = 80  # enough that a signal never comes too late
ARGUMENTS = [
    "run", "--preset", "demo", "--method", "scaffold",
    "--set", f"rounds={ROUNDS}", "--set", "partition.clients=10", "--set", "sim.checkpoint_every=3",
    "--set", "model=mlp(widths=(32,))", "--set", "sim.dropout=0.3",
]  # fmt: skip
TIMED = ("seconds", "seconds_train", "seconds_merge", "seconds_evaluate")


def start(*arguments, **options):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "fedbasin", *arguments],
        **options,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def lines(folder):
    path = folder / "rounds.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def wait_for(process, folder, rounds):
    while process.poll() is None and lines(folder) < rounds:
        time.sleep(0.005)


def records(folder):
    found = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    return [{k: v for k, v in record.items() if k not in TIMED} for record in found]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    process = start(*ARGUMENTS, "--out", str(folder))
    output, _ = process.communicate()
    assert process.returncode == 0, output
    return folder


def test_kill_at_random_points_then_resume_is_as_if_never_killed(whole, tmp_path):
    folder = tmp_path / "run"
    dice = random.Random(0)
    process = start(*ARGUMENTS, "--out", str(folder))
    kills = 0
    for _ in range(3):
        wait_for(process, folder, min(lines(folder) + dice.randint(1, 15), ROUNDS - 1))
        time.sleep(dice.random() * 0.02)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        process.communicate()
        process = start("resume", str(folder))
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert kills >= 2
    assert (folder / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert records(folder) == records(whole)
    assert not list(folder.glob("*.part"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_a_stop_finishes_the_round_saves_and_says_how_to_resume(number, whole, tmp_path):
    folder = tmp_path / "run"
    process = start(*ARGUMENTS, "--out", str(folder))
    wait_for(process, folder, 5)
    process.send_signal(number)
    output, _ = process.communicate()
    assert process.returncode == 130 and f"fedbasin resume {folder}" in output.replace("\n", "")
    done = lines(folder)
    assert 5 <= done < ROUNDS
    assert json.loads((folder / "summary.json").read_text())["status"] == "stopped"
    process = start("resume", str(folder))
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert (folder / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert records(folder) == records(whole)


def children_of(process):
    found = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if not found.exists():
        process.kill()
        pytest.skip("this system does not list a process's children")
    return [int(child) for child in found.read_text().split()]


@pytest.mark.parametrize("who", ["all", "workers"])
def test_ctrl_c_begins_no_further_run_of_a_comparison(who, tmp_path):
    """The terminal signals all processes; one that is done must not take up the next run.

    Workers alone: as if they had stopped before the first process came to hear of it.
    """
    out, settings = tmp_path / "out", ["--rounds", "100000", *ARGUMENTS[7:]]
    settings += ["--set", "sim.together=1"]  # a process has one run at a time
    command = ["compare", "fedavg", "scaffold", "fedadam", "ima", "--jobs", "2", "--seeds", "0"]
    process = start(*command, *settings, "--out", str(out), start_new_session=True)
    begun = [out / "fedavg" / "seed0", out / "scaffold" / "seed0"]
    for folder in begun:
        wait_for(process, folder, 1)
    if who == "all":
        os.killpg(process.pid, signal.SIGINT)
    else:
        for child in children_of(process):
            os.kill(child, signal.SIGINT)
    output, _ = process.communicate()
    assert process.returncode == 130, output
    assert sorted(path.parent for path in out.glob("*/seed0/config.toml")) == begun
    assert all((folder / "checkpoint.safetensors").exists() for folder in begun)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_runs_stop_and_save_where_the_process_that_began_them_is_gone(number, tmp_path):
    """A scheduler's SIGTERM comes to all of them at once."""
    out, settings = tmp_path / "out", [*ARGUMENTS[7:]]
    runs = ["compare", "fedavg", "--jobs", "2", "--seeds", "0,1"]
    command = [*runs, "--rounds", "100000", *settings, "--out", str(out)]
    process = start(*command, start_new_session=True)
    folders = [out / "fedavg" / "seed0", out / "fedavg" / "seed1"]
    for folder in folders:
        wait_for(process, folder, 1)
    children = children_of(process)
    assert len(children) >= 2
    (os.killpg if number == signal.SIGTERM else os.kill)(process.pid, number)
    output, _ = process.communicate()  # until nobody holds it: the others are gone too
    assert process.returncode == -number
    assert (f"Resume with the same command and --out {out}" in output) == (number == signal.SIGTERM)
    for folder in folders:
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["status"] == "stopped"
        assert summary["rounds"] == lines(folder)
        assert (folder / "checkpoint.safetensors").exists()


IDLE = """
import os, time, torch
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from fedbasin.experiment.child_process import prepare_worker
spawn = get_context("spawn")
pool = ProcessPoolExecutor(1, spawn, initializer=prepare_worker, initargs=(Path("none"),))
print(*(pool.submit(ask).result() for ask in (os.getpid, torch.get_num_threads)), flush=True)
time.sleep(100)
"""


def test_a_process_that_waits_for_a_run_goes_with_the_one_that_made_it():
    process = subprocess.Popen(
        [sys.executable, "-c", IDLE],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        stdout=subprocess.PIPE,
        text=True,
    )
    made, threads = map(int, process.stdout.readline().split())
    assert made != process.pid and threads == 1
    process.kill()
    process.communicate()  # until nobody holds its output


def test_a_method_of_one_s_own_is_compared_and_resumed_by_its_module(tmp_path):
    example = Path(__file__).parents[2] / "examples" / "new_method.py"
    (tmp_path / "mine.py").write_text(example.read_text())
    python = [sys.executable, "-P", "-m", "fedbasin"]  # which looks for modules as a command does
    settings = ["--preset", "demo", "--seeds", "0", "--set", "rounds=2", "--jobs", "2"]
    command = ["compare", "fedavg", "mine.my_median", *settings, "--out", "c"]
    done = subprocess.run([*python, *command], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "mine.my_median" in done.stdout, done.stderr
    (folder,) = (tmp_path / "c").glob("mine.my_median*/seed0")
    model = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()  # not finished
    resume = [*python, "resume", folder, "--trust"]  # the folder names a module
    done = subprocess.run(resume, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and (folder / "model.safetensors").read_bytes() == model
