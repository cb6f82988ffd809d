"""Run records to a figure: accuracy against rounds, one line a method."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedbasin.report.table import Curve

# Okabe and Ito's colours, told apart by colour-blind readers.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000", "#F0E442")
STYLES = ("-", "--", "-.", ":")


def draw_curves(curves: Sequence[Curve], path: Path, *, title: str = "") -> Path:
    """Draw the mean over seeds of each method, with a band from the worst to the best seed.

    Args:
        curves: the runs.
        path: where the picture goes; its ending decides the format (png, svg, pdf).
        title: what stands above it.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for number, method in enumerate(dict.fromkeys(curve.method for curve in curves)):
        rounds, low, mean, high = _band([c for c in curves if c.method == method])
        if not len(rounds):  # every seed broke off before it was scored
            continue
        colour = COLOURS[number % len(COLOURS)]
        style = STYLES[number // len(COLOURS) % len(STYLES)]
        axes.plot(rounds, 100 * mean, style, color=colour, label=method, linewidth=1.6)
        axes.fill_between(rounds, 100 * low, 100 * high, color=colour, alpha=0.15, linewidth=0)
    axes.set_xlabel("round")
    axes.set_ylabel("test accuracy, %")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path


def _band(runs: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return rounds, lowest, mean and highest accuracy where every seed was evaluated."""
    scored = [{r.round: r.accuracy for r in run.records if r.accuracy is not None} for run in runs]
    rounds = sorted(set.intersection(*(set(found) for found in scored)))
    table = np.array([[found[r] for r in rounds] for found in scored], dtype=float)
    return np.array(rounds), table.min(0), table.mean(0), table.max(0)
