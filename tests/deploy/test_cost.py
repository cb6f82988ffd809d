"""What a round costs the server: memory that does not grow with the cohort."""

from __future__ import annotations

from contextlib import ExitStack
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
CLIENTS = 40
SIZE = PARTS * PART


def model(value):
    return ArrayRecord({f"{n}": Array(np.full(PART, value, np.float32)) for n in range(PARTS)})


class Crowd(LocalGrid):
    """Many clients whose models come into being when they are pulled.

    From the first one on, what is held in memory is counted.
    """

    counting = None
    memory = None

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
                if self.memory is None:
                    self.memory = self.counting.enter_context(allocated())
                arrays = model(float(self.client(node)))
                metrics = MetricRecord({"num-examples": 1 + self.client(node)})
                content = RecordDict({"arrays": arrays, "metrics": metrics})
                reply = Message(content, reply_to=message)
            reply.metadata.__dict__["_src_node_id"] = node
            return [reply]
        return []


def test_replies_are_averaged_within_three_models_of_memory():
    grid = Crowd(ClientApp(), CLIENTS)

    class Measured(FedbasinStrategy):
        def aggregate_train(self, server_round, replies):
            with ExitStack() as grid.counting:
                return super().aggregate_train(server_round, replies)

    strategy = Measured("fedavg", fraction_evaluate=0.0)
    result = strategy.start(grid, model(0.0), num_rounds=1, timeout=60)
    weights = torch.arange(1, CLIENTS + 1, dtype=torch.float64)
    expected = float((weights * (weights - 1)).sum() / weights.sum())
    for found in result.arrays.to_torch_state_dict().values():
        torch.testing.assert_close(found, torch.full((PART,), expected), rtol=1e-4, atol=1e-3)
    assert strategy._cohort.collector.stream == "samples"
    held = grid.memory.most / (4 * SIZE)
    assert held < 3.5, held  # the cohort would be forty
    assert strategy.journal.records[0].replies == CLIENTS
