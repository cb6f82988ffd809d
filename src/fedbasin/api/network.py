"""The trained network of a run folder: as a module, and applied to new rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedbasin.core.expressions import parse
from fedbasin.core.record import RecordError, RunFolder
from fedbasin.core.rng import root
from fedbasin.core.state import read
from fedbasin.core.task import Task
from fedbasin.data.encoding import Encoding
from fedbasin.experiment.config import read_experiment
from fedbasin.experiment.interface import Interface
from fedbasin.experiment.network import network_of
from fedbasin.experiment.objects import Factory, Objects

_ROWS_AT_ONCE = 1000


def trained_network(path: Path, model: nn.Module | Factory | None = None) -> nn.Module:
    """Return the network of a finished run with its trained weights, ready to score.

    Args:
        path: the run's folder.
        model: the module or function that the run was started with, where it was given as one.
    """
    folder = RunFolder(path)
    if not folder.config.exists():
        raise RecordError(
            f"{path} holds no run: there is no config.toml in it; name a run's folder"
        )
    if not folder.model.exists():
        raise RecordError(f"{path} has no final model; finish the run: fedbasin resume {path}")
    experiment = read_experiment(folder.config)
    if model is not None:
        experiment = experiment.using(Objects(model=model))
    interface = Interface.read(folder.interface)
    network = network_of(experiment, interface.shape, interface.outputs, root(0).fold("model"))
    try:
        network.load_state_dict(read(folder.model))
    except RuntimeError as error:  # names or shapes of tensors differ
        raise RecordError(
            f"{path} was trained with another network than {experiment.model}: give the one that "
            "it was begun with"
        ) from error
    return network.eval()


@torch.no_grad()
def predict(
    run: Path | str,
    rows: Any,
    *,
    model: nn.Module | Factory | None = None,
    probabilities: bool = False,
) -> np.ndarray:
    """Apply the network of a finished run to new rows.

    A run on a table takes a table with the same columns: it is encoded as the training rows were.
    Other runs take an array of rows ``[n, ...]``.

    Args:
        run: the run's folder.
        rows: the new rows; targets are not needed.
        model: the module or function that the run was started with, where it was given as one.
        probabilities: return the probability of every class, in the order of the classes.
    """
    folder = RunFolder(Path(run))
    network = trained_network(folder.path, model)
    interface = Interface.read(folder.interface)
    if folder.encoding.exists():
        encoding = Encoding.from_json(folder.encoding.read_text(encoding="utf-8"))
        inputs = interface.prepared(encoding.apply(rows))
    else:
        inputs = interface.prepared(np.asarray(rows))
    outputs = torch.cat([network(part) for part in inputs.split(_ROWS_AT_ONCE)])
    task: Task = parse(read_experiment(folder.config).task, "task")
    return _answers(task, interface, outputs, probabilities)


def _answers(task: Task, interface: Interface, outputs: Tensor, probabilities: bool) -> np.ndarray:
    """Return what outputs mean: class names, 0/1 columns or numbers; or probabilities."""
    if probabilities:
        if type(task).probabilities is Task.probabilities:
            raise ValueError(f"the task {task} has no probabilities: leave probabilities=False")
        return np.asarray(task.probabilities(outputs).numpy())
    if type(task).answers is Task.answers:  # numbers, or a survival score
        return np.asarray(outputs.squeeze(-1).numpy())
    answers = np.asarray(task.answers(outputs).numpy())
    if interface.classes and answers.ndim == 1:
        named: np.ndarray = np.array(interface.classes)[answers]
        return named
    return answers
