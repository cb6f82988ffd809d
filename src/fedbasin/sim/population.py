"""All clients' data, resident on the device.

Rows are stored once, ordered by client, so a client's shard is a slice and costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedbasin.local.train import Shard

# Types that few of torch's operations take, and what holds the same numbers.
_WIDER = {np.dtype(a): b for a, b in (("u2", np.int32), ("u4", np.int64), ("u8", np.int64))}


def as_tensor(rows: np.ndarray, device: torch.device | str = "cpu") -> Tensor:
    """Put rows of any numbers on a device, in torch's byte order and types."""
    native = rows.dtype.newbyteorder("=")
    ready = np.require(rows, _WIDER.get(native, native), ["C", "W"])
    return torch.from_numpy(ready).to(device)


@dataclass(frozen=True)
class Population:
    """The clients' rows.

    Args:
        inputs: [m, ...] rows of client 0, then of client 1, and so on, of any type.
        labels: int64 [m], or targets without classes of any type and shape [m, ...].
        offsets: int64 [N + 1]; client i holds rows offsets[i] to offsets[i + 1].
        places: int64 [m], which row of `inputs` each row is, where several clients share rows of
            one copy; None where row is row.
    """

    inputs: Tensor
    labels: Tensor
    offsets: np.ndarray
    places: Tensor | None = None

    @classmethod
    def of(
        cls,
        inputs: np.ndarray,
        labels: np.ndarray,
        clients: Sequence[np.ndarray],
        device: torch.device | str = "cpu",
    ) -> Population:
        """Gather the rows of each client from the training data."""
        sizes = np.array([len(rows) for rows in clients], dtype=np.int64)
        order = np.concatenate([*clients, np.empty(0, np.int64)]).astype(np.int64)
        return cls(
            as_tensor(inputs[order], device),
            as_tensor(labels[order], device),
            np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]),
        )

    @classmethod
    def joined(cls, people: Sequence[Population]) -> Population:
        """Return the clients of several populations that share one copy of their inputs."""
        starts = np.cumsum([0, *(len(each.labels) for each in people)])
        offsets = [each.offsets[:-1] + start for each, start in zip(people, starts, strict=False)]
        places = [each.places for each in people if each.places is not None]
        if len(places) < len(people) or any(p.inputs is not people[0].inputs for p in people):
            raise ValueError("these populations do not share one copy of their inputs")
        labels = torch.cat([each.labels for each in people])
        ends = np.concatenate([*offsets, starts[-1:]])
        return cls(people[0].inputs, labels, ends, torch.cat(places))

    def apart(self) -> Population:
        """Return the same clients with inputs of their own, in the clients' order."""
        if self.places is None:
            return self
        return Population(self.inputs[self.places], self.labels, self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def sizes(self) -> np.ndarray:
        """Number of rows of each client, n_i."""
        return np.diff(self.offsets)

    def weights(self, clients: np.ndarray) -> Tensor:
        """Return how many rows some clients hold, float64 [C] on the device."""
        return torch.from_numpy(self.sizes[clients].astype(np.float64)).to(self.labels.device)

    def shard(self, client: int) -> Shard:
        """Return a client's rows as views."""
        rows = slice(int(self.offsets[client]), int(self.offsets[client + 1]))
        inputs = self.inputs[rows] if self.places is None else self.inputs[self.places[rows]]
        return Shard(inputs, self.labels[rows])

    def take(self, rows: Tensor) -> Tensor:
        """Return the inputs of some rows [k, ...]."""
        return self.inputs[rows if self.places is None else self.places[rows]]

    def class_counts_of(self, clients: Tensor, classes: int) -> Tensor:
        """Count the samples of some clients by class [C, classes], all on the device.

        Targets without classes have classes = 0 and no counts, [C, 0].
        """
        if not classes:
            return clients.new_zeros(len(clients), 0)
        offsets = torch.from_numpy(self.offsets).to(self.labels.device)
        first = offsets[clients][:, None]
        end = offsets[clients + 1][:, None]
        place = torch.arange(max(int(self.sizes.max()), 1), device=self.labels.device)
        real = first + place < end
        labels = self.labels[torch.where(real, first + place, 0)]
        counts = torch.zeros(len(clients), classes, dtype=torch.int64, device=labels.device)
        return counts.scatter_add_(1, labels, real.to(torch.int64))

    def class_counts(self, classes: int) -> Tensor:
        """Count samples by client and class: [N, classes]; [N, 0] without classes."""
        if not classes:
            return torch.zeros(len(self), 0, dtype=torch.int64, device=self.labels.device)
        owner = np.repeat(np.arange(len(self)), self.sizes)
        cells = torch.from_numpy(owner).to(self.labels.device) * classes + self.labels
        return torch.bincount(cells, minlength=len(self) * classes).view(len(self), classes)
