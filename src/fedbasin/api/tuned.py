"""Tuned comparisons from Python and on the command line, and their result."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn

from fedbasin.api.calls import On, What, _shown, check_arguments, experiment_of, method_names
from fedbasin.api.progress import console_for_a_bar, run_with_progress
from fedbasin.api.results import _pandas
from fedbasin.core.expressions import written
from fedbasin.core.files import output_folder
from fedbasin.core.record import Headline
from fedbasin.experiment import Experiment
from fedbasin.experiment.comparison import Cell, run_cells
from fedbasin.experiment.config import ConfigError
from fedbasin.experiment.objects import Factory
from fedbasin.experiment.sharing import jobs_for
from fedbasin.report.page import say_difference, say_p
from fedbasin.tuning import Outcome, Request, space_of
from fedbasin.tuning import tune as run_request
from fedbasin.tuning.result import (
    TunedRow,
    budget_lines,
    sensitivity_lines,
    table_lines,
    trial_lines,
    tuned_rows,
    verdict_of,
    write_files,
    write_report,
)

if TYPE_CHECKING:
    import pandas


class Tuned:
    """A tuned comparison: the table, the verdict, and every setting that was tried.

    Args:
        outcome: what the tuning found.
    """

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.path = outcome.out

    @property
    def frame(self) -> pandas.DataFrame:
        """One line a method: final score, interval and p-values against the baseline, rank."""
        return _pandas().DataFrame(table_lines(self.outcome))

    @property
    def trials(self) -> pandas.DataFrame:
        """One line a setting: its values and validation score."""
        return _pandas().DataFrame(trial_lines(self.outcome))

    @property
    def budget(self) -> pandas.DataFrame:
        """The expected best validation score of each method by the number of settings tried."""
        return _pandas().DataFrame(budget_lines(self.outcome))

    @property
    def sensitivity(self) -> pandas.DataFrame:
        """The validation score over each argument, with Spearman's rank correlation."""
        return _pandas().DataFrame(sensitivity_lines(self.outcome))

    @property
    def chosen(self) -> dict[str, Experiment]:
        """The run of each method with its chosen setting."""
        request = self.outcome.request
        return {
            method: request.chosen(method, tuple(trial.values.values()))
            for method, trial in self.outcome.chosen.items()
        }

    @property
    def verdict(self) -> str:
        """Which tuned method has the best mean, and whether the seeds can tell."""
        return verdict_of(self.outcome)

    def report(self, path: Path | str = "report.html") -> Path:
        """Write the page of the final runs, with a section about tuning."""
        return write_report(self.outcome, Path(path))

    def table(self) -> Table:
        """Return the table as the terminal shows it."""
        return table_of(tuned_rows(self.outcome), self.outcome)

    def __repr__(self) -> str:
        console = Console(file=io.StringIO(), width=160, force_jupyter=False, force_terminal=False)
        console.print(self.table())
        assert isinstance(console.file, io.StringIO)
        return f"{console.file.getvalue()}{self.verdict}\nrecords: {self.path}"


def table_of(rows: Sequence[TunedRow], outcome: Outcome) -> Table:
    """Return one line a method: chosen setting, scores, difference to the baseline, rank."""
    headline = outcome.headline
    request = outcome.request
    table = Table(
        title=Text(
            f"{request.base.data.name}, {request.base.partition.how}: {request.budget} settings x "
            f"{request.tuning_seeds} tuning seeds, {request.final_seeds} final seeds"
        ),
        caption=f"test {headline.words}: mean of the last 10 rounds, ± standard deviation over "
        "final seeds; validation: rows held out from clients' training data, tuning seeds; "
        "p: paired t-test, Holm's correction; rank: mean over final seeds",
    )
    table.add_column("method", overflow="fold")
    table.add_column("chosen", overflow="fold")
    for column in ("validation", f"test {headline.title}", f"over {request.baseline}", "p", "rank"):
        table.add_column(column, justify="right", no_wrap=column != f"over {request.baseline}")
    for tuned in rows:
        table.add_row(*(Text(cell) for cell in _cells(tuned, headline)))
    return table


def _cells(tuned: TunedRow, headline: Headline) -> tuple[str, ...]:
    row, trial, gap = tuned.row, tuned.trial, tuned.difference
    if row is None or trial is None:
        said = f"diverged for all {tuned.settings} settings"
        return tuned.method, said, "-", "-", "", "", ""
    values = ", ".join(f"{name} = {value}" for name, value in trial.values.items())
    score = headline.shown(row.score)
    if row.spread is not None:
        score += f" ± {headline.shown(row.spread)}"
    if row.diverged:
        score += f" ({row.diverged} diverged)"
    return (
        tuned.method,
        values or "nothing to tune",
        headline.shown(trial.score),
        score,
        say_difference(gap, headline),
        "" if gap is None or gap.holm is None else say_p(gap.holm),
        "" if tuned.rank is None else f"{tuned.rank:.1f}",
    )


def tune(
    what: What,
    methods: Sequence[str | object] = ("fedavg",),
    over: Mapping[str, Any] | None = None,
    out: Path | str | None = None,
    *,
    budget: int = 16,
    tuning_seeds: int = 2,
    final_seeds: int = 10,
    halving: int = 0,
    validation: float = 0.2,
    sampler: Literal["sobol", "tpe"] = "sobol",
    seed: int = 0,
    baseline: str | object = "",
    model: nn.Module | Factory | object | None = None,
    data_dir: Path | None = None,
    jobs: int | None = None,
    on: On = "here",
    progress: bool | None = None,
    **settings: Any,
) -> Tuned:
    """Compare methods, each with settings chosen for it under the same budget.

        fb.tune(data, ["fedavg", "fedprox"], over={"local.lr": (0.01, 1.0)}, budget=16)

    Settings are chosen on rows held out from the clients' training data. The chosen ones run with
    fresh seeds, and only these runs are scored on test rows. The same call with the same `out`
    resumes a stopped tuning.

    Args:
        what: an `Experiment`, or the data: a `Dataset`, or arrays ``(x, y)``.
        methods: expressions or objects. Arguments that differ from their defaults are kept.
        over: spaces of common settings and of methods' arguments: (low, high), (low, high, "log"),
            or a list of choices.
        out: the folder of all runs; a new one below ``runs/`` by default.
        budget: settings that each method may try, its defaults among them.
        tuning_seeds: runs of each setting.
        final_seeds: runs of each chosen setting.
        halving: keep one in so many settings at each rung; 0 runs every setting to the end.
        validation: share of each client's rows that settings are chosen on.
        sampler: ``"sobol"``, or ``"tpe"`` (Optuna's, the extra ``optuna``).
        seed: keys the drawn settings and the tuning seeds.
        baseline: the method that others are compared with; fedavg, else the first one.
        model: the network: an expression, a module, or a function ``(shape, outputs) -> module``.
        data_dir: a local mirror of the datasets.
        jobs: runs at once; by default as many as there are cores, one on a GPU.
        on: ``"here"``, or ``"ray"``: runs are tasks of a Ray cluster that sees the folder.
        progress: whether a bar is shown; by default on a terminal and in a notebook.
        settings: any field of `Experiment`; sections as mappings: ``local={"lr": 0.05}``.
    """
    check_arguments(out=out, data_dir=data_dir, jobs=jobs, on=on)
    path = output_folder(out, "tune")
    if over is not None and not isinstance(over, Mapping):
        raise ConfigError(f"over is {over!r:.60}: give a mapping, as {{'local.lr': (0.01, 1.0)}}")
    names = method_names(methods, settings)
    request = Request(
        base=experiment_of(what, None, model, settings),
        methods=tuple(names),
        over={name: space_of(name, given) for name, given in (over or {}).items()},
        budget=budget,
        tuning_seeds=tuning_seeds,
        final_seeds=final_seeds,
        halving=halving,
        validation=validation,
        sampler=sampler,
        seed=seed,
        baseline=written(baseline, "method") if baseline else "",
    )
    console = console_for_a_bar() if _shown(progress) else None
    return run_tuning(request, path, data_dir=data_dir, jobs=jobs, on=on, console=console)


def run_tuning(
    request: Request,
    out: Path,
    *,
    data_dir: Path | None = None,
    jobs: int | None = None,
    on: On = "here",
    console: Console | None = None,
) -> Tuned:
    """Run a request and write its files; a bar is shown on the console where one is given."""
    if on == "ray":
        from fedbasin.tuning.on_ray import run_on_ray  # needs the extra ray

        outcome = run_request(request, out, partial(run_on_ray, data_dir=data_dir, jobs=jobs))
    else:
        outcome = run_request(request, out, partial(_run_here, data_dir, jobs, console, out))
    write_files(outcome)
    return Tuned(outcome)


def _run_here(
    data_dir: Path | None, jobs: int | None, console: Console | None, out: Path, cells: list[Cell]
) -> None:
    """Run cells on this machine, with a bar where there is a console."""
    several = jobs_for([cell.experiment for cell in cells], jobs)
    if console is None:
        run_cells(cells, data_dir=data_dir, jobs=several)
        return
    again = f"the same command and --out {out}"
    run_with_progress(cells, console, data_dir, several, again=again)
