"""Starts peers, asks them for rounds in turn, and sets the answers side by side."""

import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

SPEED = Path(__file__).resolve().parent.parent
SOURCE = SPEED.parent.parent / "src"
CARRIED = SPEED.parent.parent / ".carry" / "peers"


@dataclass
class Row:
    """One peer on one shape: what it answered, or why it did not."""

    peer: str
    shape: str
    processes: int
    facts: dict[str, Any] = field(default_factory=dict)
    first: float | None = None  # seconds of the warm-up rounds, a round
    seconds: list[float] = field(default_factory=list)  # a round, in each repetition
    cpu_seconds: list[float] = field(default_factory=list)
    rounds: int = 0
    accuracy: float | None = None
    missing: str | None = None

    @property
    def median(self) -> float | None:
        """Median seconds a round."""
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def median_cpu(self) -> float | None:
        """Median processor seconds a round, over all processes of the peer."""
        return statistics.median(self.cpu_seconds) if self.cpu_seconds else None

    def as_json(self) -> dict[str, Any]:
        """Return everything for the results file."""
        return {**vars(self), "median_seconds": self.median, "median_cpu_seconds": self.median_cpu}


class Running:
    """A peer's process."""

    def __init__(
        self,
        row: Row,
        python: str,
        module: str,
        work: Path,
        device: str,
        extra: tuple[str, ...] = (),
    ) -> None:
        self.row = row
        folders = [str(SPEED), str(SOURCE), str(CARRIED), os.environ.get("PYTHONPATH", "")]
        threads = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        environment = {
            **os.environ,
            **threads,
            "PYTHONPATH": os.pathsep.join(filter(None, folders)),
        }
        command = [python, "-m", f"peers.{module}", str(work), "--device", device, *extra]
        name = f"{work.stem}-{row.peer}-{row.processes}.log".replace(" ", "_").replace(",", "")
        self.errors = work.with_name(name)
        with self.errors.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--processes", str(row.processes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=SPEED,
                env=environment,
            )
        self.row.facts = self._answer()

    def ask(self, rounds: int, score: bool) -> dict[str, Any]:
        """Run rounds and wait for the answer."""
        assert self.process.stdin
        self.process.stdin.write(json.dumps({"rounds": rounds, "score": score}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            said = self.errors.read_text(errors="replace").strip().splitlines()
            raise Gone(said[-1] if said else f"ended with status {self.process.returncode}")
        return json.loads(line)

    def close(self) -> None:
        """Let the peer end by itself, and end it if it does not."""
        assert self.process.stdin
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            self.process.wait()


class Gone(RuntimeError):
    """A peer that ended, with the last line it wrote."""


def note(text: str) -> None:
    """Say on standard error what is being done."""
    Console(stderr=True).print(text, highlight=False)


def warm_up(peer: Running, rounds: int, score: bool = False) -> bool:
    """Run the first rounds, which compile and fill caches; return whether the peer still lives."""
    try:
        peer.row.first = peer.ask(rounds, score)["seconds"] / rounds
    except Gone as reason:
        peer.row.missing = str(reason)
        return False
    peer.row.rounds += rounds
    return True


def measure(peer: Running, rounds: int, score: bool) -> bool:
    """Run a block of rounds and keep its times; return whether the peer still lives."""
    try:
        answer = peer.ask(rounds, score)
    except Gone as reason:
        peer.row.missing = str(reason)
        return False
    peer.row.seconds.append(answer["seconds"] / rounds)
    peer.row.cpu_seconds.append(answer["cpu_seconds"] / rounds)
    peer.row.rounds += rounds
    if answer["accuracy"] is not None:
        peer.row.accuracy = answer["accuracy"]
    return True


def score(peer: Running) -> None:
    """Score the final model, outside the measured time."""
    try:
        peer.row.accuracy = peer.ask(0, True)["accuracy"]
    except Gone as reason:
        peer.row.missing = str(reason)


def table(rows: list[Row], title: str) -> Table:
    """Set the rows of one shape side by side; ratios are to fedbasin on as many processes."""
    ours = {row.processes: row for row in rows if row.peer == "fedbasin" and row.seconds}
    made = Table(title=title, title_justify="left")
    columns = ("processes", "s / round", "to ours", "CPU-s / round", "to ours", "first", "accuracy")
    made.add_column("peer")
    for name in columns:
        made.add_column(name, justify="right")
    for row in sorted(rows, key=lambda row: (row.processes, row.median is None, row.median)):
        if row.median is None:
            made.add_row(row.peer, str(row.processes), f"[red]not measured: {row.missing}[/red]")
            continue
        base = ours.get(row.processes)
        made.add_row(
            row.peer,
            str(row.processes),
            f"{row.median:.4f}",
            f"{row.median / base.median:.2f}x" if base else "",
            f"{row.median_cpu:.4f}",
            f"{row.median_cpu / base.median_cpu:.2f}x" if base else "",
            f"{row.first:.2f}" if row.first is not None else "",
            f"{row.accuracy:.4f} after {row.rounds}" if row.accuracy is not None else "",
        )
    return made


def save(path: Path, rows: list[Row], facts: dict[str, Any]) -> None:
    """Write everything that was measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**facts, "rows": [row.as_json() for row in rows]}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def machine(device: str) -> dict[str, Any]:
    """Say where the numbers come from."""
    import platform

    import torch

    on_cuda = device.startswith("cuda")
    name = torch.cuda.get_device_name() if on_cuda else platform.processor() or platform.machine()
    return {
        "device": name,
        "cores": os.cpu_count(),
        "load_at_start": os.getloadavg()[0],
        "torch": torch.__version__,
        "python": sys.version.split()[0],
    }
