"""Every method with tuned settings, all under the same budget, on four problems.

    python benchmarks/evidence/tuned.py run OUT fmnist wisdm housing tail --jobs 16 --minutes 6
    python benchmarks/evidence/tuned.py table LINES...

The problems are fmnist (an MLP, 100 clients, Dirichlet(0.1)), wisdm (activities by person), housing
(a regression, clients by quantiles of the target) and tail (Fashion-MNIST with a long tail). All
methods of the catalogue that can run a problem run alone, but for rules against attackers and
noise for privacy; then the averagers (ima, wima, swa) run over the eight of them that are best on
held-out rows. Each tries 8 settings with 2 tuning seeds, chosen by rows held out from clients'
training data; 5 fresh seeds of the chosen setting are scored on test rows. The client's learning
rate is tuned for all, and beside it what each method's card names.

Written down before the first run. A run of FedAvg costs 2 to 5 seconds of a core, others up to
three times as much, and a problem has about 60 methods with 21 runs each. At hand were 16 cores for
about six minutes, and little beside it. So the network is an MLP of 64 units everywhere, fmnist has
40 rounds and the others 30, and problems run in the order above until the time is over. Settings
tried and seeds are the same everywhere: what does not fit is left out as a whole method, and the
page says which.

OUT/PROBLEM.jsonl gets a line for each setting and each final run as soon as a method is finished;
its run folders are then deleted. The same command goes on where it was stopped, also from a copy of
these lines alone.

Fashion-MNIST and the tables are read from the mirror that FEDBASIN_DATA names.
"""

import argparse
import heapq
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev

import torch

from fedbasin.core.catalogue import cards
from fedbasin.core.expressions import text
from fedbasin.core.record import RunFolder, headline_of
from fedbasin.data import from_table, load
from fedbasin.experiment import Experiment
from fedbasin.experiment.checks import check_needs
from fedbasin.experiment.config import (
    ConfigError,
    DataConfig,
    LocalConfig,
    PartitionConfig,
    SimConfig,
)
from fedbasin.experiment.objects import Objects
from fedbasin.experiment.runs import Cell, run_cell, slug
from fedbasin.report.paired import corrected, paired_difference
from fedbasin.tune import Request, read_over, tune
from fedbasin.tune.search import Trial, numbered

AVERAGERS = ("ima", "wima", "swa")
# Rules against attackers, and noise for privacy: they give up score for what is not asked here.
NOT_ASKED = (
    *("bucketing", "bulyan", "centered_clipping", "krum", "median", "norm_bound", "rfa"),
    *("trimmed_mean", "dp"),
)
MOST_AVERAGED = 8
SIM = SimConfig(
    participation="count(clients=10)", checkpoint_every=1000, evaluate_every=5, device="cpu"
)


def fmnist() -> tuple[Experiment, str]:
    """Label skew on images: 100 clients of about 600 rows, 10 a round."""
    return Experiment(
        model="mlp(widths=(64,))",
        rounds=40,
        data=DataConfig(name="fashion-mnist", proxy_per_class=10),
        partition=PartitionConfig(how="dirichlet(alpha=0.1, minimum=2)", clients=100),
        local=LocalConfig(lr=0.05, epochs=1, batch=50, clip=10.0),
        sim=replace(SIM, executor="loop"),  # clients of very different size fill no matrix
    ), "local.lr=0.01..1"


def tail() -> tuple[Experiment, str]:
    """A long tail, imbalance 0.05, and label skew: 100 clients of equal size, 10 a round."""
    base, _ = fmnist()
    return replace(
        base,
        rounds=30,
        data=replace(base.data, imbalance=0.05),
        partition=replace(base.partition, how="client_dirichlet(alpha=0.1)"),
        local=replace(base.local, epochs=2),
        sim=SIM,
    ), "local.lr=0.01..1"


def wisdm() -> tuple[Experiment, str]:
    """Activities of 36 people, a person a client, 10 a round."""
    folder = mirror() / "local/wisdm-activity/transformed"
    train, test = (next(folder.glob(f"{split}-*.parquet")) for split in ("train", "test"))
    data = from_table(train, "activity", "user", test=test, name="wisdm")
    return Experiment(
        model="mlp(widths=(64,))",
        rounds=30,
        data=DataConfig(name=data.name, proxy_per_class=5),
        partition=PartitionConfig(how="natural", clients=0),
        local=LocalConfig(lr=0.05, epochs=2, batch=20, clip=10.0),
        sim=SIM,
        objects=Objects(data),
    ), "local.lr=0.01..1"


def housing() -> tuple[Experiment, str]:
    """House prices in 100,000 dollars: 50 clients whose prices differ, 10 a round."""
    import pyarrow.compute as compute
    import pyarrow.parquet as parquet

    folder = mirror() / "local/california-housing/data"
    tables = []
    for split in ("train", "test"):
        table = parquet.read_table(next(folder.glob(f"{split}-*.parquet")))
        place = table.column_names.index("median_house_value")
        price = compute.divide(compute.cast(table["median_house_value"], "float64"), 1e5)
        tables.append(table.set_column(place, "median_house_value", price))
    data = from_table(
        tables[0], "median_house_value", test=tables[1], classes=False, name="housing"
    )
    return Experiment(
        model="mlp(widths=(64,))",
        task="regression",
        rounds=30,
        data=DataConfig(name=data.name, proxy_rows=100),
        partition=PartitionConfig(how="quantiles(dirichlet(alpha=0.3), bins=10)", clients=50),
        local=LocalConfig(lr=0.02, epochs=1, batch=32, clip=10.0),
        sim=SIM,
        objects=Objects(data),
    ), "local.lr=0.003..0.3"


PROBLEMS = {"fmnist": fmnist, "wisdm": wisdm, "housing": housing, "tail": tail}


def mirror() -> Path:
    """Return the folder of the data."""
    if "FEDBASIN_DATA" not in os.environ:
        sys.exit("set FEDBASIN_DATA to a mirror of the data")
    return Path(os.environ["FEDBASIN_DATA"])


@cache
def problem_of(name: str) -> tuple[Experiment, str]:
    """Return a problem, read once in each process."""
    return PROBLEMS[name]()


def alone(base: Experiment) -> list[str]:
    """Return every method of the catalogue that can run the problem, without the averagers."""
    chosen = []
    for card in cards("method"):
        if card.name in (*AVERAGERS, *NOT_ASKED):
            continue
        method = text(card.make())
        try:
            check_needs(replace(base, method=method).resolved())
        except ConfigError as error:
            print(f"{method} cannot run this problem: {error}")
            continue
        chosen.append(method)
    return chosen


def averaged(lines: list[dict], count: int = MOST_AVERAGED) -> list[str]:
    """Return the averagers over the methods with the best validation scores."""
    best = {}
    for line in lines:
        if line["kind"] == "trial" and line["score"] is not None and not is_average(line["method"]):
            score = line["score"] if line["higher_is_better"] else -line["score"]
            best[line["method"]] = max(score, best.get(line["method"], score))
    bases = sorted(best, key=lambda method: -best[method])[:count]
    inside = {method: "" if method == "fedavg" else f"({method})" for method in bases}
    return [f"{averager}{inside[method]}" for method in bases for averager in AVERAGERS]


def is_average(method: str) -> bool:
    return method.split("(")[0] in AVERAGERS


@dataclass(order=True)
class Task:
    """One method on one problem; those with the smallest place are begun first."""

    place: tuple[int, int, int]
    problem: str = field(compare=False)
    method: str = field(compare=False)


class Comparison:
    """Runs methods side by side: each is tuned by itself, and all share the processes.

    A method's settings do not depend on the other methods, so this is one tuned comparison.
    """

    def __init__(self, args: argparse.Namespace, pool: ProcessPoolExecutor) -> None:
        self.args = args
        self.pool = pool
        self.lines = {name: read([self.file(name)]) for name in args.problems}
        self.waiting: list[Task] = []
        self.open = dict.fromkeys(args.problems, 0)  # methods alone that have not ended
        self.running = 0
        self.changed = threading.Condition()
        self.ends = time.monotonic() + 60 * args.minutes

    def file(self, problem: str) -> Path:
        return self.args.out / f"{problem}.jsonl"

    def base(self, problem: str) -> tuple[Experiment, str]:
        base, rate = problem_of(problem)
        return (replace(base, rounds=self.args.rounds) if self.args.rounds else base), rate

    def run(self) -> bool:
        """Run all methods; return whether all have ended in time."""
        for place, problem in enumerate(self.args.problems):
            base, _ = self.base(problem)
            methods = [method for method in alone(base) if self._is_wanted(method)]
            for number, method in enumerate(methods):
                heapq.heappush(self.waiting, Task((place, 0, number), problem, method))
            self.open[problem] = len(methods)
        threads = [
            threading.Thread(target=self._work, daemon=True) for _ in range(self.args.side_by_side)
        ]
        for thread in threads:
            thread.start()
        with self.changed:
            while (self.waiting or self.running) and (left := self.ends - time.monotonic()) > 0:
                self.changed.wait(min(left, 1.0))
            return not self.waiting and not self.running

    def _is_wanted(self, method: str) -> bool:
        return not self.args.methods or method in self.args.methods.split(";")

    def _work(self) -> None:
        while True:
            with self.changed:
                while not self.waiting:
                    if not self.running:
                        return
                    self.changed.wait(1.0)
                task = heapq.heappop(self.waiting)
                self.running += 1
            error = None
            lines: list[dict] = []
            try:
                if not self._is_complete(task):
                    lines = self._tuned(task)
            except (BrokenProcessPool, CancelledError):
                return  # the time is over
            except Exception as problem:  # one method's failure leaves the others alone
                error = problem
            with self.changed:
                self._ended(task, lines, error)
                self.running -= 1
                self.changed.notify_all()

    def _is_complete(self, task: Task) -> bool:
        own = [line for line in self.lines[task.problem] if line["method"] == task.method]
        final = sum(line["kind"] == "final" for line in own)
        failed = [line for line in own if line["kind"] == "trial" and line["score"] is None]
        return final >= self.args.final_seeds or len(failed) >= self.args.budget

    def _tuned(self, task: Task) -> list[dict]:
        """Tune one method and run its final seeds."""
        base, rate = self.base(task.problem)
        over = [rate]
        if task.method.startswith("wima"):  # windows longer than the run are all alike
            over.append(f"wima.window=2..{base.rounds}")
        request = Request(
            base,
            (task.method,),
            read_over(over),
            budget=self.args.budget,
            tuning_seeds=self.args.tuning_seeds,
            final_seeds=self.args.final_seeds,
        )
        folder = self.args.out / task.problem / slug(task.method)

        def run_all(cells: list[Cell]) -> None:
            begun = [self.pool.submit(one, task.problem, c.without_data()) for c in cells]
            for each in begun:
                each.result()

        tune(request, folder, run_all)
        lines = list(lines_of(task.problem, request, folder, task.method))
        shutil.rmtree(folder)
        return lines

    def _ended(self, task: Task, lines: list[dict], error: Exception | None) -> None:
        """Write a method's lines; begin the averages of a problem when its last one has ended."""
        if error is not None:
            print(f"{task.problem} {task.method}: {type(error).__name__}: {error}", flush=True)
        if lines:
            self.lines[task.problem] += lines
            with self.file(task.problem).open("a") as file:
                file.write("".join(json.dumps(line) + "\n" for line in lines))
            spent = sum(line["seconds"] for line in lines)
            left = (self.ends - time.monotonic()) / 60
            print(f"{task.problem} {task.method}: {spent:.0f} s, {left:.1f} min left", flush=True)
        if not is_average(task.method):
            self.open[task.problem] -= 1
            if self.open[task.problem] == 0 and not self.args.no_averages:
                for number, method in enumerate(averaged(self.lines[task.problem])):
                    if not self._is_wanted(method):
                        continue
                    place = (task.place[0], 1, number)
                    heapq.heappush(self.waiting, Task(place, task.problem, method))


def one(problem: str, cell: Cell) -> None:
    """Run one cell in a process of the pool."""
    data = problem_of(problem)[0].objects.data
    objects = replace(cell.experiment.objects, data=data)
    run_cell(replace(cell, experiment=replace(cell.experiment, objects=objects)))


def prepare() -> None:
    """Prepare a process of the pool."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def run(args: argparse.Namespace) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    for problem in args.problems:
        base, _ = problem_of(problem)
        if base.objects.data is None:  # decoded once, before many processes want it
            load(base.data.name)
    pool = ProcessPoolExecutor(args.jobs, get_context("spawn"), initializer=prepare)
    comparison = Comparison(args, pool)
    finished = comparison.run()
    with comparison.changed:  # no line is half written
        if not finished:
            print(f"stopped after {args.minutes:g} minutes: give the same command to go on")
        for process in (pool._processes or {}).values():
            process.kill()  # unfinished runs start again
        sys.stdout.flush()
        os._exit(0 if finished else 3)


def lines_of(problem: str, request: Request, folder: Path, method: str) -> Iterator[dict]:
    """Yield a line for each finished setting of a method, and one for each final run."""
    for trial in numbered(request, method, request.budget):
        values = tuple(trial.values.values())
        common = {"problem": problem, "method": method, "setting": trial.number}
        cells = [
            request.tuning_cell(folder, method, trial.number, values, seed)
            for seed in range(request.tuning_seeds)
        ]
        found = [ended(cell.path) for cell in cells]
        if all(found):
            yield common | {"kind": "trial", "values": trial.values} | scored(trial, found)
        for seed in range(request.final_seeds):
            cell = request.final_cell(folder, method, trial.number, values, seed)
            if summary := ended(cell.path):
                yield (
                    common
                    | {"kind": "final", "seed": seed, "tuned": cell.experiment.method}
                    | {"score": score_of(summary), "seconds": round(summary["seconds"], 2)}
                    | {key: summary[key] for key in ("status", "device", "commit", "headline")}
                    | {"unit": summary["headline_unit"]}
                    | {"higher_is_better": summary["higher_is_better"]}
                )


def ended(path: Path) -> dict:
    """Return the summary of a run that has ended; empty where it has not."""
    folder = RunFolder(path)
    summary = folder.read_summary() if folder.summary.exists() else {}
    return summary if summary.get("status") in ("finished", "diverged") else {}


def score_of(summary: dict) -> float | None:
    """Return the score of a run; None where it diverged."""
    if summary["status"] == "diverged":
        return None
    return summary[f"{headline_of(summary).name}_mean_last10"]


def scored(trial: Trial, found: list[dict]) -> dict:
    """Return the validation scores of a setting, and what they are scores of."""
    scores = tuple(score_of(summary) for summary in found)
    trial = replace(trial, scores=scores)
    return {
        "score": trial.score,
        "scores": scores,
        "seconds": round(sum(summary["seconds"] for summary in found), 2),
        "higher_is_better": found[0]["higher_is_better"],
        "scored_on": found[0]["scored_on"],
    }


def read(files: list[Path]) -> list[dict]:
    """Read lines; one that several files hold counts once."""
    lines = {}
    for file in files:
        for text_line in file.read_text().splitlines() if file.exists() else ():
            line = json.loads(text_line)
            key = (line["problem"], line["method"], line["kind"], line["setting"], line.get("seed"))
            lines[key] = line
    return list(lines.values())


def table(args: argparse.Namespace) -> None:
    """Print the table and the verdict of each problem."""
    lines = read(args.lines)
    for problem in dict.fromkeys(line["problem"] for line in lines):
        own = [line for line in lines if line["problem"] == problem]
        print(f"## {problem}\n")
        print_table(own)


def print_table(lines: list[dict]) -> None:
    final = [line for line in lines if line["kind"] == "final"]
    higher = lines[0]["higher_is_better"]
    scale = 100 if final and final[0]["unit"] == "%" else 1
    digits = 1 if scale == 100 else 3
    scores: dict[str, dict[int, float]] = {}
    for line in final:
        if line["score"] is not None:
            scores.setdefault(line["method"], {})[line["seed"]] = line["score"]
    gaps = corrected(
        {
            method: paired_difference(own, scores.get("fedavg", {}), higher_is_better=higher)
            for method, own in scores.items()
            if method != "fedavg"
        }
    )
    order = sorted(scores, key=lambda m: fmean(scores[m].values()) * (-1 if higher else 1))
    print("| method | tuned | over fedavg | p (Holm) | seeds | validation: default | chosen | by |")
    print("|---|---|---|---|---|---|---|---|")
    for method in order:
        own = list(scores[method].values())
        spread = f" ± {scale * stdev(own):.{digits}f}" if len(own) > 1 else ""
        gap = gaps.get(method)
        said, p = "", ""
        if gap is not None and gap.low is not None and gap.high is not None:
            ends = f"{scale * gap.low:+.{digits}f}, {scale * gap.high:+.{digits}f}"
            said = f"{scale * gap.mean:+.{digits}f} [{ends}]"
            p = f"{gap.holm:.2g}"
        tried = [line for line in lines if line["kind"] == "trial" and line["method"] == method]
        number = next(line["setting"] for line in final if line["method"] == method)
        by_number = {line["setting"]: line for line in tried}
        validation = [
            f"{scale * by_number[n]['score']:.{digits}f}"
            if n in by_number and by_number[n]["score"] is not None
            else "diverged"
            for n in (0, number)
        ]
        values = by_number[number]["values"] if number in by_number else {}
        chosen = ", ".join(f"{name}={value}" for name, value in values.items())
        print(
            f"| `{method}` | {scale * fmean(own):.{digits}f}{spread} | {said} | {p} | {len(own)} | "
            f"{validation[0]} | {validation[1]} | {chosen} |"
        )
    lost = {line["method"] for line in lines} - set(scores)
    if lost:
        print(f"\nWithout a final score: {', '.join(sorted(lost))}.")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    runs = commands.add_parser("run", help="tune and run the methods of problems")
    runs.set_defaults(do=run)
    runs.add_argument("out", type=Path)
    runs.add_argument("problems", nargs="+", choices=list(PROBLEMS))
    runs.add_argument("--methods", default="", help="expressions, separated by semicolons")
    runs.add_argument("--no-averages", action="store_true", help="methods alone")
    runs.add_argument("--minutes", type=float, default=1e6, help="when to stop")
    runs.add_argument("--jobs", type=int, default=2)
    runs.add_argument("--side-by-side", type=int, default=5, help="methods in progress at once")
    runs.add_argument("--budget", type=int, default=8)
    runs.add_argument("--tuning-seeds", type=int, default=2)
    runs.add_argument("--final-seeds", type=int, default=5)
    runs.add_argument("--rounds", type=int, default=0, help="for a trial; 0: the problem's own")
    other = commands.add_parser("table", help="print tables from lines")
    other.set_defaults(do=table)
    other.add_argument("lines", type=Path, nargs="+")
    args = parser.parse_args()
    args.do(args)


if __name__ == "__main__":
    main()
