"""Result lines: one JSON object for every cell and seed that was run.

The lines that ship with fedbasin lie in ``results/<paper>.jsonl``; the user's own runs are written
beside their run folders.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import Any

from fedbasin import data
from fedbasin.core.lock import waiting_for
from fedbasin.core.reading import Reader
from fedbasin.core.record import RoundRecord, RunFolder, rounds_to_target
from fedbasin.data.sources import SOURCES
from fedbasin.papers.grid import CellConfigs, CellRun, reason
from fedbasin.papers.tables import Axis, PaperError, Score, Table, paper_names
from fedbasin.sim.provenance import begun_on


@dataclass(frozen=True)
class Result:
    """One line: the cell, its score, and the run that gave it."""

    table: str
    row: str
    column: str
    seed: int
    score: float | None  # None: not reached, or diverged before it was scored
    measure: str
    rounds: int
    full_rounds: int
    shared_rounds: int  # the first rounds, shared with another method's run
    data_share: float  # the share of the published rows that it had
    status: str
    config: str
    command: str
    commit: str | None
    device: str
    versions: dict[str, str]
    seconds: float
    # of each scored round, in percent; where the score is another metric, that one times 100
    accuracies: dict[str, float] = field(default_factory=dict)

    @property
    def reduced(self) -> bool:
        """Whether it ran for fewer rounds than the paper."""
        return self.rounds < self.full_rounds

    @property
    def partial(self) -> bool:
        """Whether the run had only a part of the published data."""
        return self.data_share < 0.99

    @property
    def key(self) -> tuple[str, str, str, int, int, str, str]:
        """What identifies the line: a second one of the same run and score has the same key."""
        return (
            self.table,
            self.row,
            self.column,
            self.seed,
            self.rounds,
            self.config,
            self.measure,
        )


def score_of(score: Score, records: Iterable[RoundRecord]) -> float | None:
    """Return a cell's number from the records of its run."""
    listed = list(records)
    if score.kind == "rounds_to_target":
        return rounds_to_target(listed, score.target / 100, score.last)
    if score.kind == "note":
        first, last = score.between
        noted = [r.notes.get(score.note) for r in listed if first <= r.round <= last]
        numbers = [n for n in noted if isinstance(n, int | float)]
        return fmean(numbers) if numbers else None
    values = [_accuracy(score, record) for record in listed[-score.last :]]
    scored = [value for value in values if value is not None]
    return 100 * fmean(scored) if scored else None


def _accuracy(score: Score, record: RoundRecord) -> float | None:
    if score.kind == "accuracy_train":
        return record.metric("accuracy_train")
    if score.kind == "metric":
        return record.metric(score.metric)
    sent = record.metric("accuracy_send")
    if score.kind == "accuracy_send" and sent is not None:
        return sent
    return record.metric("accuracy")  # without `accuracy_send` the scored model is broadcast


def data_share(name: str, folder: RunFolder, data_dir: Path | None = None) -> float:
    """Return how much of a published dataset a run had; a data folder may hold less of it.

    A run that does not say is taken to have had what is at hand.
    """
    published = max((sum(source.rows or (0, 0)) for source in SOURCES.get(name, ())), default=0)
    if not published:
        return 1.0
    rows = begun_on(folder).get("rows")
    if rows is None:
        dataset = data.load(name, data_dir=data_dir)
        rows = len(dataset.train) + len(dataset.test)
    return round(rows / published, 4)


def result_of(cell_run: CellRun, path: Path, data_dir: Path | None = None) -> Result:
    """Return the line of a run that has ended."""
    folder = RunFolder(path)
    summary = folder.read_summary()
    records = folder.read_rounds()
    score = cell_run.table.score_of(cell_run.row, cell_run.column)
    accuracies = {str(record.round): _accuracy(score, record) for record in records}
    return Result(
        table=cell_run.table.name,
        row=cell_run.row.name,
        column=cell_run.column.name,
        seed=cell_run.seed,
        score=_rounded(score_of(score, records)),
        measure=score.text,
        rounds=cell_run.experiment.rounds,
        full_rounds=cell_run.full_rounds,
        shared_rounds=folder.read_branch().get("rounds", 0),
        data_share=data_share(cell_run.experiment.data.name, folder, data_dir),
        status=str(summary.get("status")),
        config=cell_run.config,
        command=cell_run.command,
        commit=summary.get("commit"),
        device=str(summary.get("device")),
        versions={**summary.get("versions", {}), "python": str(summary.get("python"))},
        seconds=round(float(summary.get("seconds", 0.0)), 2),
        accuracies={n: round(100 * a, 4) for n, a in accuracies.items() if a is not None},
    )


def _rounded(score: float | None) -> float | None:
    return None if score is None else round(score, 4)


def append(path: Path, result: Result) -> None:
    """Add a line, unless it is there; it is on disk when this returns.

    A last line that a crash cut short is dropped: its run is over, so it is written again.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Another command may be adding its line.
    with waiting_for(path.with_name(path.name + ".lock")), path.open("a+b") as file:
        file.seek(0)
        written = file.read()
        whole = written[: written.rfind(b"\n") + 1]
        if result.key in {line.key for line in parse(whole.decode(), str(path))}:
            return
        file.truncate(len(whole))
        file.write(json.dumps(asdict(result)).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> list[Result]:
    """Read a file of lines; a crash may have truncated the last one."""
    return parse(path.read_text(encoding="utf-8"), str(path))


def parse(text: str, where: str) -> list[Result]:
    """Read lines; errors name the file, the line, the field and the value."""
    lines = text.split("\n")
    results = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            raw = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                continue
            raise PaperError(f"{where}, line {number} is not JSON: {error}") from error
        results.append(_result(raw, f"{where}, line {number}"))
    return results


def _result(raw: Any, where: str) -> Result:
    names = [f.name for f in fields(Result)]
    # lines written before accuracies were kept have none
    if not isinstance(raw, dict) or {*raw, "accuracies"} != set(names):
        raise PaperError(f"{where}: the fields must be {', '.join(names)}")
    return Reader(PaperError, where).read(Result, raw)


@cache
def shipped() -> tuple[Result, ...]:
    """Return the results that ship with fedbasin."""
    folder = resources.files("fedbasin.papers") / "results"
    results: list[Result] = []
    for name in paper_names():
        file = folder / f"{name}.jsonl"
        if file.is_file():
            results += parse(file.read_text(encoding="utf-8"), f"papers/results/{name}.jsonl")
    return tuple(results)


def fresh(table: Table, results: Iterable[Result]) -> list[Result]:
    """Return the table's own lines that were made with its current settings and score."""
    cells = {(row.name, column.name): (row, column) for row, column in cells_of(table)}
    configs: dict[tuple[str, str], CellConfigs] = {}
    kept = []
    for result in results:
        cell = (result.row, result.column)
        if result.table != table.name or cell not in cells:
            continue
        if result.measure != table.score_of(*cells[cell]).text:
            continue
        if cell not in configs:
            configs[cell] = CellConfigs(table, *cells[cell])
        if result.config == configs[cell].config(result.seed, result.rounds):
            kept.append(result)
    return kept


def served(table: Table, results: Iterable[Result]) -> dict[tuple[str, str], list[Result]]:
    """Return the lines of each cell, trials included, by its row and column.

    A cell without a line of its own takes one of the same paper whose run and score are the same:
    equal settings, seed, rounds and measure.
    """
    paper = table.name.partition("/")[0] + "/"
    results = list(results)
    by_run: dict[tuple[str, str, int, int], Result] = {}
    asked: dict[str, set[tuple[int, int]]] = {}
    for result in results:
        if not result.table.startswith(paper):
            continue
        by_run.setdefault((result.config, result.measure, result.seed, result.rounds), result)
        asked.setdefault(result.measure, set()).add((result.seed, result.rounds))
    lines: dict[tuple[str, str], list[Result]] = {}
    for result in fresh(table, results):
        lines.setdefault((result.row, result.column), []).append(result)
    for row, column in cells_of(table):
        measure = table.score_of(row, column).text
        own = {(line.seed, line.rounds) for line in lines.get((row.name, column.name), ())}
        missing = asked.get(measure, set()) - own
        if not missing or reason(table, row, column):
            continue
        configs = CellConfigs(table, row, column)
        for seed, rounds in sorted(missing):
            line = by_run.get((configs.config(seed, rounds), measure, seed, rounds))
            if line is not None:
                lines.setdefault((row.name, column.name), []).append(line)
    return lines


def cells_of(table: Table) -> list[tuple[Axis, Axis]]:
    """Return every cell of a table, then its trials."""
    return [
        *((row, column) for column in table.columns for row in table.rows),
        *table.trial_cells(),
    ]
