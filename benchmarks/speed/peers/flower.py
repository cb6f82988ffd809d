"""Flower 1.41.0: its simulation on Ray, one processor for each client at a time.

Flower draws its cohorts itself (they cannot be given, and do not follow a seed).
"""

import importlib.metadata
import os
import sys

os.environ.update(
    FLWR_TELEMETRY_ENABLED="0",
    FLWR_DISABLE_UPDATE_CHECK="1",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_DISABLE_DOCKER_CPU_WARNING="1",
    RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
)

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from peers import command, flower_client, networks, protocol
from peers.work import pixels


class Simulation:
    """Rounds of Flower's FedAvg; a block of rounds is one `start` of the strategy."""

    def __init__(self, grid, work):
        torch.set_num_threads(1)
        self.grid, shape = grid, work.shape
        self.net = networks.network(work)
        self.arrays = ArrayRecord(self.net.state_dict())
        self.strategy = FedAvg(
            fraction_train=shape.cohort / shape.clients,
            fraction_evaluate=0.0,
            min_available_nodes=shape.clients,
        )
        self.test = [torch.from_numpy(p) for p in (pixels(work.test_inputs), work.test_labels)]
        names = ("flwr", "ray", "torch")
        self.facts = {name: importlib.metadata.version(name) for name in names}

    def rounds(self, count):
        if count:
            self.arrays = self.strategy.start(self.grid, self.arrays, num_rounds=count).arrays

    def accuracy(self):
        self.net.load_state_dict(self.arrays.to_torch_state_dict())
        return networks.score(self.net, *self.test)


def main() -> None:
    work, options = command.read()
    path, rows = sys.argv[1], work.shape.rows
    server, client = ServerApp(), ClientApp()

    @client.train()
    def train(message, context):
        state = flower_client.train(
            path,
            int(context.node_config["partition-id"]),
            message.content["arrays"].to_torch_state_dict(),
        )
        content = RecordDict(
            {"arrays": ArrayRecord(state), "metrics": MetricRecord({"num-examples": rows})}
        )
        return Message(content=content, reply_to=message)

    @server.main()
    def serve(grid, context):
        protocol.serve(lambda: Simulation(grid, work))

    run_simulation(
        server,
        client,
        num_supernodes=work.shape.clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": options.processes, "include_dashboard": False},
        },
    )


if __name__ == "__main__":
    main()
