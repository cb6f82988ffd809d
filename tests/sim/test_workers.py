"""Worker processes give the loop's result to the bit, and say what went wrong."""

import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedbasin.core.method import Plan
from fedbasin.core.rng import Key
from fedbasin.core.round import Launch, Sent
from fedbasin.experiment import ConfigError, Experiment, build
from fedbasin.experiment.config import LocalConfig, PartitionConfig, SimConfig
from fedbasin.methods import Scaffold
from fedbasin.sim import LoopExecutor
from fedbasin.sim.allocator import keep_freed_memory
from fedbasin.sim.clients import ClientStates
from fedbasin.sim.workers import WorkerError, WorkerExecutor, shared_out

CONVOLUTIONS = Experiment(
    method="scaffold",
    model="lenet",
    rounds=2,
    partition=PartitionConfig(how="dirichlet(alpha=0.3, minimum=1)", clients=8),
    local=LocalConfig(lr=0.1, batch=64, momentum=0.5),
    sim=SimConfig(participation="fraction(rate=0.6)", device="cpu", workers=2),
)


def after(federation):
    server, states = federation.begin()
    *_, (last, record) = federation.rounds_from(server, states)
    return last, states.kept(), record


@pytest.fixture(scope="module")
def workers():
    """A federation with a stateful method in two processes; they are ended afterwards."""
    federation = build(CONVOLUTIONS)
    assert isinstance(federation.executor, WorkerExecutor)
    yield federation
    federation.executor.close()


def test_workers_give_the_loops_result_to_the_bit(workers):
    loop = build(replace(CONVOLUTIONS, sim=replace(CONVOLUTIONS.sim, workers=1)))
    assert isinstance(loop.executor, LoopExecutor)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ours, kept, record = after(workers)
        theirs, their_kept, their_record = after(loop)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(ours.send, theirs.send)
    assert torch.equal(kept.ids, their_kept.ids)
    assert torch.equal(kept.rows[0].control, their_kept.rows[0].control)
    assert record.train_loss == their_record.train_loss
    assert workers.executor.facts() == {"executor": "workers", "workers": 2}


def test_a_cohort_may_be_smaller_or_larger_than_before(workers):
    """Shared memory grows with what is sent; an idle worker is left alone."""
    executor = workers.executor
    loop = LoopExecutor(executor.trainer, executor.population, executor.key)
    vector, buffers = executor.trainer.net.initial()
    states = ClientStates(loop.trainer.zero_state(vector), vector)
    shared = Scaffold().broadcast(Scaffold().init(vector, workers.context), vector, workers.context)
    sent = Sent(vector, buffers, shared, 0)
    cohorts = ([3], [0, 1, 2, 3, 4, 5, 6, 7], [5, 2])
    requests = [  # the last two bring randomness of their own
        Launch(np.array(cohort), sent, Plan(0.1, 1), states, key)
        for cohort, key in zip(cohorts, (None, Key(1), Key(2)), strict=True)
    ]
    found = zip(cohorts, executor.train(requests), loop.train(requests), strict=True)
    for cohort, ours, theirs in found:
        assert ours.replies.clients.tolist() == cohort
        torch.testing.assert_close(ours.replies.models, theirs.replies.models)


def test_work_is_dealt_evenly_and_completely():
    rng = np.random.default_rng(0)
    steps = rng.integers(0, 50, 31).tolist()
    shares = shared_out(steps, 4)
    assert sorted(i for share in shares for i in share) == list(range(31))
    loads = [sum(steps[i] for i in share) for share in shares]
    assert max(loads) - min(loads) <= max(steps)
    assert shared_out([3], 2) == [[0], []]


def test_a_lost_worker_is_an_error_that_names_its_end(workers):
    server, states = workers.begin()
    rounds = workers.rounds_from(server, states)
    next(rounds)
    os.kill(workers.executor._running[1].process.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"status -9.*memory"):
        next(rounds)


def test_a_clients_own_error_comes_back_and_the_next_round_goes_well(workers):
    executor = workers.executor
    context = workers.context
    vector, buffers = executor.trainer.net.initial()
    shared = Scaffold().broadcast(Scaffold().init(vector, context), vector, context)
    states = ClientStates(executor.trainer.zero_state(vector), vector)
    good = Sent(vector, buffers, shared, 0)
    with pytest.raises(ValueError, match="expected a vector of"):
        executor.train(
            [Launch(np.array([0, 1, 2]), good._replace(vector=vector[1:]), Plan(0.1, 1), states)]
        )[0]
    again = executor.train([Launch(np.array([4, 5]), good, Plan(0.1, 1), states)])[0]
    assert again.replies.clients.tolist() == [4, 5]
    assert bool((again.replies.models != vector).any(1).all())


def test_workers_are_for_a_cpu_and_at_least_one():
    with pytest.raises(ConfigError, match=r"sim\.workers must be at least 0"):
        Experiment(sim=SimConfig(workers=-1))
    federation = build(replace(CONVOLUTIONS, sim=replace(CONVOLUTIONS.sim, workers=1)))
    one = federation.executor
    with pytest.raises(ValueError, match="at least 1"):
        WorkerExecutor(one.trainer, one.population, one.key, 0)


def test_the_allocator_is_left_alone_where_the_user_chose(monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
    assert keep_freed_memory() is False
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_")
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setattr("sys.platform", "darwin")
    assert keep_freed_memory() is False
