"""Every task on real data: what the tests of engines and of Flower's grid run."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas
import pytest

from fedbasin import Experiment
from fedbasin.data import Dataset, Rows, load
from fedbasin.experiment import build
from fedbasin.experiment.config import DataConfig, LocalConfig, PartitionConfig, SimConfig
from fedbasin.sim import Federation

METHODS = {
    "fedavg": "fedavg",
    "scaffold": "scaffold",
    "fedadam": "fedadam(lr=0.05)",
    "ima": "ima(fedavg, window=3, start=0.5)",
    "wima": "wima(fedavg, window=4)",
    "fedlaw": "fedlaw(epochs=5)",
    "fedcda": "fedcda(memory=2, batches=2, warmup=0.25)",
}


def _frames(name: str) -> list[pandas.DataFrame]:
    """Read the training and the test rows of a table in the mirror; skip where it is absent."""
    folder = Path(os.environ.get("FEDBASIN_DATA", "/nowhere")) / "local" / name / "data"
    if not folder.is_dir():
        pytest.skip(f"FEDBASIN_DATA holds no local/{name}")
    return [pandas.read_parquet(next(folder.glob(f"{part}-*"))) for part in ("train", "test")]


@cache
def survival() -> Dataset:
    """Breast cancer patients of six regions (Fed-TCGA-BRCA); the age is scaled."""
    splits = []
    for frame in _frames("fed-tcga-brca"):
        targets = frame[["time", "event"]].to_numpy(np.float32)
        inputs = frame.drop(columns=["center", "region", "time", "event"]).astype(np.float32)
        inputs["age_at_index"] = (inputs["age_at_index"] - 58) / 13
        groups = frame["center"].to_numpy(np.int64)
        splits.append(Rows(inputs.to_numpy(np.float32), targets, groups))
    regions = ("northeast", "south", "west", "midwest", "europe", "canada")
    return Dataset("fed-tcga-brca", "table", *splits, classes=(), group_names=regions)


@cache
def multilabel() -> Dataset:
    """Genes of yeast by 103 measurements, with 14 functions."""
    splits = []
    for frame in _frames("yeast-multilabel"):
        named = [name for name in frame if name.startswith("Class")]
        inputs = frame.drop(columns=named).to_numpy(np.float32)
        splits.append(Rows(inputs * 5, frame[named].to_numpy(np.int64)))
    return Dataset("yeast-multilabel", "table", *splits, classes=())


@dataclass(frozen=True)
class Case:
    """A task on data.

    Args:
        data: loads it.
        bar: what the headline of every method must be better than.
        lr: the clients' learning rate.
        how: how rows are dealt.
    """

    data: Callable[[], Dataset]
    bar: float
    lr: float = 0.1
    how: str = "iid"


CASES = {
    "classification": Case(lambda: load("wine"), 0.9, how="dirichlet(alpha=1.0, minimum=4)"),
    "binary": Case(lambda: load("breast-cancer"), 0.97, how="dirichlet(alpha=1.0, minimum=4)"),
    "regression": Case(lambda: load("diabetes"), 0.85, lr=0.05),
    "survival": Case(survival, 0.6, how="natural"),
    "multilabel": Case(multilabel, 0.4, lr=0.5),
}


def experiment(task: str, method: str = "fedavg", rounds: int = 8, **sim) -> Experiment:
    """Settings of a short run in double precision."""
    case = CASES[task]
    settings = {"device": "cpu", "executor": "loop", "compile": "off", "precision": "fp64"}
    return Experiment(
        METHODS.get(method, method),
        task=task,
        model="mlp(widths=(8,))",
        rounds=rounds,
        data=DataConfig(name=case.data().name, proxy_rows=24),
        partition=PartitionConfig(how=case.how, clients=6),
        local=LocalConfig(lr=case.lr, epochs=2, batch=16),
        sim=SimConfig(participation="count(clients=4)", **(settings | sim)),
    )


def federation(task: str, method: str = "fedavg", rounds: int = 8, **sim) -> Federation:
    """A federation that is ready to run."""
    return build(experiment(task, method, rounds, **sim), data=CASES[task].data())


def models(made: Federation, executor=None):
    """The server after each round, with its record."""
    if executor is not None:
        made = replace(made, executor=executor)
    return list(made.rounds_from(*made.begin()))
