"""``fedbasin report``: one page, and figures for print, from the records of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

_REACH = "Value of the headline metric for 'rounds to target'; 0.8 for accuracy by default."
Reach = Annotated[float | None, typer.Option("--reach", help=_REACH)]
ReachOrTarget = Annotated[float | None, typer.Option("--reach", "--target", help=_REACH)]


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders, or folders that hold some, such as runs/a.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The page to write; report.html in the folder, of several folders here by default."
        ),
    ] = None,
    reach: ReachOrTarget = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            help="The method that others are compared with, seed by seed.",
            show_default="fedavg",
        ),
    ] = None,
    png: Annotated[bool, typer.Option("--png", help="Also write the figures as PNG.")] = False,
    svg: Annotated[bool, typer.Option("--svg", help="Also write the figures as SVG.")] = False,
) -> None:
    """Write one page about some runs: table, tests, curves, clients, analyses, settings.

    The page holds all it shows: it opens from disk, needs no network and can be sent to
    anyone. --png and --svg write the same plots for a paper, beside the page. A page of an
    earlier time is replaced, and said to be; any other file is left alone.
    """
    from fedbasin.core.suggest import nearest
    from fedbasin.report.figures import write_figures
    from fedbasin.report.page import is_page, write_page
    from fedbasin.report.runs import find_runs, read_runs

    alone = runs[0] if len(runs) == 1 else Path()
    page = out or alone / "report.html"
    again = page.exists()
    if again and not is_page(page):
        raise ValueError(f"{page} is no page of fedbasin: remove it, or name another with --out")
    chosen = read_runs(find_runs(runs))
    known = sorted({run.method for run in chosen})
    if baseline is not None and baseline not in known:
        raise ValueError(f"--baseline: no run is of {baseline!r}; {nearest(baseline, known)}")
    for run in chosen:
        told = list(run.problems)
        if not run.ended:
            told.append(f"{run.path}: {run.status} after round {len(run.records)}, counted so far")
        for line in told:
            Console(stderr=True).print(Text(line, style="yellow"), soft_wrap=True)
    written = [write_page(chosen, page, target=reach, baseline=baseline or "fedavg")]
    stem = page.with_suffix("")
    written += write_figures(chosen, stem, "png") if png else []
    written += write_figures(chosen, stem, "svg") if svg else []
    names = [str(path) for path in written]
    names[0] += " (the earlier page is replaced)" if again else ""
    lines = "\n".join(names)
    amount = "1 run" if len(chosen) == 1 else f"{len(chosen)} runs"
    Console().print(Text(f"{amount} in {lines}"), soft_wrap=True)
