"""FedCDA's memory on disk: does the server's RAM stay bounded as clients grow in number?

    python benchmarks/methods/fedcda_archive.py --clients 100 300 --out archive.json

The archive is filled by FedCDA's own warm-up rounds until every one of N clients has K models of P
float32 parameters, N K P 4 bytes of files (40 GB for 300 x 3 x 11 M), which are removed at the end.
Then rounds with C random clients are measured, each from a cold page cache: seconds spent to
load (read a mapped model in whole), for the Gram matrix, to select, merge and store (write, fsync).
With `--returning R` only R of the clients come back after their first round, and only they are in
measured rounds: 1,000 clients x 11 M then need 53 GB and not 132, and a measured round is the same.
Every N is a process of its own. Memory is its peak in those rounds beyond what it had at the start:
anonymous memory, which must be there, and all of RSS, with mapped files that the system may drop.
The C replies, C P 4 bytes, are in both.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

PARTS = ("load", "gram", "select", "merge", "store")
os.environ.setdefault("OMP_NUM_THREADS", "1")


def resident(what: str) -> int:
    """Return RssAnon, VmRSS or VmHWM in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


class Watch:
    """Wall-clock seconds by part; a part inside another is counted once, as itself."""

    def __init__(self):
        self.spent, self.open, self.since = Counter(), ["rest"], time.perf_counter()

    def turn(self):
        now = time.perf_counter()
        self.spent[self.open[-1]] += now - self.since
        self.since = now

    def timed(self, part, function):
        def inside(*args, **kwargs):
            self.turn()
            self.open.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.turn()
                self.open.pop()

        return inside


class Peak(threading.Thread):
    """The most anonymous memory, looked at every 5 ms; the kernel keeps no such number."""

    def __init__(self):
        super().__init__(daemon=True)
        self.most, self.over = 0, threading.Event()

    def run(self):
        while not self.over.wait(0.005):
            self.most = max(self.most, resident("RssAnon"))

    def __exit__(self, *_):
        self.over.set()
        self.join()

    def __enter__(self):
        self.start()
        return self


def watched(watch: Watch) -> None:
    """Time FedCDA's parts where they are called."""
    from fedbasin.core.archive import Archive
    from fedbasin.methods import fedcda
    from fedbasin.methods.parts.memory import Memory

    mapped = Archive.get

    def whole(self, client, round):
        vector = mapped(self, client, round)
        vector[:: os.sysconf("SC_PAGESIZE") // vector.element_size()].sum()  # read every page
        return vector

    Archive.get = watch.timed("load", whole)
    Archive.put = watch.timed("store", Archive.put)
    Memory.pick = watch.timed("merge", Memory.pick)
    Memory.let_go = watch.timed("merge", Memory.let_go)
    fedcda.gram = watch.timed("gram", fedcda.gram)
    fedcda.choose = watch.timed("select", fedcda.choose)


def forget_pages(folder: Path) -> None:
    """Drop the files from the page cache."""
    for path in folder.iterdir():
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def cell(clients: int, args: argparse.Namespace, folder: Path) -> dict:
    """Fill the archive, then measure rounds."""
    import torch
    from tqdm import tqdm

    from fedbasin.core.archive import Archive
    from fedbasin.core.method import Context
    from fedbasin.core.rng import root
    from fedbasin.core.vectors import Layout
    from fedbasin.methods import FedCDA
    from fedbasin.sim.allocator import hand_back_gaps, keep_freed_memory
    from fedbasin.testing import replies_of

    keep_freed_memory()  # as a run does
    torch.set_num_threads(1)
    watch = Watch()
    watched(watch)
    draws = torch.Generator().manual_seed(0)
    before = {what: resident(what) for what in ("RssAnon", "VmRSS")}
    server = 0.02 * torch.randn(args.parameters, generator=draws)
    noise = 0.01 * torch.randn(args.parameters, generator=draws)
    archive, number = Archive(folder), 0
    layout = Layout(("model",), ((args.parameters,),))
    context = Context(layout, clients, 10**6, root(0), archive=archive)
    fill = FedCDA(memory=args.memory, warmup=10**9, store="disk")
    state = fill.init(server, context)

    def one_round(method, cohort):
        nonlocal state, server, number
        models = torch.empty(len(cohort), args.parameters)
        for row in models:  # shifted, the same numbers are as good as new ones
            row.copy_(noise.roll(int(torch.randint(args.parameters, (), generator=draws))))
        models += server
        began = time.perf_counter()
        watch.since, watch.spent = began, Counter()
        replies = replies_of(models, clients=cohort)
        served, state = method.aggregate(state, server, replies, context.at(number, 0.1))
        watch.turn()
        archive.sweep()
        server, number = served.send, number + 1
        if number % 10 == 0:  # where a run writes a checkpoint
            hand_back_gaps()
        parts = {part: watch.spent[part] for part in (*PARTS, "rest")}
        return {"seconds": time.perf_counter() - began, **parts}

    def in_turn(some):
        """Return cohorts in which each of some clients comes once."""
        return [
            list(range(some))[begin : begin + args.cohort] for begin in range(0, some, args.cohort)
        ]

    returning = min(args.returning or clients, clients)
    cohorts = in_turn(clients) + in_turn(returning) * (args.memory - 1)
    began = time.perf_counter()
    for cohort in tqdm(cohorts, desc=f"fill, {clients} clients", mininterval=5):
        one_round(fill, cohort)
    filled = time.perf_counter() - began
    sizes = [path.stat().st_size for path in folder.iterdir()]
    assert len(sizes) == clients + returning * (args.memory - 1)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    pick, rounds = FedCDA(memory=args.memory, warmup=0, store="disk"), []
    with Peak() as peak:
        for _ in range(args.rounds):
            forget_pages(folder)
            cohort = torch.randperm(returning, generator=draws)[: args.cohort].tolist()
            rounds.append(one_round(pick, cohort))
    return {
        "clients": clients,
        "returning": returning,
        "bytes_on_disk": sum(sizes),
        "seconds_to_fill": filled,
        "peak_anonymous_bytes": peak.most - before["RssAnon"],
        "peak_resident_bytes": resident("VmHWM") - before["VmRSS"],
        "bytes_of_replies": 4 * args.cohort * args.parameters,
        "round": {k: statistics.median(r[k] for r in rounds) for k in rounds[0]},
        "rounds": rounds,
    }


def machine() -> dict:
    import torch

    return {
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 300], help="N")
    parser.add_argument("--memory", type=int, default=3, help="K, models kept of a client")
    parser.add_argument("--parameters", type=int, default=11_000_000, help="P")
    parser.add_argument("--cohort", type=int, default=10, help="C, clients in a round")
    parser.add_argument("--rounds", type=int, default=10, help="rounds that are measured")
    parser.add_argument("--returning", type=int, default=0, help="R, clients seen K times; 0: all")
    parser.add_argument("--folder", type=Path, default=None, help="where the files may lie")
    parser.add_argument("--out", type=Path, default=None, help="JSON of all numbers")
    parser.add_argument("--cell", type=int, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        sys.stdout.write(json.dumps(cell(args.cell, args, args.folder)) + "\n")
        return
    found = []
    for clients in args.clients:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            # What a round replaces is removed after it, so a cohort's models come on top.
            returning = min(args.returning or clients, clients)
            models = clients + returning * (args.memory - 1) + args.cohort
            need, free = 4 * args.parameters * models, shutil.disk_usage(folder).free
            if need > free:
                sys.exit(f"{clients} clients need {need / 1e9:.0f} GB, {free / 1e9:.0f} are free")
            shape = ("memory", "parameters", "cohort", "rounds", "returning")
            options = [f"--{name}={getattr(args, name)}" for name in shape]
            command = [sys.executable, __file__, f"--cell={clients}", f"--folder={folder}"]
            answer = subprocess.run(
                command + options, stdout=subprocess.PIPE, text=True, check=True
            )
            found.append(json.loads(answer.stdout))
            show(found[-1])
        if args.out:
            facts = {"memory": args.memory, "parameters": args.parameters, "cohort": args.cohort}
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(facts | machine() | {"cells": found}, indent=1) + "\n")


def show(line: dict) -> None:
    sizes = ("bytes_on_disk", "peak_anonymous_bytes", "peak_resident_bytes", "bytes_of_replies")
    gigabytes = ", ".join(f"{name} {line[name] / 1e9:.2f} GB" for name in sizes)
    seconds = ", ".join(f"{part} {spent:.2f}" for part, spent in line["round"].items())
    print(f"N = {line['clients']}: {gigabytes}\n  median round, seconds: {seconds}", flush=True)


if __name__ == "__main__":
    main()
