"""A tune that is killed again and again (run as a script by test_killed.py).

One process imports everything and forks; each fork goes on with the tune and is killed by kill -9
after a random time. What the forks trained is counted in a file. The seed, the number of kills and
a folder are the arguments; the last line of the output is what was found, as JSON.
"""

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
from tune.asking import base, request

from fedbasin.sim import Run
from fedbasin.tuning import Outcome, tune
from fedbasin.tuning.result import table_lines, trial_lines


def count_into(file: Path) -> None:
    """Write a line for each round that is trained: its run and its number."""
    launch = Run.launch

    def counted(self):
        begun = launch(self)
        with file.open("a") as lines:
            lines.write(f"{'/'.join(self.folder.path.parts[-4:])} {begun.sent.round}\n")
        return begun

    Run.launch = counted


def ends_of(outcome: Outcome) -> dict[str, str]:
    """Return the records of all final runs, without times, and what the tables hold."""
    found = {"trials": str(trial_lines(outcome)), "table": str(table_lines(outcome))}
    for paths in outcome.final.values():
        for path in paths:
            lines = map(json.loads, (path / "rounds.jsonl").read_text().splitlines())
            kept = [{k: v for k, v in line.items() if "seconds" not in k} for line in lines]
            found[str(path.relative_to(outcome.out))] = str(kept)
    return found


def main() -> None:
    kills, halving, seed = (int(word) for word in sys.argv[2:])
    folder = Path(sys.argv[1])
    rng = random.Random(seed)
    torch.set_num_threads(1)
    log = folder / "trained.txt"
    count_into(log)
    experiment = base(rounds=8)
    experiment = replace(experiment, sim=replace(experiment.sim, checkpoint_every=1))
    asked = replace(request(halving=halving), base=experiment)
    began = time.monotonic()
    whole = ends_of(tune(asked, folder / "whole"))
    spent = time.monotonic() - began
    needed = Counter(log.read_text().splitlines())

    out, killed, wrong = 0, 0, []
    while killed < kills:
        log.write_text("")
        place = folder / f"killed{out}"
        out += 1
        died = 0
        while True:
            child = os.fork()
            if child == 0:
                tune(asked, place)
                os._exit(0)
            if killed < kills:
                time.sleep(rng.uniform(0, 0.3 * spent))
                os.kill(child, signal.SIGKILL)
            if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
                break
            killed += 1
            died += 1
        trained = Counter(log.read_text().splitlines())
        if set(trained) != set(needed):
            wrong.append(f"other rounds: {sorted(set(trained) ^ set(needed))}")
        again = Counter(line.rsplit(" ", 1)[0] for line in (trained - needed).elements())
        if any(more > died for more in again.values()):  # a kill loses one round of each run
            wrong.append(f"{died} kills, rounds trained again: {again}")
        if ends_of(tune(asked, place)) != whole:
            wrong.append(f"other results after {died} kills")
        if sum(Counter(log.read_text().splitlines()).values()) != sum(trained.values()):
            wrong.append("a finished tune trained again")
    print(json.dumps({"killed": killed, "tunes": out, "wrong": wrong}))


if __name__ == "__main__":
    main()
