"""The commands. Torch is imported only where something is trained, so help is instant."""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand

from fedbasin.api.progress import run_with_progress, wide_console
from fedbasin.cli.analyze import analyze
from fedbasin.cli.data import app as data_app
from fedbasin.cli.export import export
from fedbasin.cli.flower import app as flower_app
from fedbasin.cli.networks import models
from fedbasin.cli.paper import app as paper_app
from fedbasin.cli.partition import partition
from fedbasin.cli.private_counts import private_counts
from fedbasin.cli.report import Reach, ReachOrTarget, report
from fedbasin.cli.seeds import read_seeds
from fedbasin.core.files import explained, output_folder
from fedbasin.core.record import headline_of
from fedbasin.sinks import SINKS

if TYPE_CHECKING:
    from fedbasin.experiment.comparison import Cell
    from fedbasin.experiment.config import Experiment

app = typer.Typer(
    name="fedbasin",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Train one model from many clients whose data differ, and see which way of merging "
    "their models works best.\n\n"
    "Start with [bold]fedbasin compare fedavg scaffold --preset demo[/bold] (under a minute on a "
    "laptop). [bold]fedbasin demo[/bold] compares seven methods (a minute or two), and "
    "[bold]fedbasin methods[/bold] lists all of them.",
)
# Click suggests commands already. Set as an attribute: Typer before 0.20 has no such argument.
app.suggest_commands = False
console = wide_console()
DEMO_METHODS = (
    "fedavg",
    "ima(fedavg)",
    "wima(fedavg, window=20)",
    "scaffold",
    "fedlaw",
    "fedcda",
    "fedwcm",
)

Preset = Annotated[
    str | None, typer.Option(help="Settings that ship with fedbasin: demo, fmnist, cifar10.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override any setting, as in --set local.lr=0.05. May be repeated."),
]
DataDir = Annotated[
    Path | None,
    typer.Option(help="Folder that holds <owner>/<dataset>/...; else FEDBASIN_DATA, else the hub."),
]
Out = Annotated[Path | None, typer.Option(help="Where the results go; runs/... by default.")]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:1.")]
Seeds = Annotated[str, typer.Option("--seeds", "--seed", help="Seeds, as in 0,1,2 or 0..9.")]
Config = Annotated[Path | None, typer.Option("--config", help="A TOML file with settings.")]
Jobs = Annotated[
    int | None,
    typer.Option(min=1, help="Runs at once; by default as many as there are cores, one on a GPU."),
]
DataFile = Annotated[
    Path | None,
    typer.Option("--data", help="A table of your own: CSV or parquet; needs --target COLUMN."),
]
Column = Annotated[
    str | None,
    typer.Option(
        "--target",
        help="With --data: the column to predict, or several with commas (time,event).",
    ),
]
ClientColumn = Annotated[
    str | None,
    typer.Option("--client", help="With --data: the column that names each row's client."),
]
TaskName = Annotated[
    str | None, typer.Option("--task", help="binary, regression, survival, multilabel, ...")
]
Network = Annotated[
    str | None, typer.Option("--model", help="The network, such as 'mlp(widths=(64,))'.")
]
Epsilon = Annotated[
    float | None,
    typer.Option(help="For methods 'dp(...)': find the noise at which all rounds cost this much."),
]
Delta = Annotated[
    float | None,
    typer.Option(help="The chance that epsilon does not hold; below 1 / clients. dp has 1e-5."),
]
LogTo = Annotated[
    list[str] | None,
    typer.Option(
        "--log",
        click_type=click.Choice(list(SINKS)),
        help="Also log each round and the summary there. May be repeated.",
    ),
]


class _OldFlags(TyperCommand):
    """Reads the old flag ``--tensorboard`` as ``--log tensorboard``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        new: list[str] = []
        for word in args:
            new += ["--log", "tensorboard"] if word == "--tensorboard" else [word]
        return super().parse_args(ctx, new)


def main() -> None:
    """Run the command line; a user's mistake is one line, not a traceback."""
    sys.path.append(
        str(Path.cwd())
    )  # for the user's own modules; last, so that they shadow nothing
    try:
        app()
    except (ValueError, RuntimeError, OSError) as error:
        if os.environ.get("FEDBASIN_DEBUG"):
            raise
        said = explained(error) if isinstance(error, OSError) else str(error)
        line = Text.assemble(("error:", "red"), f" {said}")
        Console(stderr=True).print(line, soft_wrap=True)
        sys.exit(130 if type(error).__name__ == "Interrupted" else 1)


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(f"fedbasin {metadata.version('fedbasin')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Global options."""


def _settings(
    config: Path | None,
    preset: str | None,
    assignments: list[str] | None,
    own: Mapping[str, Any] | None = None,
) -> Experiment:
    """Build the configuration: a file or preset, then the user's table, then the settings."""
    import fedbasin.experiment  # noqa: F401  (fills the catalogue)
    from fedbasin.core.reading import COMMAND
    from fedbasin.experiment.config import (
        ConfigError,
        from_mapping,
        override,
        read_config,
        read_preset,
    )
    from fedbasin.experiment.defaults import merged

    if config is not None and preset is not None:
        raise ConfigError("give a config file or --preset, not both")
    settings = {}
    if config is not None:
        settings = read_config(config)
    elif preset:
        settings = read_preset(preset)
    if own:
        settings = merged(settings, own)
    return from_mapping(override(settings, assignments or []), form=COMMAND)


def _assignments(given: list[str] | None, **named: object) -> list[str]:
    """Join --set with the options that have their own name. The named options win."""
    extra = [
        f"{key.replace('__', '.')}={json.dumps(v)}" for key, v in named.items() if v is not None
    ]
    return [*(given or []), *extra]


def _table(
    data: Path | None, target: str | None, client: str | None, task: str | None
) -> dict[str, Any]:
    """Return the settings of a run on a table file; those that the user gives win over them."""
    if data is None:
        if client is not None:
            raise ValueError(f"--client {client} names a column: give the table with --data")
        return {}
    if target is None:
        raise ValueError(f"--data {data}: say which column to predict with --target COLUMN")
    if not data.exists():
        raise ValueError(f"--data: {data} does not exist")
    from fedbasin.experiment.defaults import defaults_for

    numbers = task is not None and task.startswith(("regression", "survival", "multilabel"))
    settings = defaults_for(
        task or "classification", named_clients=client is not None, classes=not numbers
    )
    table: dict[str, Any] = {"target": target.split(","), "client": client or ""}
    if numbers:
        table["classes"] = "no"
    return settings | {"data": {"name": str(data.absolute())}, "table": table}


def _old_target(target: str, reach: float | None) -> float:
    """Read a number given as --target, the former name of --reach."""
    try:
        number = float(target)
    except ValueError:
        raise ValueError(
            f"--target {target} names a column: give the table with --data, or a score to reach "
            "with --reach"
        ) from None
    return number if reach is None else reach


@app.command(cls=_OldFlags)
def run(
    file: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="The same as --config CONFIG.")
    ] = None,
    config: Config = None,
    preset: Preset = None,
    data: DataFile = None,
    target: Column = None,
    client: ClientColumn = None,
    task: TaskName = None,
    model: Network = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="How the server merges: 'ima(fedadam(lr=0.01))', or your own my_rules.median."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Randomness of the whole run.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds.")] = None,
    device: Device = None,
    epsilon: Epsilon = None,
    delta: Delta = None,
    out: Out = None,
    data_dir: DataDir = None,
    log: LogTo = None,
    set_: Settings = None,
) -> None:
    """Train one model with one method.

    Writes config.toml, rounds.jsonl, summary.json, checkpoint.safetensors and
    model.safetensors into its folder. Ctrl-C finishes the round, saves, and says how to resume.
    """
    named = _assignments(
        set_, method=method, seed=seed, rounds=rounds, sim__device=device, task=task, model=model
    )
    if file and config:
        raise ValueError(f"two config files are given, {file} and {config}: leave one out")
    experiment = _settings(file or config, preset, named, _table(data, target, client, task))
    if epsilon is not None or delta is not None:
        from fedbasin.experiment.privacy import calibrated, guarantee_text

        experiment = calibrated(experiment, epsilon, delta)
        console.print(Text(f"method = {experiment.method}"), soft_wrap=True)
        console.print(Text(guarantee_text([experiment.method])), soft_wrap=True)
    from fedbasin.experiment.comparison import Cell, slug

    path = output_folder(out, slug(experiment.resolved().method), "--out")
    if out is not None and (out / "config.toml").exists():
        raise ValueError(
            f"{out} holds a run already; fedbasin resume {out}, or choose another --out"
        )
    layout = [Cell(experiment.resolved(), path)]
    (summary,) = run_with_progress(layout, console, data_dir, log=log or ())
    _say_summary(summary, path)


@app.command(cls=_OldFlags)
def resume(
    folder: Annotated[Path, typer.Argument(help="The folder of a run that was stopped.")],
    data_dir: DataDir = None,
    log: LogTo = None,
    trust: Annotated[
        bool, typer.Option(help="Import and run the modules that the run's settings name.")
    ] = False,
) -> None:
    """Resume a stopped run. The result equals an uninterrupted run."""
    import fedbasin.experiment  # noqa: F401
    from fedbasin.core.record import RecordError, RunFolder
    from fedbasin.experiment.checks import check_imports
    from fedbasin.experiment.comparison import Cell
    from fedbasin.experiment.config import read_experiment
    from fedbasin.experiment.runs import mend_wiped

    if not (folder / "config.toml").exists():
        several = next(folder.glob("**/config.toml"), None) is not None
        hint = (
            "; resume the runs below it one by one, or repeat their command with --out"
            if several
            else ""
        )
        raise RecordError(f"{folder} holds no run: there is no config.toml in it{hint}")
    mend_wiped(RunFolder(folder))
    if not trust:
        check_imports(folder)
    layout = [Cell(read_experiment(folder / "config.toml"), folder)]
    if (folder / "model.safetensors").exists():
        console.print(Text(f"{folder} is finished: nothing is left to do"), soft_wrap=True)
    (summary,) = run_with_progress(layout, console, data_dir, log=log or ())
    _say_summary(summary, folder)


@app.command(cls=_OldFlags)
def compare(
    methods: Annotated[
        list[str], typer.Argument(help="Expressions, e.g. fedavg 'fedprox(mu=0.1)'.")
    ],
    seeds: Seeds = "0,1,2",
    config: Config = None,
    preset: Preset = None,
    data: DataFile = None,
    target: Column = None,
    client: ClientColumn = None,
    task: TaskName = None,
    model: Network = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds.")] = None,
    device: Device = None,
    epsilon: Epsilon = None,
    delta: Delta = None,
    reach: Reach = None,
    jobs: Jobs = None,
    out: Out = None,
    data_dir: DataDir = None,
    log: LogTo = None,
    set_: Settings = None,
) -> None:
    """Compare several methods on the same clients, cohorts and batches.

    Prints a table and writes report.html and comparison.png beside the runs. To resume a
    stopped comparison, give the same command with the same --out.
    """
    named = _assignments(set_, rounds=rounds, sim__device=device, task=task, model=model)
    if data is None and target is not None:
        reach = _old_target(target, reach)
    base = _settings(config, preset, named, _table(data, target, client, task))
    if epsilon is not None or delta is not None:
        from fedbasin.experiment.privacy import calibrated_methods, guarantee_text

        methods = calibrated_methods(base, methods, epsilon, delta)
        console.print(Text("methods: " + ", ".join(methods)), soft_wrap=True)
        console.print(Text(guarantee_text(methods)), soft_wrap=True)
    from fedbasin.experiment.comparison import cells

    path = output_folder(out, "compare", "--out")
    layout = cells(base, methods, read_seeds(seeds), path)
    _compare(layout, base, path, reach, data_dir, jobs, log or ())


@app.command()
def tune(
    methods: Annotated[
        list[str], typer.Argument(help="Expressions, e.g. fedavg fedprox 'ima(fedavg)'.")
    ],
    over: Annotated[
        list[str] | None,
        typer.Option(
            help="A range or choices, as in local.lr=0.01..1, local.epochs=1,2,5 or "
            "ima.window=2..9:linear. May be repeated."
        ),
    ] = None,
    budget: Annotated[int, typer.Option(help="Settings for each method, its defaults too.")] = 16,
    tuning_seeds: Annotated[int, typer.Option(help="Runs of each setting.")] = 2,
    final_seeds: Annotated[int, typer.Option(help="Runs of each chosen setting.")] = 10,
    halving: Annotated[
        int,
        typer.Option(
            help="Successive halving: keep one in this many at each step; 0: run all to the end."
        ),
    ] = 0,
    validation: Annotated[
        float, typer.Option(help="Share of each client's rows that settings are chosen on.")
    ] = 0.2,
    sampler: Annotated[
        str,
        typer.Option(
            click_type=click.Choice(["sobol", "tpe"]),
            help="How settings are drawn; tpe needs Optuna.",
        ),
    ] = "sobol",
    seed: Annotated[int, typer.Option(help="Randomness of the settings.")] = 0,
    baseline: Annotated[str, typer.Option(help="fedavg by default, else the first method.")] = "",
    config: Config = None,
    preset: Preset = None,
    data: DataFile = None,
    target: Column = None,
    client: ClientColumn = None,
    task: TaskName = None,
    model: Network = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds.")] = None,
    device: Device = None,
    jobs: Jobs = None,
    on: Annotated[
        str,
        typer.Option(
            click_type=click.Choice(["here", "ray"]),
            help="ray: runs are tasks of a Ray cluster that sees the folder.",
        ),
    ] = "here",
    out: Out = None,
    data_dir: DataDir = None,
    set_: Settings = None,
) -> None:
    """Compare methods, each with settings chosen for it under the same budget.

    Settings are chosen on rows held out from the clients' training data. The chosen ones run with
    fresh seeds, and only these runs are scored on test rows. fedbasin methods NAME shows what is
    tuned; an argument that is written in an expression keeps its value.

    Prints a table and a verdict; writes report.html, trials.jsonl, table.jsonl and the chosen
    settings (chosen/*.toml) into its folder. To resume, give the same command with the same --out.
    """
    named = _assignments(set_, rounds=rounds, sim__device=device, task=task, model=model)
    base = _settings(config, preset, named, _table(data, target, client, task))
    from fedbasin.cli.tune import tune_and_show
    from fedbasin.tuning import Request, read_over

    request = Request(
        base=base,
        methods=tuple(methods),
        over=read_over(over or []),
        budget=budget,
        tuning_seeds=tuning_seeds,
        final_seeds=final_seeds,
        halving=halving,
        validation=validation,
        sampler=sampler,  # type: ignore[arg-type]
        seed=seed,
        baseline=baseline,
    )
    tune_and_show(request, output_folder(out, "tune", "--out"), console, data_dir, jobs, on)


@app.command()
def demo(
    seeds: Seeds = "0..9",
    reach: ReachOrTarget = None,
    jobs: Jobs = None,
    out: Out = None,
    set_: Settings = None,
) -> None:
    """Watch several methods compete on handwritten digits: 50 clients, strong label skew, 10 seeds.

    Needs no download and about a minute on two free cores.
    """
    base = _settings(None, "demo", set_)
    from fedbasin.experiment.comparison import cells

    path = output_folder(out, "demo", "--out")
    layout = cells(base, DEMO_METHODS, read_seeds(seeds), path)
    _compare(layout, base, path, reach, None, jobs)


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="One of them, to see all about it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    markdown: Annotated[bool, typer.Option(help="The table of docs/methods.md.")] = False,
) -> None:
    """List the methods, or show one with its arguments.

    NAME may also be a rule, optimiser, schedule, task or metric; these are listed below the table.
    """
    import fedbasin.experiment  # noqa: F401
    from fedbasin.cli.listing import card_text, cards_json, cards_markdown, cards_table

    if markdown:
        typer.echo(cards_markdown(), nl=False)
    elif as_json:
        typer.echo(cards_json(name))
    elif name is None:
        console.print(cards_table())
    else:
        console.print(card_text(name), highlight=False, markup=False)


app.command()(models)
app.add_typer(data_app, name="data")
app.add_typer(paper_app, name="paper")
app.command()(analyze)
app.command()(export)
app.add_typer(flower_app, name="flower")
app.command()(partition)
app.command()(private_counts)
app.command()(report)


def _unfold(commands: typer.Typer) -> None:
    """Join the lines of each docstring paragraph, so that help fills the terminal's width."""
    for each in commands.registered_commands:
        paragraphs = (inspect.getdoc(each.callback) or "").split("\n\n")
        each.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    for group in commands.registered_groups:
        _unfold(group.typer_instance or typer.Typer())


_unfold(app)


def _compare(
    layout: list[Cell],
    base: Experiment,
    path: Path,
    target: float | None,
    data_dir: Path | None,
    jobs: int | None,
    log: Sequence[str] = (),
) -> None:
    from fedbasin.api.results import table_of
    from fedbasin.experiment.sharing import jobs_for
    from fedbasin.report.curves import draw_curves
    from fedbasin.report.page import write_page
    from fedbasin.report.runs import headline_of_runs, read_runs
    from fedbasin.report.served import served_text
    from fedbasin.report.table import summarise
    from fedbasin.report.verdict import verdict

    jobs = jobs_for([cell.experiment for cell in layout], jobs)
    again = f"the same command and --out {path}"
    run_with_progress(layout, console, data_dir, jobs, log=log, again=again)
    runs = read_runs([cell.path for cell in layout])
    headline = headline_of_runs(runs)
    target = headline.usual_target if target is None else target
    title = f"{_data_title(base)}, {base.partition.how}, {base.rounds} rounds"
    console.print(table_of(summarise(runs, target), headline, title, target))
    console.print(Text(verdict(runs)), soft_wrap=True)
    if clients := served_text(runs):
        console.print(Text(clients), soft_wrap=True)
    figure = draw_curves(
        runs, path / "comparison.png", title=f"{_data_title(base)}, {base.partition.how}"
    )
    page = write_page(runs, path / "report.html", target=target)
    console.print(Text(f"page: {page}\nfigure: {figure}\nrecords: {path}"), soft_wrap=True)


def _data_title(base: Experiment) -> str:
    """Name the data: a table by its file."""
    return Path(base.data.name).name if base.table.target else base.data.name


def _say_summary(summary: dict[str, Any], path: Path) -> None:
    if summary["status"] == "diverged":
        raise RuntimeError(
            f"{summary['method']} diverged: {summary['reason']}; the records up to there are in "
            f"{path}"
        )
    headline = headline_of(summary)
    unit = f" {headline.unit}" if headline.unit else ""
    last = headline.shown(summary[f"{headline.name}_last"])
    mean = headline.shown(summary[f"{headline.name}_mean_last10"])
    window = min(10, summary["rounds"])
    final = f"{last}{unit} (last)"
    score = f"{mean}{unit} (mean of the last {window} rounds), {final}"
    line = (
        f"{summary['method']}: {headline.name} {score if window > 1 else final}, "
        f"{summary['seconds']:.1f} s\nrecords: {path}"
    )
    console.print(Text(line), soft_wrap=True)
