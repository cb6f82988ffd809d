"""What secure aggregation costs: bytes, CPU time and memory, beside the plain sum.

    python benchmarks/deploy/secure.py --out benchmarks/deploy/results/secure.json

The clients and the server of one round in one process, message by message as they travel, without
training and without Flower's transport. A client's message is taken apart and put together again by
Flower's own records. Of 20 clients with 11.2 million parameters 3 are lost after they were sent the
model. The plain round takes the same clients' float32 updates, and adds them up as they arrive.
CPU time on one thread, median of the repeats. Memory is what the server's part allocates at most
(tracemalloc, in a pass of its own with fewer clients), with the message that has just arrived and
the opened model, in models of float32.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import tracemalloc
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict

from fedbasin.deploy.clients import ASK
from fedbasin.deploy.secure.client import KEYS, MAIL, SHARES, UNMASK, SecureClient
from fedbasin.deploy.secure.quantise import Numbers, quantise, restore
from fedbasin.deploy.secure.server import ServerProtocol
from fedbasin.deploy.secure.settings import SECURE, Session
from fedbasin.deploy.wire import content_bytes


def update_of(client: int, size: int) -> np.ndarray:
    """Return what a client has learnt."""
    return np.random.default_rng(client).normal(0, 0.01, size).astype(np.float32)


class Costs:
    """Sums CPU seconds and bytes by what they are spent on, and sees how much memory it takes."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.bytes: dict[str, int] = {}
        self.peak = 0  # bytes allocated while the server works, where they are traced

    def timed(self, what: str, work, *arguments):
        """Do something and count its CPU time."""
        if tracemalloc.is_tracing():
            tracemalloc.reset_peak()
        began = time.process_time()
        found = work(*arguments)
        self.seconds[what] = self.seconds.get(what, 0.0) + time.process_time() - began
        if tracemalloc.is_tracing() and what != "client":
            self.peak = max(self.peak, tracemalloc.get_traced_memory()[1])
        return found

    def sent(self, what: str, content: RecordDict) -> None:
        """Count a message."""
        self.bytes[what] = self.bytes.get(what, 0) + content_bytes(content)


def secure_round(clients: int, lost: int, size: int) -> dict:
    """Run one round of the protocol and return what it cost."""
    session = Session("ab", 1, 1, clients * 2 // 3 + 1, clients, 24, 0.1, 0, 0.0, "uniform")
    costs = Costs()
    server = ServerProtocol(session, size)
    contexts = [Context(1, c, {}, RecordDict(), {}) for c in range(clients)]
    everyone = range(clients)

    def asked(stage: str, client: int, mail) -> ConfigRecord:
        records = {"config": ConfigRecord({ASK: stage}), SECURE: session.record()}
        content = RecordDict(records | {MAIL: ConfigRecord(dict(mail))})
        costs.sent("down", content)
        party = SecureClient(contexts[client], client)
        answer = costs.timed("client", party.answer, content)
        costs.sent("up", answer)
        return answer["config"]

    for client in everyone:
        answer = asked(KEYS, client, {})
        costs.timed("server", server.take_keys, client, answer)
    costs.timed("server", server.close_keys)
    for client in everyone:
        answer = asked(SHARES, client, costs.timed("server", server.keys_for, client))
        costs.timed("server", server.take_shares, client, answer)
    costs.timed("server", server.close_shares)

    expected = np.zeros(size)
    for client in range(clients - lost):
        update = update_of(client, size)
        expected += update
        words = np.empty(size, np.uint32)
        costs.timed("client", quantise, update.copy(), words, session.clip, 1.0, session)
        told = Numbers(100, 1, 0, 0, 0, 5.0, 0.5, 5.0, 1.0, 1.0).words(session)
        records = {"config": ConfigRecord({ASK: "train"}), SECURE: session.record()}
        mail = ConfigRecord(dict(server.shares_for(client)))
        content = RecordDict(records | {MAIL: mail})
        costs.sent("down", content)
        party = SecureClient(contexts[client], client)
        party.begin(content)
        masked: ArrayRecord = costs.timed("client", party.masked, session, words, told, content)
        costs.sent("up", RecordDict({SECURE: masked}))
        del words, update
        first, second = sorted((array.numpy() for array in masked.values()), key=lambda a: -a.size)
        costs.timed("server", server.take_masked, client, first, second)
        del masked, first, second
    costs.timed("server", server.close_masked)
    for client in server.survivors:
        answer = asked(UNMASK, client, server.lists_for(client))
        costs.timed("server", server.take_unmask, client, answer)
    words, sums = costs.timed("opening", server.open)
    mean = np.zeros(size, np.float32)
    costs.timed("opening", restore, words, mean, session.clip, sums.shares, sums, session)
    expected /= clients - lost
    error = float(np.sqrt(np.mean((mean - expected) ** 2)))
    return {
        "client_seconds": costs.seconds["client"] / clients,
        "server_seconds": costs.seconds["server"],
        "opening_seconds": costs.seconds["opening"],
        "up_bytes_a_client": costs.bytes["up"] / (clients - lost),
        "down_bytes_a_client_without_model": costs.bytes["down"] / clients,
        "server_models": (costs.peak - expected.nbytes) / (4 * size),
        "error_rms": error,
    }


def plain_round(clients: int, lost: int, size: int) -> dict:
    """Add the same updates up as they arrive in plain."""
    costs = Costs()
    total = np.zeros(size, np.float32)
    for client in range(clients - lost):
        arrays = costs.timed(
            "client", lambda u: ArrayRecord({"w": Array(u)}), update_of(client, size)
        )
        costs.sent("up", RecordDict({"arrays": arrays}))
        costs.timed("server", lambda a: np.add(total, a["w"].numpy(), out=total), arrays)
        del arrays
    return {
        "client_seconds": costs.seconds["client"] / clients,
        "server_seconds": costs.seconds["server"],
        "up_bytes_a_client": costs.bytes["up"] / (clients - lost),
        "server_models": costs.peak / (4 * size),
    }


def main() -> None:
    """Measure both in turns and print what they took."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--clients", type=int, default=20)
    options.add_argument("--lost", type=int, default=3)
    options.add_argument("--parameters", type=int, default=11_173_962)
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--out", type=Path)
    chosen = options.parse_args()
    sizes = (chosen.clients, chosen.lost, chosen.parameters)
    found: dict[str, list[dict]] = {"secure": [], "plain": []}
    for _ in range(chosen.repeats):
        found["plain"].append(plain_round(*sizes))
        found["secure"].append(secure_round(*sizes))
    few = (4, 1, chosen.parameters)  # memory does not depend on how many clients there are
    tracemalloc.start()
    memory = {
        "plain": plain_round(*few)["server_models"],
        "secure": secure_round(*few)["server_models"],
    }
    tracemalloc.stop()
    lines = []
    for name, runs in found.items():
        line = {"round": name, "clients": sizes[0], "lost": sizes[1], "parameters": sizes[2]}
        line |= {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        line["server_models"] = memory[name]
        lines.append({k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in line.items()})
        print(json.dumps(lines[-1]), flush=True)
    if chosen.out is not None:
        text = "".join(json.dumps(line) + "\n" for line in lines)
        chosen.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
