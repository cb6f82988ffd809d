"""What a round costs the server: memory that does not grow with the cohort."""

from __future__ import annotations

from uuid import uuid4

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra fedbasin[flower]")

from counting import allocated
from deploy.grids import LocalGrid
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedbasin.deploy import FedbasinStrategy

PARTS = 40  # of a model of 16 MB
PART = 100_000
SIZE = PARTS * PART


def model(value):
    return ArrayRecord({f"{n}": Array(np.full(PART, value, np.float32)) for n in range(PARTS)})


class Crowd(LocalGrid):
    """Many clients whose models come into being when they are pulled."""

    def push_messages(self, messages):
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(uuid4())
            self._inbox[message.metadata.message_id] = message

    def pull_messages(self, message_ids):
        for message_id in message_ids:
            message = self._inbox.pop(message_id, None)
            if message is None:
                return []
            node = message.metadata.dst_node_id
            if message.metadata.message_type == "query":
                reply = Message(Error(2, "no query"), reply_to=message)
            else:
                arrays = model(float(self.client(node)))
                metrics = MetricRecord({"num-examples": 1 + self.client(node)})
                content = RecordDict({"arrays": arrays, "metrics": metrics})
                reply = Message(content, reply_to=message)
            reply.metadata.__dict__["_src_node_id"] = node
            return [reply]
        return []


def most_held(clients):
    """Run a round; return how many models the server held in memory at once."""
    grid = Crowd(ClientApp(), clients)
    strategy = FedbasinStrategy("fedavg", fraction_evaluate=0.0)
    start = model(0.0)
    with allocated() as memory:
        result = strategy.start(grid, start, num_rounds=1, timeout=60)
    weights = torch.arange(1, clients + 1, dtype=torch.float64)
    expected = float((weights * (weights - 1)).sum() / weights.sum())
    for found in result.arrays.to_torch_state_dict().values():
        torch.testing.assert_close(found, torch.full((PART,), expected), rtol=1e-4, atol=1e-3)
    assert strategy._cohort.collector.stream == "samples"
    assert strategy.journal.records[0].replies == clients
    return memory.most / (4 * SIZE)


def test_replies_are_averaged_in_memory_that_does_not_grow_with_the_cohort():
    """Twenty clients are enough to average as replies arrive; forty take no more."""
    few = most_held(20)
    assert few < 7.5  # with what is sent, and what Flower makes of it
    assert most_held(40) < few + 0.5
