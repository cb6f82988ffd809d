"""From a table to runs: the experiment of each cell and seed, or why it cannot be run."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from fedbasin.core.expressions import ExpressionError, parse
from fedbasin.experiment import Experiment, from_mapping
from fedbasin.experiment.config import RESULT_NEUTRAL
from fedbasin.papers.tables import Axis, PaperError, Table, merged, select

# Settings that say where, how fast and what to keep, not what is computed. Executors differ in
# rounding alone: enough for a result line, too much for a run that is resumed.
_NO_MATTER = {
    *(f"sim.{name}" for name in RESULT_NEUTRAL),
    "sim.compile",
    "sim.executor",
    "snapshots.clients",
    "snapshots.every",
    "snapshots.rounds",
}


@dataclass(frozen=True)
class CellRun:
    """The run of one cell with one seed."""

    table: Table
    row: Axis
    column: Axis
    seed: int
    share: float  # of the paper's rounds
    experiment: Experiment
    full_rounds: int

    @cached_property
    def config(self) -> str:
        """A hash of every setting that can change the result."""
        return fingerprint(self.experiment)

    @property
    def key(self) -> tuple[str, str, str, int, int, str, str]:
        """What identifies its result line."""
        return (
            self.table.name,
            self.row.name,
            self.column.name,
            self.seed,
            self.experiment.rounds,
            self.config,
            self.table.score_of(self.row, self.column).text,
        )

    @property
    def command(self) -> str:
        """The command that does this run alone."""
        kind = "--trials" if self.row.trial_of else "--rows"
        parts = ["fedbasin", "paper", "run", self.table.name, kind, self.row.name]
        parts += ["--columns", self.column.name, "--seeds", str(self.seed)]
        if self.share < 1:
            parts += ["--rounds", f"{self.share:g}"]
        return shlex.join(parts)

    def folder(self, out: Path) -> Path:
        """Return its run folder. Cells with equal settings share one run, across tables too."""
        return out / self.config


def fingerprint(experiment: Experiment) -> str:
    """Hash the settings that differ from the defaults, so that a new setting changes no hash."""
    return _hash(_changed(experiment.resolved()))


def _changed(resolved: Experiment) -> dict[str, Any]:
    """Return the settings that differ from the defaults and can change the result."""
    now = _flat(resolved.settings())
    default = _defaults()
    return {k: v for k, v in now.items() if v != default[k] and k not in _NO_MATTER}


@cache
def _defaults() -> dict[str, Any]:
    return _flat(Experiment().settings())


def _hash(changed: Mapping[str, Any]) -> str:
    written = json.dumps(changed, sort_keys=True)
    return hashlib.blake2b(written.encode(), digest_size=8).hexdigest()


class CellConfigs:
    """The configs of one cell for any seed and number of rounds, without building each of them.

    Building an experiment takes milliseconds and a table has hundreds of cells; a seed and a number
    of rounds change three settings.
    """

    def __init__(self, table: Table, row: Axis, column: Axis) -> None:
        """Build the cell once."""
        settings = settings_of(table, row, column)
        self._changed = _changed_by(json.dumps({**settings, "seed": 0}))
        self._split_by_seed = settings.get("partition", {}).get("seed", -1) < 0

    def config(self, seed: int, rounds: int) -> str:
        """Return what `fingerprint` returns for this seed and number of rounds."""
        numbers = {"seed": seed, "rounds": rounds}
        if self._split_by_seed:
            numbers["partition.seed"] = seed
        changed = {k: v for k, v in self._changed.items() if k not in numbers}
        changed |= {k: v for k, v in numbers.items() if v != _defaults()[k]}
        return _hash(changed)


@cache
def _changed_by(settings: str) -> dict[str, Any]:
    """Return what settings, written as JSON, change; cells of several tables share them."""
    return _changed(from_mapping(json.loads(settings)).resolved())


def _flat(settings: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{path}{key}.")
        else:
            flat[f"{path}{key}"] = value
    return flat


def method_of(table: Table, row: Axis, column: Axis) -> str:
    """Return a cell's method, with its values filled in."""
    values = {**table.values, **column.values, **row.values}
    template = row.method or column.method or table.setup.get("method", "fedavg")

    def fill(match: re.Match[str]) -> str:
        name = match[1]
        if name not in values:
            raise PaperError(
                f"{table.name}.toml: method {template!r} of row {row.name!r}, column "
                f"{column.name!r} needs a value for {{{name}}}"
            )
        return str(values[name])

    for _ in range(4):  # values may contain other values
        filled = re.sub(r"\{(\w+)\}", fill, template)
        if filled == template:
            break
        template = filled
    return template


def settings_of(table: Table, row: Axis, column: Axis) -> dict[str, Any]:
    """Return a cell's settings: the table's, then its column's, then its row's."""
    settings = merged(merged(table.setup, column.setup), row.setup)
    settings["method"] = method_of(table, row, column)
    score = table.score_of(row, column)
    settings.setdefault("sim", {})["evaluate_last"] = score.last
    return settings


def reason(table: Table, row: Axis, column: Axis) -> str:
    """Return why a cell cannot be run; empty if it can."""
    stated = table.cannot or row.cannot or column.cannot
    if stated:
        return stated
    return _unreadable(method_of(table, row, column))


@cache
def _unreadable(method: str) -> str:
    """Return why a method cannot be parsed; empty if it can."""
    try:
        parse(method, "method")
    except ExpressionError as error:
        return str(error)
    return ""


def experiment_of(
    table: Table, row: Axis, column: Axis, *, seed: int, device: str = "auto"
) -> Experiment:
    """Return a cell's experiment, with as many rounds as the paper's."""
    settings = settings_of(table, row, column)
    settings["seed"] = seed
    settings["sim"]["device"] = device
    # A stopped run loses a tenth of its rounds at most. Long windows of models are slow to save.
    rounds = settings.get("rounds", Experiment().rounds)
    settings["sim"].setdefault("checkpoint_every", max(10, int(rounds) // 10))
    return from_mapping(settings).resolved()


def cells_asked(
    table: Table, rows: str = "*", columns: str = "*", trials: str | None = None
) -> list[tuple[Axis, Axis]]:
    """Return the cells, or those of the trials, that the options of `fedbasin paper run` name."""
    picked = select(table.columns, columns, "--columns")
    if trials is None:
        named = select(table.rows, rows, "--rows")
        return [(row, column) for column in picked for row in named]
    if rows != "*":
        raise ValueError("--rows and --trials: give one of them")
    cells = table.trial_cells()
    if not cells:
        raise ValueError(f"{table.name} has no trials")
    by_name = {row.name: row for row, _ in cells}
    names = {row.name for row in select(tuple(by_name.values()), trials, "--trials")}
    return [(row, column) for row, column in cells if row.name in names and column in picked]


def cell_runs_of(
    table: Table,
    rows: Sequence[Axis],
    columns: Sequence[Axis],
    seeds: Sequence[int],
    *,
    share: float = 1.0,
    device: str = "auto",
) -> tuple[list[CellRun], dict[str, list[str]]]:
    """Return the runs of a grid, and the cells that cannot be run, by reason.

    All cells of one seed come before those of the next.
    """
    cells = [(row, column) for column in columns for row in rows]
    return runs_of(table, cells, seeds, share=share, device=device)


def runs_of(
    table: Table,
    cells: Sequence[tuple[Axis, Axis]],
    seeds: Sequence[int],
    *,
    share: float = 1.0,
    device: str = "auto",
) -> tuple[list[CellRun], dict[str, list[str]]]:
    """Return the runs of some cells, and those that cannot be run, by reason."""
    if not 0 < share <= 1:
        raise PaperError(f"--rounds is {share}: write the share of the paper's rounds, in (0, 1]")
    cell_runs: list[CellRun] = []
    reasons: dict[str, list[str]] = {}
    for seed in seeds:
        for row, column in cells:
            why = reason(table, row, column)
            if why:
                named = reasons.setdefault(why, [])
                name = f"{row.name} | {column.name}"
                if name not in named:
                    named.append(name)
                continue
            whole = experiment_of(table, row, column, seed=seed, device=device)
            part = replace(whole, rounds=max(1, round(share * whole.rounds)))
            cell_runs.append(CellRun(table, row, column, seed, share, part, whole.rounds))
    return cell_runs, reasons
