"""Runs that advance as one matrix: each is what it is alone, whatever becomes of the others."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from counting import Clock
from safetensors.torch import load_file

from fedbasin.core.catalogue import cards
from fedbasin.core.expressions import text
from fedbasin.core.lock import alone_in
from fedbasin.core.record import RunFolder
from fedbasin.data import load
from fedbasin.experiment import Experiment, build, compare, from_mapping, resume
from fedbasin.experiment.comparison import cells, run_cells
from fedbasin.experiment.config import ConfigError, LocalConfig, SimConfig, TableConfig
from fedbasin.experiment.one_copy import OneCopy, one_copy
from fedbasin.sim import batch
from fedbasin.sim.batch import joins, train_alike
from fedbasin.sim.cohort import CohortExecutor
from fedbasin.sim.population import Population
from fedbasin.sim.runner import Interrupted

METHODS = [text(card.make()) for card in cards("method")]


def base(**sim):
    return from_mapping(
        {
            "model": "mlp(widths=(8,))",
            "rounds": 3,
            "data": {"name": "digits", "proxy_per_class": 2},
            "partition": {"how": "dirichlet(alpha=0.5)", "clients": 10},
            "local": {"lr": 0.1, "batch": 32, "epochs": 2},
            "sim": {
                "participation": "count(clients=4)",
                "device": "cpu",
                "checkpoint_every": 1,
                "executor": "cohort",
                "compile": "off",
                **sim,
            },
        }
    )


def models(folder):
    return load_file(RunFolder(folder).model)


def lines(folder):
    """The records of a run without their seconds."""
    read = [json.loads(line) for line in RunFolder(folder).rounds.read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("seconds")} for line in read]


def assert_same_run(ours, theirs, bits=True):
    for name, tensor in models(theirs).items():
        if bits:
            assert torch.equal(models(ours)[name], tensor), name
        else:
            torch.testing.assert_close(models(ours)[name], tensor, rtol=1e-3, atol=1e-4)
    if bits:
        assert lines(ours) == lines(theirs)


@pytest.fixture
def widths(monkeypatch):
    """How many requests each call of a cohort answers."""
    seen = []
    train = CohortExecutor.train

    def counted(self, requests):
        seen.append(len(requests))
        return train(self, requests)

    monkeypatch.setattr(CohortExecutor, "train", counted)
    return seen


ROUNDED = {"fedgrab"}  # tests/sim/test_lean.py says why


def test_every_method_beside_others_is_what_it_is_alone(tmp_path, widths):
    """All methods of the catalogue in one batch, against each alone."""
    short = replace(base(), rounds=2)
    beside = cells(short, METHODS, [0], tmp_path / "beside")
    run_cells(beside)
    assert max(widths) > 10
    one_by_one = replace(short.sim, together=1)
    alone = cells(replace(short, sim=one_by_one), METHODS, [0], tmp_path / "alone")
    widths.clear()
    run_cells(alone)
    assert max(widths) == 1
    for ours, theirs in zip(beside, alone, strict=True):
        name = ours.experiment.method.split("(")[0]
        assert_same_run(ours.path, theirs.path, bits=name not in ROUNDED)
        summary = RunFolder(ours.path).read_summary()
        assert summary["executor"] == "cohort" and summary["share_useful_steps"] == 1.0


def test_runs_with_rates_steps_and_seeds_of_their_own(tmp_path, widths):
    layout = []
    for number, local in enumerate(
        [
            LocalConfig(lr=0.1, batch=32),
            LocalConfig(lr=0.5, batch=32, epochs=3),
            LocalConfig(batch=8),
        ]
    ):
        own = replace(base(), local=local, seed=number)
        layout += cells(own, ["fedavg", "fedprox(mu=0.1)"], [number], tmp_path / str(number))
    run_cells(layout)
    assert {2, 1} <= set(widths)  # two runs with batch 32 and no rule; the others alone
    for cell in layout:
        one = replace(cell, path=tmp_path / "one" / cell.path.relative_to(tmp_path))
        run_cells([one])
        assert_same_run(cell.path, one.path)


def test_runs_share_the_seconds_of_the_training_they_did_together(tmp_path, monkeypatch):
    clock = Clock()
    for module in ("batch", "clock"):
        monkeypatch.setattr(f"fedbasin.sim.{module}.time", clock)
    train = CohortExecutor.train

    def slow(self, requests):
        clock.sleep(10)
        return train(self, requests)

    monkeypatch.setattr(CohortExecutor, "train", slow)
    layout = cells(replace(base(), rounds=1), ["fedavg"], range(3), tmp_path)
    run_cells(layout)
    spent = [RunFolder(cell.path).read_rounds()[0].seconds for cell in layout]
    assert min(spent) > 1 and sum(spent) == pytest.approx(10)


def test_a_run_that_diverges_or_fails_harms_no_other(tmp_path, monkeypatch):
    good = base()
    wild = replace(good, local=replace(good.local, lr=1e30))
    layout = [
        *cells(good, ["fedavg"], [0, 1], tmp_path / "good"),
        *cells(wild, ["fedavg"], [2], tmp_path / "wild"),
        *cells(good, ["fedavgm"], [3, 4], tmp_path / "bad"),
    ]
    append = RunFolder.append

    def broken(self, record):
        if self.path == layout[-1].path and record.round == 2:
            raise OSError("no luck")
        append(self, record)

    monkeypatch.setattr(RunFolder, "append", broken)
    ends = {}
    run_cells(layout, on_cell=lambda cell, end: ends.__setitem__(cell.path, end))
    told = [ends[cell.path] for cell in layout]
    assert [end["status"] for end in told[:4]] == ["finished", "finished", "diverged", "finished"]
    assert isinstance(told[4], OSError)
    monkeypatch.setattr(RunFolder, "append", append)
    assert resume(layout[-1].path)["status"] == "finished"
    again = cells(base(together=1), ["fedavg"], [0, 1], tmp_path / "again")
    run_cells(again)
    for ours, theirs in zip(layout[:2], again, strict=True):
        assert_same_run(ours.path, theirs.path)


def test_a_cohort_that_fails_together_goes_on_one_by_one(tmp_path, monkeypatch):
    train = CohortExecutor.train

    def refusing(self, requests):
        if len(requests) > 1:
            raise RuntimeError("no room for so many")
        return train(self, requests)

    monkeypatch.setattr(CohortExecutor, "train", refusing)
    with pytest.warns(UserWarning, match="2 runs continue one by one in this round: no room"):
        found = compare(base(), ["fedavg"], [0, 1], tmp_path)
    assert [each["status"] for each in found] == ["finished"] * 2


def test_each_run_resumes_alone_and_beside_others(tmp_path):
    layout = cells(base(), ["fedavg", "scaffold"], [0, 1], tmp_path / "a")
    run_cells([replace(cell, until=1) for cell in layout[:2]])
    run_cells([replace(cell, until=2) for cell in layout])
    assert resume(layout[0].path)["status"] == "finished"  # alone
    run_cells(layout)
    whole = cells(base(together=1), ["fedavg", "scaffold"], [0, 1], tmp_path / "b")
    run_cells(whole)
    for ours, theirs in zip(layout, whole, strict=True):
        assert_same_run(ours.path, theirs.path)


def test_a_run_of_another_process_is_left_to_it(tmp_path):
    layout = cells(base(), ["fedavg"], [0, 1, 2], tmp_path)
    layout[1].path.mkdir(parents=True)
    ends = []
    with alone_in(layout[1].path):
        run_cells(layout, on_cell=lambda cell, end: ends.append(type(end).__name__))
    assert sorted(ends) == ["Busy", "dict", "dict"]
    assert not (layout[0].path / "run.lock").exists()


def test_a_stop_lets_every_run_save_the_round_it_is_in(tmp_path, monkeypatch):
    layout = cells(replace(base(), rounds=6), ["fedavg", "scaffold"], [0, 1], tmp_path / "a")
    append = RunFolder.append

    def interrupting(self, record):
        append(self, record)
        if record.round == 2 and self.path == layout[0].path:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(RunFolder, "append", interrupting)
    with pytest.raises(Interrupted, match="stopped by the user after round 2"):
        run_cells(layout)
    monkeypatch.setattr(RunFolder, "append", append)
    stopped = [RunFolder(cell.path).read_summary() for cell in layout]
    assert {each["status"] for each in stopped} == {"stopped"}
    assert {each["rounds"] for each in stopped} <= {2, 3}
    run_cells(layout)
    whole = cells(
        replace(base(together=1), rounds=6), ["fedavg", "scaffold"], [0, 1], tmp_path / "b"
    )
    run_cells(whole)
    for ours, theirs in zip(layout, whole, strict=True):
        assert_same_run(ours.path, theirs.path)


SCRIPT = """
import sys
import torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from experiment.test_together import base
from dataclasses import replace
from fedbasin.experiment.comparison import cells, run_cells
run_cells(cells(replace(base(), rounds=30), ["fedavg", "fedavgm"], [0, 1], Path(sys.argv[2])))
"""


def test_killed_at_any_moment_all_runs_resume(tmp_path):
    here = Path(__file__).parents[1]
    waits = np.random.default_rng(0).uniform(0.0, 1.0, 2)
    for wait in waits:
        process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(here), str(tmp_path / "a")])
        while not list(tmp_path.glob("a/*/*/rounds.jsonl")):
            assert process.poll() is None
            time.sleep(0.02)
        time.sleep(wait)
        process.kill()
        process.wait()
    longer = replace(base(), rounds=30)
    layout = cells(longer, ["fedavg", "fedavgm"], [0, 1], tmp_path / "a")
    run_cells(layout)
    whole = cells(
        replace(longer, sim=replace(longer.sim, together=1)),
        ["fedavg", "fedavgm"],
        [0, 1],
        tmp_path / "b",
    )
    run_cells(whole)
    for ours, theirs in zip(layout, whole, strict=True):
        assert_same_run(ours.path, theirs.path)


def test_two_processes_share_the_runs(tmp_path):
    ends = []
    layout = cells(base(), ["fedavg", "fedprox"], [0, 1], tmp_path / "a")
    run_cells(layout, jobs=2, on_cell=lambda cell, end: ends.append(cell.path))
    assert sorted(ends) == sorted(cell.path for cell in layout)
    whole = cells(base(together=1), ["fedavg", "fedprox"], [0, 1], tmp_path / "b")
    run_cells(whole)
    for ours, theirs in zip(layout, whole, strict=True):
        assert_same_run(ours.path, theirs.path, bits=False)


def test_rows_are_looked_up_in_one_copy_of_the_data():
    with one_copy():
        first, second = (build(replace(base(), seed=seed)) for seed in (0, 1))
        assert first.population.inputs is second.population.inputs
        assert first.evaluator.inputs is second.evaluator.inputs
        assert joins(first) and train_alike(first, second)
        joined = Population.joined([first.population, second.population])
    alone = [build(replace(base(), seed=seed)).population for seed in (0, 1)]
    for people, own, begins in zip((first, second), alone, (0, 10), strict=True):
        for client in range(10):
            theirs = own.shard(client)
            for found in (people.population.shard(client), joined.shard(begins + client)):
                assert torch.equal(found.inputs, theirs.inputs)
                assert torch.equal(found.labels, theirs.labels)
        assert torch.equal(people.population.apart().inputs, own.inputs)


def test_one_copy_is_kept_of_every_dataset_and_of_every_way_to_read_a_table():
    copies = OneCopy()
    usual = base()
    others = [
        replace(usual, data=replace(usual.data, name="other")),
        replace(usual, table=TableConfig(drop=("age",))),
    ]
    first = copies.dataset(usual, lambda: load("digits"))
    found = [copies.dataset(other, lambda: load("digits")) for other in others]
    assert len({id(dataset) for dataset in (first, *found)}) == 3
    assert copies.dataset(replace(usual, rounds=9), lambda: None) is first


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "fedprox(mu=0.3)"},
        {"model": "mlp(widths=(9,))"},
        {"local": LocalConfig(batch=8)},
        {"local": LocalConfig(batch=32, clip=1.0)},
        {"local": LocalConfig(batch=32, optimiser="adam")},
        {"local": LocalConfig(batch=32, keep_optimiser=True, momentum=0.9)},
        {"data": replace(base().data, normalise="symmetric")},
        {"data": replace(base().data, augment=True)},
        {"sim": replace(base().sim, precision="fp64")},
        {"sim": replace(base().sim, chunk=3)},
        {"sim": replace(base().sim, memory=0.5)},
    ],
)
def test_runs_that_train_otherwise_are_no_rows_of_one_matrix(changes):
    with one_copy():
        one = build(replace(base(), local=LocalConfig(batch=32)))
        other = build(replace(base(), **{"local": LocalConfig(batch=32), **changes}))
    assert joins(one) and joins(other)
    assert not train_alike(one, other) and train_alike(one, one)


@pytest.mark.parametrize(
    "changes",
    [
        {"executor": "loop"},
        {"compile": "on"},
        {"evaluate_train": True},
        {"executor": "auto", "workers": 2},
    ],
)
def test_runs_that_join_no_others(changes, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: name)
    with one_copy():
        assert not joins(build(base(**changes)))


def test_memory_bounds_how_many_runs_are_begun(tmp_path, monkeypatch, widths):
    monkeypatch.setattr(batch, "_room", lambda federation: 2)
    run_cells(cells(base(), ["fedavg"], range(5), tmp_path))
    assert max(widths) == 2
    widths.clear()
    run_cells(cells(base(together=3), ["fedavg"], range(5, 10), tmp_path))
    assert max(widths) == 2


def test_a_small_memory_cuts_the_batch_and_changes_nothing(tmp_path):
    with one_copy():
        federation = build(base(memory=1e-6))
    assert batch._room(federation) == 1
    with one_copy():
        assert 1 < batch._room(build(base(memory=0.001))) < 100


def test_a_negative_number_of_runs_is_refused():
    with pytest.raises(ConfigError, match=r"sim\.together"):
        Experiment(sim=SimConfig(together=-1))
