"""What child processes need of a run given as objects: data in files, and importable code."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from multiprocessing import current_process
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from fedbasin.core.catalogue import CATALOGUE
from fedbasin.data import Dataset, Rows
from fedbasin.experiment.config import ConfigError, Experiment
from fedbasin.experiment.executors import pick_device
from fedbasin.experiment.objects import model_name

_MAIN = ("__main__", "__mp_main__")


@dataclass(frozen=True, eq=False)
class StoredDataset:
    """A dataset whose arrays lie in files. Processes map these files and copy nothing.

    Args:
        folder: where the arrays lie.
        frame: the dataset with arrays of one row, for all that is not an array.
    """

    folder: Path
    frame: Dataset

    @classmethod
    def write(cls, dataset: Dataset, folder: Path) -> StoredDataset:
        """Write the arrays of a dataset into a new folder."""
        folder.mkdir()
        for split, rows in (("train", dataset.train), ("test", dataset.test)):
            np.save(folder / f"{split}_inputs.npy", rows.inputs)
            np.save(folder / f"{split}_labels.npy", rows.labels)
            for name, array in (("groups", rows.groups), ("missing", rows.missing)):
                if array is not None:
                    np.save(folder / f"{split}_{name}.npy", array)
        first = replace(dataset, train=dataset.train.take([0]), test=dataset.test.take([0]))
        return cls(folder, first)

    @cached_property
    def dataset(self) -> Dataset:
        """The dataset with arrays that are mapped from the files; the same one for all runs."""
        train = self._rows("train")
        test = self._rows("test")
        return replace(self.frame, train=train, test=test)

    def _rows(self, split: str) -> Rows:
        groups, missing = (self.folder / f"{split}_{name}.npy" for name in ("groups", "missing"))
        return Rows(
            np.load(self.folder / f"{split}_inputs.npy", mmap_mode="r"),
            np.load(self.folder / f"{split}_labels.npy", mmap_mode="r"),
            np.load(groups, mmap_mode="r") if groups.exists() else None,
            np.load(missing, mmap_mode="r") if missing.exists() else None,
        )


def store_all(experiments: Sequence[Experiment], folder: Path) -> dict[str, StoredDataset]:
    """Write every dataset in memory that runs use, each once; return them by name."""
    stored: dict[str, StoredDataset] = {}
    for experiment in experiments:
        dataset = experiment.objects.data
        if dataset is not None and dataset.name not in stored:
            place = folder / f"data{len(stored)}"
            stored[dataset.name] = StoredDataset.write(dataset, place)
    return stored


def from_main(experiments: Sequence[Experiment]) -> list[str]:
    """Return what runs use that is defined in the script or notebook itself."""
    names: dict[str, None] = {}
    mine = [card.name for card in CATALOGUE.values() if card.make.__module__ in _MAIN]
    for experiment in experiments:
        words = set(re.findall(r"\w+", experiment.to_toml()))
        names |= dict.fromkeys(name for name in mine if name in words)
        model = experiment.objects.model
        if isinstance(model, nn.Module):
            modules = {type(part).__module__ for part in model.modules()}
        else:
            modules = {getattr(model, "__module__", "")}
        if modules.intersection(_MAIN):
            names[model_name(model)] = None
    return list(names)


def jobs_for(experiments: Sequence[Experiment], jobs: int | None) -> int:
    """Return how many runs go at once.

    Args:
        experiments: the runs.
        jobs: what was asked for; by default one a core, or one where others cannot start.
    """
    if jobs is not None:
        return jobs
    sim = experiments[0].sim
    if pick_device(sim.device).type != "cpu" or sim.executor == "ray" or sim.workers > 1:
        return 1
    if _why_alone(experiments):
        return 1
    return min(os.cpu_count() or 1, len(experiments))


def check_jobs(experiments: Sequence[Experiment], jobs: int) -> None:
    """Refuse several processes where they cannot find what the runs use.

    Args:
        experiments: the runs.
        jobs: processes that are asked for.
    """
    if getattr(current_process(), "_inheriting", False):  # this process is being started
        raise ConfigError(
            "the script starts runs while another process imports it: put them below "
            'if __name__ == "__main__":'
        )
    reason = _why_alone(experiments) if jobs > 1 else ""
    if reason:
        raise ConfigError(f"{reason}, or give jobs=1")


def _why_alone(experiments: Sequence[Experiment]) -> str:
    """Say why no other process can run these; nothing where it can."""
    names = from_main(experiments)
    mine = f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"
    file = getattr(sys.modules["__main__"], "__file__", None)
    if not names:
        return _why_not_sent(experiments)
    if file is None or not Path(file).is_file():  # a notebook, or standard input
        return (
            f"{mine} defined in this notebook, which other processes cannot import: move the "
            "definition to a module (my_module.py) and import it"
        )
    if "__main__" not in Path(file).read_text(encoding="utf-8", errors="replace"):
        return (
            f"{mine} defined in {Path(file).name}, which other processes must import: put its "
            'last part below if __name__ == "__main__":'
        )
    return _why_not_sent(experiments)


class _Dry(ForkingPickler):
    """Goes through an object as a pool does that sends it, without its weights."""

    def persistent_id(self, part: Any) -> str | None:
        """Leave out tensors, which can always be sent."""
        return "tensor" if isinstance(part, Tensor) else None


def _why_not_sent(experiments: Sequence[Experiment]) -> str:
    """Say why a network cannot be sent to another process; nothing where it can."""
    for model in {id(each.objects.model): each.objects.model for each in experiments}.values():
        try:
            _Dry(io.BytesIO()).dump(model)
        except Exception as error:  # whatever an object raises when it is asked what it is made of
            return (
                f"{model_name(model)} cannot be sent to other processes ({error}): define it in a "
                "module (my_module.py), outside of functions, and import it"
            )
    return ""


@contextmanager
def main_script_hidden(hide: bool) -> Iterator[None]:
    """Start processes that do not import the main script, so that it needs no main guard.

    A spawned process imports the main script to find what is defined there. Runs that use nothing
    of it can do without that import.
    """
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    spec = getattr(main, "__spec__", None)
    if not hide or file is None or spec is not None:  # python -m names a module, which is guarded
        yield
        return
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = file
