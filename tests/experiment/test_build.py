"""What is chosen for a run from its size."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedbasin.core.rng import root
from fedbasin.data import load
from fedbasin.experiment import Experiment
from fedbasin.experiment.build import compiling_pays, cut_rows
from fedbasin.sim import Population


def population(clients: int, rows: int) -> Population:
    labels = np.zeros(clients * rows, dtype=np.int64)
    mine = list(np.arange(clients * rows).reshape(clients, rows))
    inputs = np.zeros((clients * rows, 1), dtype=np.uint8)
    return Population.of(inputs, labels, mine, torch.device("cpu"))


def sized(rounds: int, rate: float, **local) -> Experiment:
    base = Experiment(rounds=rounds)
    return replace(
        base,
        local=replace(base.local, **local),
        sim=replace(base.sim, participation=f"fraction(rate={rate})"),
    )


@pytest.mark.parametrize(
    ("rounds", "rate", "local", "pays"),
    [
        (300, 0.1, {"epochs": 5, "batch": 50}, True),  # rounds enough, however small
        (299, 0.1, {"epochs": 5, "batch": 50}, False),
        (60, 1.0, {"epochs": 5, "batch": 50}, True),  # 100 clients of 250 rows: 7.5 million
        (59, 1.0, {"epochs": 5, "batch": 50}, False),
        (60, 0.9, {"epochs": 5, "batch": 50}, False),  # those that take part count
        (150, 1.0, {"epochs": 1, "steps": 10, "batch": 50}, True),
        (149, 1.0, {"epochs": 1, "steps": 10, "batch": 50}, False),
    ],
)
def test_a_gpu_compiles_for_many_rounds_or_many_rows(rounds, rate, local, pays):
    run = sized(rounds, rate, **local)
    assert compiling_pays(run, population(100, 250), root(0), on_cuda=True) == pays


@pytest.mark.parametrize(
    ("rounds", "found", "pays"), [(80, True, True), (79, True, False), (80, False, False)]
)
def test_a_cpu_compiles_for_many_steps_where_there_is_a_compiler(monkeypatch, rounds, found, pays):
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/c++" if found else None)
    run = sized(rounds, 0.1, epochs=5, batch=5)  # 250 steps a client
    assert compiling_pays(run, population(10, 250), root(0), on_cuda=False) == pays


def test_held_out_rows_are_trained_on_by_nobody():
    whole = Experiment().resolved()
    part = replace(whole, partition=replace(whole.partition, hold_out=0.3))
    every, kept = (cut_rows(e, load("digits")).parts for e in (whole, part))
    assert kept.sizes().tolist() == [size - int(0.3 * size + 1e-9) for size in every.sizes()]
    assert all(
        np.isin(mine, before).all()
        for mine, before in zip(kept.clients, every.clients, strict=True)
    )
