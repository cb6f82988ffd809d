"""How much of a lead over FedAvg is the weights? FedAvg with uniform ones beside the tuned table.

    python benchmarks/evidence/uniform.py OUT        runs, and writes results/uniform_fmnist.jsonl
    python benchmarks/evidence/uniform.py            prints the difference to fedavg

About half of the methods average clients with uniform weights by default, as in their papers, and
fedavg by numbers of rows. This runs fedavg(weighting='uniform') on the problem fmnist of tuned.py
with the learning rate that fedavg chose there and the same final seeds. It is not tuned itself.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

from tuned import RESULTS, as_run, ended, problem_of, read, score_of

from fedbasin.experiment import run
from fedbasin.report.page import say_difference
from fedbasin.report.table import differences

LINES = RESULTS / "uniform_fmnist.jsonl"
METHOD = "fedavg(weighting='uniform')"


def tuned_fedavg() -> list[dict]:
    """Return the final lines of fedavg, and the learning rate that it chose."""
    lines = read([RESULTS / "tuned_fmnist.jsonl"])
    return [line for line in lines if line["method"] == "fedavg"]


def main() -> None:
    lines = tuned_fedavg()
    final = [line for line in lines if line["kind"] == "final"]
    setting = final[0]["setting"]
    (rate,) = (
        line["values"]["local.lr"]
        for line in lines
        if line["kind"] == "trial" and line["setting"] == setting
    )
    if len(sys.argv) > 1:
        base, _ = problem_of("fmnist")
        with LINES.open("w") as file:
            for line in final:
                experiment = replace(
                    base, method=METHOD, seed=line["seed"], local=replace(base.local, lr=rate)
                ).resolved()
                folder = Path(sys.argv[1]) / f"seed{line['seed']}"
                summary = ended(folder) or run(experiment, folder)
                own = {"method": METHOD, "lr": rate, "score": score_of(summary)}
                own |= {key: summary[key] for key in ("status", "device", "commit", "seconds")}
                file.write(json.dumps(line | own) + "\n")
    uniform = [json.loads(line) for line in LINES.read_text().splitlines()]
    runs = [as_run(line) for line in [*final, *uniform]]
    gap = differences(runs, "fedavg")[METHOD]
    print(f"lr {rate}: {METHOD} over fedavg, {len(uniform)} seeds:", end=" ")
    print(say_difference(gap, runs[0].headline))


if __name__ == "__main__":
    main()
