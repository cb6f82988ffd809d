"""Weights & Biases: a run of a project, online or offline."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedbasin.core.record import RoundRecord, read_object
from fedbasin.core.sink import RunStart, Sink


class WandB(Sink):
    """Logs each round's numbers and the summary to the project ``WANDB_PROJECT``, or "fedbasin".

    ``RUN/wandb.json`` remembers the W&B run and the last round that was logged. A resumed run goes
    on in the same W&B run and logs no round twice. W&B's own variables hold, such as
    ``WANDB_MODE=offline``, with which it writes into ``RUN/wandb`` only.
    """

    package = "wandb"
    _run: Any
    _place: Path
    _last: int  # the last round that was logged
    _over: bool

    def open(self, run: RunStart) -> None:
        """Start a W&B run, or continue the one that the folder remembers."""
        import wandb

        self._place = run.folder / "wandb.json"
        known = read_object(self._place) if self._place.exists() else {}
        self._last = known.get("round", 0)
        self._over = False
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "fedbasin"),
            id=known.get("id"),
            resume="allow" if known else None,
            name=run.name,
            group=run.root.name,
            config=dict(run.settings),
            dir=run.folder,
            reinit="create_new",  # a comparison has several runs in one process
            settings=wandb.Settings(console="off"),
        )
        self._remember()
        for record in run.records:
            self.record(record)

    def _remember(self) -> None:
        text = json.dumps({"id": self._run.id, "round": self._last})
        self._place.write_text(text + "\n", encoding="utf-8")

    def record(self, record: RoundRecord) -> None:
        """Log a round, unless it was logged."""
        if record.round > self._last:
            self._run.log(record.numbers(), step=record.round)
            self._last = record.round
            self._remember()

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Log the summary, and end the W&B run."""
        self._run.summary.update({f"summary/{name}": value for name, value in summary.items()})
        self._end(summary["status"] == "finished")

    def close(self) -> None:
        """Mark a run without a summary as failed."""
        if not self._over:
            self._end(False)

    def _end(self, good: bool) -> None:
        self._run.finish(exit_code=0 if good else 1)
        self._over = True
