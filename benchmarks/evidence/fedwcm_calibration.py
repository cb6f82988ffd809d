"""Where does FedCM stop converging under a long tail, and does FedWCM go on? JSON lines out.

FedCM with fixed alpha (1 is FedAvg: all shares are equal) against FedWCM, on Fashion-MNIST thinned
to a long tail and dealt in equal shares: FedWCM's setting with a small network. What the file holds
already is not run again.

    python benchmarks/evidence/fedwcm_calibration.py --out fedwcm.jsonl
    python benchmarks/evidence/fedwcm_calibration.py --out fedwcm.jsonl --show
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from itertools import product
from pathlib import Path
from statistics import fmean

import torch

from fedbasin import DataConfig, Experiment, LocalConfig, PartitionConfig, SimConfig, run
from fedbasin.core.record import RunFolder

METHODS = (
    *(f"fedcm(alpha={alpha})" for alpha in (1.0, 0.5, 0.3, 0.2, 0.1)),
    *(f"fedwcm(tau={tau})" for tau in ("0.03", "0.1", "0.3", "1e999")),
    "fedwcm(momentum='scores')",
    "fedwcm(momentum='fixed')",
)


def experiment(arguments, method, weight_decay, imbalance, beta, seed):
    return Experiment(
        method=method,
        model=arguments.model,
        seed=seed,
        rounds=arguments.rounds,
        data=DataConfig(arguments.data, imbalance=imbalance),
        partition=PartitionConfig(f"client_dirichlet(alpha={beta})", arguments.clients),
        local=LocalConfig(
            lr=arguments.lr,
            epochs=arguments.epochs,
            batch=arguments.batch,
            weight_decay=weight_decay,
            clip=10.0,
            schedule="exponential(decay=0.998)",
        ),
        sim=SimConfig(arguments.participation, evaluate_every=5, device=arguments.device),
    )


def measure(setting):
    """Run one cell; a diverged run counts with the records it left."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            summary = run(setting, Path(folder) / "run")
        except RuntimeError:
            summary = RunFolder(Path(folder) / "run").read_summary()
        records = RunFolder(Path(folder) / "run").read_rounds()
    scored = [
        record.metric("accuracy") for record in records if record.metric("accuracy") is not None
    ]
    per_class = summary["accuracy_per_class"] or []
    notes = [record.notes for record in records if record.notes]
    return {
        "status": summary["status"],
        "accuracy": summary["accuracy_mean_last10"],
        "best": max(scored),
        "lowest_late": min(scored[len(scored) // 2 :]),
        "head": fmean(per_class[:3]) if per_class else None,
        "tail": fmean(per_class[-3:]) if per_class else None,
        "curve": [round(a, 4) for a in scored],
        "seconds": round(summary["seconds"], 1),
        **{
            name: fmean(note[name] for note in notes)
            for name in ("alpha", "effective_clients", "momentum_norm")
            if notes and name in notes[0]
        },
    }


def show(lines):
    """Print a Markdown table: mean accuracy (and its range over seeds) by method and setting."""
    cells = defaultdict(list)
    for line in lines:
        column = (line["weight_decay"], line["imbalance"], line["beta"])
        cells[line["method"], column].append(line["accuracy"])
    columns = sorted({column for _, column in cells}, reverse=True)
    print(
        "| method |", " | ".join("decay {:g}, IF {:g}, beta {:g}".format(*c) for c in columns), "|"
    )
    print("|---|" + "---|" * len(columns))
    for method in dict.fromkeys(method for method, _ in cells):
        print(f"| `{method}` |", " | ".join(cell(cells.get((method, c), [])) for c in columns), "|")


def cell(found):
    if len(found) < 2:
        return "".join(f"{100 * a:.1f}" for a in found)
    return f"{100 * fmean(found):.1f} ({100 * min(found):.1f} to {100 * max(found):.1f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--show", action="store_true", help="print what is there, run nothing")
    parser.add_argument("--data", default="fashion-mnist")
    parser.add_argument("--model", default="mlp(widths=(64,))")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--imbalances", nargs="+", type=float, default=(0.1, 0.01))
    parser.add_argument("--betas", nargs="+", type=float, default=(0.6, 0.1))
    parser.add_argument("--seeds", nargs="+", type=int, default=(0,))
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--participation", default="fraction(rate=0.1)")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--weight-decays", nargs="+", type=float, default=(1e-3, 0.0))
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = arguments.out.read_text().splitlines() if arguments.out.exists() else []
    lines = [json.loads(line) for line in lines]
    if arguments.show:
        return show(lines)
    names = ("seed", "weight_decay", "imbalance", "beta", "method")
    axes = (arguments.seeds, arguments.weight_decays, arguments.imbalances, arguments.betas)
    for values in product(*axes, arguments.methods):
        key = dict(zip(names, values, strict=True))
        setting = experiment(arguments, **key).resolved()
        key["settings"] = setting.to_toml()
        if any(key.items() <= line.items() for line in lines):
            continue
        line = key | measure(setting)
        with arguments.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        short = {k: v for k, v in line.items() if k not in ("settings", "curve")}
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in short.items()}, flush=True)


if __name__ == "__main__":
    main()
