"""examples/operations: compose file, Dockerfile and units, linted here; their commands are run."""

from __future__ import annotations

import configparser
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pandas
import pytest

pytest.importorskip("flwr", reason="needs the extra fedbasin[flower]")
pytest.importorskip("yaml")

import yaml
from deploy.test_two_machines import Machine, reached

from fedbasin.core.record import RunFolder

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "examples" / "operations"
COMPOSE = yaml.safe_load((PLACE / "compose.yaml").read_text(encoding="utf-8"))
SERVICES = COMPOSE["services"]
UNITS = sorted(PLACE.glob("*.service"))


def command_of(name, **variables):
    """Return a service's command with the variables that compose fills in."""
    line = shlex.join(SERVICES[name]["command"])

    def fill(match):
        return variables.get(match[1], match[2])

    return re.sub(r"\$\{(\w+):-([^}]*)\}", fill, line)


def options_of(program):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    told = subprocess.run(
        [program, "--help"], capture_output=True, text=True, check=True,
        env={**os.environ, "PATH": path, "COLUMNS": "200"},
    )  # fmt: skip
    return set(re.findall(r"--[a-z-]+", told.stdout))


def unit_command(path):
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read(path)
    assert set(unit.sections()) == {"Unit", "Service", "Install"}
    return unit["Service"]["ExecStart"]


def given(line):
    return {re.match("--[a-z-]+", word)[0] for word in shlex.split(line) if word.startswith("--")}


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_options_that_flower_has_and_its_volumes_exist(name):
    service = SERVICES[name]
    assert given(command_of(name)) <= options_of(service["command"][0])
    for volume in service["volumes"]:
        source, target = volume.split(":")[:2]
        assert target.startswith("/")
        assert source.startswith("./") or source in COMPOSE["volumes"]
    assert service["read_only"] and service["cap_drop"] == ["ALL"]
    assert (PLACE / service["build"]["context"]).resolve() == ROOT
    assert (ROOT / service["build"]["dockerfile"]).is_file()


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_has_options_that_flower_has(path):
    line = unit_command(path)
    assert given(line) <= options_of(Path(shlex.split(line)[0]).name)
    if shutil.which("systemd-analyze"):
        told = subprocess.run(
            ["systemd-analyze", "verify", path], capture_output=True, text=True, check=False
        ).stderr
        ours = [line for line in told.splitlines() if path.name in line]
        # The program lies in /opt/fedbasin, which need not exist here.
        assert [line for line in ours if "is not executable" not in line] == []


def test_the_image_is_of_this_version_and_copies_what_is_there():
    text = (PLACE / "Dockerfile").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert SERVICES["superlink"]["image"] == f"fedbasin:{project['version']}"
    assert f"fedbasin:{project['version']} ." in text
    for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE):
        *sources, _ = line.split()
        assert all((ROOT / source).exists() for source in sources), line
    (extras,) = re.findall(r"'\.\[([\w,]+)\]'", text)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    (uid,) = re.findall(r"useradd --uid (\d+) ", text)
    user = text.index(f"USER {uid}\n")
    assert user > text.index("RUN pip") and "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1" in text


@pytest.mark.skipif(
    not os.environ.get("FEDBASIN_TEST_FEDERATION"),
    reason="starts a SuperLink, a ServerApp and SuperNodes: make test-federation",
)
def test_the_commands_of_the_compose_file_make_a_federation(tmp_path):
    """Every service as a process in a folder of its own, on loopback."""
    if reached(9092):
        pytest.skip("another SuperLink uses the port")
    keys = tmp_path / "keys"
    machines = {}

    def machine(name, **changes):
        folder = tmp_path / name
        places = dict(changes)  # first: a site's own key lies apart
        places |= {"/state/": f"{folder}/", "/keys/": f"{keys}/", "/data/": f"{folder}/"}
        places |= {"/records": f"{folder}/records", "superlink:9092": "127.0.0.1:9092"}
        machines[name] = Machine(folder, places)
        return machines[name]

    try:
        server = machine("superlink")
        server.run("fedbasin flower keys server ../keys --host superlink --host 127.0.0.1")
        (keys / "superexec.secret").write_bytes(secrets.token_hex(32).encode())
        for name in ("sample", "a", "b"):
            rows = 40 if name == "sample" else 30
            frame = pandas.DataFrame({"x": range(rows), "y": ["yes", "no"] * (rows // 2)})
            frame.to_csv(tmp_path / f"{name}.csv", index=False)
        server.run(
            f"fedbasin flower new my_app --data {tmp_path}/sample.csv --target y --set task=binary "
            f"--set rounds=1 --set partition.clients=2"
        )
        server.start(command_of("superlink"))
        end = time.monotonic() + 180
        while not reached(9092):
            assert time.monotonic() < end, (server.folder / "log").read_text()[-3000:]
            time.sleep(0.5)
        machine("serverapp").start(command_of("serverapp"))
        home = server.folder / "flower"
        home.mkdir(exist_ok=True)
        (home / "config.toml").write_text(
            '[superlink]\ndefault = "mine"\n[superlink.mine]\naddress = "127.0.0.1:9092"\n'
            f'root-certificates = "{keys}/ca.crt"\n'
        )
        for number, name in enumerate("ab"):
            site = machine(name, **{"/keys/node": f"{tmp_path}/{name}/node"})
            site.run("fedbasin flower keys node node")
            shutil.copy(tmp_path / f"{name}.csv", site.folder / "rows.csv")
            server.run(f"flwr supernode register {site.folder}/node.pub mine")
            line = command_of("supernode", CLIENT=str(number))
            site.start(f"{line} --port {9094 + number}")
        server.run("flwr run my_app mine --stream -c \"federation.folder='/records'\"")
        (record,) = RunFolder(server.folder / "records").read_rounds()
        assert record.replies == 2
    except BaseException:
        for name, one in machines.items():
            print(name, (one.folder / "log").read_text()[-1500:])
        raise
    finally:
        for one in reversed(machines.values()):
            one.stop()
