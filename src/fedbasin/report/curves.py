"""The page's plots once more, for print: learning curves, and who holds what.

A curve is a measure against rounds, seconds or bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np

from fedbasin.core.record import RoundRecord
from fedbasin.report.partition_figure import as_text, partition_figure
from fedbasin.report.runs import Run, headline_of_runs, shared_holdings, title_of
from fedbasin.report.table import by_label

# Okabe and Ito's colours without yellow, which is lost on white; told apart by colour-blind
# readers. More methods than colours get another dash.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
STYLES = ("-", "--", "-.", ":")

Against = Literal["round", "seconds", "bytes"]
_AXES: dict[Against, tuple[str, Callable[[RoundRecord], float]]] = {
    "round": ("round", lambda record: 1.0),
    "seconds": ("seconds", lambda record: record.seconds),
    "bytes": ("megabytes sent and received", lambda r: (r.bytes_down + r.bytes_up) / 1e6),
}


def write_figures(runs: Sequence[Run], stem: Path, ending: Literal["png", "svg"]) -> list[Path]:
    """Write the learning curves and who holds what; return the files.

    Args:
        runs: the runs.
        stem: folder and beginning of the file names.
        ending: the format.
    """
    import matplotlib

    title = title_of(runs)
    written = []

    def named(what: str) -> Path:
        written.append(stem.with_name(f"{stem.name}-{what}.{ending}"))
        return written[-1]

    # Text stays text in an SVG file, so that it can be searched and set in the paper's font.
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        headline = headline_of_runs(runs).name
        curves: list[tuple[str, Against]] = [
            (headline, "round"),
            (headline, "seconds"),
            (headline, "bytes"),
            ("loss", "round"),
        ]
        for measure, against in curves:
            path = named(f"{measure}-by-{against}")
            draw_curves(runs, path, title=title, measure=measure, against=against, dpi=300)
        for number, (said, held) in enumerate(shared_holdings(runs), start=1):
            line = f"{title}, {len(held.sizes):,} clients, {said}"
            partition_figure(held.stacked, held.classes, named(f"clients{number}"), line)
    return written


def draw_curves(
    runs: Sequence[Run],
    path: Path,
    *,
    title: str = "",
    measure: str = "",
    against: Against = "round",
    dpi: int = 150,
) -> Path:
    """Draw curves as `write_curves` does, into a file whose ending decides the format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_curves(runs, path, title=title, measure=measure, against=against, dpi=dpi)
    return path


def write_curves(
    runs: Sequence[Run],
    place: Path | BinaryIO,
    *,
    title: str = "",
    measure: str = "",
    against: Against = "round",
    dpi: int = 150,
) -> None:
    """Draw the mean over seeds of each method, with a band from the worst to the best seed.

    Args:
        runs: the runs.
        place: where the picture goes: a path (png, svg, pdf), or a file that takes a PNG.
        title: what stands above it.
        measure: the metric that is drawn upwards; the headline by default.
        against: what is drawn to the right; seconds and bytes are means over seeds, too.
        dpi: dots an inch, for pixel formats.
    """
    from matplotlib.figure import Figure  # not pyplot, which would choose the user's backend
    from matplotlib.ticker import MaxNLocator

    x_label, step = _AXES[against]
    headline = headline_of_runs(runs)
    if measure in ("", headline.name):
        measure = headline.name
        scale = headline.scale
        y_label = f"test {headline.name.replace('_', ' ')}"
        y_label += f", {headline.unit}" if headline.unit else ""
        y_label += "" if headline.higher_is_better else " (lower is better)"
    else:
        scale = 1.0
        y_label = f"test {measure.replace('_', ' ')}"
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for number, (label, members) in enumerate(by_label(runs).items()):
        x, low, mean, high = _band(members, measure, step)
        if not len(x):  # every seed broke off before it was scored
            continue
        colour = COLOURS[number % len(COLOURS)]
        style = STYLES[number // len(COLOURS) % len(STYLES)]
        axes.plot(x, scale * mean, style, color=colour, label=as_text(label), linewidth=1.6)
        axes.fill_between(x, scale * low, scale * high, color=colour, alpha=0.15, linewidth=0)
    axes.set_xlabel(x_label)
    if against == "round":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel(y_label)
    axes.set_title(as_text(title))
    axes.grid(alpha=0.3)
    if axes.lines:
        corner: Literal["best", "lower right", "upper right"] = "best"
        if measure == headline.name:  # the corner that curves leave free as they get better
            corner = "lower right" if headline.higher_is_better else "upper right"
        axes.legend(loc=corner, fontsize="small")
    figure.savefig(place, dpi=dpi)


def _band(
    runs: Sequence[Run], measure: str, step: Callable[[RoundRecord], float]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the axis, and the lowest, mean and highest value where every seed was evaluated."""
    scored = []
    for run in runs:
        places = accumulate(map(step, run.records))
        placed = zip(run.records, places, strict=True)
        scored.append({r.round: (x, v) for r, x in placed if (v := r.metric(measure)) is not None})
    rounds = sorted(set.intersection(*(set(points) for points in scored)))
    table = np.array([[points[r] for r in rounds] for points in scored], dtype=float)
    table = table.reshape(len(runs), len(rounds), 2)
    x = table[..., 0].mean(0)
    values = table[..., 1]
    return x, values.min(0), values.mean(0), values.max(0)
