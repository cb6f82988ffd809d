"""What a killed ``fedbasin flower up`` leaves behind, and nodes that come back too early."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra fedbasin[flower]")
if not Path("/proc").is_dir():
    pytest.skip("only Linux lists what processes were given", allow_module_level=True)

from typer.testing import CliRunner

from fedbasin.cli.app import app
from fedbasin.deploy import federation
from fedbasin.deploy.federation import FederationError, LocalFederation, end, running

DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(flush=True)
time.sleep(99)
"""


@pytest.fixture
def left(tmp_path, monkeypatch):
    """Two processes of a federation whose command was killed; one does not end when asked."""
    monkeypatch.setattr(federation, "_GRACE", 0.5)
    ours = {"FEDBASIN_FEDERATION": "0123", "FLWR_HOME": str(tmp_path / "flower")}
    other = {"FEDBASIN_FEDERATION": "4567", "FLWR_HOME": str(tmp_path / "elsewhere" / "flower")}
    started = []
    for code, more in ((DEAF, ours), (DEAF.replace("SIG_IGN", "SIG_DFL"), ours), (DEAF, other)):
        process = subprocess.Popen(
            [sys.executable, "-c", code], env=os.environ | more, stdout=subprocess.PIPE
        )
        process.stdout.readline()
        started.append(process)
    yield started
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_new_federation_names_the_processes_and_how_to_end_them(left, tmp_path):
    ids = sorted(process.pid for process in left[:2])
    with pytest.raises(FederationError) as refused, LocalFederation(tmp_path, 1):
        pass
    said = str(refused.value)
    assert f"{ids[0]}, {ids[1]}." in said and f"fedbasin flower down {tmp_path}" in said
    assert all(process.poll() is None for process in left)


def test_down_ends_the_processes_of_one_folder_alone(left, tmp_path):
    listed = CliRunner().invoke(app, ["flower", "down"])
    assert str(tmp_path / "elsewhere") in listed.output and str(left[2].pid) in listed.output
    assert all(process.poll() is None for process in left)
    done = CliRunner().invoke(app, ["flower", "down", str(tmp_path)])
    for process in left[:2]:
        assert str(process.pid) in done.output
        assert process.wait() != 0
    assert left[2].poll() is None
    assert tmp_path not in running() and tmp_path / "elsewhere" in running()
    assert end(tmp_path) == []


NODE = """
import sys, time
from pathlib import Path
count = Path("count")
tries = int(count.read_text()) + 1 if count.exists() else 1
count.write_text(str(tries))
print({says!r} if tries in {refused} else "SuperNode ID: 7", flush=True)
if tries in {refused}:
    sys.exit(1)
time.sleep(99)
"""


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    """A federation with TLS whose SuperNodes are the script `NODE`."""
    monkeypatch.setattr(federation, "_GRACE", 0.2)
    script = tmp_path / "node"
    monkeypatch.setattr(federation, "_program", lambda name: str(script))
    made = LocalFederation(tmp_path, 1)
    made._certificates = federation.make_certificates(tmp_path / "keys")

    def says(text, refused):
        body = NODE.format(says=text, refused=refused)
        script.write_text(f"#!{sys.executable}\n{body}")
        script.chmod(0o755)
        return made

    yield says
    made.stop()


def test_a_node_that_is_taken_for_connected_is_started_until_it_is_let_in(nodes, tmp_path):
    made = nodes("[code: 2004] Failed to activate SuperNode.", refused=(2, 3))
    made.start_node(0)
    made._await(lambda: "SuperNode ID" in made.log("node0"), "node0")
    made.kill("node0")
    made.start_node(0)
    assert (tmp_path / "count").read_text() == "4"
    assert made._processes["node0"].poll() is None


def test_a_node_that_is_refused_for_another_reason_is_not(nodes, tmp_path):
    made = nodes("[code: 2001] no such key", refused=(2, 3))
    made.start_node(0)
    made._await(lambda: "SuperNode ID" in made.log("node0"), "node0")
    made.kill("node0")
    with pytest.raises(FederationError, match="no such key"):
        made.start_node(0)
    assert (tmp_path / "count").read_text() == "2"
