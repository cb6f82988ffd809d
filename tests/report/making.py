"""Run folders for tests, made by hand."""

from pathlib import Path

import numpy as np

from fedbasin.core.figure_data import Analysis, Bars, BarSeries, Grid, Line, Lines, Mark, Table
from fedbasin.core.holdings import Holdings
from fedbasin.core.record import RoundRecord, RunFolder, mean_of_last
from fedbasin.core.settings import nest, write_toml

SETTINGS = {
    "model": "mlp",
    "rounds": 12,
    "data.name": "digits",
    "partition.how": "dirichlet(alpha=0.1)",
    "partition.clients": 4,
    "local.lr": 0.1,
}
HOSTILE = (
    '</script><script>alert("1")</script><img src=x onerror=alert(2)>'
    "'\"&amp; {{ 7*7 }} $x_{$ é\u2028😀"
)


def make_run(
    path,
    method="fedavg",
    seed=0,
    *,
    accuracies=None,
    rounds=12,
    planned=None,
    notes=None,
    **settings,
):
    """Write a run folder; `settings` are flat, with __ for the dot."""
    folder = RunFolder(Path(path))
    folder.path.mkdir(parents=True)
    rng = np.random.default_rng([seed, len(method)])
    if accuracies is None:
        accuracies = np.clip(np.linspace(0.2, 0.9, rounds) + rng.normal(0, 0.02, rounds), 0, 1)
    records = [
        RoundRecord(
            round=n, train_loss=3.0 / n,
            metrics={
                "accuracy": None if a is None else float(a), "loss": 2.0 / n, "accuracy_send": None,
            },
            bytes_down=1000, bytes_up=500 + n, seconds=0.25, notes=notes or {},
        )
        for n, a in enumerate(accuracies, start=1)
    ]  # fmt: skip
    for record in records:
        folder.append(record)
    flat = SETTINGS | {
        "method": method,
        "seed": seed,
        "partition.seed": seed,
        "rounds": planned or len(records),
    }
    flat |= {name.replace("__", "."): value for name, value in settings.items()}
    folder.config.write_text(write_toml(nest(flat)), encoding="utf-8")
    counts = np.random.default_rng(seed).integers(0, 9, (4, 3))
    folder.partition.write_text(Holdings(("a", "b", "c"), counts).to_csv(), encoding="utf-8")
    folder.write_summary(
        {
            "method": method, "seed": seed, "dataset": flat["data.name"],
            "partition": flat["partition.how"], "clients": 4, "model": flat["model"],
            "versions": {"fedbasin": "0.1.0", "torch": "2.13.0"}, "python": "3.11.7",
            "device": "cpu (x86_64)", "commit": "0123abc", "status": "finished", "reason": None,
            "rounds": len(records), "accuracy_mean_last10": mean_of_last(records),
            "accuracy_last": records[-1].metric("accuracy"),
            "loss_last": records[-1].metric("loss"),
            "bytes_down": sum(r.bytes_down for r in records),
            "bytes_up": sum(r.bytes_up for r in records), "seconds": 3.0 + seed,
            "peak_memory_bytes": 123_000_000, "executor": "loop",
        }
    )  # fmt: skip
    return folder


def every_kind(title="Loss around three models"):
    """An analysis with a panel of every kind."""
    x, missing = (-1.0, 0.0, 1.0), float("nan")
    one = Line("one", x, (0.4, missing, 0.3))
    two = Line("two", x, (0.1, 0.2, 0.3), low=(0.0, 0.1, 0.2), high=(0.2, 0.3, 0.4))
    steep = Line("steep", x, (0.4, 4.0, 40.0))
    values = ((1.0, 2.0, 3.0), (4.0, missing, 0.125))
    path = Line("path", (0.0, 1.0), (0.0, 2.0))
    bars = (BarSeries("one", (0.1, 0.9)), BarSeries("two", (0.2, 0.8)))
    rows = (("one", 3, 0.512345), (title, None, 0.25))
    return Analysis(
        name="plane",
        title=title,
        source="a paper, Figure 1",
        runs=("fedavg",),
        panels=(
            Lines("on the line", "position", "error", (one, two), (Mark("here", 0.0, 0.2),)),
            Lines("logarithmic", "position", "error", (steep,), log_y=True),
            Grid("plane", "u", "v", "loss", x, (0.0, 2.0), values, (Mark("w", 0.0, 2.0),), (path,)),
            Bars("by class", "class", "accuracy", ("cat", "dog"), bars),
            Table("in numbers", ("run", "rounds", "area"), rows),
        ),
        notes=("a subsample of 10 rows", title),
    )


def add_analysis(folder, analysis, name="plane"):
    folder.analysis.mkdir(exist_ok=True)
    (folder.analysis / f"{name}.json").write_text(analysis.to_json(), encoding="utf-8")
