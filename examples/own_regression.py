"""Numbers to predict: house values by district type, and air quality by station.

    FEDBASIN_DATA=FOLDER python examples/own_regression.py

House values are tested on rows drawn at random. Air quality is tested on the latest quarter of all
hours: 420,768 rows of 12 stations, 2 % of them without a target. Targets are divided by a round
number, so that errors have a readable unit. Without FOLDER tables with the same columns are made.
"""

import os
from pathlib import Path

import numpy as np
import pandas

import fedbasin as fb

HOUSES = [
    "longitude", "latitude", "housing_median_age", "total_rooms", "total_bedrooms", "population",
    "households", "median_income",
]  # fmt: skip
AIR = ["PM10", "SO2", "NO2", "CO", "O3", "TEMP", "PRES", "DEWP", "RAIN", "WSPM"]
MOMENT = ("year", "month", "day", "hour")


def read(name, make):
    """Return all rows of a table of the data folder, or made ones."""
    folder = Path(os.environ.get("FEDBASIN_DATA", "")) / "local" / name
    parts = [file for part in ("train", "test") for file in sorted(folder.glob(f"{part}-*"))]
    if not parts:
        return make(np.random.default_rng(0))
    return pandas.concat(map(pandas.read_parquet, parts), ignore_index=True)


def make_houses(rng, count=3000):
    """Return rows with the columns of the California housing table."""
    frame = pandas.DataFrame({name: rng.normal(size=count) for name in HOUSES})
    frame["ocean_proximity"] = rng.choice(["INLAND", "NEAR BAY", "NEAR OCEAN"], count)
    frame["median_house_value"] = 2e5 + 8e4 * frame["median_income"] + rng.normal(0, 3e4, count)
    return frame


def make_air(rng, hours=900):
    """Return rows with the columns of the Beijing air quality table."""
    times = pandas.date_range("2013-03-01", periods=hours, freq="h")
    moments = {name: np.tile(getattr(times, name), 4) for name in MOMENT}
    frame = pandas.DataFrame(moments | {name: rng.normal(size=4 * hours) for name in AIR})
    frame["station"] = np.repeat(["Tiantan", "Dongsi", "Huairou", "Wanliu"], hours)
    frame["PM2.5"] = 80 + 60 * frame["PM10"] + rng.normal(0, 10, len(frame))
    frame.loc[rng.random(len(frame)) < 0.02, "PM2.5"] = None
    return frame


def houses():
    """Return house values in 100,000 dollars; a type of district is a client."""
    frame = read("california-housing/data", make_houses)
    frame["median_house_value"] /= 100_000
    sizes = frame["ocean_proximity"].map(frame["ocean_proximity"].value_counts())
    return fb.data.from_table(
        frame[sizes >= 50],  # five islands are no client
        target="median_house_value",
        client="ocean_proximity",
        features=HOUSES,
        name="houses",
    )


def air():
    """Return PM2.5 in 100 micrograms a cubic metre; a station is a client, the future is tested."""
    frame = read("beijing-air-quality/hourly", make_air)
    frame["PM2.5"] /= 100
    return fb.data.from_table(
        frame,
        target="PM2.5",
        client="station",
        features=AIR,
        missing_target="drop",
        test=0.25,
        test_by="time",
        time=MOMENT,
        name="air",
    )


def main(out="runs/own_regression", rounds=15, make=(houses, air), jobs=None):
    """Compare three methods on both tables."""
    results = []
    for dataset in make:
        data = dataset()
        result = fb.compare(
            data,
            [fb.fedavg(), fb.scaffold(), fb.wima(window=5)],
            model=fb.mlp(widths=(32,)),
            rounds=rounds,
            seeds=[0],
            local={"lr": 0.05, "steps": 50, "batch": 64, "clip": 5.0},
            sim={"metrics": ["r2"]},
            out=f"{out}/{dataset.__name__}",
            jobs=jobs,
        )
        rows = len(data.train) + len(data.test)
        print(f"{data.name}: {rows:,} rows, {len(data.group_names)} clients\n{result}")
        print(f"{result.best['method']} explains {100 * result.best['r2_last']:.0f} % of variance")
        results.append(result)
    return results


if __name__ == "__main__":
    main()
