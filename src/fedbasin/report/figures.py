"""The page's plots once more, for print."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from fedbasin.report.curves import Against, draw_curves
from fedbasin.report.partition_figure import partition_figure
from fedbasin.report.runs import Run, headline_of_runs, shared_holdings, title_of


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
