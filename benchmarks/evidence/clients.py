"""What each client gets, on real data: the mean, the worst decile, alone, at home and pooled.

    python benchmarks/evidence/clients.py OUT heart wisdm fmnist --jobs 8    runs, then gathers
    python benchmarks/evidence/clients.py --table                            prints the tables

Needs FEDBASIN_DATA (local/fed-heart-disease, local/wisdm-activity, zalando-datasets/fashion_mnist).
Runs of OUT that are finished are kept, so the command goes on where it was stopped; set
OMP_NUM_THREADS=1 with several jobs. One line a run goes to
benchmarks/evidence/results/clients_SETTING.jsonl. Methods run at their defaults and every setting
below was written down before the first run: nothing is chosen on the rows that are scored.
The baselines alone and pooled do not depend on the method and are computed with FedAvg.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pandas
from scipy import stats

import fedbasin as fb
from fedbasin.core.served import WAYS, ClientTable
from fedbasin.experiment import from_mapping, run
from fedbasin.report.paired import client_gains

RESULTS = Path(__file__).parent / "results"
METHODS = ("fedavg", "fedprox", "scaffold", "fedadam", "ima", "wima", "fedcda", "fedwcm")
SETTINGS = {
    "heart": {
        "rounds": 30,
        "model": "logistic",
        "task": "binary(headline='accuracy')",
        "data": {"name": "fed_heart_disease"},
        "partition": {"how": "natural", "clients": 4, "hold_out": 0.3, "hold_out_by": "classes"},
        "local": {"lr": 0.01, "epochs": 2, "batch": 16},
        "sim": {"participation": "fraction(rate=1.0)"},
    },
    "wisdm": {
        "rounds": 50,
        "model": "mlp(widths=(64,))",
        "partition": {"how": "natural", "clients": 0, "hold_out": 0.3, "hold_out_by": "classes"},
        "local": {"lr": 0.05, "epochs": 2, "batch": 32},
        "sim": {"participation": "count(clients=10)"},
    },
    "fmnist": {
        "rounds": 60,
        "model": "mlp(widths=(64,))",
        "data": {"name": "fashion-mnist"},
        "partition": {
            "how": "dirichlet(alpha=0.1)",
            "clients": 100,
            "hold_out": 0.2,
            "hold_out_by": "classes",
        },
        "local": {"lr": 0.05, "epochs": 2, "batch": 32},
        "sim": {"participation": "fraction(rate=0.1)"},
    },
}

NAMES = {"heart": ("Cleveland", "Hungary", "Switzerland", "VA Long Beach")}


def wisdm():
    """Return the persons' rows; the test rows of the table are a tenth, drawn at random."""
    folder = Path(os.environ["FEDBASIN_DATA"]) / "local" / "wisdm-activity" / "transformed"
    parts = [pandas.read_parquet(next(folder.glob(f"{part}-*"))) for part in ("train", "test")]
    return fb.data.from_table(
        pandas.concat(parts), target="activity", client="user", test=0.1, name="wisdm"
    )


def experiment_of(setting: str, method: str, seed: int):
    """Return one run."""
    settings = json.loads(json.dumps(SETTINGS[setting]))
    settings["sim"] |= {
        "evaluate_clients": 10,
        "personalise": "epochs(1)",
        "baselines": method == "fedavg",
        "device": "cpu",
        "checkpoint_every": 1000,
    }
    return from_mapping({"method": method, "seed": seed, **settings})


def one_run(out: Path, setting: str, method: str, seed: int) -> dict:
    """Run one method with one seed, unless that is done, and return its line."""
    folder = out / setting / method / f"seed{seed}"
    if not (folder / "model.safetensors").exists():
        if folder.exists():
            shutil.rmtree(folder)  # it was stopped
        data = wisdm() if setting == "wisdm" else None
        run(experiment_of(setting, method, seed), folder, data=data)
    return line_of(setting, method, seed, folder)


def runs(out: Path, setting: str, methods: list[str], seeds: int, jobs: int) -> None:
    """Run one method after another, several seeds at once, and write a line a run.

    The lines are written when a method has run with every seed: no method is shown with fewer.
    """
    RESULTS.mkdir(exist_ok=True)
    spawned = multiprocessing.get_context("spawn")
    lines = []
    with ProcessPoolExecutor(jobs, mp_context=spawned) as pool:
        cells = [(method, seed) for method in methods for seed in range(seeds)]
        waiting = [pool.submit(one_run, out, setting, method, seed) for method, seed in cells]
        for (method, seed), done in zip(cells, waiting, strict=True):
            line = done.result()
            lines.append(json.dumps(line) + "\n")
            print(setting, seed, method, line["mean"], line["p10"], flush=True)
            if seed == seeds - 1:
                (RESULTS / f"clients_{setting}.jsonl").write_text("".join(lines), encoding="utf-8")


def line_of(setting: str, method: str, seed: int, folder: Path) -> dict:
    """Return what the table needs of one run."""
    table = ClientTable.read(folder / "clients.csv")
    summary = json.loads((folder / "summary.json").read_text())
    scores = {f"accuracy{way}": table.numbers(f"accuracy{way}") for way in WAYS}
    return {
        "setting": setting,
        "method": method,
        "seed": seed,
        "mean": summary["clients_accuracy_mean_last"],
        "p10": summary["clients_accuracy_p10_last"],
        "seconds": round(summary["seconds"], 1),
        "clients": {
            name: [None if np.isnan(v) else round(float(v), 4) for v in values]
            for name, values in scores.items()
            if values is not None
        },
    }


def interval(values: list[float], form: str = ".1f") -> str:
    """Write a mean over seeds with its 95 % interval (Student's t), times 100."""
    values = 100 * np.array(values)
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return f"{values.mean():{form}} ± {half:.1f}"


def over(gaps: list[float]) -> str:
    """Write the mean of differences within seeds with its 95 % interval, times 100."""
    return interval(gaps, "+.1f")


def tables() -> None:
    """Print the tables of docs/methods/clients.md."""
    for setting in SETTINGS:
        found = read(setting)
        if not found:
            print(f"\n{setting}: not run")
            continue
        print(f"\n### {setting}, {len(found['fedavg'])} seeds")
        print(f"\n{methods_table(found)}\n\n{ways_table(found['fedavg'])}")
        if setting in NAMES:
            print("\n" + clients_table(found["fedavg"], NAMES[setting]))


def read(setting: str) -> dict[str, dict[int, dict]]:
    """Return the lines of a setting by method and seed; empty before it has run."""
    path = RESULTS / f"clients_{setting}.jsonl"
    found = defaultdict(dict)
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        read = json.loads(line)
        found[read["method"]][read["seed"]] = read
    return dict(found)


def methods_table(found: dict[str, dict[int, dict]]) -> str:
    """Return every method's mean and worst decile, and both against FedAvg's."""
    base = found["fedavg"]
    lines = [
        "| method | mean | worst decile | mean, over FedAvg | decile, over FedAvg "
        "| clients that gain / lose | gain - lose |",
        "|---|---|---|---|---|---|---|",
    ]
    for method, by_seed in found.items():
        cells = [interval([by_seed[s][k] for s in by_seed]) for k in ("mean", "p10")]
        if method == "fedavg":
            cells += [""] * 4
        else:
            for k in ("mean", "p10"):
                cells.append(over([by_seed[s][k] - base[s][k] for s in by_seed]))
            gains = client_gains(scores(by_seed, "accuracy"), scores(base, "accuracy"))
            cells.append(f"{gains.gain} / {gains.lose} of {gains.clients}")
            cells.append(f"{100 * gains.low:+.0f} to {100 * gains.high:+.0f} %")
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def ways_table(base: dict[int, dict]) -> str:
    """Return what FedAvg's clients get of it, and of models that are not federated."""
    lines = [
        "| model | mean | worst decile | mean, over federated | decile, over federated "
        "| better than federated, % of clients |",
        "|---|---|---|---|---|---|",
    ]
    federated = scores(base, "accuracy")
    for way in WAYS:
        own = scores(base, f"accuracy{way}")
        mean = {s: float(np.nanmean(v)) for s, v in own.items()}
        decile = {s: float(np.nanquantile(v, 0.1)) for s, v in own.items()}
        cells = [interval(list(mean.values())), interval(list(decile.values()))]
        if way:
            cells.append(over([mean[s] - np.nanmean(federated[s]) for s in own]))
            cells.append(over([decile[s] - np.nanquantile(federated[s], 0.1) for s in own]))
            cells.append(interval([float(np.mean(own[s] > federated[s])) for s in own]))
        else:
            cells += [""] * 3
        lines.append(f"| {way.strip('_') or 'federated'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def clients_table(base: dict[int, dict], names: tuple[str, ...]) -> str:
    """Return every client's score of FedAvg's model and of the others."""
    heads = [way.strip("_") or "federated" for way in WAYS]
    lines = [f"| client | {' | '.join(heads)} |", "|---|" + "---|" * len(heads)]
    for client, name in enumerate(names):
        own = [scores(base, f"accuracy{way}") for way in WAYS]
        cells = [interval([values[client] for values in each.values()]) for each in own]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def scores(by_seed: dict, name: str) -> dict[int, np.ndarray]:
    """Return the clients' scores by seed."""
    return {
        seed: np.array([np.nan if v is None else v for v in line["clients"][name]])
        for seed, line in by_seed.items()
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("settings", nargs="*", help=", ".join(SETTINGS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    for each in arguments.settings:
        runs(arguments.out, each, arguments.methods, arguments.seeds, arguments.jobs)
    if arguments.table or arguments.settings:
        tables()
