"""What scores by client cost, and what a cohort saves in fine-tuning at home.

    python benchmarks/speed/clients.py            ratios of CPU-seconds, as JSON lines
    python benchmarks/speed/clients.py --many     also scores 100,000 clients

Three numbers, each of ours and the alternative in one go, interleaved, the least of several tries:
scoring 1,000 clients of 50 rows by client against scoring the same rows as one set; fine-tuning
200 clients as a cohort against one after another (a net of 64, 32 and 10 units); 100,000 clients of
10 rows each.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np
import torch

from fedbasin.core.evaluator import Evaluator
from fedbasin.core.method import Plan
from fedbasin.core.net import Net
from fedbasin.core.rng import root
from fedbasin.core.task import CLASSIFICATION
from fedbasin.local import SGD, Trainer
from fedbasin.models import mlp
from fedbasin.sim import LoopExecutor, Population
from fedbasin.sim.cohort import CohortExecutor
from fedbasin.sim.home import HomeTraining


def net_of(side: int, width: int) -> Net:
    """Return a dense network of square images."""
    return Net(mlp((1, side, side), 10, widths=(width,)))


def as_floats(raw: torch.Tensor, key: torch.Tensor | None = None) -> torch.Tensor:
    """Scale pixels."""
    return raw.float() / 255


def rows_of(count: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return made rows."""
    draws = np.random.default_rng(0)
    inputs = draws.integers(0, 256, (count, 1, side, side), dtype=np.uint8)
    return torch.from_numpy(inputs), torch.from_numpy(draws.integers(0, 10, count))


def least(tries: int, *works: Callable[[], object]) -> list[float]:
    """Return the least CPU-seconds of each piece of work, tried in turns."""
    spent: list[list[float]] = [[] for _ in works]
    for _ in range(tries):
        for work, times in zip(works, spent, strict=True):
            began = time.process_time()
            work()
            times.append(time.process_time() - began)
    return [min(times) for times in spent]


def scoring(clients: int, rows: int, tries: int) -> dict[str, float]:
    """Score by client, and as one set."""
    net = net_of(28, 64)
    evaluator = Evaluator(net, *rows_of(clients * rows, 28), as_floats, CLASSIFICATION)
    owner = torch.arange(clients).repeat_interleave(rows)
    vector = net.initial()[0]
    by_client, whole = least(
        tries,
        lambda: evaluator.scores_by(vector, owner, clients),
        lambda: evaluator.score(vector),
    )
    return {
        "clients": clients,
        "rows_each": rows,
        "by_client_s": by_client,
        "one_set_s": whole,
        "ratio": by_client / whole,
    }


def personalising(clients: int, rows: int, tries: int) -> dict[str, float]:
    """Fine-tune every client for one epoch, as a cohort and in a loop, and score each one."""
    net = net_of(8, 32)
    inputs, labels = rows_of(clients * rows, 8)
    parts = list(np.arange(clients * rows).reshape(clients, rows))
    population = Population.of(inputs.numpy(), labels.numpy(), parts)
    trainer = Trainer(net, (), SGD(), 10, as_floats, 10)
    evaluator = Evaluator(net, inputs, labels, as_floats, CLASSIFICATION)
    start = net.initial()
    key = root(0)
    ids = np.arange(clients)

    def work(executor: LoopExecutor | CohortExecutor) -> Callable[[], object]:
        training = HomeTraining("home", trainer, executor, Plan(0.1, 1), key)
        offsets = population.offsets.tolist()
        return lambda: evaluator.scores_at_home(training.models(ids, *start), offsets)

    def looped() -> None:
        loop = HomeTraining(
            "home", trainer, LoopExecutor(trainer, population, key), Plan(0.1, 1), key
        )
        for groups, models, buffers in loop.models(ids, *start):
            for group, model, statistics in zip(groups.tolist(), models, buffers, strict=True):
                mine = slice(group * rows, (group + 1) * rows)
                evaluator.on(inputs[mine], labels[mine]).score(model, statistics)

    cohort, loop = least(tries, work(CohortExecutor(trainer, population, key, False)), looped)
    return {"clients": clients, "cohort_s": cohort, "loop_s": loop, "speedup": loop / cohort}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--many", action="store_true")
    parser.add_argument("--tries", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps({"scoring": scoring(1000, 50, arguments.tries)}), flush=True)
    print(json.dumps({"personalising": personalising(200, 50, arguments.tries)}), flush=True)
    if arguments.many:
        print(json.dumps({"many": scoring(100_000, 10, 1)}), flush=True)
