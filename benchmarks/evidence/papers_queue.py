"""Run what papers_queue.toml lists and has no result line yet, on a CPU or a GPU.

    python benchmarks/evidence/papers_queue.py --what                    # what is left and its cost
    python benchmarks/evidence/papers_queue.py --lane cpu --minutes 150  # cheapest a cell first

An entry is one `fedbasin paper run`. A line is added to src/fedbasin/papers/results/ as soon as its
run ends. Stop the queue at any moment (Ctrl-C, SIGTERM): what was begun is saved, and the next
queue resumes it from its run folder in --out. On a CPU everything runs at the lowest priority with
one thread a process.

On a GPU without network: pack the data (carry_data.py), copy src and its result lines to a folder
that later transfers do not replace, and start the queue detached from there, so that no command
has to wait for it:

    setsid nohup python papers_queue.py --lane gpu --jobs 3 --minutes 22 --out RUNS --lines LINES &

LINES/*.jsonl may be copied back at any time and added to the lines here with --take. A run folder
that is copied back resumes here too.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedbasin.core.reading import Reader
from fedbasin.papers import PaperError, load_table
from fedbasin.papers.grid import CellRun, cells_asked, runs_of
from fedbasin.papers.results import append, read

HERE = Path(__file__).parent
LINES = HERE.parents[1] / "src" / "fedbasin" / "papers" / "results"
FEDBASIN = (sys.executable, "-m", "fedbasin")
DEVICES = {"cpu": "cpu", "gpu": "cuda"}


@dataclass(frozen=True)
class Entry:
    """Cells that one command runs.

    Args:
        table: the table, such as ``"fedlaw/table3"``.
        lane: where they run.
        minutes: what all of them take, of one core or of the whole GPU.
        why: what they decide.
        seeds: their seeds.
        rows: the rows, as `fedbasin paper run` takes them.
        columns: the columns, likewise.
        trials: these trials instead of rows.
    """

    table: str
    lane: Literal["cpu", "gpu"]
    minutes: float
    why: str
    seeds: tuple[int, ...]
    rows: str = "*"
    columns: str = "*"
    trials: str | None = None

    @property
    def arguments(self) -> list[str]:
        """The command's words after ``fedbasin``."""
        named = ["--rows", self.rows] if self.trials is None else ["--trials", self.trials]
        seeds = ",".join(map(str, self.seeds))
        return [
            *("paper", "run", self.table, *named),
            *("--columns", self.columns, "--seeds", seeds, "--device", DEVICES[self.lane]),
        ]

    def runs(self) -> list[CellRun]:
        """Return the runs that the command does; a cell that cannot be run is an error."""
        table = load_table(self.table)
        cells = cells_asked(table, self.rows, self.columns, self.trials)
        runs, cannot = runs_of(table, cells, self.seeds)
        if cannot:
            raise PaperError(f"{self.table}: the queue names cells that cannot be run: {cannot}")
        return runs


@dataclass(frozen=True)
class Left:
    """What is left of an entry: its cells without a line, their runs and the runs' minutes."""

    entry: Entry
    cells: int
    runs: int
    minutes: float

    def __str__(self) -> str:
        """Return one line about it."""
        cost = f"{self.minutes:.0f} min for {self.cells} cells"
        return f"{self.entry.lane}, {cost}: {shlex.join(self.entry.arguments)}  # {self.entry.why}"


def read_entries(path: Path) -> list[Entry]:
    """Return the entries of a file."""
    reader = Reader(PaperError, path.name)
    listed = tomllib.loads(path.read_text(encoding="utf-8"))["entries"]
    return [reader.read(Entry, raw, f"entries[{n}]") for n, raw in enumerate(listed)]


def left_of(entries: Sequence[Entry], lines: Path) -> list[Left]:
    """Return what has no line yet; first what costs the fewest minutes a cell.

    A line of the same paper with equal settings and score serves a cell as its own does.
    """
    stored = {
        (file.stem, line.config, line.measure)
        for file in lines.glob("*.jsonl")
        for line in read(file)
    }
    left = []
    for entry in entries:
        runs = entry.runs()
        missing = [run for run in runs if (_paper(entry), run.config, _score(run)) not in stored]
        if missing:
            configs = {run.config for run in missing}
            share = len(configs) / len({run.config for run in runs})
            left.append(Left(entry, len(missing), len(configs), share * entry.minutes))
    return sorted(left, key=lambda each: each.minutes / each.cells)


def _paper(entry: Entry) -> str:
    return entry.table.partition("/")[0]


def _score(run: CellRun) -> str:
    return run.table.score_of(run.row, run.column).text


def work(waiting: Sequence[Left], minutes: float, jobs: int, out: Path, lines: Path) -> None:
    """Run entries in their order, several at once, until the time is over."""
    ends = time.monotonic() + 60 * minutes
    waiting = list(waiting)
    running: list[subprocess.Popen[bytes]] = []
    try:
        while (waiting or running) and time.monotonic() < ends:
            while waiting and len(running) < jobs:
                running.append(_begun(waiting.pop(0), out, lines))
            time.sleep(0.2)
            running = [process for process in running if process.poll() is None]
    finally:
        for process in running:  # it saves its run and ends
            process.terminate()
        for process in running:
            process.wait()


def _begun(left: Left, out: Path, lines: Path) -> subprocess.Popen[bytes]:
    print(time.strftime("%H:%M"), left, flush=True)
    results = lines / f"{_paper(left.entry)}.jsonl"
    places = ["--out", str(out), "--results", str(results), "--jobs", "1"]
    process = subprocess.Popen(
        [*FEDBASIN, *left.entry.arguments, *places],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C reaches the queue alone, which stops it once
    )
    if left.entry.lane == "cpu":
        _let_others_go_first(process.pid)
    return process


def _let_others_go_first(session: int) -> None:
    """Give a session the lowest priority: Linux compares nice values within a session alone."""
    group = Path(f"/proc/{session}/autogroup")
    if group.exists():
        with contextlib.suppress(OSError):
            group.write_text("19", encoding="ascii")


def take(files: Sequence[Path], lines: Path) -> None:
    """Add the lines of other files to those of their papers; those that are there stay."""
    for file in files:
        for line in read(file):
            append(lines / f"{line.table.partition('/')[0]}.jsonl", line)


def main() -> None:
    """Read the options and work, or say what is left."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--lane", choices=list(DEVICES), help="both, where nothing is run")
    parser.add_argument("--minutes", type=float, default=150.0)
    parser.add_argument("--jobs", type=int, default=1, help="entries at once")
    parser.add_argument("--what", action="store_true", help="print what is left and end")
    parser.add_argument("--take", type=Path, nargs="+", metavar="FILE", help="add these lines")
    parser.add_argument("--out", type=Path, default=Path("runs/papers"), help="run folders")
    parser.add_argument("--lines", type=Path, default=LINES, help="folder of the result lines")
    parser.add_argument("--queue", type=Path, default=HERE / "papers_queue.toml")
    options = parser.parse_args()
    if options.take:
        take(options.take, options.lines)
        return
    entries = [e for e in read_entries(options.queue) if options.lane in (None, e.lane)]
    left = left_of(entries, options.lines)
    if options.what:
        for each in left:
            print(each)
        minutes = sum(each.minutes for each in left)
        cells, runs = sum(each.cells for each in left), sum(each.runs for each in left)
        print(f"{cells} cells, {runs} runs, {minutes:.0f} minutes")
        return
    if options.lane is None:
        parser.error("name the lane: --lane cpu or --lane gpu")
    if options.lane == "cpu":
        os.nice(19)
    # SIGTERM stops it as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        work(left, options.minutes, options.jobs, options.out, options.lines)
    except KeyboardInterrupt:
        sys.exit("stopped; what was begun resumes with the same command")


if __name__ == "__main__":
    main()
