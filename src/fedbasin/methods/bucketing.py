r"""Bucketing: average replies in small random groups before a robust rule sees them.

    shuffle the replies, put them in ceil(n / s) buckets of s (the last may be smaller)
    reply of a bucket = the plain mean of its members
    w+ = inner(w, buckets)

On non-IID data an honest update looks hostile because few others resemble it; the mean of s of
them is closer to the others. The inner rule still meets as many hostile rows as before among fewer
rows: its share `hostile` grows by s.

The members' reports (SCAFFOLD's variates) and BatchNorm statistics are averaged by the same
buckets. A bucket has the mean of its members' sample counts, and the id of its member of lowest id.

Departures from the paper: none known. Methods that count clients see buckets: SCAFFOLD moves c by
1/N for each bucket.
Cost: none for clients. Server: a copy of ceil(n / s) models a round, no memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedbasin.core.bounds import at_least
from fedbasin.core.catalogue import entry
from fedbasin.core.method import Context, Method, Replies, Served, Wrapped, Wrapper
from fedbasin.core.protocols import MergesStatistics, merge_statistics
from fedbasin.core.tree import mapped
from fedbasin.methods.fedavg import FedAvg


@entry(
    "method",
    paper="Karimireddy et al., ICLR 2022",
    url="https://arxiv.org/abs/2006.09365",
    is_fedavg_when={"size": 1},
    tunable="nothing: the size of buckets says how many hostile clients are borne",
)
@dataclass(frozen=True)
class Bucketing(MergesStatistics, Wrapper):
    """Average replies in random buckets before any method merges them.

    Args:
        inner: the method that merges the buckets, such as ``krum(hostile=0.4)``.
        size: s, how many replies are in a bucket; 1 is the inner method.
    """

    inner: Method = field(default_factory=FedAvg)
    size: int = at_least(1, default=2)

    def aggregate(
        self, state: Wrapped, server: Tensor, replies: Replies, context: Context
    ) -> tuple[Served, Wrapped]:
        """Merge the buckets with the inner method."""
        together = _averaged(replies, self._buckets(replies, context))
        served, inner = self.inner.aggregate(state.inner, server, together, context)
        return served, Wrapped((), inner)

    def merge_statistics(self, before: Tensor, replies: Replies, context: Context) -> Tensor:
        """Average the statistics by the same buckets, then merge them as the inner method does."""
        together = _averaged(replies, self._buckets(replies, context))
        return merge_statistics(self.inner, before, together, context)

    def streams(self) -> None:
        """Every reply counts."""
        return None

    def _buckets(self, replies: Replies, context: Context) -> list[Tensor]:
        """Return the places of each bucket's members, the same for the same clients."""
        order = replies.clients.argsort()
        order = order[replies.weights[order] > 0]
        shuffled = context.key.fold("bucketing").numpy().permutation(len(order))
        places = order[torch.from_numpy(shuffled).to(order.device)]
        return list(places.split(self.size))


def _means(column: Tensor, buckets: list[Tensor]) -> Tensor:
    """Return the mean of each bucket's rows; of whole numbers, its first member's."""
    if not column.is_floating_point():
        return column[torch.stack([bucket[0] for bucket in buckets])]
    return torch.stack([column[bucket].mean(0) for bucket in buckets])


def _averaged(replies: Replies, buckets: list[Tensor]) -> Replies:
    """Return one reply for each bucket."""
    clients = torch.stack([replies.clients[bucket].min() for bucket in buckets])
    return replace(mapped(lambda column: _means(column, buckets), replies), clients=clients)
