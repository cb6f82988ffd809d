"""The inputs and outputs of a trained network, kept in the run folder for later use."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedbasin.core.reading import Reader
from fedbasin.core.record import RecordError, read_object
from fedbasin.data import Dataset
from fedbasin.data.dataset import Kind
from fedbasin.data.transform import Transform


@dataclass(frozen=True)
class Interface:
    """The inputs and outputs of a run's network.

    Args:
        kind: of the inputs, as in `Dataset`.
        shape: of one input, without the batch axis.
        outputs: how many outputs the network has.
        classes: the name of every class; empty where targets have no classes.
        mean: of images, per channel.
        std: of images, per channel.
    """

    kind: Kind
    shape: tuple[int, ...]
    outputs: int
    classes: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    @classmethod
    def of(cls, dataset: Dataset, outputs: int, transform: Transform) -> Interface:
        """Describe the network that is trained on a dataset."""
        shape = tuple(dataset.train.inputs.shape[1:])
        return cls(dataset.kind, shape, outputs, dataset.classes, transform.mean, transform.std)

    @classmethod
    def read(cls, path: Path) -> Interface:
        """Read the file of a run folder."""
        if not path.exists():
            raise RecordError(
                f"{path} does not exist: the run was made by a version that kept no such file"
            )
        return Reader(RecordError, file=str(path)).read(cls, read_object(path))

    def to_json(self) -> str:
        """Write it as JSON."""
        return json.dumps(asdict(self)) + "\n"

    def prepared(self, rows: np.ndarray) -> Tensor:
        """Return rows as the network takes them; other shapes are refused.

        Args:
            rows: [n, ...] as in `Dataset`: pixels, tokens, or numbers.
        """
        if rows.shape[1:] != self.shape:
            raise ValueError(
                f"rows have the shape {list(rows.shape)}, the network takes [n, "
                f"{', '.join(map(str, self.shape))}]"
            )
        transform = Transform(self.mean, self.std, kind=self.kind)
        return transform(torch.from_numpy(np.array(rows)))
