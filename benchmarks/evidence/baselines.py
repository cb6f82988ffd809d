"""Every method of the catalogue on Fashion-MNIST: alone, under `wima` and under `ima`.

    python benchmarks/evidence/baselines.py OUT --jobs 8

Reduced: an MLP of 64 hidden units, 40 rounds, 3 seeds, the same setting for all and every method's
own defaults, so the table compares defaults and not tuned methods. Finished runs are skipped when
it is started again. OUT/results.jsonl holds a line for each run and OUT/table.md the table.
"""

import argparse
import json
import statistics
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

from tqdm import tqdm

from fedbasin.core.catalogue import cards
from fedbasin.core.expressions import text
from fedbasin.experiment import Experiment
from fedbasin.experiment.comparison import Cell, cells, run_cell
from fedbasin.experiment.config import DataConfig, LocalConfig, PartitionConfig, SimConfig

WRAPS = {"alone": "{}", "wima": "wima({}, window=10)", "ima": "ima({})"}
TRAJECTORY = ("ima", "wima", "swa")
KEEP = ("method", "seed", "status", "accuracy_mean_last10", "loss_last", "seconds", "device")


def setting(rounds: int, data: str) -> Experiment:
    """Return what all runs share."""
    return Experiment(
        method="fedavg",
        model="mlp(widths=(64,))",
        rounds=rounds,
        data=DataConfig(name=data, proxy_per_class=10),
        partition=PartitionConfig(how="dirichlet(alpha=0.1, minimum=2)", clients=100, seed=1),
        local=LocalConfig(lr=0.05, epochs=1, batch=50, clip=10.0),
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
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--methods", default="", help="names, separated by commas; all by default")
    args = parser.parse_args()
    chosen = [m for m in bases() if not args.methods or m.split("(")[0] in args.methods.split(",")]
    seeds = [int(seed) for seed in args.seeds.split(",")]
    base, runs = setting(args.rounds, args.data), args.out / "runs"
    run_all(cells(base, wrapped(chosen), seeds, runs), args.jobs)
    gather(cells(base, wrapped(bases()), seeds, runs), args.out)


def wrapped(methods: list[str]) -> list[str]:
    """Return every method alone, then under each average."""
    return [wrap.format(method) for wrap in WRAPS.values() for method in methods]


def run_all(layout: list[Cell], jobs: int) -> None:
    """Run all cells, seed by seed; one that fails is named and the others go on."""
    with ProcessPoolExecutor(jobs, get_context("spawn"), initializer=single_thread) as pool:
        running = {pool.submit(run_cell, cell): cell for cell in layout}
        for done in tqdm(as_completed(running), total=len(running), mininterval=5):
            if error := done.exception():
                tqdm.write(f"{running[done].path}: {type(error).__name__}: {error}")


def gather(layout: list[Cell], out: Path) -> None:
    """Write a line for each finished run and the table of all methods."""
    found: dict[str, list[float | None]] = {}
    with (out / "results.jsonl").open("w") as file:
        for cell in layout:
            path = cell.path / "summary.json"
            summary = json.loads(path.read_text()) if path.exists() else {}
            if summary.get("status") in ("finished", "diverged"):
                file.write(json.dumps({key: summary.get(key) for key in KEEP}) + "\n")
                accuracy = summary.get("accuracy_mean_last10")
                found.setdefault(cell.experiment.method, []).append(accuracy)
    table = ["| method | alone | under wima(window=10) | under ima |", "|---|---|---|---|"]
    base = layout[0].experiment
    for method in bases():
        names = [replace(base, method=w.format(method)).resolved().method for w in WRAPS.values()]
        cells_of = " | ".join(shown(found.get(name, [])) for name in names)
        table.append(f"| `{method}` | {cells_of} |")
    (out / "table.md").write_text("\n".join(table) + "\n")


def single_thread() -> None:
    import torch

    import fedbasin.experiment  # noqa: F401  (fills the catalogue of a new process)

    torch.set_num_threads(1)


def shown(values: list[float | None]) -> str:
    """Return the mean and spread in per cent, with the number of seeds where it is not three."""
    good = [100 * value for value in values if value is not None]
    if len(good) < len(values):
        return f"diverged in {len(values) - len(good)} of {len(values)}"
    if not good:
        return "not run"
    spread = f" ± {statistics.stdev(good):.1f}" if len(good) > 1 else ""
    return f"{statistics.mean(good):.1f}{spread}" + (
        "" if len(good) == 3 else f" (n = {len(good)})"
    )


if __name__ == "__main__":
    main()
