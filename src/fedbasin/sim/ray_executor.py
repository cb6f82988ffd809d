"""The Ray executor: shards of a cohort on the processes of one machine or of a cluster.

Every worker is a Ray actor that holds the clients' rows and an engine of its own (cohort or
loop) on its own device. A round deals the cohort to the workers and joins what comes back.
Workers hold no state of the run: clients' own states stay with the driver and are sent with
their shard, and randomness is keyed by (seed, round, client). So a lost worker is replaced, its
shard is trained again, and the result equals that of one process.

The rows are placed in Ray's object store once; workers of one machine share that copy.
Ray passes objects between its processes by pickling them: join only a cluster whose
processes are all your own.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import metadata
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from torch import Tensor

from fedbasin.core.method import Plan, Probe, Replies
from fedbasin.core.rng import Key
from fedbasin.core.round import Gathered, Launch, ProbeRequest, Sent
from fedbasin.core.tree import rebuild, row, stack
from fedbasin.local.batches import count_steps
from fedbasin.local.train import Trainer
from fedbasin.sim.clients import ClientStates
from fedbasin.sim.loop import Executor
from fedbasin.sim.population import Population

Engine = Callable[[Trainer, Population, Key], Executor]
_log = logging.getLogger(__name__)


class ClusterError(RuntimeError):
    """A cluster that cannot be joined, or has no room for the workers."""


class ShardLost(RuntimeError):
    """A shard that no worker could train, with the clients and the reason."""


class Setup(NamedTuple):
    """What a worker needs for the whole run."""

    trainer: Trainer  # its network on the CPU
    inputs: np.ndarray
    labels: np.ndarray
    offsets: np.ndarray
    key: Key
    engine: Engine


class Ready(NamedTuple):
    """What a worker states when it has started."""

    engine: str
    versions: dict[str, str]


class Rows(NamedTuple):
    """What comes back for every client of a shard; leaves are arrays [c, ...]."""

    replies: Replies
    own: Any


class Worker:
    """One actor: an engine on the device that Ray gave it."""

    def start(self, setup: Setup) -> Ready:
        """Move the run's network and rows to this worker's device."""
        device = torch.device("cuda" if ray.get_gpu_ids() else "cpu")
        if device.type == "cpu":
            torch.set_num_threads(1)  # parallelism is by workers
        trainer = replace(setup.trainer, net=setup.trainer.net.on(device))
        inputs = shared_tensor(setup.inputs).to(device)
        labels = shared_tensor(setup.labels).to(device)
        population = Population(inputs, labels, setup.offsets)
        self._trainer = trainer
        self._device = device
        self._engine = setup.engine(trainer, population, setup.key)
        return Ready(str(self._engine.facts()["executor"]), versions())

    def train(
        self, clients: np.ndarray, own: Any, sent: Sent, plan: Plan, key: Key | None
    ) -> tuple[Rows, float]:
        """Train a shard; return what its clients send back, and their mean training loss."""
        sent = _tensors(sent, self._device)
        own = _tensors(own, self._device)
        states = ClientStates(self._trainer.zero_state(sent.vector), sent.vector)
        states.put(clients.tolist(), [row(own, i) for i in range(len(clients))], sent.round)
        gathered = self._engine.train([Launch(clients, sent, plan, states, key)])[0]
        rows = Rows(gathered.replies, stack(gathered.own))
        return _arrays(rows), float(gathered.train_loss)

    def probe(self, clients: np.ndarray, sent: Sent) -> Probe:
        """Return the full gradients of a shard."""
        request = ProbeRequest(clients, _tensors(sent, self._device))
        probe: Probe = _arrays(self._engine.probe([request])[0])
        return probe


class RayExecutor(Executor):
    """Train a cohort in shards on Ray actors. The result equals that of one process.

    Args:
        trainer: how a client trains; workers use the kind of device its network is on.
        population: the clients' data.
        key: the run's randomness.
        engine: makes the executor of one worker.
        workers: how many; 0 takes one for each GPU of the cluster, or for each core on a CPU.
        address: a running cluster, ``"auto"`` or ``"host:port"``; empty starts one here.
        retries: how often a shard of a round is given to a new worker before the run stops.
        patience: seconds a worker may take to start.
    """

    def __init__(
        self,
        trainer: Trainer,
        population: Population,
        key: Key,
        engine: Engine,
        *,
        workers: int = 0,
        address: str = "",
        retries: int = 3,
        patience: float = 120.0,
    ) -> None:
        self._sizes = population.sizes
        self._trainer = trainer
        self._retries = retries
        self._patience = patience
        self._lost = 0
        self._workers: list[Any] = []
        self._joined = not ray.is_initialized()  # else the cluster is the caller's to leave
        try:
            if self._joined:
                join(address, workers)
            self._cluster = ray.get_runtime_context().gcs_address
            count, gpus = room(ray.cluster_resources(), workers, trainer.net.device.type == "cuda")
            self._actor = ray.remote(Worker).options(num_cpus=1, num_gpus=gpus, max_restarts=0)
            rows = (population.inputs.cpu().numpy(), population.labels.cpu().numpy())
            plain = replace(trainer, net=trainer.net.on("cpu"))
            self._setup = ray.put(Setup(plain, *rows, population.offsets, key, engine))
            self._workers = [self._actor.remote() for _ in range(min(count, len(population)))]
            started = [worker.start.remote(self._setup) for worker in self._workers]
            ready = [self._introduced(each) for each in started]
            self._engine = ready[0].engine
        except RayError as error:
            self.close()
            raise ClusterError(f"the Ray workers could not be started: {_last_line(error)}") from (
                _cause(error)
            )
        except BaseException:
            self.close()
            raise

    def train(self, launches: Sequence[Launch]) -> list[Gathered]:
        """Deal the clients of each cohort to the workers and join what they send back."""
        return [self._train(launch) for launch in launches]

    def _train(self, launch: Launch) -> Gathered:
        cohort = launch.cohort
        sent = launch.sent
        plan = launch.plan
        steps = np.array(
            [count_steps(plan, int(n), self._trainer.batch) for n in self._sizes[cohort]]
        )
        common = ray.put(_arrays(sent))

        def submit(worker: Any, shard: np.ndarray) -> Any:
            own = stack([launch.states.get(int(client)) for client in shard])
            return worker.train.remote(shard, _arrays(own), common, plan, launch.key)

        places, parts = self._dealt(cohort, steps, sent.round, submit)
        rows: Rows = _joined([part for part, _ in parts], places, sent.vector.device)
        samples = np.array([part.replies.weights.sum() for part, _ in parts])
        losses = np.array([loss for _, loss in parts])
        loss = torch.tensor((losses * samples).sum() / samples.sum(), device=sent.vector.device)
        own = [row(rows.own, i) for i in range(len(cohort))]
        return Gathered(rows.replies, own, loss)

    def probe(self, requests: Sequence[ProbeRequest]) -> list[Probe]:
        """Return the full gradients of each request's cohort at the model it was sent."""
        return [self._probe(each.cohort, each.sent) for each in requests]

    def _probe(self, cohort: np.ndarray, sent: Sent) -> Probe:
        common = ray.put(_arrays(sent))
        places, parts = self._dealt(
            cohort, self._sizes[cohort], sent.round, lambda w, shard: w.probe.remote(shard, common)
        )
        probe: Probe = _joined(parts, places, sent.vector.device)
        return probe

    def facts(self) -> dict[str, Any]:
        """Name the executor, its cluster and workers, what they run, and how many were lost."""
        return {
            "executor": "ray",
            "cluster": self._cluster,
            "workers": len(self._workers),
            "workers_engine": self._engine,
            "workers_lost": self._lost,
        }

    def close(self) -> None:
        """Stop the workers, and leave or end the cluster if it was joined or started here."""
        for worker in self._workers:
            ray.kill(worker)
        self._workers = []
        if self._joined:
            ray.shutdown()

    def _dealt(
        self, cohort: np.ndarray, work: np.ndarray, round: int, submit: Callable[..., Any]
    ) -> tuple[list[np.ndarray], list[Any]]:
        """Deal a cohort to the workers; return each shard's places in it, and its result."""
        order = np.argsort(-work, kind="stable")
        count = min(len(self._workers), len(cohort))
        places = [order[n::count] for n in range(count)]  # long and short clients for everyone
        shards = [cohort[place] for place in places]
        tries = [0] * count
        waiting = {submit(self._workers[n], shards[n]): n for n in range(count)}
        parts: dict[int, Any] = {}
        while waiting:
            (done,), _ = ray.wait(list(waiting))
            n = waiting.pop(done)
            try:
                parts[n] = ray.get(done)
            except RayError as error:
                cause = _cause(error)
                if not isinstance(cause, RayError):
                    raise cause from error  # the engine's own, not a lost worker
                shard = f"round {round + 1}, shard {n + 1} of {count} ({_names(shards[n])})"
                tries[n] = self._replace(n, tries[n], shard, error)
                waiting[submit(self._workers[n], shards[n])] = n
        return places, [parts[n] for n in range(count)]

    def _introduced(self, ready: Any) -> Ready:
        """Wait for a worker to start, and refuse one that runs other code."""
        try:
            worker: Ready = ray.get(ready, timeout=self._patience)
        except GetTimeoutError as error:
            raise GetTimeoutError(
                f"no worker started within {self._patience:.0f} s; "
                "the cluster may have no free cores or GPUs"
            ) from error
        if worker.versions != versions():
            raise ClusterError(f"a Ray worker has {worker.versions}, this process {versions()}")
        return worker

    def _replace(self, n: int, tries: int, shard: str, error: RayError) -> int:
        """Put a new worker in the place of a lost one; return how many were tried by now."""
        while tries < self._retries:
            tries += 1
            self._lost += 1
            reason = _last_line(error)
            _log.warning("%s: worker lost, try %d: %s", shard, tries, reason)
            ray.kill(self._workers[n])
            self._workers[n] = self._actor.remote()
            try:
                self._introduced(self._workers[n].start.remote(self._setup))
                return tries
            except RayError as failure:
                error = failure
        raise ShardLost(
            f"{shard} was lost {tries + 1} times, the last time because: {_last_line(error)} "
            "Resume the run from its last checkpoint with fedbasin resume"
        ) from error


def versions() -> dict[str, str]:
    """Return the versions that results depend on."""
    return {name: metadata.version(name) for name in ("fedbasin", "torch")}


def room(resources: dict[str, float], workers: int, on_cuda: bool) -> tuple[int, float]:
    """Return how many workers a cluster takes and the share of a GPU that each one has.

    >>> room({"CPU": 8.0, "GPU": 2.0}, 0, True), room({"CPU": 8.0, "GPU": 2.0}, 3, True)
    ((2, 1.0), (3, 0.5))
    >>> room({"CPU": 8.0}, 0, False)
    (8, 0.0)
    """
    cores = int(resources.get("CPU", 0))
    gpus = int(resources.get("GPU", 0))
    if on_cuda and not gpus:
        raise ClusterError("the run is on cuda and the Ray cluster has no GPU; set sim.device=cpu")
    count = workers or (gpus if on_cuda else cores)
    if not 0 < count <= cores:
        raise ClusterError(
            f"sim.workers: {count} workers need a core each, the Ray cluster has {cores}"
        )
    return count, 1 / math.ceil(count / gpus) if on_cuda else 0.0


def shared_tensor(array: np.ndarray) -> Tensor:
    """Return a view of an array that may lie, read-only, in memory shared with other workers."""
    with warnings.catch_warnings():  # torch has no read-only tensors; engines never write to rows
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def join(address: str, workers: int) -> None:
    """Start Ray on this machine, or join the cluster at an address."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # nothing is reported to anyone
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray's default to come
    here: dict[str, Any] = {"include_dashboard": False, "num_cpus": workers or None}
    try:
        if address and address != "auto":
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), 10).close()  # Ray waits for minutes
        settings = {} if address else here
        ray.init(address=address or "local", logging_level=logging.ERROR, **settings)
    except (OSError, RuntimeError, ValueError) as error:
        where = f"sim.address: no Ray cluster at {address!r}" if address else "Ray cannot start"
        raise ClusterError(f"{where}: {_last_line(error)}") from error


def _joined(parts: list[Any], places: list[np.ndarray], device: torch.device) -> Any:
    """Put the rows of the shards together in the order of the cohort."""
    columns = zip(*(_leaves(part) for part in parts), strict=True)

    def whole(_: str, first: Any) -> Any:
        column = next(columns)
        if not isinstance(first, np.ndarray):
            return first
        rows = np.empty((sum(map(len, places)), *first.shape[1:]), first.dtype)
        for place, shard in zip(places, column, strict=True):
            rows[place] = shard
        return torch.from_numpy(rows).to(device)

    return rebuild(parts[0], whole)


def _arrays(tree: Any) -> Any:
    """Return a tree with arrays for tensors: what Ray hands over without a copy."""
    return rebuild(tree, lambda _, t: t.detach().cpu().numpy() if isinstance(t, Tensor) else t)


def _tensors(tree: Any, device: torch.device) -> Any:
    """Return a tree with arrays replaced by tensors that own their memory."""
    return rebuild(
        tree,
        lambda _, leaf: torch.tensor(leaf, device=device) if isinstance(leaf, np.ndarray) else leaf,
    )


def _leaves(tree: Any) -> list[Any]:
    leaves: list[Any] = []
    rebuild(tree, lambda _, leaf: leaves.append(leaf))
    return leaves


def _cause(error: RayError) -> Exception:
    """Return what a worker's own code raised, or the error of Ray itself."""
    return error.cause if isinstance(error, RayTaskError) else error  # type: ignore[no-any-return]


def _last_line(error: Exception) -> str:
    """Return the line of Ray's long messages that says what happened."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1].strip()


def _names(clients: np.ndarray) -> str:
    shown = ", ".join(str(client) for client in clients[:5])
    return f"clients {shown}{', ...' if len(clients) > 5 else ''}"
