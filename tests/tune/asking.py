"""Two small classes with planted row numbers, and requests on them."""

from dataclasses import replace

import numpy as np

from fedbasin.data import from_arrays
from fedbasin.experiment import Experiment
from fedbasin.experiment.config import LocalConfig, PartitionConfig, SimConfig
from fedbasin.experiment.objects import Objects
from fedbasin.tuning import Request, read_over

ROWS = 120


def planted(flipped: bool = False):
    """Two classes; the first column is a row's own number, above 1000 for test rows."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2 * ROWS, 4)).astype(np.float32)
    y = (x[:, 1] + 0.3 * rng.normal(size=2 * ROWS) > 0).astype(np.int64)
    x[:, 0] = 1e-6 * np.concatenate([np.arange(ROWS), 1000 + np.arange(ROWS)])
    test = 1 - y[ROWS:] if flipped else y[ROWS:]
    return from_arrays(x[:ROWS], y[:ROWS], test=(x[ROWS:], test), name="planted")


def base(data=None, **changes) -> Experiment:
    experiment = Experiment(
        model="logistic",
        rounds=6,
        partition=PartitionConfig(how="iid", clients=4),
        local=LocalConfig(lr=0.05, batch=8),
        sim=SimConfig(participation="count(clients=2)", executor="loop", checkpoint_every=2),
    )
    return replace(experiment.using(Objects(data or planted())), **changes)


def request(data=None, methods=("fedavg", "fedprox"), **options) -> Request:
    over = read_over(options.pop("over", ["local.lr=0.001..1"]))
    usual = {"budget": 4, "tuning_seeds": 1, "final_seeds": 2}
    return Request(base(data), methods, over, **usual | options)
