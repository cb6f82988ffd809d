"""FedLab 1.3.0 on runs of the demo: its standalone pipeline with the serial FedAvg trainer.

FedLab's mean is uniform over clients; fedbasin's counts their rows.
"""

import torch
from torch import nn

from peers import demo
from peers.fedlab_serial import without_torchvision


class Batches:
    """A client's rows in batches, shuffled anew in every epoch."""

    def __init__(self, inputs, labels, batch):
        self.inputs, self.labels, self.batch = inputs, labels, batch

    def __iter__(self):
        for part in torch.randperm(len(self.labels)).split(self.batch):
            yield self.inputs[part], self.labels[part]


class Rows:
    """The dataset FedLab asks for a client's loader."""

    def __init__(self, run):
        self.inputs = [torch.from_numpy(each) for each in run.inputs]
        self.labels = [torch.from_numpy(each) for each in run.labels]

    def get_dataloader(self, client, batch):
        return Batches(self.inputs[client], self.labels[client], batch)


def prepared(work):
    torch.set_num_threads(1)
    without_torchvision()
    from fedlab.contrib.algorithm.fedavg import FedAvgSerialClientTrainer, FedAvgServerHandler

    settings = work.settings
    test, answers = torch.from_numpy(work.test_inputs), torch.from_numpy(work.test_labels)

    def trained(run):
        net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        with torch.no_grad():
            for parameter, values in zip(net.parameters(), run.weights, strict=True):
                parameter.copy_(torch.from_numpy(values))
        clients = len(run.labels)
        trainer = FedAvgSerialClientTrainer(net, clients)
        trainer.setup_dataset(Rows(run))
        trainer.setup_optim(settings.epochs, settings.batch, settings.lr)
        handler = FedAvgServerHandler(net, settings.rounds, len(run.cohorts[0]) / clients)
        handler.num_clients = clients
        curve = []
        for cohort in run.cohorts:
            trainer.local_process(handler.downlink_package, [int(client) for client in cohort])
            for package in trainer.uplink_package:
                handler.load(package)
            with torch.no_grad():
                right = handler.model(test).argmax(1) == answers
            curve.append(float(right.float().mean()))
        return curve

    return trained


if __name__ == "__main__":
    demo.serve(prepared)
