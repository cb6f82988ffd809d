"""FedLab 1.3.0: its standalone pipeline with the serial FedAvg trainer."""

import importlib.metadata
import sys
from types import ModuleType

import torch

from peers import command, networks, protocol
from peers.work import pixels


def without_torchvision() -> None:
    """Let FedLab import its datasets, which are not used here, where torchvision is missing.

    Beside a CPU build of torch, pip offers only a torchvision that is built for CUDA and fails.
    """
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        names = ("torchvision", "torchvision.transforms", "torchvision.datasets")
        stubs = {name: ModuleType(name) for name in names}
        stubs["torchvision"].transforms = stubs["torchvision.transforms"]
        stubs["torchvision"].datasets = stubs["torchvision.datasets"]
        for name in ("MNIST", "CIFAR10", "CIFAR100"):
            setattr(stubs["torchvision.datasets"], name, object)
        sys.modules.update(stubs)


class Serial:
    """One round is one turn of FedLab's `StandalonePipeline.main`."""

    def __init__(self, work, options):
        networks.prepare(options.device)
        without_torchvision()
        from fedlab.contrib.algorithm.fedavg import FedAvgSerialClientTrainer, FedAvgServerHandler

        shape, self.device, self.work, self.done = work.shape, options.device, work, 0
        inputs = torch.from_numpy(pixels(work.inputs)).to(self.device)
        labels = torch.from_numpy(work.labels).to(self.device)
        self.test = [
            torch.from_numpy(part).to(self.device)
            for part in (pixels(work.test_inputs), work.test_labels)
        ]
        generator = torch.Generator().manual_seed(0)

        class Rows:
            """The loader FedLab asks for: batches that are cut from the device's rows."""

            def get_dataloader(self, client, batch):
                order = torch.randperm(shape.rows, generator=generator).to(inputs.device)
                return [(inputs[client][part], labels[client][part]) for part in order.split(batch)]

        class Trainer(FedAvgSerialClientTrainer):
            """FedLab's trainer has no momentum: a fresh optimiser for every client has."""

            def train(self, model_parameters, train_loader):
                if shape.momentum:
                    self.optimizer = torch.optim.SGD(
                        self._model.parameters(), self.lr, momentum=shape.momentum
                    )
                return super().train(model_parameters, train_loader)

        cuda = self.device.startswith("cuda")
        where = {"cuda": cuda, "device": "cuda:0" if cuda else None}
        net = networks.network(work, self.device)
        self.trainer = Trainer(net, shape.clients, **where)
        self.trainer.setup_dataset(Rows())
        self.trainer.setup_optim(1, shape.batch, shape.lr)
        share = shape.cohort / shape.clients
        self.handler = FedAvgServerHandler(net, 1_000_000, share, **where)
        self.handler.num_clients = shape.clients
        self.facts = {"torch": torch.__version__, "fedlab": importlib.metadata.version("fedlab")}

    def rounds(self, count):
        for _ in range(count):
            cohort = self.work.cohorts[self.done % len(self.work.cohorts)]
            self.trainer.local_process(self.handler.downlink_package, cohort)
            for package in self.trainer.uplink_package:
                self.handler.load(package)
            self.done += 1
        networks.synchronise(self.device)

    def accuracy(self):
        return networks.score(self.handler.model, *self.test)


if __name__ == "__main__":
    protocol.serve(lambda: Serial(*command.read()))
