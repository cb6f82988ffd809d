"""Sinks: where the numbers of a run go beside its folder.

The run folder always writes its own files. A sink gets the same numbers as they appear, for
TensorBoard, MLflow, Weights & Biases or code of the user's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from fedbasin.core.record import RoundRecord

_teller = logging.getLogger(__name__)


class SinkError(ValueError):
    """A sink that cannot be used or has failed, with the reason and what to do."""


@dataclass(frozen=True)
class RunStart:
    """What a sink is told when a run starts or is resumed.

    Args:
        folder: the run's folder.
        root: the folder of the comparison that the run belongs to; else the run's own.
        settings: every setting by its full name, such as ``local.lr``.
        records: the rounds that the run has already; none for a new run.
    """

    folder: Path
    root: Path
    settings: Mapping[str, Any]
    records: tuple[RoundRecord, ...]

    @property
    def name(self) -> str:
        """The run's name: its folder, as seen from where the comparison lies."""
        return self.folder.absolute().relative_to(self.root.absolute().parent).as_posix()


class Sink:
    """Receives the numbers of one run after another; override what you need.

    After an exception in `open` or `record` the run saves a checkpoint and ends with `SinkError`.
    The run's files are complete, and it can be resumed.
    """

    package: ClassVar[str] = ""  # what must be installed for it, if anything

    @property
    def name(self) -> str:
        """What errors call it."""
        return type(self).__name__

    def open(self, run: RunStart) -> None:
        """Start with a new or resumed run."""

    def record(self, record: RoundRecord) -> None:
        """Take a round. A round after the last checkpoint comes again when a run is resumed."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Take the summary of a run whose ``status`` is finished, stopped or diverged."""

    def close(self) -> None:
        """Close files and connections; called after `open`, however the run ends."""


@dataclass(frozen=True)
class FunctionSink(Sink):
    """Calls a function with each round's record."""

    function: Callable[[RoundRecord], object]

    @property
    def name(self) -> str:
        """The function's name."""
        return getattr(self.function, "__qualname__", repr(self.function))

    def record(self, record: RoundRecord) -> None:
        """Call the function."""
        self.function(record)


@dataclass(frozen=True)
class Log:
    """All sinks of one run. What a sink raises is told with the sink's name.

    Args:
        sinks: where the numbers go.
        folder: the run's folder.
        root: the folder of the comparison that the run belongs to; else the run's own.
        settings: every setting by its full name.
    """

    sinks: Sequence[Sink]
    folder: Path
    root: Path
    settings: Mapping[str, Any]
    _opened: list[Sink] = field(default_factory=list, init=False)

    def open(self, records: Sequence[RoundRecord]) -> None:
        """Open the sinks for a run that has these rounds already."""
        run = RunStart(self.folder, self.root, self.settings, tuple(records))
        for sink in self.sinks:
            try:
                sink.open(run)
            except Exception as error:
                raise self._error(sink, "when the run started", error) from error
            self._opened.append(sink)

    def record(self, record: RoundRecord) -> SinkError | None:
        """Give a round to every sink; return the first error, to be raised after a checkpoint."""
        first = None
        for sink in self._opened:
            try:
                sink.record(record)
            except Exception as error:
                failed = self._error(sink, f"at round {record.round}", error)
                failed.__cause__ = error
                first = first or failed
        return first

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Give the summary to every sink.

        Only a finished run then raises `SinkError`. A run that was stopped or has diverged raises
        an error of its own, which must not be hidden.
        """
        for sink in self._opened:
            try:
                sink.finish(summary)
            except Exception as error:
                told = f"{sink.name} failed at the summary: {type(error).__name__}: {error}"
                if summary.get("status") == "finished":
                    raise SinkError(f"log: {told}. {self.folder} is complete") from error
                _teller.warning("log: %s", told)

    def close(self) -> None:
        """Close what was opened; an error here is only told."""
        while self._opened:
            sink = self._opened.pop()
            try:
                sink.close()
            except Exception as error:
                _teller.warning("log: %s could not be closed: %s", sink.name, error)

    def _error(self, sink: Sink, when: str, error: Exception) -> SinkError:
        return SinkError(
            f"log: {sink.name} failed {when}: {type(error).__name__}: {error}. The run is saved. "
            "Correct the sink or leave it out, then resume the run (fedbasin resume "
            f"{self.folder}, or start the federation again)"
        )
