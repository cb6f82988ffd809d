"""What hostile clients and noise cost each way of merging, on Fashion-MNIST.

    python benchmarks/evidence/trust.py robust alie methods tff noise bucketing
                                                         runs what is missing
    python benchmarks/evidence/trust.py --table          prints the tables
    python benchmarks/evidence/trust.py --page docs/methods/trust.md    writes them into the page

Needs FEDBASIN_DATA (zalando-datasets/fashion_mnist, for alie ylecun/mnist too); epsilon needs
`pip install 'fedbasin[dp]'`.
One line a run goes to benchmarks/evidence/results/trust_SETTING.jsonl as soon as it has ended, and
what has a line is not run again. Nothing is chosen on the rows that are scored: rates, clips and
attacks were written down before the first run; rounds and cells were cut for time alone.

    robust      rules and attacks at momentum 0 and 0.9 of the clients, IID rows, one step a round
    alie        the same rules under ALIE, with more steps: as the authors on MNIST, and IID rows
    bucketing   the same rules on clients that hold one or two classes, with and without buckets
    methods     ways to merge under attack, alone and over a robust rule, five steps a round
    noise       ways to merge where every client clips and adds noise
    tff         client-level privacy by the noise, as in TFF's tutorial, and averages around it
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

from fedbasin.experiment import from_mapping, run

RESULTS = Path(__file__).parent / "results"
SEEDS = (0, 1, 2)
CLIENTS = 25
BAD = 5  # of them, where nothing else is said
CROWD = 11  # of them, with IPM on IID rows

PLAIN = "fedavg(weighting='uniform')"
KEPT = "kept_momentum(beta=0.9)"
SORTED = "shards(per_client=1)"  # every client holds one or two classes
ATTACKS = ("none", "sign_flip", "alie", "ipm")
# Ways to merge, alone and over a rule: the name in the tables and the expression.
METHODS = {
    "fedavg": PLAIN,
    "ima": f"ima({PLAIN})",
    "wima": f"wima({PLAIN}, window=10)",
    "fedlaw": "fedlaw",
    "fedcda": "fedcda",
    "scaffold": "scaffold",
    "median": "median",
    "fedcda(merge=median)": "fedcda(merge=median)",
    "norm_bound(fedlaw)": "norm_bound(fedlaw)",
    "norm_bound(scaffold)": "norm_bound(scaffold)",
}


class Cell(NamedTuple):
    """One run: what its line is found by, and what is run."""

    setting: str
    method: str  # as the tables call it
    attack: str
    case: str  # what else differs: momentum, buckets or noise
    seed: int
    experiment: dict


def of_rules(hostile: int, replies: int, momentum: float, lr: float = 0.05) -> dict[str, str]:
    """Return the robust rules for so many hostile ones among the replies.

    Centered clipping has the paper's tau for MNIST (10, three passes) times the learning rate.
    """
    share = round((hostile + 0.2) / replies, 4)  # rounded down it gives the number again
    local = f"local={KEPT}" if momentum else ""

    def rule(name: str, *arguments: str) -> str:
        return f"{name}({', '.join(filter(None, (*arguments, local)))})"

    return {
        "mean": rule("fedavg", "weighting='uniform'"),
        "median": rule("median"),
        "krum": rule("krum", f"hostile={share}", "keep=1"),
        "rfa": rule("rfa"),
        "centered_clipping": rule("centered_clipping", f"tau={10 * lr:g}", "iterations=3"),
    }


SMALL = {"model": "mlp(widths=(16,))"}  # with batches of 16, of all settings but robust


def settings(method: str, seed: int, attack: str, bad: int, **changes: object) -> dict:
    """Return an experiment on Fashion-MNIST."""
    made = {
        "method": method,
        "seed": seed,
        "rounds": 100,
        "model": "mlp(widths=(32,))",
        "data": {"name": "fashion-mnist"},
        "partition": {"how": "iid", "clients": CLIENTS},
        "local": {"lr": 0.05, "steps": 1, "batch": 32},
        "sim": {
            "participation": "fraction(rate=1.0)",
            "device": "cpu",
            "evaluate_every": 1000,
            "evaluate_last": 5,
            "checkpoint_every": 10_000,
        },
    }
    for section, change in changes.items():
        made[section] = {**made[section], **change} if isinstance(change, dict) else change
    if attack != "none":
        made["attack"] = attack
        made["partition"] = {**made["partition"], "hostile": bad / CLIENTS}
    return made


def robust() -> Iterator[Cell]:
    """Yield rule x attack x momentum, on IID rows."""
    for seed in SEEDS:
        for momentum in (0.0, 0.9):
            for attack in ATTACKS:
                bad = CROWD if attack == "ipm" else BAD
                for name, method in of_rules(bad, CLIENTS, momentum).items():
                    made = settings(method, seed, attack, bad)
                    yield Cell("robust", name, attack, f"momentum {momentum:g}", seed, made)


def alie() -> Iterator[Cell]:
    """Yield rules under ALIE at the paper's z, and at 1.5, with more steps than `robust` has.

    One case is the MNIST setting of Karimireddy et al. (sorted labels, momentum 0.9, rate 0.01, 600
    steps), the other their CIFAR-10 setting (IID rows, momentum 0, rate 0.1) on Fashion-MNIST.
    """
    mnist = {"rounds": 600, "data": {"name": "mnist"}, "partition": {"how": SORTED}}
    iid = {"rounds": 1000}
    for seed in SEEDS:
        for case, momentum, lr, changes in (
            ("MNIST, sorted labels, momentum 0.9", 0.9, 0.01, mnist),
            ("Fashion-MNIST, IID, momentum 0", 0.0, 0.1, iid),
        ):
            for attack in ("none", "alie", *(("alie(z=1.5)",) if changes is iid else ())):
                for name, method in of_rules(BAD, CLIENTS, momentum, lr).items():
                    if changes is iid and name in ("krum", "centered_clipping"):
                        continue  # for time
                    made = settings(method, seed, attack, BAD, **changes, local={"lr": lr})
                    yield Cell("alie", name, attack, case, seed, made)


def bucketing() -> Iterator[Cell]:
    """Yield rule x attack with and without buckets, where clients hold one or two classes."""
    for seed in SEEDS:
        for attack in ("none",):
            for size in (1, 2):
                replies = -(-CLIENTS // size)
                for name, method in of_rules(BAD, replies, 0.9).items():
                    if name == "centered_clipping":
                        continue
                    around = f"bucketing({method}, size=2)" if size == 2 else method
                    rows = {"how": SORTED}
                    made = settings(around, seed, attack, BAD, rounds=60, partition=rows)
                    yield Cell("bucketing", name, attack, f"buckets of {size}", seed, made)


def _merging(method: str, seed: int, attack: str) -> dict:
    changes: dict[str, object] = {
        **SMALL,
        "rounds": 25,
        "partition": {"how": "dirichlet(alpha=0.5)"},
        "local": {"steps": 5, "batch": 16},
    }
    if "fedlaw" in method:
        changes["data"] = {"proxy_per_class": 10}
    return settings(method, seed, attack, BAD, **changes)


def methods() -> Iterator[Cell]:
    """Yield ways to merge under attack; `norm_bound` is a guard at the median length."""
    for seed in SEEDS:
        for attack in ("none", "sign_flip(scale=5.0)"):
            for name, method in METHODS.items():
                yield Cell("methods", name, attack, "", seed, _merging(method, seed, attack))


def noise() -> Iterator[Cell]:
    """Yield ways to merge replies of which each is clipped to 0.5 and has noise.

    The noise of a mean of 25 is that of `dp(clip=0.5, noise=z)` with as many clients.
    """
    bases = {
        "fedavg": "fedavg(weighting='uniform', {})",
        "ima": "ima(fedavg(weighting='uniform', {}))",
        "wima": "wima(fedavg(weighting='uniform', {}), window=10)",
        "fedlaw": "fedlaw({})",
        "fedcda": "fedcda({})",
        "scaffold": "scaffold({})",
        "median": "median({})",
    }
    for seed in SEEDS:
        for z in (0.0, 0.2):
            local = f"local=local_dp(clip=0.5, noise={z / CLIENTS**0.5:.4f})"
            for name, base in bases.items():
                made = _merging(base.format(local), seed, "none")
                yield Cell("noise", name, "none", f"z {z:g}", seed, made)


def tff() -> Iterator[Cell]:
    """Yield TFF's four points (1,000 clients, Poisson cohorts of 50), and averages around dp."""
    momentum = f"fedavgm({PLAIN}, momentum=0.9)"
    ways = {
        "dp(fedavgm)": "dp({}, clip=0.1, noise={}, adaptive=True)".format(momentum, "{}"),
        "ima(dp(fedavgm))": "ima(dp({}, clip=0.1, noise={}, adaptive=True))".format(momentum, "{}"),
        "wima(dp(fedavgm))": "wima(dp({}, clip=0.1, noise={}, adaptive=True), window=10)".format(
            momentum, "{}"
        ),
    }
    for seed in SEEDS:
        for name, way in ways.items():
            for z in (0.0, 0.5, 0.75, 1.0) if name == "dp(fedavgm)" else (0.0, 1.0):
                made = settings(
                    way.format(z),
                    seed,
                    "none",
                    0,
                    **SMALL,
                    rounds=80,
                    partition={"clients": 1000},
                    local={"steps": 0, "epochs": 1, "batch": 16},
                    sim={"participation": "poisson(rate=0.05)"},
                )
                yield Cell("tff", name, "none", f"z {z:g}", seed, made)


SETTINGS = {
    "robust": robust,
    "alie": alie,
    "methods": methods,
    "noise": noise,
    "tff": tff,
    "bucketing": bucketing,
}


def key(line: dict) -> tuple:
    """Return what a line is found by."""
    return line["method"], line["attack"], line["case"], line["seed"]


def lines(setting: str) -> list[dict]:
    """Return the lines that are there."""
    path = RESULTS / f"trust_{setting}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def one_run(cell: Cell) -> dict:
    """Run a cell and return its line. A model that is no longer finite has no accuracy."""
    line = {
        "setting": cell.setting,
        "method": cell.method,
        "attack": cell.attack,
        "case": cell.case,
        "seed": cell.seed,
        "expression": cell.experiment["method"],
    }
    with tempfile.TemporaryDirectory() as folder:
        try:
            run(from_mapping(cell.experiment), Path(folder) / "run")
        except (ValueError, FloatingPointError) as error:
            return {**line, "accuracy": None, "error": str(error)[:200]}
        text = (Path(folder) / "run" / "rounds.jsonl").read_text(encoding="utf-8")
    records = [json.loads(row) for row in text.splitlines()]
    scores = [row["accuracy"] for row in records if row.get("accuracy") is not None]
    line["accuracy"] = round(mean(scores), 4)
    for note in ("epsilon", "clip"):
        if f"note_{note}" in records[-1]:
            line[note] = round(records[-1][f"note_{note}"], 4)
    return line


def runs(settings: list[str]) -> None:
    """Run what has no line yet, seed by seed."""
    RESULTS.mkdir(exist_ok=True)
    done = {(setting, *key(line)) for setting in settings for line in lines(setting)}
    cells = [cell for setting in settings for cell in SETTINGS[setting]()]
    for cell in sorted(cells, key=lambda cell: cell.seed):
        if (cell.setting, cell.method, cell.attack, cell.case, cell.seed) in done:
            continue
        line = one_run(cell)
        with (RESULTS / f"trust_{cell.setting}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(cell.setting, *key(line), line["accuracy"], flush=True)


def shown(found: list[dict]) -> str:
    """Write a mean over seeds and its standard deviation, times 100."""
    values = [100 * line["accuracy"] for line in found if line["accuracy"] is not None]
    if not values:
        return "-"
    spread = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
    return f"{mean(values):.1f}{spread}" + ("" if len(values) == len(found) else " (of some)")


def table(setting: str) -> list[str]:
    """Return one setting as the lines of a table: methods down, attacks across."""
    cells = defaultdict(list)
    for line in lines(setting):
        cells[line["method"], line["case"], line["attack"]].append(line)
    if not cells:
        return [f"`{setting}`: not run"]
    rows = dict.fromkeys((method, case) for method, case, _ in cells)
    columns = list(dict.fromkeys(attack for *_, attack in cells))
    spent = any("epsilon" in line for found in cells.values() for line in found)
    heads = ["method", "case", *("accuracy" if c == "none" else c for c in columns), "seeds"]
    written = []
    for method, case in rows:
        found = [cells[method, case, attack] for attack in columns]
        seeds = "-".join(str(n) for n in sorted({len(each) for each in found if each}))
        row = [method, case, *map(shown, found), seeds]
        if spent:
            row.append(str(found[0][0].get("epsilon", "-")))
        written.append(row)
    if spent:
        heads.append("epsilon, delta 1e-5")
    return [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *written)]


def write_tables(page: Path) -> None:
    """Put the tables into a page, between their marks."""
    text = page.read_text(encoding="utf-8")
    for setting in SETTINGS:
        begin, end = f"<!-- {setting} -->", f"<!-- end of {setting} -->"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = "\n".join([before + begin, "", *table(setting), "", end + after])
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("settings", nargs="*", help=", ".join(SETTINGS))
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--page", type=Path, help="write the tables into this page")
    arguments = parser.parse_args()
    runs(arguments.settings)
    if arguments.table:
        for each in SETTINGS:
            print(f"\n### {each}\n", *table(each), sep="\n")
    if arguments.page:
        write_tables(arguments.page)
