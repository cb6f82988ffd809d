"""Every task learns on real data, gives the same model in every engine, and resumes exactly."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from experiment.real_tasks import CASES, METHODS, experiment, federation, models

from fedbasin import Experiment, resume, run
from fedbasin.core.catalogue import CATALOGUE
from fedbasin.data import Dataset, Rows
from fedbasin.experiment import ConfigError, build
from fedbasin.sim import LoopExecutor
from fedbasin.sim.cohort import CohortExecutor
from fedbasin.sim.workers import WorkerExecutor

ROUNDS = 4  # where engines are compared
# Ray leaves files of its own open while it starts.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def same(found, wanted):
    for (ours, record), (theirs, _) in zip(found, wanted, strict=True):
        for name in ("send", "score"):
            a, b = getattr(ours, name), getattr(theirs, name)
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)
        assert np.isfinite(record.train_loss)


@pytest.mark.parametrize("task", CASES)
@pytest.mark.parametrize("method", METHODS)
def test_a_task_learns_and_the_cohort_equals_the_loop(task, method):
    made = federation(task, method)
    assert type(made.executor) is LoopExecutor
    headline = made.evaluator.headline
    first = made.evaluator.score(made.net.initial()[0])[headline.name]
    found = models(made)
    last = found[-1][1].metric(headline.name)
    assert headline.reached(last, CASES[task].bar), f"{headline.name} is {last:.3f}"
    assert not headline.reached(first, CASES[task].bar)
    cohort = federation(task, method, executor="cohort")
    assert type(cohort.executor) is CohortExecutor
    same(models(cohort), found)


@pytest.fixture(params=CASES)
def wanted(request):
    """A task, with the loop's servers by method."""
    task = request.param
    return task, {method: models(federation(task, method, ROUNDS)) for method in METHODS}


def on_processes(task, wanted, started):
    """Compare every method; those without client rules share one set of processes."""
    running = {}
    try:
        for method, servers in wanted.items():
            made = federation(task, method, ROUNDS)
            rules = made.method.rules()
            assert not rules or method == "scaffold"
            if rules not in running:
                running[rules] = started(made)
            found = models(made, running[rules])
            same(found, servers)
            yield found, servers
    finally:
        for executor in running.values():
            executor.close()


def test_worker_processes_give_the_bits_of_the_loop(wanted):
    def started(made):
        return WorkerExecutor(made.trainer, made.population, made.key, 1)

    for found, servers in on_processes(*wanted, started):
        assert torch.equal(found[-1][0].send, servers[-1][0].send)


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray", reason="needs the extra ray: pip install 'fedbasin[ray]'")
    from fedbasin.sim import ray_executor

    ray_executor.join("", 2)
    yield
    ray.shutdown()


def test_ray_gives_the_model_of_the_loop(cluster, wanted):
    task, servers = wanted

    def started(made):
        return federation(task, str(made.method), ROUNDS, executor="ray", workers=1).executor

    if task != "survival":  # workers take seconds to start: rules travel once
        del servers["scaffold"]
    assert len(list(on_processes(task, servers, started))) == len(servers)


# --- resuming ------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["regression", "survival"])
@pytest.mark.parametrize("method", ["scaffold", "wima(ima(fedlaw(epochs=2), window=2, start=0.5))"])
def test_a_resumed_run_ends_as_an_uninterrupted_one(task, method, tmp_path):
    settings = experiment(task, method, 6, checkpoint_every=2)
    settings = replace(settings, local=replace(settings.local, optimiser="adam", lr=0.01))
    mine = CASES[task].data()

    def stop(record):
        if record.round == 3:
            raise ConnectionAbortedError("pulled")

    with pytest.raises(ConnectionAbortedError):
        run(settings, tmp_path / "stopped", data=mine, on_round=stop)
    ended = resume(tmp_path / "stopped", data=mine)
    whole = run(settings, tmp_path / "whole", data=mine)
    ours, theirs = (tmp_path / name for name in ("stopped", "whole"))
    model = "model.safetensors"
    assert (ours / model).read_bytes() == (theirs / model).read_bytes()
    lines = [(folder / "rounds.jsonl").read_text().splitlines() for folder in (ours, theirs)]
    for one, other in zip(*lines, strict=True):
        assert timeless(json.loads(one)) == timeless(json.loads(other))
    assert timeless(ended) == timeless(whole)
    assert whole["headline"] == {"regression": "rmse", "survival": "c_index"}[task]


def timeless(record):
    return {name: value for name, value in record.items() if "seconds" not in name}


# --- a task of one's own -------------------------------------------------------------------------


OWN_TASK = '''
"""A task of a user's own: counts, by the Poisson loss."""

from dataclasses import dataclass
from typing import ClassVar

from fedbasin.core.catalogue import entry
from fedbasin.core.task import RowTask


@entry("task")
@dataclass(frozen=True)
class Counts(RowTask):
    """Counts: exp of the output is the expected one.

    Args:
        offset: added to the output.
    """

    offset: float = 0.0

    usual_metrics: ClassVar[tuple[str, ...]] = ("loss",)

    def outputs(self, targets):
        """One output."""
        if not targets.whole or targets.columns != 1:
            raise ValueError("counts needs one whole number a row")
        return 1

    def check_values(self, targets):
        """Counts are not negative."""
        if (targets < 0).any():
            raise ValueError(f"counts needs counts of at least 0, got {int(targets.min())}")

    def each(self, outputs, targets):
        """Return the negative log-likelihood of every row, without its constant."""
        rate = outputs[:, 0] + self.offset
        return rate.exp() - targets * rate
'''


@pytest.fixture
def counts(tmp_path, monkeypatch):
    """Rows with counts, a module with a task for them, and the catalogue as it was afterwards."""
    (tmp_path / "own_tasks.py").write_text(OWN_TASK, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(200, 4)).astype(np.float32)
    targets = rng.poisson(np.exp(inputs[:, 0])).astype(np.int64)
    rows = Rows(inputs, targets)
    yield Dataset("counts", "table", rows.take(slice(0, 150)), rows.take(slice(150, 200)), ())
    CATALOGUE.pop("counts", None)
    sys.modules.pop("own_tasks", None)


def test_a_task_of_a_users_module_runs_in_processes(counts, tmp_path):
    base = replace(experiment("regression", "fedavg", 3), task="own_tasks.counts(offset=0.5)")
    assert isinstance(base, Experiment)
    ends = {}
    for name, sim in (
        ("loop", {}),
        ("workers", {"workers": 2}),
        ("cohort", {"executor": "cohort"}),
    ):
        out = tmp_path / name
        summary = run(replace(base, sim=replace(base.sim, **sim)), out, data=counts)
        assert summary["headline"] == "loss" and summary["status"] == "finished"
        ends[name] = (out / "model.safetensors").read_bytes(), summary["loss_last"]
    assert ends["workers"] == ends["loop"]
    assert ends["cohort"][1] == pytest.approx(ends["loop"][1], rel=1e-9)
    before = build(base, data=counts)
    first = before.evaluator.score(before.net.initial()[0])["loss"]
    assert ends["loop"][1] < first - 0.2
    bad = replace(counts.train, labels=counts.train.labels - 1)
    with pytest.raises(ConfigError, match="task: counts needs counts of at least 0, got -1"):
        build(base, data=replace(counts, train=bad))
