"""Every method with tuned settings, all under the same budget, on four problems.

    python benchmarks/evidence/tuned.py run OUT fmnist wisdm housing tail --jobs 16 --minutes 6
    python benchmarks/evidence/tuned.py table LINES...
    python benchmarks/evidence/tuned.py page        (docs/methods/evidence.md from results/)

The problems are fmnist (an MLP, 100 clients, Dirichlet(0.1)), wisdm (activities by person), housing
(a regression, clients by quantiles of the target) and tail (Fashion-MNIST with a long tail). All
methods of the catalogue that can run a problem run alone, but for rules against attackers and
noise for privacy; then the averagers (ima, wima, swa) run over FedAvg and over the eight methods
that are best on held-out rows. Each tries 8 settings with 2 tuning seeds, chosen by rows held out
from clients' training data; 5 fresh seeds of the chosen setting are scored on test rows. The
client's learning rate is tuned for all, and beside it what each method's card names.

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
from statistics import fmean

import torch

from fedbasin.core.catalogue import cards
from fedbasin.core.expressions import text
from fedbasin.core.record import Headline, RoundRecord, RunFolder, headline_of
from fedbasin.data import from_table, load
from fedbasin.experiment import Experiment
from fedbasin.experiment.checks import check_needs
from fedbasin.experiment.comparison import Cell, run_cell, slug
from fedbasin.experiment.config import (
    ConfigError,
    DataConfig,
    LocalConfig,
    PartitionConfig,
    SimConfig,
)
from fedbasin.experiment.objects import Objects
from fedbasin.report.page import say_difference, say_p
from fedbasin.report.paired import Difference, corrected, paired_difference
from fedbasin.report.runs import Run, headline_of_runs
from fedbasin.report.table import differences, mean_ranks, summarise
from fedbasin.report.verdict import verdict
from fedbasin.tuning import Request, read_over, tune
from fedbasin.tuning.search import Trial, numbered

AVERAGERS = ("ima", "wima", "swa")
# Rules against attackers, and noise for privacy: they give up score for what is not asked here.
NOT_ASKED = (
    *("bucketing", "bulyan", "centered_clipping", "krum", "median", "norm_bound", "rfa"),
    *("trimmed_mean", "dp"),
)
# Half of the methods average clients uniformly by default, and FedAvg does not: FedAvg with uniform
# weights is a row of its own, so that a method's gain can be told from that of its weights.
ALSO = ("fedavg(weighting='uniform')",)
MOST_AVERAGED = 8
RESULTS = Path(__file__).parent / "results"
MINUS = "\N{MINUS SIGN}"
PAGE = Path(__file__).parents[2] / "docs" / "methods" / "evidence.md"
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
    left_out = (*AVERAGERS, *NOT_ASKED)
    methods = [text(card.make()) for card in cards("method") if card.name not in left_out]
    chosen = []
    for method in (*methods, *ALSO):
        try:
            check_needs(replace(base, method=method).resolved())
        except ConfigError as error:
            print(f"{method} cannot run this problem: {error}")
            continue
        chosen.append(method)
    return chosen


def averaged(lines: list[dict], count: int = MOST_AVERAGED) -> list[str]:
    """Return the averagers over FedAvg and over the methods with the best validation scores."""
    best = {}
    for line in lines:
        if line["kind"] == "trial" and line["score"] is not None and not is_average(line["method"]):
            score = line["score"] if line["higher_is_better"] else -line["score"]
            best[line["method"]] = max(score, best.get(line["method"], score))
    bases = sorted(best, key=lambda method: -best[method])[:count]
    inside = ["", *(f"({method})" for method in bases if method != "fedavg")]
    return [f"{averager}{base}" for base in inside for averager in AVERAGERS]


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
        self.open = dict.fromkeys(args.problems, 0)  # methods that have not ended
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
            methods = self.args.methods.split(";") if self.args.methods else alone(base)
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
        self.open[task.problem] -= 1
        if self.open[task.problem] == 0 and not self.args.methods:
            for number, method in enumerate(averaged(self.lines[task.problem])):
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
        print(f"## {problem}\n")
        print(table_of([line for line in lines if line["problem"] == problem]))


def page(args: argparse.Namespace) -> None:
    """Write the tables of the page anew."""
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def with_tables(text: str) -> str:
    """Return a page whose marked places hold the tables of the lines in results/."""
    for problem in PROBLEMS:
        start, end = f"<!-- {problem} -->\n", f"<!-- end of {problem} -->"
        before, found, rest = text.partition(start)
        if found:
            lines = read([RESULTS / f"tuned_{problem}.jsonl"])
            text = before + start + table_of(lines) + end + rest.partition(end)[2]
    for name, made in (("all", overview), ("averages", averages)):
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, _, rest = text.partition(start)
        text = before + start + made() + end + rest.partition(end)[2]
    return text


def final_runs(problem: str) -> list[Run]:
    """Return the final runs of a problem from the lines in results/."""
    lines = read([RESULTS / f"tuned_{problem}.jsonl"])
    return [as_run(line) for line in lines if line["kind"] == "final"]


def overview() -> str:
    """Return the table of what each method alone gains over FedAvg, a column a problem."""
    titles = []
    gains: dict[str, list[str]] = {}
    for place, problem in enumerate(PROBLEMS):
        runs = final_runs(problem)
        headline = headline_of_runs(runs)
        unit = "points" if headline.unit == "%" else headline.words
        titles.append(f"`{problem}`, {unit}")
        for method, gap in differences(runs, "fedavg").items():
            if gap is None or is_average(method):
                continue
            gains.setdefault(method, [""] * len(PROBLEMS))[place] = marked(gap, headline)

    def order(method: str) -> tuple[int, int, str]:
        better = sum(cell.startswith("**") for cell in gains[method])
        worse = sum(cell.startswith("_") for cell in gains[method])
        return (-better, worse, method)

    lines = [f"| method | {' | '.join(titles)} |", f"|---|{'---|' * len(titles)}"]
    lines += [
        f"| `{method}` | {' | '.join(gains[method])} |" for method in sorted(gains, key=order)
    ]
    return "\n".join(lines) + "\n"


def averages() -> str:
    """Return the table of what averages over rounds gain over the method they average."""
    lines = [
        f"| problem | method alone | {' | '.join(f'`{name}`' for name in AVERAGERS)} |",
        f"|---|---|{'---|' * len(AVERAGERS)}",
    ]
    raised = dict.fromkeys(AVERAGERS, 0)
    seen = dict.fromkeys(AVERAGERS, 0)
    for problem in PROBLEMS:
        runs = final_runs(problem)
        headline = headline_of_runs(runs)
        scores: dict[str, dict[int, float]] = {}
        for run in runs:
            if run.records[0].metrics:
                scores.setdefault(run.method, {})[run.seed] = run.records[0].metrics[headline.name]
        found = {}
        for method, own in scores.items():
            inside = inside_of(method)
            if inside is not None:
                found[method] = paired_difference(own, scores[inside])
        gaps = corrected(found)
        for inside in dict.fromkeys(inside_of(method) for method in gaps):
            cells = []
            for averager in AVERAGERS:
                name = averager if inside == "fedavg" else f"{averager}({inside})"
                gap = gaps.get(name)
                cells.append(marked(gap, headline))
                seen[averager] += gap is not None
                raised[averager] += gap is not None and ahead(gap, headline)
            alone_score = headline.shown(fmean(scores[inside].values()))
            lines.append(f"| `{problem}` | `{inside}`: {alone_score} | {' | '.join(cells)} |")
    counts = [f"`{name}` {raised[name]} of {seen[name]}" for name in AVERAGERS]
    lines += ["", f"Means that are better than the method's own: {', '.join(counts)}."]
    return "\n".join(lines) + "\n"


def inside_of(method: str) -> str | None:
    """Return the method that an average is of; None for others."""
    if not is_average(method):
        return None
    return method.partition("(")[2].removesuffix(")") or "fedavg"


def ahead(gap: Difference, headline: Headline) -> bool:
    """Return whether a difference is an improvement."""
    return gap.mean != 0 and (gap.mean > 0) == headline.higher_is_better


def marked(gap: Difference | None, headline: Headline) -> str:
    """Write a mean difference: bold where seeds show it is better, italic where worse."""
    if gap is None:
        return ""
    told = gap.holm is not None and gap.holm < 0.05
    mark = ("**" if ahead(gap, headline) else "_") if told else ""
    mean = f"{headline.scale * gap.mean:+.{headline.digits}f}".replace("-", MINUS)
    return f"{mark}{mean}{mark}"


def table_of(lines: list[dict]) -> str:
    """Return the verdict and the table of one problem, as the page has them."""
    final = [line for line in lines if line["kind"] == "final"]
    runs = [as_run(line) for line in final]
    headline = headline_of_runs(runs)
    rows = {row.method: row for row in summarise(runs, None) if row.score is not None}
    gaps = differences(runs, "fedavg")
    ranks = mean_ranks(runs)
    sign = -1 if headline.higher_is_better else 1
    chosen = {line["method"]: line["setting"] for line in final}
    trials: dict[str, dict[int, dict]] = {}
    for line in lines:
        if line["kind"] == "trial":
            trials.setdefault(line["method"], {})[line["setting"]] = line
    said = [
        verdict(runs),
        "",
        f"| method | test {headline.title} | over fedavg | p (Holm) | rank | validation: default | "
        "chosen | setting |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for method, row in sorted(rows.items(), key=lambda item: sign * item[1].score):
        gap = gaps[method]
        score = headline.shown(row.score)
        if row.spread is not None:
            score += f" ± {headline.shown(row.spread)}"
        if row.diverged:
            score += f" ({row.diverged} of {row.seeds} seeds diverged)"
        default, best = (
            "diverged" if score is None else headline.shown(score)
            for score in (trials[method][n]["score"] for n in (0, chosen[method]))
        )
        p = "" if gap is None or gap.holm is None else say_p(gap.holm)
        rank = f"{ranks[method]:.1f}" if method in ranks else ""
        values = trials[method][chosen[method]]["values"].items()
        setting = ", ".join(f"{name.removeprefix('local.')}={value}" for name, value in values)
        gain = say_difference(gap, headline)
        said.append(
            f"| `{method}` | {score} | {gain} | {p} | {rank} | {default} | {best} | {setting} |"
        )
    lost = sorted(set(trials) - set(rows))
    if lost:
        said += ["", f"Diverged for every setting: {', '.join(lost)}."]
    return "\n".join(said) + "\n"


def as_run(line: dict) -> Run:
    """Return a final run as reports take it: its score is its only record."""
    metrics = {} if line["score"] is None else {line["headline"]: line["score"]}
    summary = {name: line[name] for name in ("headline", "higher_is_better")}
    return Run(
        label=line["method"],
        seed=line["seed"],
        records=(RoundRecord(round=1, metrics=metrics),),
        seconds=line["seconds"],
        status=line["status"],
        method=line["method"],
        summary=summary | {"headline_unit": line["unit"]},
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    runs = commands.add_parser("run", help="tune and run the methods of problems")
    runs.set_defaults(do=run)
    runs.add_argument("out", type=Path)
    runs.add_argument("problems", nargs="+", choices=list(PROBLEMS))
    runs.add_argument("--methods", default="", help="only these, separated by semicolons")
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
    written = commands.add_parser("page", help="write the tables of docs/methods/evidence.md anew")
    written.set_defaults(do=page)
    args = parser.parse_args()
    args.do(args)


if __name__ == "__main__":
    main()
