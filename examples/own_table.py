"""A table of your own: who earns more than 50,000 dollars, by occupation.

    FEDBASIN_DATA=FOLDER python examples/own_table.py

Columns are numbers and text with missing values. Each occupation is a client. Without
FOLDER/local/adult a table with the same columns is made on the spot.
"""

import os
from pathlib import Path

import numpy as np
import pandas

import fedbasin as fb

NUMBERS = ["age", "education-num", "capital-gain", "capital-loss", "hours-per-week"]
TEXTS = ["workclass", "marital-status", "relationship", "race", "sex", "native-country"]


def read():
    """Return training and test rows of adult, or made ones."""
    folder = Path(os.environ.get("FEDBASIN_DATA", "")) / "local" / "adult" / "data"
    if not folder.is_dir():
        return make(4000, 0), make(1000, 1)
    return tuple(pandas.read_parquet(next(folder.glob(f"{part}-*"))) for part in ("train", "test"))


def make(count, seed):
    """Return rows with adult's columns, in which the income depends on some of them."""
    rng = np.random.default_rng(seed)
    frame = pandas.DataFrame({name: rng.normal(40, 12, count).round() for name in NUMBERS})
    for name in TEXTS:
        frame[name] = rng.choice(["first", "second", "third"], count)
    frame["occupation"] = rng.choice(["Sales", "Craft-repair", "Tech-support"], count)
    score = frame["age"] - 40 + 20 * (frame["sex"] == "first") + rng.normal(0, 9, count)
    frame["income"] = np.where(score > 15, ">50K", "<=50K")
    frame.loc[rng.random(count) < 0.05, "workclass"] = None
    return frame


def main(out="runs/own_table", rounds=20, seeds=range(2), rows=None, jobs=None):
    """Compare three methods, then ask the best network about new rows."""
    train, test = (part.dropna(subset="occupation")[:rows] for part in read())
    data = fb.data.from_table(
        train,
        target="income",
        client="occupation",
        features=NUMBERS + TEXTS,  # fnlwgt is a sampling weight, education repeats education-num
        test=test[test["occupation"].isin(train["occupation"])],
    )
    result = fb.compare(
        data,
        [fb.fedavg(), fb.scaffold(), fb.ima(fb.scaffold(), window=5)],
        model=fb.mlp(widths=(32,)),
        task=fb.binary(),
        rounds=rounds,
        seeds=seeds,
        out=out,
        jobs=jobs,
    )
    print(result)
    people = test[NUMBERS + TEXTS][:5]
    chances = result.best.predict(people, probabilities=True)[:, 1]
    for age, answer, chance in zip(
        people["age"], result.best.predict(people), chances, strict=True
    ):
        print(f"age {age:.0f}: {answer} (chance of >50K {chance:.2f})")
    return result


if __name__ == "__main__":
    main()
