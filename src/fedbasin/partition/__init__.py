"""Partitions: labels in, who holds which row out. NumPy only.

Every partition is a function ``(pool, clients, rng, *, its own arguments) -> Partition`` in the
catalogue, so ``dirichlet(alpha=0.1)`` is what a config file and the command line write. `pool`
holds the labels of the n rows (and their groups), `clients` is N, the number of clients that
share them, and `rng` the only source of randomness: same seed, same split.

>>> import numpy as np
>>> pool = Pool(labels=np.repeat(np.arange(10), 50), classes=10)
>>> split = dirichlet(pool, 5, np.random.default_rng(0), alpha=0.5)
>>> int(split.sizes().sum()), split.counts(pool.labels, pool.classes).shape
(500, (5, 10))
"""

from fedbasin.partition.by_class import (
    categorical_dirichlet,
    class_dirichlet,
    dirichlet,
    grouped_dirichlet,
    hybrid_dirichlet,
)
from fedbasin.partition.by_client import client_dirichlet, pachinko
from fedbasin.partition.by_group import domain_skew, natural
from fedbasin.partition.by_label import iid, quantity_skew, shards
from fedbasin.partition.by_target import quantiles, size_dirichlet
from fedbasin.partition.fedlab import fedlab_dirichlet, fedlab_shards
from fedbasin.partition.flower import from_flower
from fedbasin.partition.labels import exchange_labels
from fedbasin.partition.pool import Partition, Pool
from fedbasin.partition.tail import evened, longtail

__all__ = [
    "Partition",
    "Pool",
    "categorical_dirichlet",
    "class_dirichlet",
    "client_dirichlet",
    "dirichlet",
    "domain_skew",
    "evened",
    "exchange_labels",
    "fedlab_dirichlet",
    "fedlab_shards",
    "from_flower",
    "grouped_dirichlet",
    "hybrid_dirichlet",
    "iid",
    "longtail",
    "natural",
    "pachinko",
    "quantiles",
    "quantity_skew",
    "shards",
    "size_dirichlet",
]
