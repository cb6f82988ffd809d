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


def runs(out: Path, setting: str, seeds: int, jobs: int) -> None:
    """Run every method with every seed, several at once, and write a line a run."""
    cells = [(seed, method) for seed in range(seeds) for method in METHODS]
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawned) as pool:
        waiting = [pool.submit(one_run, out, setting, method, seed) for seed, method in cells]
        lines = []
        for done in waiting:
            line = done.result()
            lines.append(line)
            print(setting, line["seed"], line["method"], line["mean"], line["p10"], flush=True)
    RESULTS.mkdir(exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (RESULTS / f"clients_{setting}.jsonl").write_text(text, encoding="utf-8")


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


def interval(values: list[float]) -> str:
    """Write a mean over seeds with its 95 % interval, times 100."""
    values = 100 * np.array(values)
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return f"{values.mean():.1f} ± {half:.1f}"


def tables() -> None:
    """Print the tables of docs/methods/clients.md."""
    for setting in SETTINGS:
        path = RESULTS / f"clients_{setting}.jsonl"
        if not path.exists():
            print(f"\n{setting}: not run")
            continue
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found = defaultdict(dict)
        for line in lines:
            found[line["method"]][line["seed"]] = line
        base = found["fedavg"]
        print(f"\n### {setting}, {len(base)} seeds\n")
        print("| method | mean | worst decile | mean vs FedAvg | decile vs FedAvg |"
              " clients that gain / lose | gain - lose, 95 % |")  # fmt: skip
        print("|---|---|---|---|---|---|---|")
        for method, by_seed in found.items():
            cells = [interval([by_seed[s][k] for s in by_seed]) for k in ("mean", "p10")]
            if method == "fedavg":
                print(f"| {method} | {cells[0]} | {cells[1]} | | | | |")
                continue
            for k in ("mean", "p10"):
                cells.append(interval([by_seed[s][k] - base[s][k] for s in by_seed]))
            gains = client_gains(scores(by_seed, "accuracy"), scores(base, "accuracy"))
            cells.append(f"{gains.gain} / {gains.lose} of {gains.clients}")
            cells.append(f"{100 * gains.low:+.0f} to {100 * gains.high:+.0f} %")
            print(f"| {method} | {' | '.join(cells)} |")
        print("\n| FedAvg's clients | mean | worst decile | better than federated |")
        print("|---|---|---|---|")
        federated = scores(base, "accuracy")
        for way in WAYS:
            own = scores(base, f"accuracy{way}")
            decile = [float(np.nanquantile(v, 0.1)) for v in own.values()]
            mean = [float(np.nanmean(v)) for v in own.values()]
            won = [float(np.mean(own[s] > federated[s])) for s in own]
            name = way.strip("_") or "federated"
            print(f"| {name} | {interval(mean)} | {interval(decile)} |"
                  f" {interval(won) + ' % of clients' if way else ''} |")  # fmt: skip


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
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    for each in arguments.settings:
        runs(arguments.out, each, arguments.seeds, arguments.jobs)
    if arguments.table or arguments.settings:
        tables()
