"""Default settings for a user's own data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedbasin.data import Dataset
from fedbasin.experiment.config import ConfigError, PartitionConfig

# Hospitals and banks are few and always there; of thousands of devices some are drawn.
_EVERYONE = {
    "partition": {"how": "natural", "clients": 0},
    "sim": {"participation": "at_most(clients=20)"},
}


def defaults_for(task: str, *, named_clients: bool, classes: bool) -> dict[str, Any]:
    """Return the default settings for a user's own data.

    Args:
        task: what the outputs mean.
        named_clients: whether the data names each row's client.
        classes: whether the targets have classes.
    """
    settings: dict[str, Any] = {"task": task}
    if named_clients:
        return settings | _EVERYONE
    if not classes:
        return settings | {"partition": {"how": "iid"}}
    return settings


def dealt_to(rows: int) -> int:
    """Return how many clients share rows that name none: 50 rows each, from 2 to the usual 50."""
    return max(2, min(PartitionConfig().clients, rows // 50))


def task_for(dataset: Dataset) -> str:
    """Name the task that targets like these are most often for."""
    labels = dataset.train.labels
    if dataset.classes:
        return "classification"
    if labels.ndim == 1 or labels.shape[1] == 1:
        return "regression"
    if np.issubdtype(labels.dtype, np.integer):
        return "multilabel"
    raise ConfigError(
        f"the targets of {dataset.name} are numbers in {labels.shape[1]} columns: give task=, such "
        "as 'regression', or 'survival' for time and event"
    )


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings where those of `over` win."""
    result = dict(base)
    for name, value in over.items():
        if isinstance(value, Mapping) and isinstance(result.get(name), Mapping):
            result[name] = {**result[name], **value}
        else:
            result[name] = value
    return result
