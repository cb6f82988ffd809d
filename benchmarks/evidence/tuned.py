"""Every method with tuned settings, all under the same budget, on four problems.

    python benchmarks/evidence/tuned.py run OUT PROBLEM --jobs 16 --piece 1/2 --minutes 9
    python benchmarks/evidence/tuned.py run OUT PROBLEM --averaged LINES... --jobs 16
    python benchmarks/evidence/tuned.py table LINES...

PROBLEM is fmnist (an MLP, 100 clients, Dirichlet(0.1)), wisdm (activities by person), housing (a
regression, clients by quantiles of the target) or tail (Fashion-MNIST with a long tail). Each
method tries 8 settings with 2 tuning seeds, chosen by rows held out from clients' training data;
5 fresh seeds of the chosen setting are scored on test rows. The client's learning rate is tuned
for all, and beside it what each method's card names.

The first command runs all methods of the catalogue alone, or a piece of them; pieces may run on
different machines, since a method's settings do not depend on the other methods. The second runs
the averagers (ima, wima, swa) over the eight methods that are best on held-out rows. Both go on
where they were stopped, stop by themselves after `--minutes`, and write what is finished to
OUT/PROBLEM-....jsonl: a line for each setting and one for each final run. The third prints the
table and the verdict of each problem from such lines.

Fashion-MNIST and the tables are read from the mirror that FEDBASIN_DATA names.
"""

import argparse
import json
import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

from fedbasin.core.catalogue import cards
from fedbasin.core.expressions import text
from fedbasin.core.record import RunFolder, headline_of
from fedbasin.data import from_table
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
from fedbasin.experiment.runs import run_cells
from fedbasin.report.paired import corrected, paired_difference
from fedbasin.sim import Interrupted
from fedbasin.tune import Request, read_over, tune
from fedbasin.tune.search import Trial, numbered

AVERAGERS = ("ima", "wima", "swa")
SIM = SimConfig(participation="count(clients=10)", checkpoint_every=1000, evaluate_every=5)
MOST_AVERAGED = 8


def fmnist() -> tuple[Experiment, str]:
    """Label skew on images: 100 clients of about 600 rows, 10 a round."""
    return Experiment(
        model="mlp(widths=(64,))",
        rounds=40,
        data=DataConfig(name="fashion-mnist", proxy_per_class=10),
        partition=PartitionConfig(how="dirichlet(alpha=0.1, minimum=2)", clients=100),
        local=LocalConfig(lr=0.05, epochs=1, batch=50, clip=10.0),
        sim=SIM,
    ), "local.lr=0.01..1"


def tail() -> tuple[Experiment, str]:
    """A long tail, imbalance 0.05, and label skew: 100 clients of equal size, 10 a round."""
    base, _ = fmnist()
    return replace(
        base,
        data=replace(base.data, imbalance=0.05),
        partition=replace(base.partition, how="client_dirichlet(alpha=0.1)"),
        local=replace(base.local, epochs=3),
    ), "local.lr=0.01..1"


def wisdm() -> tuple[Experiment, str]:
    """Activities of 36 people, a person a client, 10 a round."""
    folder = mirror() / "local/wisdm-activity/transformed"
    train, test = (next(folder.glob(f"{split}-*.parquet")) for split in ("train", "test"))
    data = from_table(train, "activity", "user", test=test, name="wisdm")
    return Experiment(
        model="mlp(widths=(64,))",
        rounds=40,
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
        rounds=40,
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


def alone(base: Experiment) -> list[str]:
    """Return every method of the catalogue that can run the problem, without the averagers."""
    chosen = []
    for card in cards("method"):
        if card.name in AVERAGERS:
            continue
        method = text(card.make())
        try:
            check_needs(replace(base, method=method).resolved())
        except ConfigError as error:
            print(f"{method} cannot run this problem: {error}")
            continue
        chosen.append(method)
    return chosen


def averaged(files: list[Path], problem: str) -> list[str]:
    """Return the averagers over the methods with the best validation scores."""
    best = {}
    for line in read(files):
        if line["problem"] == problem and line["kind"] == "trial" and line["score"] is not None:
            sign = 1 if line["higher_is_better"] else -1
            score = sign * line["score"]
            best[line["method"]] = max(score, best.get(line["method"], score))
    named = {m: s for m, s in best.items() if not m.startswith(tuple(f"{a}(" for a in AVERAGERS))}
    bases = sorted(named, key=lambda method: -named[method])[:MOST_AVERAGED]
    if not bases:
        sys.exit(f"the lines hold no setting of {problem}: run the methods alone first")
    print("averaged:", ", ".join(bases))
    inside = {method: "" if method == "fedavg" else f"({method})" for method in bases}
    return [f"{averager}{inside[method]}" for averager in AVERAGERS for method in bases]


def request_of(args: argparse.Namespace) -> Request:
    base, rate = PROBLEMS[args.problem]()
    if args.rounds:
        base = replace(base, rounds=args.rounds)
    over = [rate]
    methods = averaged(args.averaged, args.problem) if args.averaged else alone(base)
    if args.averaged:  # windows longer than the run are all alike
        over.append(f"wima.window=2..{base.rounds}")
    if args.methods:
        wanted = args.methods.split(";")
        methods = [method for method in methods if method in wanted]
    part, parts = (int(number) for number in args.piece.split("/"))
    if not 1 <= part <= parts:
        sys.exit(f"--piece is {args.piece}: write 1/2 for the first of two pieces")
    methods = methods[part - 1 :: parts]
    if args.averaged and not any(method.startswith("wima") for method in methods):
        over.pop()
    seeds = {"tuning_seeds": args.tuning_seeds, "final_seeds": args.final_seeds}
    return Request(base, tuple(methods), read_over(over), budget=args.budget, **seeds)


def run(args: argparse.Namespace) -> None:
    request = request_of(args)
    kind = "averaged" if args.averaged else "alone"
    folder = args.out / args.problem
    end = threading.Timer(60 * args.minutes, os.kill, (os.getpid(), signal.SIGINT))
    end.daemon = True
    end.start()
    print(f"{len(request.methods)} methods: {', '.join(request.methods)}", flush=True)
    finished = False
    try:
        tune(request, folder, lambda cells: run_cells(cells, jobs=args.jobs))
        finished = True
    except (KeyboardInterrupt, Interrupted):
        print(f"stopped after {args.minutes:g} minutes: give the same command to go on")
    finally:
        end.cancel()
    name = f"{args.problem}-{kind}-{args.piece.replace('/', 'of')}.jsonl"
    lines = [line for method in request.methods for line in lines_of(args, request, folder, method)]
    (args.out / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    seconds = sum(line["seconds"] for line in lines)
    print(f"{args.out / name}: {len(lines)} lines, {seconds / 60:.1f} core-minutes of runs")
    if not finished:
        sys.exit(3)


def lines_of(args: argparse.Namespace, request: Request, folder: Path, method: str) -> list[dict]:
    """Return a line for each finished setting of a method, and one for each final run."""
    lines = []
    for trial in numbered(request, method, request.budget):
        values = tuple(trial.values.values())
        common = {"problem": args.problem, "method": method, "setting": trial.number}
        cells = [
            request.tuning_cell(folder, method, trial.number, values, seed)
            for seed in range(request.tuning_seeds)
        ]
        found = [ended(cell.path) for cell in cells]
        if all(found):
            lines.append(common | {"kind": "trial", "values": trial.values} | scored(trial, found))
        for seed in range(request.final_seeds):
            cell = request.final_cell(folder, method, trial.number, values, seed)
            if summary := ended(cell.path):
                lines.append(
                    common
                    | {"kind": "final", "seed": seed, "tuned": cell.experiment.method}
                    | {"score": score_of(summary), "seconds": summary["seconds"]}
                    | {key: summary[key] for key in ("status", "device", "commit", "headline")}
                    | {"unit": summary["headline_unit"]}
                    | {"higher_is_better": summary["higher_is_better"]}
                )
    return lines


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
        "seconds": sum(summary["seconds"] for summary in found),
        "higher_is_better": found[0]["higher_is_better"],
        "scored_on": found[0]["scored_on"],
    }


def read(files: list[Path]) -> list[dict]:
    """Read lines; one that several files hold counts once."""
    lines = {}
    for file in files:
        for text_line in file.read_text().splitlines():
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
    one = commands.add_parser("run", help="tune and run the methods of a problem")
    one.set_defaults(do=run)
    one.add_argument("out", type=Path)
    one.add_argument("problem", choices=list(PROBLEMS))
    one.add_argument("--piece", default="1/1", help="1/3: the first third of the methods")
    one.add_argument("--methods", default="", help="expressions, separated by semicolons")
    one.add_argument("--averaged", type=Path, nargs="*", default=[], help="lines of methods alone")
    one.add_argument("--minutes", type=float, default=1e6, help="when to stop")
    one.add_argument("--jobs", type=int, default=2)
    one.add_argument("--budget", type=int, default=8)
    one.add_argument("--tuning-seeds", type=int, default=2)
    one.add_argument("--final-seeds", type=int, default=5)
    one.add_argument("--rounds", type=int, default=0, help="for a trial; 0: the problem's own")
    other = commands.add_parser("table", help="print tables from lines")
    other.set_defaults(do=table)
    other.add_argument("lines", type=Path, nargs="+")
    args = parser.parse_args()
    args.do(args)


if __name__ == "__main__":
    main()
