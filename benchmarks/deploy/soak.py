"""A long federation in which everything dies now and then: what is lost, and what memory it takes.

    python benchmarks/deploy/soak.py                             # 200 clients, 300 rounds
    python benchmarks/deploy/soak.py --clients 30 --rounds 40

Flower's messages and apps run in one process, without SuperLink and SuperNodes, so that a few
hundred rounds take minutes (`make test-federation` kills real processes). SCAFFOLD trains on the
digits, and every client keeps its variate in a file. By chance, with a fixed seed:

- 1 of 100 replies is malformed, so that no server may merge it;
- a node dies with its message, and comes back later under a new id;
- the ServerApp dies in a round, and is started again from its folder;
- the SuperLink dies with it: all messages are lost, and all nodes have new ids.

At the end the simulator trains the clients that the audit trail says were merged, round by round:
its model and state must be the federation's.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))  # the grid of the tests

import numpy as np  # noqa: E402
import torch  # noqa: E402
from deploy.grids import LocalGrid, app_for  # noqa: E402
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict  # noqa: E402

from fedbasin.core.rng import Key  # noqa: E402
from fedbasin.core.tree import flatten  # noqa: E402
from fedbasin.deploy import Handling, Records, strategy_of  # noqa: E402
from fedbasin.deploy.audit import FILE, check  # noqa: E402
from fedbasin.experiment import build, from_mapping  # noqa: E402
from fedbasin.sim import Federation  # noqa: E402


class Killed(BaseException):
    """The ServerApp dies here."""


@dataclass
class Dying(LocalGrid):
    """Nodes, a SuperLink and a ServerApp that die by chance.

    Args:
        draws: decides when.
        malformed: share of replies that are forged.
        deaths: share of messages with which a node dies.
        crashes: share of rounds in which the ServerApp dies; in a third of them the SuperLink does.
    """

    draws: Any = None
    malformed: float = 0.01
    deaths: float = 0.01
    crashes: float = 0.05
    away: dict[int, int] = field(default_factory=dict)  # clients, and how many rounds they are gone
    counted: Counter[str] = field(default_factory=Counter)
    _next: int = 5000

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Let messages be answered, and let things die."""
        messages = list(messages)
        trains = any(m.metadata.message_type == "train" for m in messages)
        if trains:
            self.return_nodes()
        ids = list(super().push_messages(messages))
        self.sent.clear()
        if not trains:
            return ids
        for message in messages:
            if self.draws.random() < self.deaths:
                self._inbox.pop(message.metadata.message_id, None)
                client = self.client(message.metadata.dst_node_id)
                del self.contexts[message.metadata.dst_node_id]
                self.away[client] = int(self.draws.integers(1, 5))
                self.counted["nodes killed"] += 1
        if self.draws.random() < self.crashes:
            if self.draws.random() < 1 / 3:
                self.counted["SuperLinks killed"] += 1
                self._inbox.clear()
                for client in [self.client(node) for node in self.contexts]:
                    self.away[client] = 0
                self.contexts.clear()
                self.return_nodes()
            self.counted["ServerApps killed"] += 1
            raise Killed
        return ids

    def return_nodes(self) -> None:
        """Let nodes come back under new ids, as Flower gives them."""
        for client, rounds in list(self.away.items()):
            self.away[client] = rounds - 1
            if rounds <= 0:
                del self.away[client]
                self._next += 1
                self.add(client, self._next)

    def add(self, client: int, node: int) -> None:
        """Add a node whose client keeps its state in a file."""
        where = {"partition-id": client, "num-partitions": self.clients, **self.node_config}
        self.contexts[node] = Context(1, node, where, RecordDict(), {})

    def forged(self, client: int, reply: Message) -> Iterable[Message]:
        """Return what arrives in place of a reply."""
        if self.draws.random() >= self.malformed:
            return [reply]
        self.counted["replies malformed"] += 1
        spoil(reply, self.draws)
        return [reply]


def spoil(reply: Message, draws: Any) -> None:
    """Make a reply one that no server may merge, in one of six ways."""
    arrays, metrics = reply.content["arrays"], reply.content["metrics"]
    name = list(arrays)[draws.integers(len(arrays))]
    values = arrays[name].numpy().copy()
    kind = draws.integers(6)
    if kind == 0:
        values.reshape(-1)[draws.integers(values.size)] = np.nan
        arrays[name] = Array(values)
    elif kind == 1:
        arrays[name] = Array(values[..., :-1].copy())
    elif kind == 2:
        cut = arrays[name].data[: draws.integers(len(arrays[name].data))]
        arrays[name] = Array(arrays[name].dtype, arrays[name].shape, arrays[name].stype, cut)
    elif kind == 3:
        del arrays[name]
    elif kind == 4:
        metrics["steps"] = 10**15
    else:
        metrics["server-round"] = 0


class Replayed(Federation):
    """A simulation of given cohorts."""

    cohorts: dict[int, list[int]]

    def cohort(self, round: int) -> tuple[np.ndarray, np.ndarray]:
        """Return who was merged after so many rounds."""
        who = np.array(self.cohorts.get(round, []), dtype=np.int64)
        return who, who


def federation_of(clients: int, rounds: int, cohort: int) -> Federation:
    """Return what is trained."""
    settings = {
        "method": "scaffold",
        "model": "mlp(widths=(16,))",
        "rounds": rounds,
        "data": {"name": "digits"},
        "partition": {"how": "iid", "clients": clients},
        "local": {"lr": 0.1, "epochs": 1, "batch": 8},
        "sim": {
            "participation": f"count(clients={cohort})",
            "evaluate_every": rounds,
            "precision": "fp64",  # in float32 a ReLU now and then switches by rounding alone
        },
    }
    return build(from_mapping(settings).resolved())


def resident() -> int:
    """Return the process's memory in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def merged_cohorts(file: Path) -> dict[int, list[int]]:
    """Return who was merged in each round that counts: a round made again replaces the first."""
    found: dict[int, list[int]] = {}
    for line in file.read_text().splitlines():
        said = json.loads(line)
        if "round" in said:
            found[said["round"] - 1] = [each["client"] for each in said["merged"]]
    return found


def apart(a: Any, b: Any) -> float:
    """Return how far two servers are apart at most, relative to the numbers' size."""
    theirs = dict(flatten(b))
    return max(
        float((leaf - theirs[path]).abs().max() / (1e-12 + theirs[path].abs().max()))
        for path, leaf in flatten(a)
        if isinstance(leaf, torch.Tensor) and leaf.numel()
    )


def soak(clients: int, rounds: int, cohort: int, seed: int, folder: Path) -> dict[str, Any]:
    """Run it, and return figures."""
    federation = federation_of(clients, rounds, cohort)
    draws = Key(seed).fold("soak").numpy()
    states = {"state-dir": str(folder / "states")}
    grid = Dying(app_for(federation), clients, node_config=states, draws=draws)
    grid.carry = lambda message: message
    grid.tamper = grid.forged
    memory: dict[int, int] = {}
    began = time.perf_counter()
    arrays = ArrayRecord(federation.net.state_dict(*federation.net.initial()))
    done = False
    while not done:
        strategy = strategy_of(
            federation,
            seed=0,
            records=Records(folder / "run"),
            handling=Handling(patience=30.0),
            min_train_nodes=cohort // 2,
            min_available_nodes=clients // 2,
            fraction_evaluate=0.0,
        )
        append = strategy.journal.append

        def noted(record: Any) -> None:
            memory[record.round] = resident()
            append(record)  # noqa: B023  (of this start)

        strategy.journal.append = noted
        try:
            strategy.start(grid, arrays, num_rounds=rounds, timeout=0.5)
            done = True
        except Killed:
            continue
    seconds = time.perf_counter() - began
    trail = folder / "run" / FILE
    replay = Replayed(**{f.name: getattr(federation, f.name) for f in fields(federation) if f.init})
    object.__setattr__(replay, "cohorts", merged_cohorts(trail))
    server, own = replay.begin()
    expected = list(replay.rounds_from(server, own))[-1][0]
    records = strategy.journal.records
    early = memory[max(rounds // 10, 1)]
    return {
        "clients": clients,
        "rounds": len(records),
        "cohort": cohort,
        **grid.counted,
        "replies_merged": sum(len(c) for c in replay.cohorts.values()),
        "replies_refused": sum(r.refused for r in records),
        "clients_refused": len(strategy.journal.refused),
        "audit": check(trail).broken or "the chain holds",
        "apart": apart(strategy._server, expected),
        "memory_after_a_tenth_MB": round(early / 1e6, 1),
        "memory_at_the_end_MB": round(memory[rounds] / 1e6, 1),
        "seconds": round(seconds, 1),
        "cpu_seconds": round(time.process_time(), 1),
    }


def main() -> None:
    """Soak and print the figures; the exit status is 1 if something was lost."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--clients", type=int, default=200)
    options.add_argument("--rounds", type=int, default=300)
    options.add_argument("--cohort", type=int, default=20)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--out", type=Path)
    chosen = options.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        cohort = min(chosen.cohort, chosen.clients)
        found = soak(chosen.clients, chosen.rounds, cohort, chosen.seed, Path(folder))
    text = json.dumps(found, indent=2)
    print(text)
    if chosen.out is not None:
        chosen.out.write_text(text + "\n")
    lost = found["rounds"] != chosen.rounds or found["apart"] > 1e-9
    sys.exit(int(lost or found["audit"] != "the chain holds"))


if __name__ == "__main__":
    main()
