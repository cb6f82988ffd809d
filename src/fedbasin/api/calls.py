"""Run, compare and resume from Python, on your own data and networks or those of the catalogue."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from torch import nn

from fedbasin import experiment as experiments
from fedbasin.api.progress import console_for_a_bar, run_with_progress
from fedbasin.api.results import Comparison, RunResult
from fedbasin.core.bounds import at_least
from fedbasin.core.expressions import written
from fedbasin.core.files import output_folder
from fedbasin.core.reading import PYTHON, Reader
from fedbasin.core.record import RoundRecord
from fedbasin.data import Dataset, from_arrays
from fedbasin.experiment import ConfigError, Experiment, from_mapping
from fedbasin.experiment.comparison import Cell, cells, run_cells
from fedbasin.experiment.defaults import dealt_to, defaults_for, merged, task_for
from fedbasin.experiment.objects import Factory
from fedbasin.experiment.privacy import calibrated, calibrated_methods
from fedbasin.experiment.runs import refuse_diverged
from fedbasin.experiment.sharing import jobs_for
from fedbasin.sinks import Target

OnRound = Callable[[RoundRecord], bool | None]
On = Literal["here", "ray"]
What = Experiment | Dataset | tuple[Any, Any]


def run(
    what: What | None = None,
    out: Path | str | None = None,
    *,
    data: Dataset | tuple[Any, Any] | None = None,
    model: nn.Module | Factory | object | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    data_dir: Path | None = None,
    on_round: OnRound | None = None,
    log: Sequence[Target] = (),
    progress: bool | None = None,
    **settings: Any,
) -> RunResult:
    """Train one model with one method, in a new folder.

        fb.run(data, model=make_network, method=fb.ima(window=3), task="binary", rounds=50)

    Args:
        what: an `Experiment`, or the data: a `Dataset`, or arrays ``(x, y)``.
        out: the run's folder; a new one below ``runs/`` by default.
        data: the data, where `what` is not; beside an `Experiment` it takes the place of what
            `data.name` says.
        model: the network: an expression, a module, or a function ``(shape, outputs) -> module``.
        epsilon: for a method with `dp`: its noise becomes the least at which all rounds together
            cost no more.
        delta: the chance that epsilon does not hold.
        data_dir: a local mirror of the datasets.
        on_round: called with each round's `RoundRecord`. The run ends early, with its summary and
            its model, where it returns True.
        log: where else records go: names (tensorboard, mlflow, wandb), `Sink` objects, functions.
        progress: whether a bar is shown; by default on a terminal and in a notebook.
        settings: any field of `Experiment`; sections as mappings: ``local={"lr": 0.05}``.
    """
    check_arguments(out=out, epsilon=epsilon, delta=delta, data_dir=data_dir)
    path = output_folder(out, "run")
    base = experiment_of(what, data, model, settings)
    if epsilon is not None or delta is not None:
        base = calibrated(base, epsilon, delta)
    if on_round is None and _shown(progress):
        layout = [Cell(base.resolved(), path)]
        (summary,) = run_with_progress(layout, console_for_a_bar(), data_dir, log=log)
        refuse_diverged(summary, path)
    else:
        summary = experiments.run(base, path, data_dir=data_dir, on_round=on_round, log=log)
    return RunResult(path, summary, base.objects.model)


def resume(
    out: Path | str,
    *,
    data: Dataset | None = None,
    model: nn.Module | Factory | None = None,
    data_dir: Path | None = None,
    on_round: OnRound | None = None,
    log: Sequence[Target] = (),
) -> RunResult:
    """Resume a stopped run; the result equals an uninterrupted run.

    Args:
        out: the run's folder.
        data: the data that the run was given in memory; other data is refused.
        model: the module or function that the run was given; others are refused.
        data_dir: a local mirror of the datasets.
        on_round: as in `run`.
        log: as in `run`.
    """
    summary = experiments.resume(
        out, data_dir=data_dir, data=data, model=model, on_round=on_round, log=log
    )
    return RunResult(Path(out), summary, model)


def compare(
    what: What,
    methods: Sequence[str | object] = ("fedavg",),
    seeds: Sequence[int] = (0, 1, 2),
    out: Path | str | None = None,
    *,
    model: nn.Module | Factory | object | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    data_dir: Path | None = None,
    jobs: int | None = None,
    log: Sequence[Target] = (),
    progress: bool | None = None,
    **settings: Any,
) -> Comparison:
    """Run every method with every seed on the same clients.

        fb.compare(data, model=make_network, methods=["fedavg", fb.ima(fb.scaffold(), window=5)])

    The same call with the same `out` resumes a comparison that was stopped.

    Args:
        what: an `Experiment`, or the data: a `Dataset`, or arrays ``(x, y)``.
        methods: expressions or objects.
        seeds: the seeds that each method runs with.
        out: the folder of all runs; a new one below ``runs/`` by default.
        model: the network: an expression, a module, or a function ``(shape, outputs) -> module``.
        epsilon: as in `run`, for each method with `dp`; the others are not changed.
        delta: as in `run`.
        data_dir: a local mirror of the datasets.
        jobs: runs at once; by default as many as there are cores, one on a GPU.
        log: as in `run`; with several jobs names only.
        progress: whether a bar is shown; by default on a terminal and in a notebook.
        settings: any field of `Experiment`; sections as mappings: ``local={"lr": 0.05}``.
    """
    check_arguments(out=out, epsilon=epsilon, delta=delta, data_dir=data_dir, jobs=jobs)
    path = output_folder(out, "compare")
    if "seed" in settings:
        raise ConfigError(f"a comparison takes seeds=[{settings['seed']!r}], not seed")
    names = method_names(methods, settings)
    base = experiment_of(what, None, model, settings)
    names = calibrated_methods(base, names, epsilon, delta)
    layout = cells(base, names, _listed("seeds", seeds, "[0, 1, 2]"), path)
    jobs = jobs_for([cell.experiment for cell in layout], jobs)
    if _shown(progress):
        again = f"the same call and out={str(path)!r}"
        console = console_for_a_bar()
        summaries = run_with_progress(layout, console, data_dir, jobs, log=log, again=again)
    else:
        summaries = run_cells(layout, data_dir=data_dir, jobs=jobs, log=log)
    network = base.objects.model
    results = [
        RunResult(cell.path, summary, network)
        for cell, summary in zip(layout, summaries, strict=True)
    ]
    return Comparison(results, path)


@dataclass(frozen=True)
class _Arguments:
    """What `run`, `compare` and `tune` take beside settings, each what it needs."""

    out: os.PathLike[str] | str | None = None
    epsilon: float | None = None
    delta: float | None = None
    data_dir: os.PathLike[str] | str | None = None
    jobs: int | None = at_least(1, default=None)
    on: On = "here"


def check_arguments(**given: Any) -> None:
    """Refuse arguments of a call that have a wrong type or are out of bounds."""
    Reader(ConfigError, noun="argument", form=PYTHON).values(_Arguments, given)


def method_names(methods: Any, settings: Mapping[str, Any]) -> list[str]:
    """Return the expressions of the methods that are compared."""
    if "method" in settings:
        raise ConfigError("a comparison takes methods=[...], not method")
    listed = _listed("methods", methods, "['fedavg', 'scaffold']")
    return [written(method, "method") for method in listed]


def _listed(name: str, given: Any, example: str) -> list[Any]:
    """Return the items of a list, a tuple, a range, ...; refuse what holds no items."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ConfigError(f"{name} is {given!r:.80}: give a list, such as {name}={example}")
    return list(given)


def experiment_of(
    what: Any, data: Any, model: object | None, settings: Mapping[str, Any]
) -> Experiment:
    """Return the configuration of a call: of an experiment, or of data with its defaults."""
    given = dict(settings)
    if model is not None:
        given["model"] = model
    if isinstance(what, Experiment):
        base = from_mapping(given, what, PYTHON)
        if data is None:
            return base
        return base.using(replace(base.objects, data=_dataset(data)))
    if what is not None and data is not None:
        raise ConfigError("the data is given twice: leave out data=")
    if what is None and data is None:
        return from_mapping(given, form=PYTHON)
    dataset = _dataset(data if what is None else what)
    task = given["task"] if "task" in given else task_for(dataset)
    defaults = defaults_for(task, named_clients=dataset.clients, classes=bool(dataset.classes))
    if not dataset.clients:
        defaults = merged({"partition": {"clients": dealt_to(len(dataset.train))}}, defaults)
    base = from_mapping(given, from_mapping(defaults), PYTHON)
    return base.using(replace(base.objects, data=dataset))


def _dataset(data: Any) -> Dataset:
    """Return data as a dataset; arrays (x, y) become one."""
    if isinstance(data, Dataset):
        return data
    if isinstance(data, tuple) and len(data) == 2:
        return from_arrays(*data)
    if hasattr(data, "columns"):
        raise ConfigError(
            "data is a table: say what to predict with fedbasin.data.from_table(table, target=...)"
        )
    raise ConfigError(
        f"data is a {type(data).__name__}: give (x, y), or what fedbasin.data.from_arrays, "
        "from_table, from_clients, from_torch, from_huggingface, from_folder or from_texts returns"
    )


def _shown(progress: bool | None) -> bool:
    """Whether a bar is shown: in the main thread, on a terminal or in a notebook."""
    if threading.current_thread() is not threading.main_thread():
        return False
    if progress is not None:
        return progress
    return Console().is_terminal or "ipykernel" in sys.modules
