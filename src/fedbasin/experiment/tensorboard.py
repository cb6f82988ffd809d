"""Records as TensorBoard's events, for those who watch their runs there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from fedbasin.core.record import RoundRecord
from fedbasin.experiment.config import ConfigError


@contextmanager
def tensorboard_events(folder: Path) -> Iterator[Callable[[RoundRecord], None]]:
    """Yield what takes each round's record and writes its numbers into a folder.

    A resumed run starts a new file there, which tells TensorBoard to forget the rounds that
    are made again.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            "--tensorboard needs the package tensorboard: pip install 'fedbasin[tensorboard]'"
        ) from error
    writers: list[Any] = []

    def write(record: RoundRecord) -> None:
        if not writers:
            # Only now is it known at which round the run goes on.
            writers.append(SummaryWriter(str(folder), purge_step=record.round, flush_secs=2))
        for name, value in _numbers(record).items():
            writers[0].add_scalar(name, value, record.round)

    try:
        yield write
    finally:
        for writer in writers:
            writer.close()


def _numbers(record: RoundRecord) -> dict[str, float]:
    """Return the single numbers of a record; the method's own go by ``note/``."""
    columns = {f.name: getattr(record, f.name) for f in fields(record) if f.name != "round"}
    columns |= {f"note/{name}": value for name, value in record.notes.items()}
    return {name: value for name, value in columns.items() if isinstance(value, int | float)}
