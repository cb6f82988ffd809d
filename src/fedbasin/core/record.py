"""The run folder: what a run leaves behind, in files that pandas opens.

    config.toml              every setting, expressions in canonical form
    begun.toml               the settings it was started with; a resumed run must have the same
    data.json                how many rows the dataset had, and a hash that tells it from others
    partition.csv            who holds how many rows of each class
    rounds.jsonl             one line a round, flushed as it is written
    clients.csv              one line a client: what it gets, where clients are scored
    summary.json             the headline numbers
    checkpoint.safetensors   where to resume
    branches/                checkpoints of earlier rounds, from which other runs start
    branch.json              which run the first rounds were taken from, if they were
    model.safetensors        the final model
    archive/                 models of clients, for methods that keep them on disk
    clients/                 what clients keep between rounds, where it does not fit in memory
    snapshots/               models of chosen rounds, for analyses
    analysis/                what analyses found
    tensorboard/             events, if the run is logged there
    mlflow.json, wandb.json  the ids of the run there, if it is logged there

This module reads and writes text only, so reports need no tensors.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import fmean
from types import NoneType
from typing import Any, NamedTuple, TextIO

from fedbasin.core.files import FileError, parsed_json, replacing


class RecordError(ValueError):
    """A run folder that cannot be used, with the reason and what to do."""


class Headline(NamedTuple):
    """The metric that runs are compared by."""

    name: str = "accuracy"
    higher_is_better: bool = True
    unit: str = "%"

    @property
    def scale(self) -> float:
        """What a value is multiplied by to be shown in its unit."""
        return 100.0 if self.unit == "%" else 1.0

    @property
    def title(self) -> str:
        """The name with the unit."""
        words = self.name.replace("_", " ")
        return f"{words} ({self.unit})" if self.unit else words

    @property
    def digits(self) -> int:
        """How many decimal places a value is written with."""
        return 2 if self.unit == "%" else 4

    @property
    def words(self) -> str:
        """The name as a text writes it, with the direction where less is better."""
        words = self.name.replace("_", " ")
        return words if self.higher_is_better else f"{words} (lower is better)"

    def shown(self, value: float | None) -> str:
        """Write a value in the unit; a dash where there is none."""
        return "-" if value is None else f"{self.scale * value:.{self.digits}f}"

    @property
    def usual_target(self) -> float | None:
        """The target where none is given: 80 % accuracy; other metrics have none."""
        return 0.8 if self.name == "accuracy" else None

    def target_title(self, target: float | None) -> str:
        """Name the column of rounds to a target."""
        if target is None:
            return "rounds to target"
        if self.unit == "%":
            return f"rounds to {100 * target:g}%"
        return f"rounds to {self.name} {target:g}"

    def reached(self, value: float, target: float) -> bool:
        """Whether a value is as good as a target."""
        return value >= target if self.higher_is_better else value <= target


def headline_of(summary: Mapping[str, Any]) -> Headline:
    """Return a run's headline from its summary; runs of older versions have accuracy."""
    name = summary.get("headline")
    if not isinstance(name, str):
        return Headline()
    unit = summary.get("headline_unit")
    higher = summary.get("higher_is_better") is not False
    return Headline(name, higher, unit if isinstance(unit, str) else "")


def latest_score(record: RoundRecord) -> str:
    """Write the headline of a record for a progress display: its first metric."""
    for name, value in record.metrics.items():
        if not isinstance(value, int | float):
            return ""
        if not math.isfinite(value):
            return f"{name} -"
        return f"{100 * value:5.1f} %" if name == "accuracy" else f"{name} {value:.4g}"
    return ""


Number = float | None


@dataclass(frozen=True)
class RoundRecord:
    """One line of ``rounds.jsonl``. Numbers that do not exist are null.

    Metrics are columns of their own: ``accuracy`` is that of the scored model on the test set,
    ``accuracy_send`` that of the broadcast model where it is another one, ``accuracy_train`` that
    of the scored model on all clients' rows if asked for. A column that is no field here is a
    metric.
    """

    round: int  # rounds finished, counted from 1
    metrics: Mapping[str, Number | list[Number]] = field(default_factory=dict)
    train_loss: float | None = None  # mean over the cohort's local training
    lr: float = 0.0
    replies: int = 0  # clients that answered
    dropped: int = 0  # clients that were drawn but did not answer
    refused: int = 0  # answers of a real federation that could not be used
    update_norm: float | None = None  # |send - what was sent before|
    model_norm: float | None = None  # |score|
    bytes_down: int = 0  # what a real federation would send to the cohort
    bytes_up: int = 0  # and receive from it
    seconds_train: float = 0.0
    seconds_merge: float = 0.0
    seconds_evaluate: float = 0.0
    seconds: float = 0.0  # the whole round
    notes: Mapping[str, float | list[float]] = field(default_factory=dict)  # by the method

    def metric(self, name: str) -> float | None:
        """Return a metric that is one number; None where it was not measured or is undefined."""
        value = self.metrics.get(name)
        return value if isinstance(value, int | float) and math.isfinite(value) else None

    def line(self) -> str:
        """Return the record as one line of JSON, metrics and notes beside the other columns."""
        flat: dict[str, Any] = {}
        for name in COLUMNS:
            flat[name] = getattr(self, name)
            if name == "round":
                flat |= self.metrics
        return json.dumps(_plain(flat | {f"note_{k}": v for k, v in self.notes.items()}))

    def numbers(self) -> dict[str, float]:
        """Return the single numbers by column, without the round, lists and what is null."""
        flat = json.loads(self.line())
        del flat["round"]
        return {name: value for name, value in flat.items() if isinstance(value, int | float)}

    @classmethod
    def read(cls, line: str) -> RoundRecord:
        """Read a line back."""
        flat = parsed_json(line)
        if not isinstance(flat, dict) or not isinstance(flat.get("round"), int):
            raise RecordError("a line of rounds.jsonl must be an object with a round number")
        known: dict[str, Any] = {}
        metrics: dict[str, Any] = {}
        notes: dict[str, Any] = {}
        for name, value in flat.items():
            if name.startswith("note_"):
                notes[name.removeprefix("note_")] = value
                continue
            kinds = (int, float, NoneType) if name in COLUMNS else (int, float, list, NoneType)
            if not isinstance(value, kinds):
                raise RecordError(f"{name} is {value!r:.40}, which is no number")
            if name in COLUMNS:
                known[name] = value
            else:
                metrics[name] = value
        return cls(**known, metrics=metrics, notes=notes)


def _read_or_none(line: str) -> RoundRecord | None:
    try:
        return RoundRecord.read(line)
    except (ValueError, TypeError):
        return None


COLUMNS = tuple(f.name for f in fields(RoundRecord) if f.name not in ("metrics", "notes"))


def _plain(value: Any) -> Any:
    """Replace what JSON cannot say (NaN, Inf) by null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


@dataclass(frozen=True)
class RunFolder:
    """The files of one run."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved settings."""
        return self.path / "config.toml"

    @property
    def begun(self) -> Path:
        """The settings as the run was begun."""
        return self.path / "begun.toml"

    @property
    def partition(self) -> Path:
        """Who holds what."""
        return self.path / "partition.csv"

    @property
    def client_table(self) -> Path:
        """What each client gets."""
        return self.path / "clients.csv"

    @property
    def rounds(self) -> Path:
        """One line a round."""
        return self.path / "rounds.jsonl"

    @property
    def summary(self) -> Path:
        """The headline numbers."""
        return self.path / "summary.json"

    @property
    def checkpoint(self) -> Path:
        """Where to resume."""
        return self.path / "checkpoint.safetensors"

    def branching(self, round: int) -> Path:
        """The checkpoint after a round, for other runs that begin alike."""
        return self.path / "branches" / f"round{round:05d}.safetensors"

    @property
    def branch(self) -> Path:
        """Which run the first rounds were taken from."""
        return self.path / "branch.json"

    @property
    def model(self) -> Path:
        """The final model."""
        return self.path / "model.safetensors"

    @property
    def interface(self) -> Path:
        """What the network takes and gives."""
        return self.path / "interface.json"

    @property
    def encoding(self) -> Path:
        """How the columns of a table became numbers."""
        return self.path / "encoding.json"

    @property
    def archive(self) -> Path:
        """Models of clients that a method keeps on disk."""
        return self.path / "archive"

    @property
    def clients(self) -> Path:
        """What clients keep between rounds, where it does not fit in memory."""
        return self.path / "clients"

    @property
    def snapshots(self) -> Path:
        """Models of chosen rounds."""
        return self.path / "snapshots"

    @property
    def analysis(self) -> Path:
        """What analyses found."""
        return self.path / "analysis"

    def append(self, record: RoundRecord) -> None:
        """Add one line; a killed process leaves it there."""
        with self._open_rounds() as file:
            file.write(record.line() + "\n")

    def sync_rounds(self) -> None:
        """Hand the lines to the disk, before a checkpoint that knows their rounds.

        Lines after the last checkpoint need not outlast a power cut: resuming trains these rounds
        again. To sync each of them takes as long as a round of a small run.
        """
        with self._open_rounds() as file:
            os.fsync(file.fileno())

    @contextmanager
    def _open_rounds(self) -> Iterator[TextIO]:
        try:
            with self.rounds.open("a", encoding="utf-8") as file:
                yield file
        except OSError as error:
            raise FileError(
                f"{self.rounds} cannot be written ({error.strerror or error}); make room, then "
                f"resume the run of {self.path}"
            ) from error

    def read_rounds(self) -> list[RoundRecord]:
        """Read all whole lines; a last line cut short by a crash is left out."""
        if not self.rounds.exists():
            return []
        pieces = self.rounds.read_text(encoding="utf-8").split("\n")
        records = []
        for number, line in enumerate(pieces[:-1], start=1):
            try:
                records.append(RoundRecord.read(line))
            except (ValueError, TypeError) as error:
                raise RecordError(f"{self.rounds}, line {number}: {error}") from error
        return records

    def keep_rounds(self, last: int) -> list[RoundRecord]:
        """Drop the lines after a round, so that resuming writes each round once.

        Rounds that a power cut took from the file's end, or made unreadable, get an empty record
        with the note ``lost``: the checkpoint has all that the run needs.
        """
        known = self._readable_rounds(last)
        if [record.round for record in known] != list(range(1, len(known) + 1)):
            raise RecordError(
                f"{self.rounds} does not hold rounds 1 to {last} in order, which the checkpoint "
                "was written after; restore the file or start the run again elsewhere"
            )
        lost = range(len(known) + 1, last + 1)
        kept = known + [RoundRecord(round, notes={"lost": 1.0}) for round in lost]
        write_atomically(self.rounds, "".join(record.line() + "\n" for record in kept))
        return kept

    def _readable_rounds(self, last: int) -> list[RoundRecord]:
        """Read the lines up to a round, or up to where a power cut took the rest."""
        if not self.rounds.exists():
            return []
        lines = self.rounds.read_bytes().decode(errors="replace").split("\n")[:-1]
        found = [_read_or_none(line) for line in lines]
        records = []
        for number, record in enumerate(found):
            if record is not None:
                records.append(record)
            elif "\0" in lines[number] or not any(found[number:]):
                break  # a power cut: the file's end was not on the disk
            else:
                raise RecordError(f"{self.rounds}, line {number + 1} is damaged; restore the file")
        return [record for record in records if record.round <= last]

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the headline numbers."""
        write_atomically(self.summary, json.dumps(_plain(summary), indent=2) + "\n")

    def read_summary(self) -> dict[str, Any]:
        """Read the headline numbers."""
        try:
            return read_object(self.summary)
        except FileNotFoundError as error:
            raise RecordError(
                f"{self.path} has no summary.json: the run has not finished; resume it with "
                f"fedbasin resume {self.path}"
            ) from error

    def read_branch(self) -> dict[str, Any]:
        """Read which run the first rounds were taken from; empty where they were not."""
        return read_object(self.branch) if self.branch.exists() else {}


def read_object(path: Path) -> dict[str, Any]:
    """Read a file that holds one object of JSON."""
    try:
        content = parsed_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RecordError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise RecordError(f"{path} must hold one object")
    return content


def is_wiped(path: Path) -> bool:
    """Whether a power cut took what a file held: it is there, and holds nothing or NUL bytes."""
    return path.is_file() and not path.read_bytes().strip(b"\0 \r\n\t")


def write_atomically(path: Path, content: str) -> None:
    """Write a text file so that it is either the old one or the new one."""
    with replacing(path) as temporary:
        temporary.write_text(content, encoding="utf-8")


def mean_of_last(
    records: Iterable[RoundRecord], count: int = 10, metric: str = "accuracy"
) -> float | None:
    """Return the mean of a metric over the last `count` rounds, of those that were evaluated."""
    scored = [record.metric(metric) for record in list(records)[-count:]]
    values = [value for value in scored if value is not None]
    return fmean(values) if values else None


def rounds_to_target(
    records: Iterable[RoundRecord], target: float, last: int = 1, headline: Headline | None = None
) -> int | None:
    """Return the first round at which the mean of the last scores is at the target, or None."""
    headline = headline or Headline()
    recent: deque[float] = deque(maxlen=last)
    for record in records:
        value = record.metric(headline.name)
        if value is not None:
            recent.append(value)
            if len(recent) == last and headline.reached(sum(recent) / last, target):
                return record.round
    return None


def scores_of(records: Sequence[RoundRecord], headline: Headline) -> dict[str, Any]:
    """Return what a summary says about the scores of a run.

    It names the headline metric, its direction and unit, then each metric's last value.
    """
    last: dict[str, Any] = {headline.name: None, "loss": None}
    for record in records:
        known = _plain(record.metrics)  # as a record that is read back has them
        last |= {name: value for name, value in known.items() if value is not None}
    said: dict[str, Any] = {
        "headline": headline.name,
        "headline_unit": headline.unit,
        "higher_is_better": headline.higher_is_better,
        f"{headline.name}_mean_last10": mean_of_last(records, 10, headline.name),
    }
    for name, value in last.items():
        said[name if isinstance(value, list) else f"{name}_last"] = value
    return said
