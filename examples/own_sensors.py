"""Sensors of persons: which activity, for persons whose data was never trained on.

    FEDBASIN_DATA=FOLDER python examples/own_sensors.py

A row holds 43 statistics of ten seconds of an accelerometer. Each person is a client. The same
network is tested on other rows of the same persons, and on persons held out. The two tests have
other rows, so their difference also depends on which persons are held out. Without
FOLDER/local/wisdm-activity a table with such columns is made on the spot.
"""

import os
from pathlib import Path

import numpy as np
import pandas

import fedbasin as fb

ACTIVITIES = ["Downstairs", "Jogging", "Sitting", "Standing", "Upstairs", "Walking"]


def read():
    """Return all rows of WISDM, or made ones."""
    folder = Path(os.environ.get("FEDBASIN_DATA", "")) / "local" / "wisdm-activity" / "transformed"
    if not folder.is_dir():
        return make()
    return pandas.concat(
        [pandas.read_parquet(next(folder.glob(f"{part}-*"))) for part in ("train", "test")]
    )


def make(count=3000, persons=20):
    """Return rows in which every person moves in a way of their own."""
    rng = np.random.default_rng(0)
    users, kinds = rng.integers(0, persons, count), rng.integers(0, 6, count)
    ways, habits = rng.normal(size=(6, 43)), rng.normal(size=(persons, 43))
    values = ways[kinds] + habits[users] + rng.normal(size=(count, 43))
    frame = pandas.DataFrame(values, columns=[f"X{number}" for number in range(43)])
    return frame.assign(user=users, activity=np.array(ACTIVITIES)[kinds])


def main(out="runs/own_sensors", rounds=30, seeds=range(2), jobs=None):
    """Train on all persons, and without a quarter of them."""
    frame, results = read(), {}
    for test_by in ("rows", "clients"):
        data = fb.data.from_table(
            frame, target="activity", client="user", test=0.25, test_by=test_by, name="sensors"
        )
        results[test_by] = fb.compare(
            data,
            [fb.fedavg(), fb.wima(window=5)],
            model=fb.mlp(widths=(64,)),
            rounds=rounds,
            seeds=seeds,
            sim={"participation": "count(clients=10)", "metrics": ["macro_f1"]},
            out=f"{out}/{test_by}",
            jobs=jobs,
        )
        print(f"held out by {test_by}\n{results[test_by]}")
    known, unseen = (results[name].best["accuracy_mean_last10"] for name in ("rows", "clients"))
    print(f"accuracy {100 * known:.1f} % for known persons, {100 * unseen:.1f} % for unseen ones")
    return results


if __name__ == "__main__":
    main()
