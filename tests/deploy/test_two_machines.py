"""docs/two_machines.md as written: a server and sites in folders of their own, on loopback."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pandas
import pytest
from typer.testing import CliRunner

pytest.importorskip("flwr", reason="needs the extra fedbasin[flower]")

from cryptography import x509

from fedbasin.cli.app import app as command
from fedbasin.core.record import RunFolder
from fedbasin.deploy.federation import QUIET

PAGE = (Path(__file__).parents[2] / "docs" / "two_machines.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"<!-- on: (\w+) -->\n```bash\n(.*?)```", re.DOTALL)


def commands():
    """Return the page's commands in order, each with the machine that it is for."""
    found = [(m[1], line) for m in BLOCK.finditer(PAGE) for line in m[2].strip().splitlines()]
    assert len(found) == 9
    return found


def test_the_certificate_names_the_hosts_and_no_key_is_replaced(tmp_path):
    run = CliRunner().invoke
    words = ["flower", "keys", "server", str(tmp_path / "k"), "--host", "fed.example.org"]
    result = run(command, [*words, "--host", "10.0.0.7", "--days", "30"])
    assert result.exit_code == 0, result.output
    made = x509.load_pem_x509_certificate((tmp_path / "k" / "server.pem").read_bytes())
    names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fed.example.org"]
    assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.7"]
    assert 29 <= (made.not_valid_after_utc - made.not_valid_before_utc).days <= 31
    assert (tmp_path / "k" / "server.key").stat().st_mode & 0o077 == 0
    again = run(command, words)
    assert isinstance(again.exception, ValueError) and "is not empty" in str(again.exception)
    node = ["flower", "keys", "node", str(tmp_path / "node")]
    assert run(command, node).exit_code == 0
    key = (tmp_path / "node").read_bytes()
    assert (tmp_path / "node").stat().st_mode & 0o077 == 0
    again = run(command, node)
    assert "exists: a new key" in str(again.exception) and (tmp_path / "node").read_bytes() == key


class Machine:
    """A folder in which commands run, as on a machine of its own."""

    def __init__(self, folder, changes):
        self.folder = folder
        self.changes = changes
        self.processes = []
        folder.mkdir()
        self.log = (folder / "log").open("ab")

    def start(self, line):
        for old, new in self.changes.items():
            line = line.replace(old, new)
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        process = subprocess.Popen(
            shlex.split(line),
            cwd=self.folder,
            env={**os.environ, **QUIET, "PATH": path, "OMP_NUM_THREADS": "1",
                 "FLWR_HOME": str(self.folder / "flower")},
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        self.processes.append(process)
        return process

    def run(self, line):
        code = self.start(line).wait(timeout=400)
        assert code == 0, f"{line}\n{(self.folder / 'log').read_text()[-3000:]}"

    def stop(self):
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self.log.close()


def reached(port):
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_for(port, machine):
    end = time.monotonic() + 180
    while not reached(port):
        assert time.monotonic() < end, (machine.folder / "log").read_text()[-3000:]
        time.sleep(0.5)


def write_rows(machine, name, count):
    frame = pandas.DataFrame({"age": range(count), "died": ["yes", "no"] * (count // 2)})
    frame.to_csv(machine.folder / name, index=False)


def write_settings(server):
    """Write what the page says about Flower's settings of the server."""
    settings = re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL)[1]
    for old, new in server.changes.items():
        settings = settings.replace(old, new)
    (server.folder / "flower").mkdir(exist_ok=True)
    (server.folder / "flower" / "config.toml").write_text(settings)


def hand_out(server, site):
    """Give a site what the page says that it gets from the server."""
    shutil.copy(server.folder / "keys" / "ca.crt", site.folder)
    shutil.copy(server.folder / "facts.json", site.folder)
    shutil.copytree(server.folder / "my_federation", site.folder / "my_federation")


@pytest.mark.skipif(
    not os.environ.get("FEDBASIN_TEST_FEDERATION"),
    reason="starts a SuperLink and SuperNodes: make test-federation",
)
def test_the_page_runs_as_written(tmp_path):
    if reached(9092):
        pytest.skip("another SuperLink uses the port of the page")
    changes = {"fed.example.org": "127.0.0.1", "/absolute/path/of": str(tmp_path / "server")}
    server = Machine(tmp_path / "server", changes)
    sites = [Machine(tmp_path / f"site{i}", dict(changes)) for i in range(2)]
    # One machine cannot give two nodes the same port for their own processes.
    sites[1].changes |= {
        "partition-id=0": "partition-id=1",
        "flower-supernode": "flower-supernode --port 9095",
    }
    write_rows(server, "sample.csv", 60)
    write_rows(sites[0], "rows.csv", 40)
    write_rows(sites[1], "rows.csv", 40)
    try:
        for where, line in commands():
            if line.startswith("flower-superlink"):
                server.start(line)
                wait_for(9092, server)
            elif line.startswith("flower-supernode"):
                for site in sites:
                    site.start(line)
            elif "--facts" in line:
                for site in sites:
                    hand_out(server, site)
                    site.run(line)
            elif "register" in line:
                write_settings(server)
                for site in sites:
                    shutil.copy(site.folder / "node.pub", server.folder)
                    server.run(line)
            else:
                for machine in [server] if where == "server" else sites:
                    machine.run(line)
        records = RunFolder(server.folder / "records").read_rounds()
        assert [record.replies for record in records] == [2, 2]
        assert (server.folder / "records" / "model.safetensors").exists()
    finally:
        for machine in (server, *sites):
            machine.stop()
