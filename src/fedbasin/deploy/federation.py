"""A whole federation on this machine: SuperLink, SuperNodes and a run, stopped at the end."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from fedbasin.core.system import ask_to_end, family_of, kill, processes_with
from fedbasin.deploy.certificates import Certificates, make_certificates, make_node_key

QUIET = {  # no telemetry, no update check, no installation
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
_MARK = "FEDBASIN_FEDERATION"  # the variable that marks every process of a federation
_HOME = "FLWR_HOME"  # the variable that says where Flower's configuration lies
_GRACE = 5.0  # seconds that a process has to end by itself
_KNOWN = 60.0  # seconds that a SuperLink takes a killed node with a key for connected
_NAME = "local"  # of the SuperLink in Flower's configuration


class FederationError(RuntimeError):
    """A federation that does not start or does not finish, with where to look."""


@dataclass
class LocalFederation:
    """SuperLink and SuperNodes on loopback; use it in a ``with`` block.

    Args:
        folder: where logs, keys, the SuperLink's database and the nodes' states go.
        nodes: how many SuperNodes there are.
        tls: whether messages are encrypted and nodes must prove who they are.
        simulate: whether Flower's simulation engine (Ray) takes the place of SuperNodes.
        patience: seconds that a process may take to start.
        environment: further variables for all processes.
        data: the table of each node, in its node configuration; empty where nodes name none.
    """

    folder: Path
    nodes: int = 3
    tls: bool = False
    simulate: bool = False
    patience: float = 120.0
    environment: Mapping[str, str] = field(default_factory=dict)
    data: Sequence[Path] = ()
    _mark: str = field(default_factory=lambda: secrets.token_hex(8))
    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _started: set[str] = field(default_factory=set)
    _certificates: Certificates | None = None
    _port: int = 0

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise ValueError(f"nodes must be at least 1, got {self.nodes}")
        if self.tls and self.simulate:
            raise ValueError("simulated nodes send nothing over a network: leave tls out")
        if self.data and len(self.data) != self.nodes:
            raise ValueError(f"{len(self.data)} tables for {self.nodes} nodes: give each node one")
        if self.data and self.simulate:
            raise ValueError("simulated nodes have no files of their own: leave simulate out")
        self.folder = self.folder.resolve()

    def __enter__(self) -> LocalFederation:
        self._refuse_leftovers()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._port = _free_port()
            if self.tls:
                self._certificates = make_certificates(self.folder / "keys")
            self._configure()
            self.start_link()
            for node in range(0 if self.simulate else self.nodes):
                if self.tls:
                    self.register(make_node_key(self.folder / "keys" / f"node{node}"))
                self.start_node(node)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start_link(self) -> None:
        """Start the SuperLink, or restart it with its database."""
        security = ["--insecure"]
        if self._certificates is not None:
            security = [
                *("--ssl-ca-certfile", str(self._certificates.authority)),
                *("--ssl-certfile", str(self._certificates.server)),
                *("--ssl-keyfile", str(self._certificates.key)),
                "--enable-supernode-auth",
            ]
        self._start(
            "superlink",
            "flower-superlink",
            *security,
            *(["--simulation"] if self.simulate else []),
            "--disable-runtime-dependency-installation",
            *("--host", "127.0.0.1", "--port", str(self._port)),
            *("--database", str(self.folder / "superlink.db")),
        )
        self._await(lambda: _listens(self._port), "superlink")

    def start_node(self, node: int, *, key: Path | None = None, secure: bool | None = None) -> None:
        """Start a SuperNode, or restart it as the same client.

        A SuperLink turns a node with a key away (code 2004, exit code 305) while it takes the
        killed one for connected, about a minute. So a restart tries again until it is let in.

        Args:
            node: the client's number.
            key: another key than the one made for it.
            secure: whether it speaks TLS and shows a key; as the federation by default.
        """
        security = ["--insecure"]
        if self._certificates is not None and secure is not False:
            security = [
                *("--root-certificates", str(self._certificates.authority)),
                *("--auth-supernode-private-key", str(key or self.folder / "keys" / f"node{node}")),
            ]
        facts = (
            f"partition-id={node} num-partitions={self.nodes} state-dir='{self.folder / 'states'}'"
        )
        if self.data:
            facts += f" data='{self.data[node].resolve()}'"
        command = (
            *security,
            *("--superlink", f"127.0.0.1:{self._port}"),
            *("--port", str(_free_port())),
            *("--node-config", facts),
        )
        name = f"node{node}"
        again = name in self._started
        self._started.add(name)
        before = len(self.log(name))
        self._start(name, "flower-supernode", *command)
        if again and self._certificates is not None:
            self._until_let_in(name, before, command)

    def _until_let_in(self, name: str, before: int, command: tuple[str, ...]) -> None:
        """Start a SuperNode again until the SuperLink drops the connection of the killed one."""
        deadline = time.monotonic() + _KNOWN + self.patience
        while "SuperNode ID" not in self.log(name)[before:]:
            if self._processes[name].poll() is not None:
                said = self.log(name)[before:]
                if "[code: 2004]" not in said or time.monotonic() > deadline:
                    raise FederationError(f"{name} ended: {_last_lines(said)}")
                time.sleep(_GRACE)
                before = len(self.log(name))
                self._start(name, "flower-supernode", *command)
            time.sleep(0.2)

    def register(self, public: Path) -> None:
        """Let the SuperLink know a node's public key."""
        done = self._flwr("supernode", "register", str(public), _NAME)
        if done.returncode:
            raise FederationError(f"cannot register {public}: {_last_lines(done.stdout)}")

    def kill(self, name: str) -> None:
        """Kill ``"superlink"`` or ``"node0"`` with all its processes, as a power cut would."""
        process = self._processes.pop(name)
        for pid in family_of(process.pid, self._marked()):
            kill(pid)
        process.wait()

    def run(self, app: Path, settings: Mapping[str, Any]) -> subprocess.Popen[bytes]:
        """Start a run of an app with settings of its own; its log goes to ``run.log``."""
        overrides = self.folder / "overrides.toml"
        lines = [f"{json.dumps(k)} = {json.dumps(v)}" for k, v in settings.items()]
        overrides.write_text("\n".join(lines) + "\n", encoding="utf-8")
        command = ["run", str(app.resolve()), _NAME, "--stream", "-c", str(overrides)]
        self._processes.pop("run", None)
        return self._start("run", "flwr", *command)

    def log(self, name: str) -> str:
        """Return the log of a process."""
        path = self.folder / f"{name}.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def stop(self) -> None:
        """Stop every process of this federation."""
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        deadline = time.monotonic() + _GRACE
        while self._marked() and time.monotonic() < deadline:
            for process in self._processes.values():
                process.poll()
            time.sleep(0.1)
        for pid in self._marked():
            kill(pid)
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._processes.clear()

    def _refuse_leftovers(self) -> None:
        """Refuse a folder where processes of an earlier federation still run."""
        left = running().get(self.folder)
        if left:
            raise FederationError(
                f"processes of a federation still run in {self.folder}: {_ids(left)}. Wait until "
                "it is over; if its command was killed, end them with "
                f"fedbasin flower down {self.folder}"
            )

    def _configure(self) -> None:
        """Tell Flower's command line where the SuperLink is."""
        home = self.folder / "flower"
        home.mkdir(parents=True, exist_ok=True)
        lines = ["[superlink]", f'default = "{_NAME}"', f"[superlink.{_NAME}]"]
        lines.append(f'address = "127.0.0.1:{self._port}"')
        if self._certificates is None:
            lines.append("insecure = true")
        else:
            lines.append(f"root-certificates = {json.dumps(str(self._certificates.authority))}")
        if self.simulate:
            lines.append(f"options.num-supernodes = {self.nodes}")
            lines.append("options.backend.client-resources.num-cpus = 1")
            lines.append("options.backend.client-resources.num-gpus = 0")
        (home / "config.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def _environment(self) -> dict[str, str]:
        own = {_HOME: str(self.folder / "flower"), _MARK: self._mark}
        folder = str(Path(sys.executable).parent)
        path = {"PATH": os.pathsep.join([folder, os.environ.get("PATH", "")])}
        return {"OMP_NUM_THREADS": "1", **os.environ, **QUIET, **path, **self.environment, **own}

    def _start(self, name: str, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [_program(program), *arguments],
                cwd=self.folder,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes[name] = process
        return process

    def _await(self, ready: Any, name: str) -> None:
        deadline = time.monotonic() + self.patience
        while not ready():
            ended = self._processes[name].poll() is not None
            if ended or time.monotonic() > deadline:
                why = "ended at once" if ended else f"did not come up in {self.patience:g} s"
                raise FederationError(f"{name} {why}: {_last_lines(self.log(name))}")
            time.sleep(0.2)

    def _flwr(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [_program("flwr"), *arguments],
            cwd=self.folder,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=self.patience,
            check=False,
        )

    def _marked(self) -> list[int]:
        """Return the processes of this federation that still run."""
        known = processes_with(_MARK)
        return [pid for pid, variables in known.items() if variables[_MARK] == self._mark]


def running() -> dict[Path, list[int]]:
    """Return the federations that run on this machine: the processes of each, by its folder."""
    found: dict[Path, list[int]] = {}
    for pid, variables in processes_with(_MARK).items():
        if _HOME in variables:
            found.setdefault(Path(variables[_HOME]).parent, []).append(pid)
    return found


def end(folder: Path) -> list[int]:
    """End all processes of the federation in a folder; return them.

    They are asked to end first, and killed where they have not after some seconds.
    """
    folder = folder.resolve()
    ended = sorted(running().get(folder, []))
    for pid in ended:
        ask_to_end(pid)
    deadline = time.monotonic() + _GRACE
    while (left := running().get(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left or []:
        kill(pid)
    while running().get(folder) and time.monotonic() < deadline + _GRACE:
        time.sleep(0.1)
    return ended


def _ids(processes: list[int]) -> str:
    return ", ".join(map(str, sorted(processes)))


def _program(name: str) -> str:
    """Return where a command of Flower is: beside this Python, or on the path."""
    beside = Path(sys.executable).parent / name
    path = str(beside) if beside.exists() else shutil.which(name)
    if path is None:
        raise FederationError(f"{name} is not installed: pip install 'fedbasin[flower]'")
    return path


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _last_lines(text: str, count: int = 5) -> str:
    return " | ".join(text.strip().splitlines()[-count:]) or "it said nothing"
