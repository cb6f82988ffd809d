"""Data that ship with scikit-learn, for a first run without any download: digits and tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbasin.data.dataset import Dataset, Rows
from fedbasin.data.labels import DIGITS
from fedbasin.data.split import held_out

TEST_SHARE = 0.2


@dataclass(frozen=True)
class Embedded:
    """What is known about a dataset before it is loaded.

    Args:
        load: returns it.
        rows: (train, test).
        classes: how many classes; 0 for targets without classes.
        shape: of one input.
        use: what it is there for.
    """

    load: Callable[[], Dataset]
    rows: tuple[int, int]
    classes: int
    shape: tuple[int, ...]
    use: str


def digits() -> Dataset:
    """Return 1,797 handwritten digits of 8x8 pixels, a fifth of each class held out for test.

    The published values 0..16 are stretched to 0..255, so that they scale to [0, 1] like any image.
    """
    pixels, labels = _digits_of_scikit_learn()
    inputs = np.rint(pixels * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    rows = Rows(inputs, labels.astype(np.int64))
    is_test = held_out(rows.labels, TEST_SHARE)
    train, test = rows.take(~is_test), rows.take(is_test)
    return Dataset("digits", "image", train, test, DIGITS, mean=(0.0,), std=(1.0,))


def _digits_of_scikit_learn() -> tuple[NDArray[Any], NDArray[Any]]:
    """Return pixels and labels; read from its file, as the import takes seconds."""
    found = find_spec("sklearn")
    if found is not None and found.origin is not None:
        file = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz"
        if file.is_file():
            table = np.loadtxt(file, delimiter=",")
            return table[:, :-1], table[:, -1]
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return pixels, labels


def breast_cancer() -> Dataset:
    """Return 569 tumours by 30 measurements, malignant or benign; a fifth of each class is test."""
    from sklearn.datasets import load_breast_cancer

    return _with_classes("breast-cancer", load_breast_cancer())


def wine() -> Dataset:
    """Return 178 wines of three growers by 13 measurements; a fifth of each class is test."""
    from sklearn.datasets import load_wine

    return _with_classes("wine", load_wine())


def diabetes() -> Dataset:
    """Return 442 patients by 10 measurements; the target is the progress of their disease.

    A fifth of the rows is test. The target is standardised as the inputs are.
    """
    from sklearn.datasets import load_diabetes

    inputs, target = load_diabetes(return_X_y=True, scaled=False)
    is_test = held_out(np.zeros(len(target), dtype=np.int64), TEST_SHARE)
    labels = _standardised(target, ~is_test)
    rows = Rows(_standardised(inputs, ~is_test), labels)
    return Dataset("diabetes", "table", rows.take(~is_test), rows.take(is_test), classes=())


def _with_classes(name: str, bunch: Any) -> Dataset:
    labels = bunch.target.astype(np.int64)
    is_test = held_out(labels, TEST_SHARE)
    rows = Rows(_standardised(bunch.data, ~is_test), labels)
    classes = tuple(str(each) for each in bunch.target_names)
    return Dataset(name, "table", rows.take(~is_test), rows.take(is_test), classes)


def _standardised(numbers: NDArray[np.float64], is_train: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Subtract the mean of the training rows, and divide by their standard deviation."""
    known = numbers[is_train]
    scaled: NDArray[np.float64] = (numbers - known.mean(axis=0)) / known.std(axis=0)
    return scaled.astype(np.float32)


EMBEDDED = {
    "digits": Embedded(digits, (1442, 355), 10, (1, 8, 8), "the demo"),
    "breast-cancer": Embedded(breast_cancer, (456, 113), 2, (30,), "first runs on a table"),
    "wine": Embedded(wine, (144, 34), 3, (13,), "first runs on a table"),
    "diabetes": Embedded(diabetes, (354, 88), 0, (10,), "first runs of a regression"),
}
