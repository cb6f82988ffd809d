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
            help="The page to write. It replaces an older page of fedbasin, and no other file.",
            show_default="report.html in the folder, or here for several folders",
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
    anyone. --png and --svg write the same plots for a paper, beside the page.
    """
    from fedbasin.core.suggest import nearest
    from fedbasin.report.curves import write_figures
    from fedbasin.report.page import write_page
    from fedbasin.report.runs import find_runs, read_runs

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
    if out is None:
        out = runs[0] / "report.html" if len(runs) == 1 else Path("report.html")
    replaced = _replaces_a_page(out)
    written = [write_page(chosen, out, target=reach, baseline=baseline or "fedavg")]
    stem = out.with_suffix("")
    written += write_figures(chosen, stem, "png") if png else []
    written += write_figures(chosen, stem, "svg") if svg else []
    lines = "\n".join(str(path) for path in written)
    amount = "1 run" if len(chosen) == 1 else f"{len(chosen)} runs"
    Console().print(Text(f"{amount} in {lines}"), soft_wrap=True)
    if replaced:
        Console().print(Text(f"replaced the page that was in {out}"), soft_wrap=True)


def _replaces_a_page(out: Path) -> bool:
    """Say whether a page is there already; refuse to replace what fedbasin did not write."""
    if not out.exists():
        return False
    if out.is_file():
        with out.open("rb") as file:
            start = file.read(4096)
        if b'<meta name="generator" content="fedbasin report">' in start:
            return True
    raise ValueError(f"--out: {out} exists and is no page of fedbasin report; name another file")
