"""TensorBoard: events in the run's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedbasin.core.record import RoundRecord
from fedbasin.core.sink import RunStart, Sink

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard(Sink):
    """Writes each round's numbers as events into ``RUN/tensorboard``.

    A resumed run writes the rounds it has once more, into a new file there. TensorBoard then
    forgets the older files, which may hold rounds that are made again.
    """

    package = "tensorboard"
    _writer: SummaryWriter

    def open(self, run: RunStart) -> None:
        """Start a new file."""
        from torch.utils.tensorboard import SummaryWriter

        folder = str(run.folder / "tensorboard")
        self._writer = SummaryWriter(folder, purge_step=1, flush_secs=2)
        for record in run.records:
            self.record(record)

    def record(self, record: RoundRecord) -> None:
        """Write a round; the method's own numbers get a section of their own."""
        for name, value in record.numbers().items():
            if name.startswith("note_"):
                name = "note/" + name.removeprefix("note_")
            self._writer.add_scalar(name, value, record.round)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the summary as text."""
        text = json.dumps(summary, indent=4)
        indented = "".join(f"    {line}\n" for line in text.splitlines())  # code, in Markdown
        self._writer.add_text("summary", indented, summary.get("rounds"))

    def close(self) -> None:
        """Close the file."""
        self._writer.close()
