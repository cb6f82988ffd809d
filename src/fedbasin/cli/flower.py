"""``fedbasin flower``: a real federation on Flower, from a new app to a run on this machine."""

from __future__ import annotations

import signal
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import TextColumn, TimeRemainingColumn
from rich.text import Text

from fedbasin.api.progress import bar, tell_a_log
from fedbasin.cli.flower_check import check
from fedbasin.cli.flower_keys import app as keys_app
from fedbasin.core.record import RunFolder, headline_of, latest_score

if TYPE_CHECKING:
    from fedbasin.deploy.federation import LocalFederation

app = typer.Typer(
    no_args_is_help=True,
    help="Run the same methods in a real federation, on Flower (needs the extra flower).",
)
app.add_typer(keys_app, name="keys")
app.command()(check)
console = Console()


Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="A setting of the run or the federation, as in local.lr=0.05. May be repeated.",
    ),
]


@app.command()
def new(
    folder: Annotated[Path, typer.Argument(help="A new folder; its name is the app's.")],
    set_: Assignments = None,
    seed: Annotated[int | None, typer.Option(help="The run's seed.")] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="A table that may be shared, on this machine. It fixes how every node's own table "
            "becomes numbers, and the server scores on some of its rows."
        ),
    ] = None,
    target: Annotated[str | None, typer.Option(help="The column of --data to predict.")] = None,
) -> None:
    """Write a complete Flower app: settings, ServerApp, ClientApp.

    It runs as it is: fedbasin flower up FOLDER, or flwr run FOLDER. Without --data, its nodes share
    out a public dataset. With --data and --target, each node names a table of its own.
    """
    check_installed()
    from fedbasin.deploy import write_app

    settings = _flat(set_, seed)
    encoding = ""
    if (data is None) != (target is None):
        raise ValueError("--data and --target belong together: a table, and the column to predict")
    if data is not None and target is not None:
        from fedbasin.data import from_table

        made = from_table(data, target).encoding
        assert made is not None  # every table has one
        encoding = made.to_json()
        own = {"federation.sample": str(data.resolve()), "partition.how": "iid"}
        settings = {**own, "data.proxy_per_class": 0, **settings}
    with TemporaryDirectory() as scratch:  # a bad setting is told before anything is written
        trial = Path(scratch) / folder.resolve().name
        write_app(trial, settings, encoding)
        _check_settings(trial)
    for path in write_app(folder, settings, encoding):
        console.print(Text(f"  {path}"), soft_wrap=True)
    tables = " --data SITE0.csv --data SITE1.csv" if encoding else ""
    console.print(Text(f"Run it: fedbasin flower up {folder}{tables}"), soft_wrap=True)


@app.command()
def up(
    folder: Annotated[
        Path | None, typer.Argument(help="A Flower app; without one, a new app of ours.")
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1, help="How many SuperNodes (clients).", show_default="3, or one a --data"
        ),
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="A node's own table; repeat it for each node, in order. The app reads it."
        ),
    ] = None,
    tls: Annotated[
        bool, typer.Option(help="Encrypt messages and let nodes prove who they are.")
    ] = False,
    simulate: Annotated[
        bool, typer.Option(help="Let Flower's simulation engine (Ray) be the clients.")
    ] = False,
    secure: Annotated[
        bool,
        typer.Option(help="Let the server see only the sum of a cohort's updates, none alone."),
    ] = False,
    method: Annotated[str | None, typer.Option(help="How the server merges.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Number of rounds.")] = None,
    seed: Annotated[int | None, typer.Option(help="The run's seed.")] = None,
    set_: Assignments = None,
    out: Annotated[
        Path | None, typer.Option(help="Where records and logs go; a run that is there is resumed.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds the whole run may take.")] = 3600.0,
) -> None:
    """Start a federation on this machine, run an app on it, and shut it down.

    A SuperLink and SuperNodes run as separate processes and communicate over loopback, with
    temporary certificates and node keys for --tls. To resume a stopped run, give the same
    --out. Nothing is reported to anyone.
    """
    check_installed()
    _check_given(folder, method)
    tables = _tables(folder, data, simulate)
    if tables and nodes not in (None, len(tables)):
        raise ValueError(f"--nodes {nodes}, and {len(tables)} times --data: give each node one")
    nodes = nodes or len(tables) or 3
    own = _flat(set_, seed)
    if secure:
        _check_secure(folder, method)
    from fedbasin.deploy import write_app
    from fedbasin.deploy.federation import LocalFederation

    place = (out or Path("runs") / f"flower-{datetime.now():%Y%m%d-%H%M%S}").resolve()
    run = RunFolder(place / "run")
    if folder is None:
        folder = place / "app"
        if not folder.exists():
            write_app(folder)
    _check_known(folder, own)
    settings: dict[str, Any] = {
        "federation.folder": str(run.path),
        "federation.min-nodes": nodes,
        "partition.clients": nodes,
    } | own
    given = (("method", method), ("rounds", rounds), ("federation.secure", secure or None))
    settings |= {key: value for key, value in given if value is not None}
    kind = "simulated clients" if simulate else "SuperNodes"
    console.print(Text(f"Starting a SuperLink and {nodes} {kind}; logs: {place}"), soft_wrap=True)
    with _told_to_end(), LocalFederation(place, nodes, tls, simulate, data=tables) as federation:
        _run(federation, folder, settings, run, timeout)
    summary = run.read_summary()
    headline = headline_of(summary)
    last = summary.get(f"{headline.name}_last")
    said = "" if last is None else f"{headline.name} {headline.shown(last)} {headline.unit}".strip()
    said = f"{said}, " if said else ""
    line = (
        f"{summary['method']}: {said}{summary['rounds']} rounds, {summary['seconds']:.0f} s, "
        f"{summary['bytes_up'] / 1e6:.2f} MB up, {summary['bytes_down'] / 1e6:.2f} MB down"
    )
    console.print(Text(f"{line}\nrecords: {run.path}"), soft_wrap=True)


@app.command()
def down(
    folder: Annotated[
        Path | None, typer.Argument(help="What --out was; without it, all that run are listed.")
    ] = None,
) -> None:
    """End the processes that a killed fedbasin flower up has left behind.

    Records stay; fedbasin flower up with the same --out resumes the run.
    """
    check_installed()
    from fedbasin.deploy.federation import end, running

    if folder is None:
        for place, processes in sorted(running().items()):
            ids = ", ".join(map(str, sorted(processes)))
            console.print(Text(f"{place}: {ids}"), soft_wrap=True)
        console.print(Text("End one with: fedbasin flower down FOLDER"), soft_wrap=True)
        return
    ended = end(folder)
    ids = ", ".join(map(str, ended))
    said = f"ended {ids}" if ended else f"no federation runs in {folder}"
    console.print(Text(said), soft_wrap=True)


@app.command()
def audit(
    run: Annotated[Path, typer.Argument(help="A run folder with merged.jsonl.")],
) -> None:
    """Check the audit trail of a federation, and say who was refused.

    The exit status is 1 if a line was changed, removed or added.
    """
    from fedbasin.deploy.audit import FILE, check, refusals_of

    folder = RunFolder(run)
    file = run / FILE
    if not file.is_file():
        raise ValueError(f"{run} has no {FILE}: name the folder of a federation's records")
    found = check(file)
    head = folder.read_summary().get("audit") if folder.summary.exists() else None
    broken = found.broken
    if not broken and head not in (None, found.head):
        broken = "the last line is not the one in summary.json"
    for who, times in refusals_of(file).items():
        console.print(Text(f"refused {times} times: {who}"), soft_wrap=True)
    told = f"changed: {broken}" if broken else "the chain holds"
    console.print(Text(f"{file}: {found.lines} lines, {told}; {found.head}"), soft_wrap=True)
    if broken:
        raise typer.Exit(1)


@contextmanager
def _told_to_end() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C, so that no process is left behind."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(
    federation: LocalFederation,
    folder: Path,
    settings: dict[str, Any],
    run: RunFolder,
    timeout: float,
) -> None:
    """Run an app, with one progress bar for its rounds."""
    from fedbasin.deploy.federation import FederationError

    deadline = time.monotonic() + timeout
    before = run.summary.stat().st_mtime_ns if run.summary.exists() else 0
    process = federation.run(folder, settings)
    score = TextColumn("{task.fields[score]}")
    told = time.monotonic()
    with bar(console, TimeRemainingColumn(), score) as progress:
        total = settings.get("rounds", _rounds(folder))
        task = progress.add_task("waiting for the nodes", total=total, score="")
        while process.poll() is None:
            if time.monotonic() > deadline:
                raise FederationError(f"the run took longer than --timeout {timeout:g} s")
            records = run.read_rounds()
            if records:
                progress.update(task, score=latest_score(records[-1]))
                progress.update(task, description="round", completed=len(records))
            told = tell_a_log(progress, task, told)
            time.sleep(0.5)
    if not run.summary.exists() or run.summary.stat().st_mtime_ns == before:
        lines = federation.log("run").strip().splitlines()
        tail = "\n".join(lines[-8:])
        raise FederationError(
            f"the run did not finish; its log ends with\n{tail}\nall logs: {federation.folder}"
        )
    summary = run.read_summary()
    if summary["status"] == "failed":
        raise FederationError(
            f"the run failed: {summary['reason']}\nrecords: {run.path}\nall logs: "
            f"{federation.folder}"
        )


def _flat(assignments: list[str] | None, seed: int | None) -> dict[str, Any]:
    """Return settings by dotted name; refuse what Flower cannot carry."""
    from fedbasin.core.settings import flatten
    from fedbasin.deploy.app import check_setting
    from fedbasin.experiment.config import override

    given = flatten(override({}, assignments or []))
    for name, value in given.items():
        check_setting(name, value)
    return given if seed is None else given | {"seed": seed}


def _check_settings(folder: Path) -> None:
    """Read the settings of a new app as its server will; a bad one is told now."""
    from fedbasin.deploy import nested
    from fedbasin.deploy.app import read_app
    from fedbasin.experiment import from_mapping

    settings = nested(read_app(folder))
    settings.pop("federation", None)
    from_mapping(settings).resolved()


def _check_known(folder: Path, own: dict[str, Any]) -> None:
    """Refuse settings that the app does not have: Flower overrides only those that it has."""
    from fedbasin.core.suggest import nearest
    from fedbasin.deploy.app import read_app

    known = read_app(folder)
    for name in own:
        if name not in known:
            raise ValueError(
                f"--set {name}: {folder}/pyproject.toml has no such setting; "
                f"{nearest(name, known)}, or write it there below [tool.flwr.app.config]"
            )


def _tables(folder: Path | None, data: list[Path] | None, simulate: bool) -> list[Path]:
    """Check the nodes' own tables."""
    if not data:
        return []
    if folder is None:
        raise ValueError(
            "--data needs an app that reads tables: fedbasin flower new my_app --data SAMPLE.csv "
            "--target COLUMN, then fedbasin flower up my_app --data SITE0.csv --data SITE1.csv"
        )
    if simulate:
        raise ValueError("--simulate: simulated nodes have no files of their own; leave it out")
    for path in data:
        if not path.exists():
            raise ValueError(f"--data: there is no {path}")
        if "'" in str(path.resolve()):
            raise ValueError(f"--data: Flower cannot take the apostrophe in {path}; rename it")
    return data


def _rounds(folder: Path) -> int | None:
    """Return the rounds of an app's settings; None if they do not say."""
    said: Any = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    for key in ("tool", "flwr", "app", "config", "rounds"):
        said = said.get(key) if isinstance(said, dict) else None
    return said if isinstance(said, int) else None


def _check_given(folder: Path | None, method: str | None) -> None:
    """Refuse bad settings before any process starts; the app would report them in its log only."""
    if folder is not None and not (folder / "pyproject.toml").is_file():
        told = f"{folder} is no Flower app, it has no pyproject.toml"
        raise ValueError(f"{told}; fedbasin flower new {folder} writes one")
    if method is not None:
        import fedbasin.experiment  # noqa: F401  (fills the catalogue)
        from fedbasin.core.expressions import parse

        if folder is not None:
            sys.path.append(str(folder))  # for methods of the app's own modules
        parse(method, "method")


def _check_secure(folder: Path | None, method: str | None) -> None:
    """Refuse an app that does not know the setting, and methods that cannot be secured."""
    if folder is not None:
        config: Any = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
        for key in ("tool", "flwr", "app", "config", "federation", "secure"):
            config = config.get(key) if isinstance(config, dict) else None
        if config is None:
            raise ValueError(
                f"--secure: {folder} has no setting federation.secure; give its strategy "
                "secure=Secure(...) and its clients secure=2, as fedbasin flower new does"
            )
    if method is not None:
        from fedbasin.core.expressions import parse
        from fedbasin.deploy.secure.fitness import check_method

        check_method(parse(method, "method"))


def check_installed() -> None:
    """Fail if Flower is not installed."""
    if find_spec("flwr") is None:
        raise ValueError("this needs Flower: pip install 'fedbasin[flower]'")
