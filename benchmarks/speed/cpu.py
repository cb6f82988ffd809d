"""The same FedAvg work with fedbasin and its peers on a CPU, one thread a process.

    python benchmarks/speed/cpu.py --out cpu.json

Every peer has a virtual environment of its own under benchmarks/.venvs, made on first use from
peers/requirements; one that cannot be made or started is a line of the table with its reason. All
start from the same rows and initial model and run in turns: a repetition asks each peer for a few
rounds. The number shown is the median over repetitions, after a warm-up; the accuracy of the final
model shows that the work was done. Peers are compared with fedbasin on as many processes.
"""

import argparse
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from peers import driver, work
from rich.console import Console

HERE = Path(__file__).resolve().parent
VENVS = HERE.parent / ".venvs"
CONSTRAINTS = HERE.parent.parent / "constraints.txt"


@dataclass(frozen=True)
class Peer:
    """Where a peer's script and environment are, and on how many processes it can run."""

    module: str
    venv: str | None = None  # None: this interpreter
    processes: tuple[int, ...] = (1,)
    shapes: tuple[str, ...] = tuple(work.SHAPES)
    extra: tuple[str, ...] = ()


PEERS = {
    "fedbasin": Peer("ours", None, (1, 2)),
    "fedbasin, uncompiled": Peer("ours", None, (1,), ("W2",), ("--compile", "off")),
    "fedbasin, bf16": Peer("ours", None, (1, 2), ("W0", "W1"), ("--precision", "bf16")),
    "tuned loop": Peer("tuned", None, (1, 2)),
    "plain loop": Peer("plain"),
    "pfl-research": Peer("pfl_research", "pfl", (1, 2)),
    "FedLab": Peer("fedlab_serial", "fedlab"),
    "FedJAX": Peer("fedjax_jit", "fedjax"),
    "Flower": Peer("flower", "flower", (1, 2)),
}
ROUNDS = {"W0": 1, "W1": 1, "W2": 10}  # of a repetition


def interpreter(venv: str | None, install: bool) -> str:
    """Return a peer's Python, making its environment if need be; raise with pip's last line."""
    if venv is None:
        return sys.executable
    folder, wanted = VENVS / venv, HERE / "peers" / "requirements" / f"{venv}.txt"
    python, done = folder / "bin" / "python", folder / "installed.txt"
    if done.exists() and done.read_text() == wanted.read_text():
        return str(python)
    if not install:
        raise driver.Gone(f"{folder.name}: no environment, and --no-install was given")
    driver.note(f"making the environment of {venv}")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    command = [str(python), "-m", "pip", "install", "--quiet", "--requirement", str(wanted)]
    if venv == "fedlab":
        command.append("--no-deps")
    if venv == "flower":
        command += ["--constraint", str(CONSTRAINTS)]
    found = subprocess.run(command, capture_output=True, text=True)
    if found.returncode:
        said = [line for line in found.stderr.splitlines() if "ERROR" in line]
        raise driver.Gone(said[-1] if said else f"pip ended with status {found.returncode}")
    done.write_text(wanted.read_text())
    return str(python)


def started(shape: str, args: argparse.Namespace, path: Path) -> tuple[list, list]:
    """Start what was asked for; return all rows and the peers that run."""
    rows, running = [], []
    wanted = {int(n) for n in args.processes.split(",")}
    for name in args.peers.split(";"):
        peer = PEERS[name]
        for processes in sorted(wanted.intersection(peer.processes)):
            if shape not in peer.shapes:
                continue
            row = driver.Row(name, shape, processes)
            rows.append(row)
            try:
                python = interpreter(peer.venv, not args.no_install)
                driver.note(f"{shape}: starting {name}, {processes} process(es)")
                found = driver.Running(row, python, peer.module, path, "cpu", peer.extra)
            except driver.Gone as reason:
                row.missing = str(reason)
                continue
            if driver.warm_up(found, args.warmup):
                running.append(found)
    return rows, running


def measure(shape: str, args: argparse.Namespace, folder: Path) -> tuple[list[driver.Row], str]:
    """Run all peers of a shape in turns."""
    path = folder / f"{shape}.npz"
    made = work.make(work.SHAPES[shape])
    work.write(made, path)
    rows, running = started(shape, args, path)
    rounds = args.rounds or ROUNDS[shape]
    for turn in range(args.repeats):
        driver.note(f"{shape}: repetition {turn + 1} of {args.repeats}")
        running = [peer for peer in running if driver.measure(peer, rounds, score=False)]
    for peer in running:
        driver.score(peer)
        peer.close()
    return rows, made.source


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default=",".join(work.SHAPES))
    parser.add_argument("--peers", default=";".join(PEERS), help="names, separated by ';'")
    parser.add_argument("--processes", default="1,2")
    parser.add_argument("--rounds", type=int, default=0, help="of a repetition; 0: 1, 1 and 10")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=2, help="unmeasured rounds before the first")
    parser.add_argument("--no-install", action="store_true", help="use the environments there are")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    facts, found, console = driver.machine("cpu"), [], Console(width=110)
    with tempfile.TemporaryDirectory() as folder:
        for shape in args.shapes.split(","):
            rows, source = measure(shape, args, Path(folder))
            facts[f"rows_of_{shape}"] = source
            found += rows
            console.print(driver.table(rows, f"{shape}: {work.SHAPES[shape].what}, {source}"))
            if args.out:
                driver.save(args.out, found, facts)


if __name__ == "__main__":
    main()
