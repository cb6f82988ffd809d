"""Several labels a row: the functions of genes of yeast.

    FEDBASIN_DATA=FOLDER python examples/own_multilabel.py

The target is 14 columns of 0 and 1. The table names no clients, so a partition deals rows: here
clients hold unequal numbers of them. Without FOLDER/local/yeast-multilabel a table is made.
"""

import os
from pathlib import Path

import numpy as np
import pandas

import fedbasin as fb

CLASSES = tuple(f"Class{number}" for number in range(1, 15))


def read():
    """Return training and test rows of yeast, or made ones."""
    folder = Path(os.environ.get("FEDBASIN_DATA", "")) / "local" / "yeast-multilabel" / "data"
    if not folder.is_dir():
        frame = make()
        return frame[:1500], frame[1500:]
    return tuple(pandas.read_parquet(next(folder.glob(f"{part}-*"))) for part in ("train", "test"))


def make(count=2000):
    """Return rows with 103 measurements and 14 labels that follow from them."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(count, 103))
    labels = values @ rng.normal(size=(103, 14)) + 5 * rng.normal(size=(count, 14)) > 5
    frame = pandas.DataFrame(values, columns=[f"Att{number}" for number in range(1, 104)])
    return pandas.concat([frame, pandas.DataFrame(labels.astype(int), columns=CLASSES)], axis=1)


def main(out="runs/own_multilabel", rounds=20, seeds=range(2), jobs=None):
    """Compare three methods."""
    train, test = read()
    data = fb.data.from_table(train, target=CLASSES, test=test, name="yeast")
    result = fb.compare(
        data,
        [fb.fedavg(), fb.scaffold(), fb.wima(window=5)],
        model=fb.mlp(widths=(64,)),
        task=fb.multilabel(),
        rounds=rounds,
        seeds=seeds,
        partition={"how": fb.size_dirichlet(alpha=1.0), "clients": 10},
        sim={"participation": fb.fraction(rate=1.0)},
        out=out,
        jobs=jobs,
    )
    print(result)
    found, true = result.best.predict(test).sum(1).mean(), test[[*CLASSES]].sum(axis=1).mean()
    print(f"{found:.1f} labels a gene are predicted, {true:.1f} are true")
    return result


if __name__ == "__main__":
    main()
