"""The loop everyone writes first: load the global weights, train, add up, divide."""

import torch
from torch import nn

from peers import command, networks, protocol
from peers.work import pixels


class Plain:
    """Clients one after another with `torch.optim.SGD`."""

    def __init__(self, work, options):
        networks.prepare(options.device)
        self.shape, self.device, self.work = work.shape, options.device, work
        self.net = networks.network(work, self.device)
        self.server = [p.detach().clone() for p in self.net.parameters()]
        self.inputs = torch.from_numpy(pixels(work.inputs)).to(self.device)
        self.labels = torch.from_numpy(work.labels).to(self.device)
        self.test = [
            torch.from_numpy(part).to(self.device)
            for part in (pixels(work.test_inputs), work.test_labels)
        ]
        self.done, self.generator = 0, torch.Generator().manual_seed(0)
        self.facts = {"torch": torch.__version__}

    def rounds(self, count):
        for _ in range(count):
            cohort = self.work.cohorts[self.done % len(self.work.cohorts)]
            total = [torch.zeros_like(p) for p in self.server]
            for client in cohort:
                self.train(client)
                for part, parameter in zip(total, self.net.parameters(), strict=True):
                    part += parameter.detach()
            self.server = [part / len(cohort) for part in total]
            self.done += 1
        networks.synchronise(self.device)

    def train(self, client):
        self.load()
        optimiser = torch.optim.SGD(
            self.net.parameters(), lr=self.shape.lr, momentum=self.shape.momentum
        )
        order = torch.randperm(self.shape.rows, generator=self.generator).to(self.device)
        for rows in order.split(self.shape.batch):
            optimiser.zero_grad()
            logits = self.net(self.inputs[client][rows])
            nn.functional.cross_entropy(logits, self.labels[client][rows]).backward()
            optimiser.step()

    @torch.no_grad()
    def load(self):
        for parameter, part in zip(self.net.parameters(), self.server, strict=True):
            parameter.copy_(part)

    def accuracy(self):
        self.load()
        return networks.score(self.net, *self.test)


if __name__ == "__main__":
    protocol.serve(lambda: Plain(*command.read()))
