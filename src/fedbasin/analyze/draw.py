"""Figure data to a picture: every panel, in colours safe for colour-blind readers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedbasin.core.figure_data import Analysis, Bars, Grid, Lines, Panel, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart by colour-blind readers; then by the style of the line.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
_STYLES = ("-", "--", "-.", ":")
_MARKERS = "*DsvP^"
_BESIDE = (
    (4, 4),
    (4, -11),
    (4, 16),
    (4, -23),
)  # points from a mark to its name, if others are near
_NEAR = 0.06  # of an axis
_CROWDED = 5  # from more lines than this the legend stands beside the panel
_LONG = 45  # letters, of names that would cover the lines
_LETTER = 0.055  # inches a letter of a legend is wide
_SCALE = "cividis"  # even in lightness, and made for colour-blind readers


def draw(analysis: Analysis, path: Path) -> Path:
    """Draw all panels side by side, two in a row; the ending of the path says the format."""
    from matplotlib.figure import Figure  # slow to import, and needed only here

    panels = analysis.panels
    columns = min(len(analysis.panels), 2)
    rows = [panels[start : start + columns] for start in range(0, len(panels), columns)]
    heights = [max(_height(panel) for panel in row) for row in rows]
    widths = [6.4 + max(map(_legend_width, panels[c::columns])) for c in range(columns)]
    figure = Figure(figsize=(sum(widths), sum(heights)), layout="constrained")
    grid = figure.add_gridspec(len(rows), columns, height_ratios=heights, width_ratios=widths)
    for number, panel in enumerate(panels):
        axes = figure.add_subplot(grid[divmod(number, columns)])
        axes.set_title(_plain(panel.title), fontsize=10, loc="left")
        _draw_panel(figure, axes, panel)
    figure.suptitle(_plain(analysis.title), fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path


def _height(panel: Panel) -> float:
    """Return the inches a panel needs."""
    return 1 + 0.25 * len(panel.rows) if isinstance(panel, Table) else 4.4


def _names(panel: Panel) -> list[str]:
    """Return what a panel's legend names."""
    if isinstance(panel, Lines):
        return [line.name for line in panel.series] + [mark.name for mark in panel.marks]
    return [one.name for one in panel.series] if isinstance(panel, Bars) else []


def _has_legend_beside(panel: Panel) -> bool:
    """Whether a legend inside would cover what is drawn."""
    longest = max(map(len, _names(panel)), default=0)
    crowded = isinstance(panel, Lines) and len(panel.series) > _CROWDED
    return isinstance(panel, Bars) or crowded or longest > _LONG


def _legend_width(panel: Panel) -> float:
    """Return the inches a legend beside a panel needs."""
    longest = max(map(len, _names(panel)), default=0)
    return 0.6 + _LETTER * longest if _has_legend_beside(panel) else 0.0


def _plain(text: str) -> str:
    """Keep matplotlib from reading a name as a formula."""
    return text.replace("$", r"\$")


def _draw_panel(figure: Figure, axes: Axes, panel: Panel) -> None:
    if isinstance(panel, Table):
        _draw_table(axes, panel)
        return
    axes.set_xlabel(_plain(panel.x_label))
    axes.set_ylabel(_plain(panel.y_label))
    if isinstance(panel, Lines):
        _draw_lines(axes, panel)
    elif isinstance(panel, Grid):
        _draw_grid(figure, axes, panel)
    else:
        _draw_bars(axes, panel)


def _draw_lines(axes: Axes, panel: Lines) -> None:
    from matplotlib.ticker import MaxNLocator

    for line, (colour, style) in zip(panel.series, _looks(panel), strict=True):
        dot = "o" if len(line.x) <= 12 else ""
        axes.plot(
            line.x, line.y, style, marker=dot, markersize=3, color=colour, label=_plain(line.name)
        )
        if line.low and line.high:
            axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.15, linewidth=0)
    for number, mark in enumerate(panel.marks):
        shape = _MARKERS[number % len(_MARKERS)]
        axes.plot(mark.x, mark.y, shape, color="black", label=_plain(mark.name), linestyle="")
    positive = [y for line in panel.series for y in line.y if y > 0]
    if panel.log_y and positive:
        axes.set_yscale("log")
    if panel.x_label == "round":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    if _has_legend_beside(panel):
        _legend_beside(axes)
    elif panel.series:
        axes.legend(fontsize="x-small", handlelength=4)


def _legend_beside(axes: Axes) -> None:
    # long handles, on which the styles of lines can be told apart
    axes.legend(fontsize="x-small", handlelength=4, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _looks(panel: Lines) -> list[tuple[str, str]]:
    """Return colour and style of each line: one colour a run, where lines are parts of runs.

    A name is "run, part" or a run alone; the part is what follows the last comma outside brackets.
    """
    split = [_run_and_part(line.name) for line in panel.series]
    runs = list(dict.fromkeys(run for run, _ in split))
    parts = list(dict.fromkeys(part for _, part in split))
    if len(runs) == len(split) or len(runs) == 1 or len(parts) > len(_STYLES):
        places = [(i, i // len(_COLOURS)) for i in range(len(split))]
    else:
        places = [(runs.index(run), parts.index(part)) for run, part in split]
    return [(_COLOURS[c % len(_COLOURS)], _STYLES[s % len(_STYLES)]) for c, s in places]


def _run_and_part(name: str) -> tuple[str, str]:
    depth = 0
    for place in range(len(name) - 1, 0, -1):
        depth += {")": 1, "(": -1}.get(name[place], 0)
        if name[place] == "," and not depth:
            return name[:place], name[place + 1 :].strip()
    return name, ""


def _draw_grid(figure: Figure, axes: Axes, panel: Grid) -> None:
    values = np.ma.masked_invalid(np.array(panel.values, dtype=float))
    mesh = axes.pcolormesh(panel.x, panel.y, values, cmap=_SCALE, shading="nearest")
    axes.set_aspect("equal")  # both axes of every grid are of one kind
    figure.colorbar(mesh, ax=axes, label=_plain(panel.value_label))
    spread = values.min() is not np.ma.masked and values.max() > values.min()
    if min(values.shape) > 2 and panel.marks and spread:
        axes.contour(panel.x, panel.y, values, levels=12, colors="white", linewidths=0.5)
    for line in panel.paths:
        axes.plot(line.x, line.y, "o-", color="white", markersize=3, linewidth=0.8)
    for mark, place in zip(panel.marks, _name_places(panel), strict=True):
        axes.plot(mark.x, mark.y, "o", color="white", markeredgecolor="black")
        axes.annotate(
            _plain(mark.name), (mark.x, mark.y), xytext=place, textcoords="offset points",
            fontsize="x-small", bbox={"facecolor": "white", "alpha": 0.7, "pad": 1, "linewidth": 0},
        )  # fmt: skip


def _name_places(panel: Grid) -> list[tuple[int, int]]:
    """Return where each mark's name stands, clear of the names of marks near by."""
    width = (panel.x[-1] - panel.x[0]) or 1.0
    height = (panel.y[-1] - panel.y[0]) or 1.0
    places: list[tuple[int, int]] = []
    for number, mark in enumerate(panel.marks):
        taken = [
            places[other]
            for other, before in enumerate(panel.marks[:number])
            if abs(before.x - mark.x) / width < 4 * _NEAR
            and abs(before.y - mark.y) / height < _NEAR
        ]
        places.append(next((place for place in _BESIDE if place not in taken), _BESIDE[0]))
    return places


def _draw_bars(axes: Axes, panel: Bars) -> None:
    places = np.arange(len(panel.categories))
    width = 0.8 / max(len(panel.series), 1)
    for number, one in enumerate(panel.series):
        shift = (number - (len(panel.series) - 1) / 2) * width
        colour = _COLOURS[number % len(_COLOURS)]
        axes.bar(places + shift, one.values, width, color=colour, label=_plain(one.name))
    few = max(1, math.ceil(len(places) / 20))
    names = [_plain(name) for name in panel.categories[::few]]
    axes.set_xticks(places[::few], names, rotation=45, ha="right", fontsize="x-small")
    _legend_beside(axes)


def _draw_table(axes: Axes, panel: Table) -> None:
    axes.axis("off")
    if not panel.rows:
        return
    cells = [[_plain(_shown(cell)) for cell in row] for row in panel.rows]
    drawn = axes.table(cells, colLabels=[_plain(c) for c in panel.columns], loc="upper center")
    drawn.auto_set_font_size(False)
    drawn.set_fontsize(7)
    drawn.auto_set_column_width(list(range(len(panel.columns))))


def _shown(cell: object) -> str:
    if cell is None:
        return "-"
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)
