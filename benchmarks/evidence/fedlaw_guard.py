"""How should FedLAW's gamma be bounded? JSON lines out; what the file holds is not run again.

    python benchmarks/evidence/fedlaw_guard.py --out guard.jsonl
    python benchmarks/evidence/fedlaw_guard.py --out guard.jsonl --show

Settings: `stuck`, digits with 100 clients and a deep network, where FedLAW without a guard stays
at chance; `tail`, the demo with a long tail and 5 proxy rows a class; `tiny`, the same with one
proxy row a class; `fmnist`, Fashion-MNIST with 100 clients. Proxy rows come from the training rows.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

import torch
from tqdm import tqdm

from fedbasin import Experiment, run
from fedbasin.core.record import RunFolder
from fedbasin.experiment.config import (
    DataConfig,
    LocalConfig,
    PartitionConfig,
    SimConfig,
    from_mapping,
    read_preset,
)

METHODS = (
    "fedavg",
    "fedlaw(learn='lambda')",
    "fedlaw(guard=0)",
    *(f"fedlaw(guard={guard}{more})" for more in ("", ", guard_growth=True") for guard in (5, 10)),
)
DEMO = from_mapping(read_preset("demo"))
SETTINGS = {
    "stuck": Experiment(
        model="mlp(widths=(64,64,64,64))",
        rounds=100,
        data=DataConfig(proxy_per_class=10),
        partition=PartitionConfig("dirichlet(alpha=0.1, minimum=1)", 100),
        local=LocalConfig(
            lr=0.08,
            epochs=5,
            batch=32,
            momentum=0.9,
            weight_decay=5e-4,
            schedule="exponential(decay=0.99)",
        ),
        sim=SimConfig("fraction(rate=0.1)"),
    ),
    "tail": replace(DEMO, data=replace(DEMO.data, imbalance=0.1, proxy_per_class=5)),
    "tiny": replace(DEMO, data=replace(DEMO.data, imbalance=0.1, proxy_per_class=1)),
    "fmnist": Experiment(
        model="mlp(widths=(64,))",
        rounds=60,
        data=DataConfig("fashion-mnist", proxy_per_class=10),
        partition=PartitionConfig("dirichlet(alpha=0.1, minimum=2)", 100, seed=1),
        local=LocalConfig(lr=0.05, epochs=1, batch=50, clip=10.0),
        sim=SimConfig("fraction(rate=0.1)", evaluate_every=5),
    ),
}


def measure(experiment: Experiment) -> dict:
    """Run one cell and keep how it ended, how large the model became and what gamma did."""
    with tempfile.TemporaryDirectory() as folder:
        summary = run(experiment, Path(folder) / "run")
        records = RunFolder(Path(folder) / "run").read_rounds()
    gammas = [record.notes["gamma"] for record in records if "gamma" in record.notes]
    return {
        "accuracy": summary["accuracy_mean_last10"],
        "loss": summary["loss_last"],
        "norm_first": records[0].model_norm,
        "norm_last": records[-1].model_norm,
        "gamma_most": max(gammas, default=1.0),
        "gamma_last10": fmean(gammas[-10:] or [1.0]),
        "seconds": round(summary["seconds"], 1),
    }


def show(lines: list[dict]) -> None:
    """Print a Markdown table for each setting."""
    found = defaultdict(lambda: defaultdict(list))
    for line in lines:
        found[line["setting"]][line["method"]].append(line)
    for setting, methods in found.items():
        print(
            f"\n| {setting} | accuracy (%) | test loss | norm | most gamma | last gamma | seeds |"
        )
        print("|---|---|---|---|---|---|---|")
        for method, runs in methods.items():
            mean = {name: fmean(run[name] for run in runs) for name in runs[0] if name in NUMBERS}
            spread = stdev(run["accuracy"] for run in runs) if len(runs) > 1 else 0.0
            print(
                f"| `{method}` | {100 * mean['accuracy']:.1f} ± {100 * spread:.1f} "
                f"| {mean['loss']:.2f} | {mean['norm_first']:.1f} to {mean['norm_last']:.1f} "
                f"| {max(run['gamma_most'] for run in runs):.2f} | {mean['gamma_last10']:.3f} "
                f"| {len(runs)} |"
            )


NUMBERS = ("accuracy", "loss", "norm_first", "norm_last", "gamma_last10")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--show", action="store_true", help="print what is there, run nothing")
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    args = parser.parse_args()
    lines = args.out.read_text().splitlines() if args.out.exists() else []
    lines = [json.loads(line) for line in lines]
    if args.show:
        return show(lines)
    torch.set_num_threads(1)
    done = {(line["setting"], line["seed"], line["method"]) for line in lines}
    wanted = [(s, n, m) for s in args.settings for n in args.seeds for m in METHODS]
    for setting, seed, method in tqdm([cell for cell in wanted if cell not in done]):
        experiment = replace(SETTINGS[setting], method=method, seed=seed)
        line = {"setting": setting, "method": method, "seed": seed} | measure(experiment)
        with args.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
    return None


if __name__ == "__main__":
    main()
