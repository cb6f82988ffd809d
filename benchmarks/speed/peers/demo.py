"""Runs of the demo for peers: rows, cohorts and initial models of every seed in one file.

NumPy only where a peer reads it. A peer runs the seeds one after another in one process, scores the
test rows in every round, and prints one JSON object: processor seconds of each run, of what comes
before the first, and the accuracy in %, mean of the last 10 rounds, of each run.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Settings(NamedTuple):
    """What all runs share."""

    rounds: int
    lr: float
    epochs: int
    batch: int
    runs: int


class Run(NamedTuple):
    """What one seed gives to a peer."""

    inputs: list[np.ndarray]  # float32 [rows, 64] of each client
    labels: list[np.ndarray]  # int64 [rows]
    cohorts: list[np.ndarray]  # clients of each round
    weights: list[np.ndarray]  # the initial model, in torch's shapes


class Work(NamedTuple):
    """All runs, and the rows that they are scored on."""

    settings: Settings
    test_inputs: np.ndarray
    test_labels: np.ndarray
    each: Callable[[], Iterator[Run]]


def write(path: Path, runs: int) -> None:
    """Write the demo's runs with seeds 0, 1, ..."""
    from dataclasses import replace

    from fedbasin.experiment import from_mapping
    from fedbasin.experiment.assemble import build
    from fedbasin.experiment.config import read_preset

    base = from_mapping(read_preset("demo"))
    local = base.local
    arrays = {}
    for seed in range(runs):
        federation = build(replace(base, seed=seed))
        people = federation.population
        rows = federation.trainer.transform(people.inputs, None).flatten(1)
        vector, _ = federation.net.initial()
        arrays[f"inputs{seed}"] = rows.numpy()
        arrays[f"labels{seed}"] = people.labels.numpy()
        arrays[f"offsets{seed}"] = people.offsets
        arrays[f"cohorts{seed}"] = np.array([federation.cohort(t)[1] for t in range(base.rounds)])
        for name, part in federation.net.layout.views(vector).items():
            arrays[f"weights{seed} {name}"] = part.numpy()
    scored = federation.evaluator
    arrays["test_inputs"] = federation.trainer.transform(scored.inputs, None).flatten(1).numpy()
    arrays["test_labels"] = scored.labels.numpy()
    settings = Settings(base.rounds, local.lr, local.epochs, local.batch, runs)
    np.savez(path, settings=np.array(settings), **arrays)


def read(path: str) -> Work:
    """Read what `write` wrote."""
    found = dict(np.load(path, allow_pickle=False))
    rounds, lr, epochs, batch, runs = found["settings"].tolist()
    settings = Settings(int(rounds), lr, int(epochs), int(batch), int(runs))

    def each() -> Iterator[Run]:
        for seed in range(settings.runs):
            cuts = found[f"offsets{seed}"][1:-1]
            yield Run(
                np.split(found[f"inputs{seed}"], cuts),
                np.split(found[f"labels{seed}"], cuts),
                list(found[f"cohorts{seed}"]),
                [part for name, part in found.items() if name.startswith(f"weights{seed} ")],
            )

    return Work(settings, found["test_inputs"], found["test_labels"], each)


def serve(prepared: Callable[[Work], Callable[[Run], list[float]]]) -> None:
    """Run what a peer makes of the work, and print what it took.

    Args:
        prepared: returns what trains one run and returns its accuracy after each round.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    work = read(sys.argv[1])
    before = time.process_time()
    trained = prepared(work)
    preparing = time.process_time() - before
    seconds = []
    accuracies = []
    for run in work.each():
        began = time.process_time()
        curve = trained(run)
        seconds.append(time.process_time() - began)
        accuracies.append(100 * float(np.mean(curve[-10:])))
    said = {"preparing": preparing, "seconds": seconds, "accuracies": accuracies}
    answers.write(json.dumps(said) + "\n")
    answers.flush()
