"""How much of a method's score is the draw of its last cohorts? JSON lines out.

    python benchmarks/evidence/cohorts.py --out cohorts.jsonl
    python benchmarks/evidence/cohorts.py --out cohorts.jsonl --show
    python benchmarks/evidence/cohorts.py --balance

FedIMA's CIFAR-10 setting on the authors' split, methods without averaging, under cohorts drawn from
a seed of the run and under the authors' own, `reseeded(seed=2023)`; what the file holds is not run
again. `--balance` runs nothing: it prints how far the labels of a cohort's rows are from those of
all rows (Kullback-Leibler divergence in nats), mean over all rounds, the last 50, and the ten that
are scored, and the twelve rounds in which they are nearest. `--model 'mlp(widths=(64,))'` fits a
CPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from tqdm import tqdm

from fedbasin import Experiment, data, run
from fedbasin.core.expressions import parse
from fedbasin.core.record import RunFolder, mean_of_last
from fedbasin.core.rng import root
from fedbasin.experiment import from_mapping
from fedbasin.experiment.config import read_preset
from fedbasin.experiment.rows import cut_rows
from fedbasin.sim.participation import draw_cohort

METHODS = (
    "fedavg",
    "fednova",
    "fedasam(rho=0.7, eta=0.2)",
    "fedyogi(first='zero')",
    "fedfa(pull=0.1, keep=0.9, calibrate_from=0.25)",
)
AUTHORS = "authors"
SOURCES = {f"seed {n}": ("fraction(rate=0.1)", n) for n in range(6)}
SOURCES[AUTHORS] = ("reseeded(seed=2023, rate=0.1)", 0)


def setting(model: str, method: str, source: str) -> Experiment:
    """FedIMA's setting with one method and one way to draw cohorts."""
    base = from_mapping(read_preset("cifar10"))
    participation, seed = SOURCES[source]
    return replace(
        base,
        model=model,
        method=method,
        seed=seed,
        partition=replace(base.partition, how="fedlab_dirichlet(alpha=0.1, seed=1)"),
        sim=replace(base.sim, participation=participation),
    )


def measure(experiment: Experiment) -> dict:
    """Run one cell; keep its score and how much single rounds differ."""
    with tempfile.TemporaryDirectory() as folder:
        run(experiment, Path(folder) / "run")
        records = RunFolder(Path(folder) / "run").read_rounds()
    last = [record.metric("accuracy") for record in records[-50:]]
    return {
        "accuracy": mean_of_last(records),
        "last50": fmean(last),
        "last50_std": float(np.std(last)),
    }


def balance() -> None:
    """Print how far from even the cohorts are."""
    experiment = setting("cifar_cnn", "fedavg", AUTHORS)
    rows = cut_rows(experiment, data.load(experiment.data.name))
    labels = rows.splits.train.labels
    held = np.stack([np.bincount(labels[mine], minlength=10) for mine in rows.parts.clients])
    even = held.sum(0) / held.sum()
    print("| cohorts | all rounds | last 50 | last 10 | evenest rounds |\n|---|---|---|---|---|")
    for source, (participation, seed) in SOURCES.items():
        choice, everyone = parse(participation, "participation"), np.arange(len(held))
        apart = []
        for round in range(experiment.rounds):
            seen = held[draw_cohort(choice, everyone, root(seed), round)].sum(0)
            share = seen[seen > 0] / seen.sum()
            apart.append(float((share * np.log(share / even[seen > 0])).sum()))
        means = (fmean(apart[-last:]) for last in (len(apart), 50, 10))
        evenest = ", ".join(str(round + 1) for round in np.argsort(apart)[:12])
        print(f"| {source} | " + " | ".join(f"{mean:.3f}" for mean in means) + f" | {evenest} |")


def show(lines: list[dict]) -> None:
    """Print a Markdown table."""
    print("| model | method | cohorts | last 10 rounds | last 50 rounds |\n|---|---|---|---|---|")
    for line in sorted(lines, key=lambda line: (line["model"], line["method"], line["cohorts"])):
        print(
            f"| `{line['model']}` | `{line['method']}` | {line['cohorts']} "
            f"| {100 * line['accuracy']:.1f} "
            f"| {100 * line['last50']:.1f} ± {100 * line['last50_std']:.1f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("cohorts.jsonl"))
    parser.add_argument("--balance", action="store_true", help="of labels alone; run nothing")
    parser.add_argument("--show", action="store_true", help="print what is there, run nothing")
    parser.add_argument("--model", default="cifar_cnn")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--cohorts", nargs="+", default=["seed 0", AUTHORS], choices=SOURCES)
    args = parser.parse_args()
    if args.balance:
        return balance()
    lines = args.out.read_text().splitlines() if args.out.exists() else []
    lines = [json.loads(line) for line in lines]
    if args.show:
        return show(lines)
    torch.set_num_threads(1)
    done = {(line["model"], line["method"], line["cohorts"]) for line in lines}
    wanted = [(args.model, m, c) for c in args.cohorts for m in args.methods]
    for model, method, source in tqdm([cell for cell in wanted if cell not in done]):
        line = {"model": model, "method": method, "cohorts": source}
        line |= measure(setting(model, method, source))
        with args.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
    return None


if __name__ == "__main__":
    main()
