"""Images of your own: X-rays of the chest, with and without pneumonia.

    FEDBASIN_DATA=FOLDER python examples/own_images.py

Images are an array uint8 [n, channels, height, width]. They name no clients, so a Dirichlet
partition deals them: some hospitals see many ill patients, some few. Without
FOLDER/local/pneumoniamnist images are made on the spot.
"""

import io
import os
from pathlib import Path

import numpy as np
import pandas
from PIL import Image

import fedbasin as fb


def read():
    """Return images and labels to train on and to test on: of PneumoniaMNIST, or made ones."""
    folder = Path(os.environ.get("FEDBASIN_DATA", "")) / "local" / "pneumoniamnist" / "data"
    if not folder.is_dir():
        return make(800, 0), make(200, 1)
    return tuple(decoded(next(folder.glob(f"{part}-*"))) for part in ("train", "test"))


def decoded(file):
    """Return the images [n, 1, 28, 28] and the labels of a parquet file."""
    frame = pandas.read_parquet(file)
    column = next(name for name in frame if name.startswith("im"))
    images = [np.asarray(Image.open(io.BytesIO(cell["bytes"]))) for cell in frame[column]]
    return np.stack(images)[:, None], frame["label"].to_numpy()


def make(count, seed):
    """Return noise with a bright spot in the images of class 1."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, count)
    images = rng.integers(0, 150, (count, 1, 28, 28)).astype(np.uint8)
    images[labels == 1, :, 10:18, 10:18] += 80
    return images, labels


def main(out="runs/own_images", rounds=10, seeds=(0,), rows=None, jobs=None):
    """Compare three methods."""
    (x, y), test = ((images[:rows], labels[:rows]) for images, labels in read())
    data = fb.data.from_arrays(x, y, test=test, classes=["normal", "pneumonia"], name="x-rays")
    result = fb.compare(
        data,
        [fb.fedavg(), fb.scaffold(), fb.wima(window=3)],
        model=fb.lenet(),
        task=fb.binary(),
        rounds=rounds,
        seeds=seeds,
        partition={"how": fb.dirichlet(alpha=0.5), "clients": 10},
        sim={"participation": fb.fraction(rate=0.5)},
        out=out,
        jobs=jobs,
    )
    print(result)
    chances = result.best.predict(test[0][:5], probabilities=True)[:, 1]
    print("chance of pneumonia in five images:", ", ".join(f"{chance:.2f}" for chance in chances))
    return result


if __name__ == "__main__":
    main()
