"""The plain loop tuned by hand: channels last, freed memory kept, clients shared out to processes.

What a careful user gets from PyTorch alone on a CPU; the bar for an engine. The allocator's
settings must stand in the environment before a process starts, so the script starts itself again.
"""

import os
import sys

import numpy as np
import torch
from torch import multiprocessing as mp

from peers import command, networks, plain, protocol

ALLOCATOR = {
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(1 << 26),
}


class Loop(plain.Plain):
    """The plain loop with its network and rows in channels-last order."""

    def __init__(self, work, options):
        super().__init__(work, options)
        self.net = self.net.to(memory_format=torch.channels_last)

    def train(self, client):
        self.load()
        optimiser = torch.optim.SGD(
            self.net.parameters(), lr=self.shape.lr, momentum=self.shape.momentum
        )
        order = torch.randperm(self.shape.rows, generator=self.generator)
        for rows in order.split(self.shape.batch):
            inputs = self.inputs[client][rows].to(memory_format=torch.channels_last)
            logits = self.net(inputs)
            torch.nn.functional.cross_entropy(logits, self.labels[client][rows]).backward()
            optimiser.step()
            optimiser.zero_grad()

    def summed(self, clients):
        """Train clients and return the sum of their models as one vector."""
        total = torch.zeros(sum(p.numel() for p in self.server))
        for client in clients:
            self.train(client)
            total += torch.cat([p.detach().reshape(-1) for p in self.net.parameters()])
        return total

    def take(self, vector):
        """Make a vector the server's model."""
        parts = vector.split([p.numel() for p in self.server])
        self.server = [part.view(p.shape) for part, p in zip(parts, self.server, strict=True)]


def follow(pipe, model, total, options):
    """Train a share of every cohort, in a process of its own."""
    loop = Loop(*options)
    while (clients := pipe.recv()) is not None:
        loop.take(model.clone())
        total.copy_(loop.summed(clients))
        pipe.send(True)


class Tuned(Loop):
    """Rounds in one process, or in several with the model and its sums in shared memory."""

    def __init__(self, work, options):
        super().__init__(work, options)
        size = sum(p.numel() for p in self.server)
        self.model, self.pipes = torch.empty(size).share_memory_(), []
        self.totals = [torch.empty(size).share_memory_() for _ in range(options.processes - 1)]
        spawned = mp.get_context("spawn")
        for total in self.totals:
            ours, theirs = spawned.Pipe()
            spawned.Process(
                target=follow, args=(theirs, self.model, total, (work, options)), daemon=True
            ).start()
            self.pipes.append(ours)

    def rounds(self, count):
        for _ in range(count):
            cohort = self.work.cohorts[self.done % len(self.work.cohorts)]
            mine, *others = np.array_split(cohort, len(self.pipes) + 1)
            self.model.copy_(torch.cat([p.reshape(-1) for p in self.server]))
            for pipe, share in zip(self.pipes, others, strict=True):
                pipe.send(share)
            total = self.summed(mine)
            for pipe, part in zip(self.pipes, self.totals, strict=True):
                pipe.recv()
                total += part
            self.take(total / len(cohort))
            self.done += 1
        networks.synchronise(self.device)


if __name__ == "__main__":
    if not set(ALLOCATOR) <= set(os.environ):
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **ALLOCATOR})
    protocol.serve(lambda: Tuned(*command.read()))
