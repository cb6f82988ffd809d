"""Ours beside theirs as a picture: all papers at a glance, or one table cell by cell."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from fedbasin.papers.beside import NEAR, Compared
from fedbasin.papers.tables import Table, paper_names
from fedbasin.report.curves import COLOURS
from fedbasin.report.partition_figure import as_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKS = "osv^D*"  # of the papers, beside their colours
_VERDICTS = {"near": "#0072B2", "gain": "#56B4E9", "missed": "#D55E00"}
_NO_VERDICT = "#777777"  # reduced, other data, or nothing in print to compare with
_ACROSS = 3  # panels in a row
Pair = Callable[[Compared], tuple[float | None, float | None]]


def draw_all(cells: Sequence[Compared], path: Path) -> Path:
    """Draw the scores and gains of all cells with a verdict, the paper's against ours.

    The legend counts every cell with a verdict. What cannot be drawn is counted below: rounds to a
    target and cells without a score.

    Args:
        cells: cells of any tables.
        path: where the picture goes; its ending decides the format (png, svg, pdf).
    """
    from matplotlib.figure import Figure  # slow to import, and needed only here

    judged = [c for c in cells if c.judged]
    points = [c for c in judged if c.score.kind != "rounds_to_target"]
    if not points:
        raise ValueError("no cell of what was asked for has a verdict to draw")
    figure = Figure(figsize=(11, 5.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.set_title(f"accuracy or c-index, %; grey: within {NEAR:g} points", fontsize=10, loc="left")
    _against(left, points, lambda c: (c.published.value, c.ours.mean if c.ours else None))
    line = np.array(left.get_xlim())
    left.fill_between(line, line - NEAR, line + NEAR, color="black", alpha=0.1, linewidth=0)
    half = "gain over the baseline, points; grey: its direction, and at least half of it"
    right.set_title(half, fontsize=10, loc="left")
    right.set(xscale="symlog", yscale="symlog")
    _against(right, points, lambda c: (c.gain_paper, c.gain_ours))
    low, high = right.get_xlim()
    up = np.geomspace(0.01, high, 200)
    down = -np.geomspace(0.01, -low, 200)
    right.fill_between(up, up / 2, high, color="black", alpha=0.1, linewidth=0)
    right.fill_between(down, 2 * down, down / 2, color="black", alpha=0.1, linewidth=0)
    right.axhline(0, color="black", linewidth=0.5)
    right.axvline(0, color="black", linewidth=0.5)
    ticks = [tick for tick in (-50, -10, -3, -1, 0, 1, 3, 10, 50) if low < tick < high]
    for axis in (right.xaxis, right.yaxis):
        axis.set_ticks(ticks, [str(tick) for tick in ticks])
    right.set(xlim=(low, high), ylim=(low, high))
    _legend(left, cells)
    figure.supxlabel(told(judged), fontsize=9)
    return _saved(figure, path)


def told(judged: Sequence[Compared]) -> str:
    """Say in one line what the cells with a verdict come to."""
    near = [cell for cell in judged if cell.verdict == "near"]
    ways = Counter(cell.direction for cell in near)
    verdicts = Counter(cell.verdict for cell in judged)
    rounds = sum(cell.score.kind == "rounds_to_target" for cell in judged)
    unscored = sum(
        cell.score.kind != "rounds_to_target" and (cell.ours is None or cell.ours.mean is None)
        for cell in judged
    )
    return (
        f"{len(judged)} cells: {len(near)} near (direction of the gain {ways['confirmed']} "
        f"confirmed, {ways['not confirmed']} not, {ways['too small to tell']} too small to tell, "
        f"{ways['']} without one), {verdicts['gain']} gain, {verdicts['missed']} missed.\n"
        f"Not drawn: {rounds} rounds to a target, {unscored} without a score. "
        "Hollow: a direction that is not confirmed."
    )


def _legend(axes: Axes, cells: Sequence[Compared]) -> None:
    """Name every paper with its number of cells that have a verdict, drawn or not."""
    from matplotlib.lines import Line2D

    handles = []
    for name, colour, mark in zip(paper_names(), COLOURS, _MARKS, strict=False):
        mine = [cell for cell in cells if cell.table.name.startswith(f"{name}/")]
        judged = sum(cell.judged for cell in mine)
        reduced = sum(cell.verdict == "reduced" for cell in mine)
        label = f"{name}, {judged} cells" + (f" ({reduced} reduced)" if reduced else "")
        if judged or reduced:
            handles.append(Line2D([], [], color=colour, marker=mark, linestyle="", label=label))
    axes.legend(handles=handles, fontsize="small", loc="upper left")


def _against(axes: Axes, cells: Sequence[Compared], pair: Pair) -> None:
    """Draw one dot for every cell that has both numbers, and where they are equal."""
    reach = [0.0]
    for name, colour, mark in zip(paper_names(), COLOURS, _MARKS, strict=False):
        for hollow in (False, True):
            mine = [
                pair(cell)
                for cell in cells
                if cell.table.name.startswith(f"{name}/")
                and (cell.direction == "not confirmed") is hollow
            ]
            points = [(x, y) for x, y in mine if x is not None and y is not None]
            if points:
                x, y = zip(*points, strict=True)
                fill = "none" if hollow else "full"
                axes.plot(x, y, mark, color=colour, fillstyle=fill, alpha=0.8, markersize=5)
                reach += [*x, *y]
    low = 1.2 * min(reach) - 1
    high = 1.1 * max(reach) + 1
    axes.plot([low, high], [low, high], color="black", linewidth=0.8)
    axes.set(xlim=(low, high), ylim=(low, high), xlabel="paper", ylabel="ours", aspect="equal")
    axes.grid(alpha=0.3)


def draw_table(table: Table, cells: Sequence[Compared], path: Path) -> Path:
    """Draw the cells of one table that were run, a panel for each of its columns.

    Args:
        table: the table.
        cells: some of its cells.
        path: where the picture goes; its ending decides the format (png, svg, pdf).
    """
    from matplotlib.figure import Figure

    ran = [cell for cell in cells if cell.ours and cell.ours.mean is not None]
    if not ran:
        raise ValueError(f"{table.name}: nothing of what was asked for has a score to draw")
    columns = [c for c in table.columns if any(cell.column == c for cell in ran)]
    down = math.ceil(len(columns) / _ACROSS)
    across = math.ceil(len(columns) / down)
    tall = max(sum(cell.column == column for cell in ran) for column in columns)
    size = (max(7.0, 4.2 * across), down * (1.1 + 0.24 * tall) + 0.9)
    figure = Figure(figsize=size, layout="constrained")
    panels = list(figure.subplots(down, across, squeeze=False).flat)
    for axes, column in zip(panels, columns, strict=False):
        _panel(axes, [cell for cell in ran if cell.column == column])
        axes.set_title(as_text(column.name), fontsize=10, loc="left")
    for axes in panels[len(columns) :]:
        axes.axis("off")
    figure.suptitle(as_text(f"{table.name}: {table.score.text}"), fontsize=11)
    figure.supxlabel(
        "hollow: the paper; filled: ours, the mean and all seeds. Dark blue: near, light blue: the "
        "gain comes out, orange: missed, grey: no verdict",
        fontsize=8,
    )
    return _saved(figure, path)


def _panel(axes: Axes, cells: Sequence[Compared]) -> None:
    for place, cell in enumerate(cells):
        colour = _VERDICTS.get(cell.verdict.partition(",")[0], _NO_VERDICT)
        seeds = list(cell.ours.scores.values()) if cell.ours else []
        mean = fmean(seeds)
        theirs = cell.published.value
        if theirs is not None:
            axes.plot([theirs, mean], [place, place], color=colour, linewidth=1)
            axes.plot(theirs, place, "D", markerfacecolor="white", color=colour, markersize=6)
        axes.plot(seeds, [place] * len(seeds), "|", color=colour, markersize=8)
        axes.plot(mean, place, "o", color=colour, markersize=6)
    axes.set_yticks(range(len(cells)), [as_text(cell.row.name) for cell in cells], fontsize=8)
    axes.invert_yaxis()
    axes.grid(alpha=0.3)


def _saved(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path
