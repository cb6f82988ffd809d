"""The command ``tune``: run a tuned comparison and show what came out."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from fedbasin.api.tuned import run_tuning
from fedbasin.tuning import Request


def tune_and_show(
    request: Request,
    out: Path,
    console: Console,
    data_dir: Path | None,
    jobs: int | None,
    on: str,
) -> None:
    """Run a request; print the table, the verdict and where the files are."""
    rungs = ", ".join(f"{count} to round {end}" for count, end in request.rungs())
    line = (
        f"{len(request.methods)} methods, settings of each: {rungs}; "
        f"{request.tuning_seeds} tuning seeds, {request.final_seeds} final seeds"
    )
    console.print(Text(line), soft_wrap=True)
    tuned = run_tuning(request, out, data_dir=data_dir, jobs=jobs, on=on, console=console)  # type: ignore[arg-type]
    console.print(tuned.table())
    console.print(Text(tuned.verdict), soft_wrap=True)
    where = f"chosen settings: {out / 'chosen'}\nrecords: {out}"
    if tuned.outcome.final:
        where = f"page: {tuned.report(out / 'report.html')}\n{where}"
    console.print(Text(where), soft_wrap=True)
