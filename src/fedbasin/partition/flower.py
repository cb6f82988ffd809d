"""Any partitioner object of `flwr_datasets` makes a fedbasin partition (extra ``flower``)."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedbasin.partition.pool import Partition, Pool

_ROW = "fedbasin_row"


def from_flower(
    partitioner: Any, pool: Pool, *, label: str = "label", group: str = "group"
) -> Partition:
    """Let a Flower partitioner share out the rows of the pool.

    The partitioner is handed an in-memory dataset with the labels (and groups) as columns; the
    rows in each of its partitions become one client. It must be fresh: Flower allows one
    dataset in the life of a partitioner.

    Args:
        partitioner: an object such as ``PathologicalPartitioner(10, partition_by="label", ...)``.
        pool: the rows.
        label: name the partitioner uses for the column of labels.
        group: name it uses for the column of groups, such as a natural id.
    """
    name = type(partitioner).__name__
    if partitioner.is_dataset_assigned():
        raise ValueError(f"partitioner {name} already has a dataset: make a fresh one")
    columns = {_ROW: np.arange(pool.rows), label: pool.labels}
    if pool.groups is not None:
        columns[group] = pool.groups
    partitioner.dataset = _dataset(columns)
    clients = []
    for client in range(int(partitioner.num_partitions)):
        part = partitioner.load_partition(client)
        if _ROW not in part.column_names:
            raise ValueError(f"partitioner {name} splits columns: use one that splits rows")
        clients.append(np.sort(np.asarray(part[_ROW], dtype=np.int64)))
    return Partition(tuple(clients), pool.rows)


def _dataset(columns: dict[str, Any]) -> Any:
    try:
        from datasets import Dataset  # type: ignore[import-not-found, unused-ignore]
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a Flower partitioner needs the package 'datasets': pip install 'fedbasin[flower]'"
        ) from error
    return Dataset.from_dict(columns)
