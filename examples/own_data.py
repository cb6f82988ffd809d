"""Data of your own: arrays of images and labels, put where fedbasin finds them.

    python examples/own_data.py
    fedbasin compare fedavg scaffold --data-dir my_data --set data.name=hf:me/stripes

Images lie as on the Hugging Face hub: parquet files in FOLDER/OWNER/NAME/data/. Every command then
takes them as hf:OWNER/NAME, with --data-dir FOLDER or the variable FEDBASIN_DATA. A file of their
own, test-00000-of-00001.parquet, holds the rows to score; without it a fifth of each class does.
"""

import io
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
from PIL import Image

from fedbasin import DataConfig, Experiment, run


def make_images(rng, count=1500):
    """Return grey images of stripes (uint8, [n, height, width]) and their class: which way."""
    labels = rng.integers(0, 3, count)
    bright = np.arange(12) // 2 % 2 * 120
    kinds = np.stack([np.tile(bright, (12, 1)), np.tile(bright, (12, 1)).T, np.zeros((12, 12))])
    return (kinds[labels] + rng.integers(0, 130, (count, 12, 12))).astype(np.uint8), labels


def as_png(image):
    """Return one image as the hub stores it; colour is [height, width, 3]."""
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return {"bytes": file.getvalue(), "path": None}


def main(folder="my_data", out="runs/stripes", rounds=20):
    """Store the images, then train on them."""
    images, labels = make_images(np.random.default_rng(0))
    path = Path(folder) / "me" / "stripes" / "data" / "train-00000-of-00001.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table({"image": [as_png(image) for image in images], "label": labels})
    pyarrow.parquet.write_table(table, path)
    data = DataConfig(name="hf:me/stripes")
    experiment = Experiment(data=data, model="mlp(widths=(64,))", rounds=rounds)
    summary = run(experiment, out, data_dir=Path(folder))
    print(f"stripes: {100 * summary['accuracy_mean_last10']:.2f} %")
    return summary


if __name__ == "__main__":
    main()
