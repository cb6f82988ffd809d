"""Run folders to the contents of a report: records, settings, what clients hold, analyses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedbasin.core.figure_data import Analysis, FigureDataError
from fedbasin.core.files import read_toml
from fedbasin.core.holdings import Holdings
from fedbasin.core.record import Headline, RecordError, RoundRecord, RunFolder, headline_of
from fedbasin.core.served import ClientTable
from fedbasin.core.settings import flatten, write_value

# Settings that change no result.
_NO_EFFECT = (
    "sim.checkpoint_every",
    "sim.evaluate_train",
    "sim.evaluate_clients",
    "sim.personalise",
    "sim.baselines",
    "snapshots.",
)


@dataclass(frozen=True, eq=False)
class Run:
    """One run: what it was and how it went."""

    label: str  # the method, with those settings that tell runs of this report apart
    seed: int
    records: tuple[RoundRecord, ...]
    seconds: float
    status: str = "finished"
    path: Path = Path()
    method: str = ""
    summary: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)  # flat: "local.lr"
    holdings: Holdings | None = None
    clients: ClientTable | None = None  # what each client gets, where clients were scored
    analyses: tuple[Analysis, ...] = ()
    problems: tuple[str, ...] = ()  # files of the folder that could not be read

    @property
    def headline(self) -> Headline:
        """The metric that the run is judged by."""
        return headline_of(self.summary)

    @property
    def ended(self) -> bool:
        """Whether the run cannot be resumed: it is finished, or has diverged."""
        return self.status in ("finished", "diverged")


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Return the run folders among and below the given folders, each once."""
    found: dict[Path, None] = {}
    for path in paths:
        if (path / "summary.json").exists() or (path / "config.toml").exists():
            found[path] = None
            continue
        below = sorted(file.parent for file in path.rglob("summary.json"))
        if not below:
            raise RecordError(f"{path} is no run folder and holds none: there is no summary.json")
        found |= dict.fromkeys(below)
    return list(found)


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read run folders and tell runs of the same method with other settings apart."""
    runs = [_read(path) for path in paths]
    telling = telling_settings(runs)
    named = [replace(run, label=_label(run, telling)) for run in runs]
    places: dict[tuple[str, int], Path] = {}
    for run in named:
        other = places.setdefault((run.label, run.seed), run.path)
        if other is not run.path:
            raise RecordError(
                f"{other} and {run.path} are both {run.label} with seed {run.seed}; a report "
                "counts a seed once, leave one of them out"
            )
    return named


def headline_of_runs(runs: Sequence[Run]) -> Headline:
    """Return the metric that all runs are judged by; runs of different ones are not compared."""
    found = list(dict.fromkeys(run.headline for run in runs))
    if len(found) > 1:
        raise RecordError(
            f"some runs are judged by {found[0].name}, others by {found[1].name}; report them apart"
        )
    return found[0] if found else Headline()


def telling_settings(runs: Sequence[Run]) -> list[str]:
    """Return the settings, beside method and seed, in which runs differ and results may."""
    ignored = {"method", "seed"} | ({"partition.seed"} if partition_follows_seed(runs) else set())
    names = dict.fromkeys(name for run in runs for name in run.settings)
    return [
        name
        for name in names
        if name not in ignored
        and not name.startswith(_NO_EFFECT)
        and any(run.settings.get(name) != runs[0].settings.get(name) for run in runs)
    ]


def partition_follows_seed(runs: Sequence[Run]) -> bool:
    """Say whether every run dealt its rows by its own seed."""
    return all(run.settings.get("partition.seed") == run.settings.get("seed") for run in runs)


def is_federated(run: Run) -> bool:
    """Say whether real clients made the run, on Flower."""
    return run.summary.get("executor") == "flower"


def title_of(runs: Sequence[Run]) -> str:
    """Say what the runs share: the data and how it is split."""
    shared = [fact for name, fact in shared_facts(runs) if name in ("dataset", "partition")]
    return ", ".join(shared) or f"{len(runs)} runs"


def shared_facts(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Return what a reader wants to know first, where it is the same for all runs."""
    names = ("dataset", "partition", "task", "clients", "model", "rounds")
    found = []
    for name in names:
        values = {str(run.summary.get(name, "")) for run in runs}
        if len(values) != 1:
            continue
        value = values.pop()
        if value and (name, value) != ("task", "classification"):  # most runs are
            found.append((name, value))
    return found


def shared_holdings(runs: Sequence[Run]) -> list[tuple[str, Holdings]]:
    """Return who holds what, once for all runs that share it, and say which runs these are."""
    shared: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        if (held := run.holdings) is not None:
            key = (held.classes, held.stacked.tobytes(), held.corrupted)
            shared.setdefault(key, []).append(run)
    several = len({run.settings.get("partition.how") for run in runs}) > 1
    found = []
    for members in shared.values():
        seeds = ", ".join(str(seed) for seed in sorted({run.seed for run in members}))
        how = f"{members[0].settings.get('partition.how')}, " if several else ""
        held = members[0].holdings
        assert held is not None
        wrong = f", {len(held.corrupted)} corrupted" if held.corrupted else ""
        found.append((f"{how}seed {seeds}{wrong}", held))
    return found


def _label(run: Run, telling: Sequence[str]) -> str:
    said = [
        f"{name} = {write_value(run.settings[name])}" for name in telling if name in run.settings
    ]
    return ", ".join([run.method, *said])


def _read(path: Path) -> Run:
    folder = RunFolder(path)
    summary = folder.read_summary()
    problems = []
    seed = summary.get("seed", 0)
    seconds = summary.get("seconds", 0.0)
    if not isinstance(seed, int) or not isinstance(seconds, int | float):
        raise RecordError(f"{folder.summary}: seed and seconds must be numbers")
    settings: dict[str, Any] = {}
    holdings = None
    analyses = []
    try:
        if folder.config.exists():
            settings = flatten(read_toml(folder.config))
    except ValueError as error:
        problems.append(f"{folder.config} is not TOML: {error}")
    try:
        holdings = Holdings.read(folder.partition) if folder.partition.exists() else None
    except RecordError as error:
        problems.append(str(error))
    clients = None
    try:
        clients = ClientTable.read(folder.client_table) if folder.client_table.exists() else None
    except RecordError as error:
        problems.append(str(error))
    for file in sorted(folder.analysis.glob("*.json")):
        try:
            analyses.append(Analysis.from_json(file.read_text(encoding="utf-8")))
        except (FigureDataError, UnicodeDecodeError) as error:
            problems.append(f"{file}: {error}")
    records = tuple(folder.read_rounds())
    counted = summary.get("rounds")
    if [record.round for record in records] != list(range(1, len(records) + 1)):
        problems.append(f"{folder.rounds} does not hold rounds 1 to {len(records)} in order")
    if counted not in (None, len(records)):
        problems.append(f"{folder.rounds} holds {len(records)} rounds, the summary has {counted}")
    method = str(summary.get("method", path.name))
    return Run(
        label=method,
        seed=seed,
        records=records,
        seconds=float(seconds),
        status=str(summary.get("status", "finished")),
        path=path,
        method=method,
        summary=summary,
        settings=settings,
        holdings=holdings,
        clients=clients,
        analyses=tuple(analyses),
        problems=tuple(problems),
    )
