"""The picture of a partition: who holds how much of what."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Paul Tol's "muted" colours, told apart by readers with any kind of colour blindness.
CLASS_COLOURS = (
    *("#332288", "#88CCEE", "#44AA99", "#117733", "#999933"),
    *("#DDCC77", "#CC6677", "#882255", "#AA4499", "#DDDDDD"),
)
_MOST_BARS = 500
_ID_ORDER = 60  # up to here clients stand in the order of their ids


def partition_figure(
    counts: NDArray[np.int64], class_names: Sequence[str], path: Path, title: str = ""
) -> Path:
    """Draw one stacked bar a client: rows of each class above, their shares below.

    Up to 60 clients stand in the order of their ids; more are ordered by the class they hold
    most of, empty ones last, so that the skew shows as blocks. Beyond 500 clients, 500 of
    them, evenly spaced in that order, are drawn. More than ten classes are coloured along one
    scale, dark to bright. Without classes there is one bar of all rows a client.

    Args:
        counts: rows of each class that each client holds, [N, C]; all rows [N, 1] without classes.
        class_names: C names; none without classes.
        path: file to write; its ending says the format.
        title: a line above the picture.
    """
    from matplotlib.figure import Figure  # slow to import, and needed only here

    order = order_of_clients(counts)
    shown = counts[order]
    sizes = np.maximum(shown.sum(axis=1, keepdims=True), 1)
    figure = Figure(
        figsize=(float(np.clip(5 + 0.06 * len(shown), 7, 13)), 6.0), layout="constrained"
    )
    panels = [(shown, "rows")]
    if class_names:
        panels.append((shown / sizes, "share of the client's rows"))
    ratios = [3, 2][: len(panels)]
    drawn = figure.subplots(len(panels), 1, sharex=True, height_ratios=ratios, squeeze=False)
    rows_axes = drawn[0, 0]
    share_axes = drawn[-1, 0]
    colours = _colours(counts.shape[1])
    for axes, (table, label) in zip(drawn[:, 0], panels, strict=True):
        _stack(axes, table, colours)
        axes.set_ylabel(label)
        axes.spines[["top", "right"]].set_visible(False)
    rows_axes.yaxis.get_major_locator().set_params(integer=True)
    rows_axes.set_title(as_text(title), loc="left", fontsize=11)
    share_axes.set_xlim(-0.6, len(shown) - 0.4)
    share_axes.set_xlabel(_axis_text(len(counts), len(shown), bool(class_names)))
    _name_clients(share_axes, len(shown))
    if class_names:
        _explain_colours(figure, class_names, colours)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def as_text(words: str) -> str:
    """Keep matplotlib from reading $ as mathematics and from leaving out names with a leading _."""
    shown = words.replace("$", r"\$")
    return f"\N{ZERO WIDTH SPACE}{shown}" if shown.startswith("_") else shown


def order_of_clients(counts: NDArray[np.int64], most: int = _MOST_BARS) -> NDArray[np.int64]:
    """Choose at most so many clients to draw, and the order they stand in."""
    if len(counts) <= _ID_ORDER:
        return np.arange(len(counts))
    second, first = np.argsort(np.pad(counts, ((0, 0), (1, 0))), axis=1, kind="stable").T[-2:]
    share = counts.max(axis=1) / np.maximum(counts.sum(axis=1), 1)
    # The last key weighs most. Empty clients count as the least pure of the last class.
    order = np.lexsort((second, -share, first))
    if len(counts) > most:
        order = order[np.linspace(0, len(counts) - 1, most).astype(np.int64)]
    return order


def _colours(classes: int) -> list[Any]:
    if classes <= len(CLASS_COLOURS):
        return list(CLASS_COLOURS[:classes])
    from matplotlib import colormaps

    return list(colormaps["viridis"](np.linspace(0, 1, classes)))


def _stack(axes: Axes, table: NDArray[Any], colours: Sequence[Any]) -> None:
    """Stack one bar a client; a whole class is one collection, which keeps 500 clients quick."""
    from matplotlib.collections import PolyCollection

    half = 0.4 if len(table) <= _ID_ORDER else 0.5
    left = np.arange(len(table)) - half
    right = np.arange(len(table)) + half
    tops = np.cumsum(table, axis=1, dtype=np.float64)
    bottoms = tops - table
    for label, colour in enumerate(colours):
        low = bottoms[:, label]
        high = tops[:, label]
        corners = [(left, low), (left, high), (right, high), (right, low)]
        boxes = np.stack([np.stack(corner, axis=-1) for corner in corners], axis=1)
        held = list(boxes[table[:, label] > 0])
        axes.add_collection(PolyCollection(held, facecolors=[colour], linewidths=0))
    axes.set_ylim(0, max(float(tops[:, -1].max()) * 1.02, 1e-9))


def _axis_text(clients: int, shown: int, classes: bool) -> str:
    if clients <= _ID_ORDER:
        return "client"
    few = "" if shown == clients else f"{shown} of "
    ordered = ", ordered by the class they hold most of" if classes else ""
    return f"{few}{clients:,} clients{ordered}"


def _name_clients(axes: Axes, shown: int) -> None:
    """Number the clients where they stand in the order of their ids, and only there."""
    if shown > _ID_ORDER:
        axes.set_xticks([])
    else:
        axes.set_xticks(np.arange(0, shown, 1 if shown <= 30 else 5))


def _explain_colours(figure: Any, class_names: Sequence[str], colours: Sequence[Any]) -> None:
    if len(class_names) <= len(CLASS_COLOURS):
        from matplotlib.patches import Patch

        handles = [
            Patch(color=c, label=as_text(n)) for c, n in zip(colours, class_names, strict=True)
        ]
        figure.legend(handles=handles[::-1], loc="outside right upper", frameon=False)
        return
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    scale = ScalarMappable(Normalize(0, len(class_names) - 1), "viridis")
    bar = figure.colorbar(scale, ax=figure.axes, label="class", fraction=0.03, pad=0.01)
    marks = np.unique(np.linspace(0, len(class_names) - 1, 8).astype(int))
    bar.set_ticks(marks, labels=[as_text(class_names[mark]) for mark in marks])
