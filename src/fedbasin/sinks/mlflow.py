"""MLflow: a run in a store of files beside the runs, or at a tracking URI of the user's."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbasin.core.lock import waiting_for
from fedbasin.core.record import RoundRecord, read_object, write_atomically
from fedbasin.core.sink import RunStart, Sink

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "diverged": "FAILED"}
_MOST_PARAMS = 100  # that a server takes at once


class MLflow(Sink):
    """Logs settings as parameters, each round's numbers as metrics, and the summary.

    ``RUN/mlflow.json`` remembers the MLflow run, so that a resumed run continues it. A round that
    MLflow has already is not logged again.

    Args:
        tracking_uri: where to log; by default ``MLFLOW_TRACKING_URI``, else the folder ``mlruns``
            beside the runs.
    """

    package = "mlflow"
    _client: MlflowClient
    _run: str  # MLflow's id
    _last: int  # the last round that MLflow has
    _over: bool

    def __init__(self, tracking_uri: str = "") -> None:
        self._uri = tracking_uri

    def open(self, run: RunStart) -> None:
        """Make an MLflow run, or continue the one that the folder remembers."""
        # As with Ray: fedbasin reports nothing to anyone unless the user asks for it.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.tracking import MlflowClient

        place = run.folder / "mlflow.json"
        known = read_object(place) if place.exists() else self._new_place(run)
        uri = known.get("tracking_uri")
        if uri is None:
            # MLflow prefers databases and asks for this where a store is made of files.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = (run.folder / known["store"]).resolve().as_uri()
        self._client = MlflowClient(tracking_uri=uri)
        if "run" not in known:
            known["run"] = _new_run(self._client, run)
            write_atomically(place, json.dumps(known) + "\n")
        self._run = known["run"]
        self._over = False
        self._client.update_run(self._run, status="RUNNING")
        self._last = int(self._client.get_run(self._run).data.metrics.get("round", 0))
        for record in run.records:
            self.record(record)

    def _new_place(self, run: RunStart) -> dict[str, Any]:
        if uri := self._uri or os.environ.get("MLFLOW_TRACKING_URI"):
            return {"tracking_uri": uri}
        # Relative, so that a comparison's folder can be moved.
        return {"store": Path(os.path.relpath(run.root / "mlruns", run.folder)).as_posix()}

    def record(self, record: RoundRecord) -> None:
        """Log a round, unless MLflow has it."""
        if record.round > self._last:
            # The round comes last: it says that the others have arrived.
            self._log(record.numbers() | {"round": record.round}, record.round)
            self._last = record.round

    def _log(self, numbers: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(_allowed(name), value, now, step) for name, value in numbers.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Log the summary's numbers as metrics and its texts as tags, and end the MLflow run."""
        numbers = {k: v for k, v in summary.items() if type(v) in (int, float)}
        self._log({f"summary/{k}": v for k, v in numbers.items()}, self._last)
        for name, value in summary.items():
            if isinstance(value, str):
                self._client.set_tag(self._run, _allowed(name), value)
        self._client.set_terminated(self._run, _STATUS.get(summary["status"], "FAILED"))
        self._over = True

    def close(self) -> None:
        """Mark a run without a summary as failed."""
        if not self._over:
            self._client.set_terminated(self._run, "FAILED")


def _new_run(client: MlflowClient, run: RunStart) -> str:
    from mlflow.entities import Param

    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fedbasin")
    # Two processes of a comparison that begin at once would each make an experiment of that name.
    with waiting_for(run.root / "mlflow.lock"):
        experiment = _experiment(client, name)
    made: str = client.create_run(experiment, run_name=run.name).info.run_id
    params = [Param(_allowed(name), str(value)) for name, value in run.settings.items()]
    for first in range(0, len(params), _MOST_PARAMS):
        client.log_batch(made, params=params[first : first + _MOST_PARAMS])
    return made


def _experiment(client: MlflowClient, name: str) -> str:
    from mlflow.exceptions import MlflowException

    known = client.get_experiment_by_name(name)
    if known is None:
        try:
            made: str = client.create_experiment(name)
            return made
        except MlflowException:
            known = client.get_experiment_by_name(name)  # another process may have been faster
            if known is None:
                raise
    experiment: str = known.experiment_id
    return experiment


def _allowed(name: str) -> str:
    """Replace characters that MLflow's names may not have."""
    return re.sub(r"[^\w\-. /]", "_", name)
