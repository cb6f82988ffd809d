"""Runs as tasks of a Ray cluster (extra ``ray``).

Each run is a task that writes into its own folder, which all machines of the cluster must see. Ray
starts the task of a lost machine again, and the run resumes from its checkpoint. Ray passes objects
between processes by pickling them: join only a cluster whose processes are all your own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray
import torch
from ray.exceptions import RayTaskError

from fedbasin.experiment.comparison import Cell, open_cell
from fedbasin.experiment.executors import pick_device
from fedbasin.experiment.pool import run_in_child
from fedbasin.experiment.sharing import StoredDataset, check_jobs, store_all
from fedbasin.sim.ray_executor import join

_RETRIES = 20  # times that a task is started again after its machine was lost


def run_on_ray(cells: list[Cell], *, data_dir: Path | None = None, jobs: int | None = None) -> None:
    """Run or resume cells on a Ray cluster.

    Args:
        cells: the runs.
        data_dir: a local mirror of the datasets, at the same place on all machines.
        jobs: cores of a cluster that is started here; RAY_ADDRESS names one to join instead.
    """
    experiments = [cell.experiment for cell in cells]
    check_jobs(experiments, 2)  # what a script defines itself is not found elsewhere
    started = not ray.is_initialized()
    if started:
        join(os.environ.get("RAY_ADDRESS", ""), jobs or 0)
    try:
        folder = cells[0].root or cells[0].path
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix="data-", dir=folder) as shared:
            stored = store_all(experiments, Path(shared))
            gpus = 1 if pick_device(experiments[0].sim.device).type == "cuda" else 0
            task = ray.remote(_run).options(num_cpus=1, num_gpus=gpus, max_retries=_RETRIES)
            waiting = [task.remote(cell.without_data(), data_dir, stored) for cell in cells]
            _wait_for(waiting)
    finally:
        if started:
            ray.shutdown()


def _run(cell: Cell, data_dir: Path | None, stored: Mapping[str, StoredDataset]) -> dict[str, Any]:
    """Run one cell in a process of the cluster."""
    torch.set_num_threads(1)
    opening = partial(open_cell, data_dir=data_dir, stored=stored)
    (outcome,) = run_in_child(opening, False, [cell])
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _wait_for(waiting: list[Any]) -> None:
    """Wait until all tasks have ended; the first error ends the others."""
    while waiting:
        done, waiting = ray.wait(waiting)
        for each in done:
            try:
                ray.get(each)
            except RayTaskError as error:
                cause = error.cause
                raise (cause if isinstance(cause, Exception) else error) from None
