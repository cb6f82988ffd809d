"""What every peer is given: rows of every client, the cohorts, the initial model, the settings.

NumPy only: a peer's own environment need not have torch. Weights are in torch's order and
shapes ([out, in, height, width], [out, in]).
"""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

CLASSES = 10
COHORTS = 2000  # drawn ahead; a longer run starts again


@dataclass(frozen=True)
class Shape:
    """One workload: clients, their training, and the network by fedbasin's name."""

    name: str
    what: str
    model: str
    image: tuple[int, int, int]
    clients: int
    rows: int  # of each client
    cohort: int
    batch: int
    lr: float
    momentum: float
    dataset: str  # real rows where they are to be had
    weights: tuple[tuple[int, ...], ...]


def _with_biases(*kernels: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(part for kernel in kernels for part in (kernel, kernel[:1]))


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            "W0",
            "FedIMA's Fashion-MNIST CNN",
            "fmnist_cnn",
            (1, 28, 28),
            clients=100,
            rows=500,
            cohort=10,
            batch=50,
            lr=0.01,
            momentum=0.9,
            dataset="fmnist",
            weights=_with_biases(
                (32, 1, 5, 5), (32, 32, 5, 5), (384, 512), (128, 384), (CLASSES, 128)
            ),
        ),
        Shape(
            "W1",
            "pfl-research's CIFAR-10 benchmark",
            "pfl_cnn",
            (3, 32, 32),
            clients=1000,
            rows=50,
            cohort=50,
            batch=10,
            lr=0.1,
            momentum=0.0,
            dataset="cifar10",
            weights=_with_biases((32, 3, 3, 3), (64, 32, 3, 3), (128, 12544), (CLASSES, 128)),
        ),
        Shape(
            "W2",
            "FLUTE's LR / MNIST benchmark",
            "logistic",
            (1, 28, 28),
            clients=1000,
            rows=60,
            cohort=10,
            batch=10,
            lr=0.03,
            momentum=0.0,
            dataset="mnist",
            weights=_with_biases((CLASSES, 784)),
        ),
    )
}


@dataclass(frozen=True)
class Work:
    """A shape with its arrays."""

    shape: Shape
    inputs: np.ndarray  # uint8 [clients, rows, C, H, W]
    labels: np.ndarray  # int64 [clients, rows]
    test_inputs: np.ndarray  # uint8 [n, C, H, W]
    test_labels: np.ndarray
    cohorts: np.ndarray  # int64 [COHORTS, cohort]
    weights: list[np.ndarray]  # the initial model
    source: str  # where the rows come from


def pixels(raw: np.ndarray) -> np.ndarray:
    """Scale bytes as all peers do: (x / 255 - 0.5) / 0.25."""
    return ((raw.astype(np.float32) / 255) - 0.5) / 0.25


def make(shape: Shape, seed: int = 0) -> Work:
    """Make the work of a shape from real rows where a local mirror has them, else synthetic."""
    rng = np.random.default_rng(seed)
    need = shape.clients * shape.rows
    train, test, source = _real(shape, need, rng) or _synthetic(shape, need, rng)
    draws = [rng.choice(shape.clients, shape.cohort, replace=False) for _ in range(COHORTS)]
    return Work(
        shape,
        train[0].reshape(shape.clients, shape.rows, *shape.image),
        train[1].reshape(shape.clients, shape.rows),
        *test,
        np.sort(np.array(draws), axis=1),
        _initial(shape, rng),
        source,
    )


def _initial(shape: Shape, rng: np.random.Generator) -> list[np.ndarray]:
    """Draw weights uniformly within torch's default bound, 1 / sqrt(fan in)."""
    found, bound = [], 1.0
    for part in shape.weights:
        if len(part) > 1:
            bound = 1 / math.sqrt(math.prod(part[1:]))
        found.append(rng.uniform(-bound, bound, part).astype(np.float32))
    return found


def _synthetic(shape: Shape, need: int, rng: np.random.Generator):
    """Draw a smooth picture for each class, and rows that are that picture under heavy noise."""
    channels, height, width = shape.image
    coarse = rng.integers(0, 256, (CLASSES, channels, height // 4, width // 4))
    pictures = coarse.repeat(4, 2).repeat(4, 3)

    def rows(count):
        labels = rng.integers(0, CLASSES, count)
        noise = rng.integers(-160, 161, (count, *shape.image), dtype=np.int16)
        inputs = np.clip(pictures[labels].astype(np.int16) // 3 + 85 + noise, 0, 255)
        return inputs.astype(np.uint8), labels

    return rows(need), rows(2000), "synthetic rows of the same shape"


def _real(shape: Shape, need: int, rng: np.random.Generator):
    """Return real rows dealt at random (IID), or None without a local mirror of the dataset."""
    import os

    mirror = os.environ.get("FEDBASIN_DATA")
    if not mirror:
        return None
    from fedbasin import data

    try:
        dataset = data.load(shape.dataset, data_dir=Path(mirror))
    except data.DataError:
        return None
    order = rng.permutation(len(dataset.train))[:need]
    train, test = dataset.train.take(order), dataset.test
    return (
        (np.array(train.inputs), np.array(train.labels)),
        (np.array(test.inputs), np.array(test.labels)),
        f"{shape.dataset}, real rows",
    )


def write(work: Work, path: Path) -> None:
    """Write the work to one file of plain arrays."""
    settings = np.frombuffer(
        json.dumps({**asdict(work.shape), "source": work.source}).encode(), np.uint8
    )
    weights = {f"weight{i:02d}": part for i, part in enumerate(work.weights)}
    np.savez(
        path,
        settings=settings,
        inputs=work.inputs,
        labels=work.labels,
        test_inputs=work.test_inputs,
        test_labels=work.test_labels,
        cohorts=work.cohorts,
        **weights,
    )


def read(path: Path | str) -> Work:
    """Read back what `write` wrote."""
    with np.load(path, allow_pickle=False) as found:
        settings = json.loads(found["settings"].tobytes())
        source = settings.pop("source")
        settings["image"] = tuple(settings["image"])
        settings["weights"] = tuple(tuple(part) for part in settings["weights"])
        return Work(
            Shape(**settings),
            found["inputs"],
            found["labels"],
            found["test_inputs"],
            found["test_labels"],
            found["cohorts"],
            [found[name] for name in sorted(found.files) if name.startswith("weight")],
            source,
        )
