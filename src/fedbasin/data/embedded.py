"""The digits images that ship with scikit-learn: data for a first run, without any download."""

from __future__ import annotations

import numpy as np

from fedbasin.data.dataset import Dataset, Rows
from fedbasin.data.labels import DIGITS
from fedbasin.data.split import held_out

NAME = "digits"
TEST_SHARE = 0.2
ROWS = (1442, 355)
SHAPE = (1, 8, 8)


def digits() -> Dataset:
    """Return 1,797 handwritten digits of 8x8 pixels, a fifth of each class held out for test.

    The published values 0..16 are stretched to 0..255, so that they scale to [0, 1] like any image.
    """
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    inputs = np.rint(pixels * (255 / 16)).astype(np.uint8).reshape(-1, *SHAPE)
    rows = Rows(inputs, labels.astype(np.int64))
    is_test = held_out(rows.labels, TEST_SHARE)
    train, test = rows.take(~is_test), rows.take(is_test)
    return Dataset(NAME, "image", train, test, DIGITS, mean=(0.0,), std=(1.0,))
