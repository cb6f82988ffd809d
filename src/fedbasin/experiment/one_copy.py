"""One copy of the data for runs that advance side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbasin.data import Dataset, Rows
from fedbasin.experiment.config import Experiment
from fedbasin.sim import Population
from fedbasin.sim.population import as_tensor


class OneCopy:
    """The datasets of runs, each loaded once, with tensors that all of them index."""

    def __init__(self) -> None:
        self._datasets: list[tuple[Any, Dataset]] = []
        self._tensors: list[tuple[np.ndarray, torch.device, Tensor]] = []

    def dataset(self, experiment: Experiment, load: Callable[[], Dataset]) -> Dataset:
        """Return the data of a run, whose training rows know their place in it."""
        what = (experiment.data.name, experiment.table, id(experiment.objects.data))
        for known, dataset in self._datasets:
            if known == what:
                return dataset
        dataset = load()
        places = np.arange(len(dataset.train))
        dataset = replace(dataset, train=replace(dataset.train, origin=places))
        self._datasets.append((what, dataset))
        return dataset

    def tensor(self, array: np.ndarray, device: torch.device) -> Tensor:
        """Return an array of a dataset on a device."""
        for known, where, tensor in self._tensors:
            if known is array and where == device:
                return tensor
        tensor = as_tensor(array, device)
        self._tensors.append((array, device, tensor))
        return tensor


ONE_COPY: ContextVar[OneCopy | None] = ContextVar("one_copy", default=None)


@contextmanager
def one_copy(copies: OneCopy | None = None) -> Iterator[None]:
    """Let the runs that are built inside share their data, with those built in it before."""
    token = ONE_COPY.set(copies or OneCopy())
    try:
        yield
    finally:
        ONE_COPY.reset(token)


def population_of(
    experiment: Experiment,
    dataset: Dataset,
    train: Rows,
    clients: Sequence[np.ndarray],
    device: torch.device,
) -> Population:
    """Return the clients of a run: with rows of their own, or with places in the one copy."""
    shared = ONE_COPY.get()
    if shared is None or train.origin is None or not may_join(experiment, device):
        return Population.of(train.inputs, train.labels, clients, device)
    order = np.concatenate([*clients, np.empty(0, np.int64)]).astype(np.int64)
    sizes = np.array([len(rows) for rows in clients], dtype=np.int64)
    return Population(
        shared.tensor(dataset.train.inputs, device),
        as_tensor(train.labels[order], device),
        np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]),
        as_tensor(train.origin[order], device),
    )


def may_join(experiment: Experiment, device: torch.device) -> bool:
    """Whether a run may advance with others, by its settings; others have rows of their own."""
    sim = experiment.sim
    alone = sim.evaluate_train or sim.evaluate_clients or sim.personalise or sim.baselines
    return (
        device.type == "cpu"
        and sim.executor in ("auto", "cohort")
        and sim.compile != "on"
        and sim.workers <= 1
        and not alone
    )


def scored_rows(dataset: Dataset, part: Rows, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return rows as tensors; those of a whole split are shared."""
    shared = ONE_COPY.get()
    if shared is None or part.inputs is not dataset.test.inputs:
        return as_tensor(part.inputs, device), as_tensor(part.labels, device)
    return shared.tensor(part.inputs, device), shared.tensor(part.labels, device)
