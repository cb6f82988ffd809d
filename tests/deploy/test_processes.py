"""Real processes, killed for real: SuperLink, ServerApp, SuperNodes, TLS and node keys.

Every message starts a process that imports torch, so these take minutes: `make test-federation`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("flwr", reason="needs the extra fedbasin[flower]")
if not os.environ.get("FEDBASIN_TEST_FEDERATION"):
    pytest.skip("takes minutes: make test-federation", allow_module_level=True)

from deploy.grids import LocalGrid
from flwr.app import ArrayRecord, ConfigRecord

from fedbasin.core.record import RunFolder
from fedbasin.data import from_table
from fedbasin.deploy import FedbasinStrategy
from fedbasin.deploy.certificates import make_node_key
from fedbasin.deploy.federation import LocalFederation

LEAN = Path(__file__).parent / "lean"
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(900)


def federation(folder, nodes, **settings):
    source = {"PYTHONPATH": str(ROOT / "src")}
    return LocalFederation(folder, nodes, environment=source, patience=200, **settings)


def wait(until, what, seconds=400.0):
    deadline = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.2)


def rounds(run):
    return [] if not run.rounds.exists() else run.read_rounds()


def finished(run, process, nodes):
    wait(lambda: process.poll() is not None, "the run ends")
    assert run.summary.exists(), nodes.log("run")
    return run.read_summary()


def in_process(nodes, count):
    """The same app on a grid inside this process."""
    sys.path.insert(0, str(LEAN))
    try:
        from lean.client_app import app, model
    finally:
        sys.path.remove(str(LEAN))
    app_with = LocalGrid(app, nodes)
    for context in app_with.contexts.values():
        context.run_config = {"method": "scaffold"}
    strategy = FedbasinStrategy("scaffold", fraction_evaluate=0.0)
    arrays = ArrayRecord(model().state_dict())
    lr = ConfigRecord({"lr": 0.1})
    return strategy.start(app_with, arrays, num_rounds=count, timeout=9, train_config=lr).arrays


def test_a_node_is_killed_and_comes_back_and_the_run_goes_on(tmp_path):
    """Round 1: all three. Then node 2 dies inside a round, and later comes back."""
    run = RunFolder(tmp_path / "run")
    settings = {"folder": str(run.path), "rounds": 5, "timeout": 45.0, "min-nodes": 2}
    with federation(tmp_path / "f", 3) as nodes:
        process = nodes.run(LEAN, settings | {"min-nodes": 3})
        wait(lambda: len(rounds(run)) >= 1, "round 1")
        nodes.kill("node2")
        wait(lambda: len(rounds(run)) >= 2, "round 2 goes on with the rest")
        nodes.start_node(2)
        summary = finished(run, process, nodes)
        log = nodes.log("run")
    found = rounds(run)
    assert [r.round for r in found] == [1, 2, 3, 4, 5] and summary["status"] == "finished"
    assert found[0].replies == 3
    assert (found[1].replies, found[1].dropped) == (2, 1)
    assert "no reply from client 2" in log
    assert found[-1].replies == 3, "the node that came back takes part again"
    assert not summary["refused"]


def test_a_round_waits_for_its_minimum(tmp_path):
    """Both clients are needed; one dies inside the round and comes back."""
    run = RunFolder(tmp_path / "run")
    settings = {"folder": str(run.path), "rounds": 2, "timeout": 30.0, "min-replies": 2}
    with federation(tmp_path / "f", 2) as nodes:
        process = nodes.run(LEAN, settings)
        wait(lambda: len(rounds(run)) >= 1, "round 1")
        nodes.kill("node1")
        wait(lambda: "waiting for 1 more (minimum: 2)" in nodes.log("run"), "the log says why")
        assert len(rounds(run)) == 1
        nodes.start_node(1)
        finished(run, process, nodes)
    assert [r.replies for r in rounds(run)] == [2, 2]


def test_the_superlink_is_killed_and_the_run_ends_as_if_it_never_had_been(tmp_path):
    """SCAFFOLD's clients have a state; the round in flight is lost, and made again."""
    run = RunFolder(tmp_path / "run")
    settings = {"folder": str(run.path), "rounds": 3, "timeout": 200.0}
    with federation(tmp_path / "f", 2) as nodes:
        nodes.run(LEAN, settings)
        wait(lambda: len(rounds(run)) >= 1, "round 1")
        states = nodes.folder / "states"
        before = {f: f.read_bytes() for f in states.rglob("*.safetensors")}
        wait(
            lambda: any(f.read_bytes() != old for f, old in before.items()),
            "a client has trained in round 2",
        )
        nodes.kill("superlink")
        nodes.kill("run")
        assert len(rounds(run)) == 1
        nodes.start_link()
        process = nodes.run(LEAN, settings)
        summary = finished(run, process, nodes)
        assert "Resuming after round 1" in nodes.log("run")
    assert [r.round for r in rounds(run)] == [1, 2, 3] and summary["status"] == "finished"
    expected = in_process(2, 3).to_torch_state_dict()
    for name, tensor in load_file(run.model).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-7)


def test_with_tls_strangers_and_plain_text_are_refused(tmp_path):
    run = RunFolder(tmp_path / "run")
    settings = {"folder": str(run.path), "rounds": 1, "timeout": 200.0}
    with federation(tmp_path / "f", 2, tls=True) as nodes:
        make_node_key(tmp_path / "stranger")
        nodes.start_node(7, key=tmp_path / "stranger")
        nodes.start_node(8, secure=False)
        wait(lambda: nodes._processes["node7"].poll() is not None, "the stranger gives up")
        assert nodes._processes["node7"].returncode != 0
        process = nodes.run(LEAN, settings)
        finished(run, process, nodes)
        link = nodes.log("superlink")
        assert "SuperNode ID" not in nodes.log("node7") + nodes.log("node8")
        assert link.count("[Fleet.ActivateNode]") == 2
    assert rounds(run)[0].replies == 2
    mode = (nodes.folder / "keys" / "node0").stat().st_mode
    assert mode & 0o077 == 0


def test_nothing_is_left_behind(tmp_path):
    with federation(tmp_path / "f", 1) as nodes:
        assert nodes._marked()
        mark = nodes._mark
    assert not nodes._marked() and mark == nodes._mark


def ours(folder):
    """The processes of a federation, by another way than the code's."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"FLWR_HOME={folder}".encode() in (place / "environ").read_bytes():
                found.append(place.name)
    return found


def up(folder, **pipes):
    command = [sys.executable, "-m", "fedbasin", "flower", "up", "--nodes", "2", "--out"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    return subprocess.Popen([*command, str(folder)], env=environment, **pipes)


def test_a_scheduler_that_ends_the_command_ends_its_processes(tmp_path):
    process = up(tmp_path)
    wait(lambda: len(ours(tmp_path)) >= 3, "a SuperLink and two SuperNodes run")
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM
    assert not ours(tmp_path)


def test_a_killed_command_leaves_processes_that_the_next_names_and_down_ends(tmp_path):
    process = up(tmp_path)
    wait(lambda: len(ours(tmp_path)) >= 3, "a SuperLink and two SuperNodes run")
    process.kill()
    process.wait()
    left = ours(tmp_path)
    assert len(left) >= 3
    again = up(tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    _, said = again.communicate(timeout=200)
    assert again.returncode == 1
    assert all(pid in said.decode() for pid in left), said.decode()
    assert f"fedbasin flower down {tmp_path}" in said.decode()
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "fedbasin", "flower", "down", str(tmp_path)]
    subprocess.run(command, env=environment, check=True, timeout=200)
    assert not ours(tmp_path)


def test_a_node_with_a_key_that_is_killed_comes_back_within_the_minute(tmp_path):
    with federation(tmp_path / "f", 1, tls=True) as nodes:
        wait(lambda: "SuperNode ID" in nodes.log("node0"), "the node is let in")
        nodes.kill("node0")
        nodes.start_node(0)
        log = nodes.log("node0")
        assert "[code: 2004]" in log  # else Flower has mended it, and the wait can go
        assert log.count("SuperNode ID") == 2


TABLES = """\"\"\"Clients that read tables of their own.\"\"\"

from pathlib import Path

from fedbasin.deploy import client_app, node_table
from lean.client_app import model

ENCODING = Path(__file__).with_name("encoding.json")
app = client_app(model, lambda context: node_table(context, ENCODING), batch=8)
"""


def test_over_tls_a_bad_row_is_in_its_sites_log_alone(tmp_path):
    """In plain, and then with secure aggregation: all that the server writes is searched."""
    app = tmp_path / "app"
    shutil.copytree(LEAN, app)
    settings = app / "pyproject.toml"
    settings.write_text(settings.read_text().replace("lean.client_app:app", "lean.tables:app"))
    (app / "lean" / "tables.py").write_text(TABLES)
    good = [f"{n}.5,{n % 5},{n % 7},1.5,{'abc'[n % 3]}\n" for n in range(40)]
    tables = [tmp_path / f"site{number}.csv" for number in range(3)]
    for table in tables:
        table.write_text("".join(["age,weight,pulse,dose,died\n", *good]))
    encoding = from_table(tables[0], "died").encoding
    (app / "lean" / "encoding.json").write_text(encoding.to_json())
    with tables[2].open("a") as file:
        file.write("61,70,80,1,Quibbleworth,carcinoma\n")
    runs = [RunFolder(tmp_path / name) for name in ("plain", "secure")]
    with federation(tmp_path / "f", 3, tls=True, data=tables) as nodes:
        for run in runs:
            settings = {"folder": str(run.path), "rounds": 1, "secure": run.path.name == "secure"}
            settings |= {"method": "fedavg", "min-nodes": 2, "timeout": 200.0}
            finished(run, nodes.run(app, settings), nodes)
        log = nodes.log("node2")
        written = [*runs[0].path.rglob("*"), *runs[1].path.rglob("*")]
        written += [nodes.folder / f"{name}.log" for name in ("run", "superlink")]
        written += nodes.folder.glob("superlink.db*")
    server = b"".join(path.read_bytes() for path in written if path.is_file())
    assert "Quibbleworth,carcinoma" in log and str(tables[2]) in log
    assert b"site2.csv: row 40 (counted from 0) has 6 values" in server
    for leaked in (b"Quibbleworth", b"carcinoma", str(tables[2]).encode()):
        assert leaked not in server
    assert [run.read_summary()["status"] for run in runs] == ["finished", "finished"]
