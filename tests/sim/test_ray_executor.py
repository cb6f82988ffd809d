"""The Ray executor equals one process, whatever the number of workers and whoever dies."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fedbasin.core.method import Plan
from fedbasin.core.rng import Key
from fedbasin.core.round import Launch, ProbeRequest, Sent
from fedbasin.core.tree import tensors
from fedbasin.experiment import Experiment, LocalConfig, PartitionConfig, SimConfig, run
from fedbasin.local import SGD
from fedbasin.methods import FedAvg, Scaffold
from fedbasin.sim import LoopExecutor
from fedbasin.sim.clients import ClientStates
from fedbasin.sim.cohort import CohortExecutor
from fedbasin.testing import toy_federation

ray = pytest.importorskip("ray", reason="needs the extra ray: pip install 'fedbasin[ray]'")
from fedbasin.sim import ray_executor  # noqa: E402
from fedbasin.sim.ray_executor import (  # noqa: E402
    ClusterError,
    RayExecutor,
    ShardLost,
    room,
    shared_tensor,
)

# Ray leaves files of its own open while it starts.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
matrix = partial(CohortExecutor, compiled=False)


@pytest.fixture(scope="module")
def cluster():
    """A cluster of this process; executors find it running and leave it running."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray_executor.join("", 4)
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


def federation(**settings):
    """Six ragged clients, five of them a round, with own state, momentum, decay and clipping."""
    return toy_federation(
        Scaffold(),
        optimiser=SGD(0.9, 0.01),
        clip=2.0,
        keep_optimiser=True,
        participation="count(clients=5)",
        **settings,
    )


def on_ray(base, engine, **settings):
    one = base.executor
    return replace(
        base, executor=RayExecutor(one.trainer, one.population, one.key, engine, **settings)
    )


def history(federation):
    """Every round's model and training loss, and the clients' states in the end."""
    server, states = federation.begin()
    rounds = [(s.send, r.train_loss) for s, r in federation.rounds_from(server, states)]
    models, losses = zip(*rounds, strict=True)
    kept = [torch.cat(tensors(states.get(client))) for client in range(6)]  # variate, momentum
    return torch.stack(models), torch.tensor(losses), torch.stack(kept)


def assert_same(one, other):
    for left, right in zip(one, other, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-11)


def test_shards_of_the_matrix_give_the_result_of_one_process(cluster):
    base = federation()
    one = base.executor
    spread = on_ray(base, matrix, workers=3)
    with closing(spread):
        found = history(spread)
        assert spread.executor.facts() == {
            "executor": "ray",
            "cluster": cluster,
            "workers": 3,
            "workers_engine": "cohort",
            "workers_lost": 0,
        }
    assert ray.is_initialized()  # the caller's cluster goes on
    assert_same(found, history(base))
    whole = matrix(one.trainer, one.population, one.key)
    assert_same(found, history(replace(base, executor=whole)))


def test_a_users_dropout_has_the_masks_of_one_process(cluster):
    base = federation(
        module=nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 3)), rounds=2
    )
    with closing(on_ray(base, matrix, workers=2)) as spread:
        assert_same(history(spread), history(base))


@dataclass(frozen=True)
class Mortal(LoopExecutor):
    """A loop whose process is killed when it has trained client 0: once in round 2, and then
    whenever it comes to round 4."""

    folder: Path = Path()

    def train(self, requests):
        gathered = super().train(requests)
        cohort = requests[0].cohort
        sent = requests[0].sent
        deaths = len(list(self.folder.iterdir()))
        if 0 in cohort and ((sent.round == 1 and not deaths) or sent.round == 3):
            (self.folder / str(deaths)).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return gathered


def test_a_lost_shard_is_trained_again_and_given_up_by_name(cluster, tmp_path, caplog):
    spread = on_ray(federation(rounds=3), partial(Mortal, folder=tmp_path), workers=2, retries=1)
    with closing(spread):
        assert_same(history(spread), history(federation(rounds=3)))
        assert spread.executor.facts()["workers_lost"] == len(list(tmp_path.iterdir())) == 1
        assert caplog.messages[0].startswith("round 2, shard 1 of 2 (clients 0, ")
        server, states = spread.begin()
        longer = replace(spread, rounds=4)
        named = r"^round 4, shard 1 of 2 \(clients 0, .*\) was lost 2 times.*process has died"
        with pytest.raises(ShardLost, match=named):
            list(longer.rounds_from(replace(server, round=3), states))
    assert len(list(tmp_path.iterdir())) == 3


def test_statistics_come_back_and_an_engines_own_error_is_raised_as_it_is(cluster, monkeypatch):
    """With BatchNorm; batches of 4 leave one row over for clients of 9, 5 and 1 rows."""
    layers = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))
    base = toy_federation(FedAvg(), module=layers)
    vector, buffers = base.net.initial()
    states = ClientStates((), vector)
    who = np.array([4, 0, 2])
    sent = Sent(vector, buffers, (), 0)
    plan = Plan(0.1, 2)
    request = Launch(who, sent, plan, states, Key(5))  # not the executor's own randomness
    expected = base.executor.train([request])[0]
    spread = on_ray(base, LoopExecutor, workers=2)
    with closing(spread):
        found = spread.executor.train([request])[0]
        probed = spread.executor.probe([ProbeRequest(who, sent)])[0]
        with pytest.raises(ValueError, match=r"^client 5: BatchNorm cannot train"):
            spread.executor.train([request._replace(cohort=np.array([0, 5]))])
        with monkeypatch.context() as patch, pytest.raises(ClusterError, match="'torch': '0'"):
            patch.setattr(ray_executor, "versions", lambda: {"torch": "0"})
            spread.executor._introduced(ray.put(ray_executor.Ready("loop", {"torch": "1"})))
    assert found.replies.clients.tolist() == [4, 0, 2]
    for name in ("models", "weights", "steps", "lr_sum", "effective_steps", "last_loss"):
        torch.testing.assert_close(getattr(found.replies, name), getattr(expected.replies, name))
    torch.testing.assert_close(found.replies.buffers, expected.replies.buffers)
    wanted = base.executor.probe([ProbeRequest(who, sent)])[0]
    torch.testing.assert_close(probed.gradients, wanted.gradients)
    assert probed.weights.tolist() == wanted.weights.tolist() == [3, 16, 7]
    assert not torch.equal(found.replies.buffers[0], found.replies.buffers[1])
    torch.testing.assert_close(found.train_loss, expected.train_loss)


EXPERIMENT = Experiment(
    method="scaffold",
    model="mlp(widths=(16,))",
    rounds=4,
    partition=PartitionConfig(how="dirichlet(alpha=0.3, minimum=1)", clients=8),
    local=LocalConfig(lr=0.1, epochs=2, batch=16, momentum=0.5, weight_decay=1e-3),
    sim=SimConfig(
        participation="fraction(rate=0.5)", precision="fp64", device="cpu", checkpoint_every=1
    ),
)


def shipped(folder):
    model = load_file(folder / "model.safetensors")
    return torch.cat([model[name].flatten() for name in sorted(model)])


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The model of the experiment in one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    run(replace(EXPERIMENT, sim=replace(EXPERIMENT.sim, executor="loop")), folder)
    return shipped(folder)


# Ray must have been left when the command ends, not only when the process does.
PROGRAM = """
import ray
from fedbasin.cli import main
try:
    main()
finally:
    assert not ray.is_initialized()
"""


def start(*arguments, **how):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **how,
    )


def test_a_run_resumed_with_other_workers_on_a_cluster_ends_the_same(cluster, alone, tmp_path):
    def stop(record):
        if record.round == 3:
            raise ConnectionAbortedError("pulled")

    sim = replace(EXPERIMENT.sim, executor="ray", workers=2)
    folder = tmp_path / "run"
    with pytest.raises(ConnectionAbortedError):
        run(replace(EXPERIMENT, sim=sim), folder, on_round=stop)
    config = folder / "config.toml"
    elsewhere = config.read_text().replace("workers = 2", "workers = 1")
    config.write_text(elsewhere.replace('address = ""', f'address = "{cluster}"'))
    process = start("resume", folder)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["executor"], summary["workers"]) == ("ray", 1)
    assert summary["cluster"] == cluster
    assert summary["workers_engine"] == "cohort"  # what auto takes for this model
    torch.testing.assert_close(shipped(folder), alone, rtol=1e-9, atol=1e-11)


def session(leader):
    """The ids of all living processes of a session."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # gone by now
        if int(fields[3]) == leader and fields[0] != "Z":
            found.add(int(stat.parent.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc to find processes")
def test_ctrl_c_finishes_the_round_and_leaves_no_process(tmp_path):
    """The terminal signals Ray's processes too: they must finish the round all the same."""
    folder = tmp_path / "run"
    sim = replace(EXPERIMENT.sim, executor="ray", workers=1, checkpoint_every=500)
    (tmp_path / "long.toml").write_text(replace(EXPERIMENT, rounds=2000, sim=sim).to_toml())
    process = start("run", tmp_path / "long.toml", "--out", folder, start_new_session=True)
    rounds = folder / "rounds.jsonl"
    while process.poll() is None and not (rounds.exists() and rounds.read_text()):
        time.sleep(0.01)
    assert len(session(process.pid)) > 3  # it, Ray's own and a worker
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate()
    assert process.returncode == 130 and f"fedbasin resume {folder}" in output.replace("\n", "")
    assert (folder / "checkpoint.safetensors").exists()
    while session(process.pid):  # Ray's processes end after the command
        time.sleep(0.05)


def test_workers_that_cannot_start_are_refused_with_the_reason(cluster):
    def broken(trainer, population, key):
        raise LookupError("no such engine")

    with pytest.raises(ClusterError, match="not be started: LookupError: no such engine"):
        on_ray(federation(), broken, workers=1)
    with pytest.raises(ClusterError, match="not be started: no worker started within 0 s"):
        on_ray(federation(), LoopExecutor, workers=1, patience=0.0)


def test_an_address_without_a_cluster_is_said_at_once():
    with pytest.raises(
        ClusterError, match=r"^sim.address: no Ray cluster at '127.0.0.1:1': .*refu"
    ):
        ray_executor.join("127.0.0.1:1", 0)


def test_room_for_workers():
    assert room({"CPU": 4.0}, 3, False) == (3, 0.0)
    assert room({"CPU": 16.0, "GPU": 4.0}, 0, True) == (4, 1.0)
    assert room({"CPU": 16.0, "GPU": 2.0}, 5, True) == (5, 1 / 3)  # three on one, two on the other
    with pytest.raises(ClusterError, match=r"sim.workers: 5 .* has 4"):
        room({"CPU": 4.0}, 5, False)
    with pytest.raises(ClusterError, match="no GPU"):
        room({"CPU": 4.0}, 1, True)


def test_rows_in_shared_memory_are_not_copied():
    array = np.arange(6)
    array.flags.writeable = False
    assert np.shares_memory(shared_tensor(array).numpy(), array)
