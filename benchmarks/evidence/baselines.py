"""Every method of the catalogue on Fashion-MNIST: alone, under `wima` and under `ima`.

    python benchmarks/evidence/baselines.py OUT --jobs 8

Reduced: an MLP, 60 rounds, 3 seeds, the same setting and every method's own defaults for all, so
the table compares defaults and not tuned methods. Finished runs are skipped when it is started
again. OUT/results.jsonl holds a line for each run and OUT/table.md the table.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fedbasin.core.catalogue import cards
from fedbasin.core.expressions import text
from fedbasin.experiment import Experiment
from fedbasin.experiment.config import DataConfig, LocalConfig, PartitionConfig, SimConfig
from fedbasin.experiment.runs import Cell, cells, run_cell

TRAJECTORY = ("ima", "wima", "swa")
KEEP = ("method", "seed", "status", "accuracy_mean_last10", "loss_last", "seconds", "device")


def setting(rounds: int, data: str) -> Experiment:
    """Return what all runs share."""
    return Experiment(
        method="fedavg",
        model="mlp",
        rounds=rounds,
        data=DataConfig(name=data, proxy_per_class=10),
        partition=PartitionConfig(how="dirichlet(alpha=0.1, minimum=2)", clients=100, seed=1),
        local=LocalConfig(lr=0.05, epochs=2, batch=50, clip=10.0),
        sim=SimConfig(participation="fraction(rate=0.1)", checkpoint_every=1000, evaluate_every=5),
    )


def bases() -> list[str]:
    """Return every method that is not a trajectory average, as its default expression."""
    return [text(card.make()) for card in cards("method") if card.name not in TRAJECTORY]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", default="fashion-mnist")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--methods", default="", help="names, separated by commas; all by default")
    args = parser.parse_args()
    chosen = [m for m in bases() if not args.methods or m.split("(")[0] in args.methods.split(",")]
    wraps = {"alone": "{}", "wima": "wima({}, window=15)", "ima": "ima({})"}
    methods = [wrap.format(method) for wrap in wraps.values() for method in chosen]
    seeds = [int(seed) for seed in args.seeds.split(",")]
    base = setting(args.rounds, args.data)
    args.out.mkdir(parents=True, exist_ok=True)
    found = {}
    with (args.out / "results.jsonl").open("w") as file:
        # Seed by seed, so that a run that is cut short has whole seeds.
        for summary in summaries(cells(base, methods, seeds, args.out / "runs"), args.jobs):
            file.write(json.dumps({key: summary.get(key) for key in KEEP}) + "\n")
            file.flush()
            found.setdefault(summary["method"], []).append(summary.get("accuracy_mean_last10"))
    table = ["| method | alone | under wima(window=15) | under ima |", "|---|---|---|---|"]
    for method in chosen:
        names = [replace(base, method=w.format(method)).resolved().method for w in wraps.values()]
        table.append(f"| `{method}` | " + " | ".join(shown(found[name]) for name in names) + " |")
    (args.out / "table.md").write_text("\n".join(table) + "\n")


def summaries(layout: list[Cell], jobs: int) -> Iterator[dict[str, Any]]:
    """Run all cells and yield their summaries; one that fails is a line that says why."""
    with ProcessPoolExecutor(jobs, get_context("spawn"), initializer=single_thread) as pool:
        running = {pool.submit(run_cell, cell): cell for cell in layout}
        for done in tqdm(as_completed(running), total=len(running), mininterval=5):
            experiment = running[done].experiment
            if done.exception() is None:
                yield done.result()
            else:
                reason = f"{type(done.exception()).__name__}: {done.exception()}"[:300]
                yield {"method": experiment.method, "seed": experiment.seed, "status": reason}


def single_thread() -> None:
    import torch

    import fedbasin.experiment  # noqa: F401  (fills the catalogue of a new process)

    torch.set_num_threads(1)


def shown(values: list[float | None]) -> str:
    """Return the mean and spread in per cent; a run that failed or diverged has none."""
    good = [100 * value for value in values if value is not None]
    if len(good) < len(values):
        return f"no result in {len(values) - len(good)} of {len(values)}"
    spread = f" ± {statistics.stdev(good):.1f}" if len(good) > 1 else ""
    return f"{statistics.mean(good):.1f}{spread}"


if __name__ == "__main__":
    main()
