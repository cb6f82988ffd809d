"""A federation in plain NumPy: softmax regression, one client after another, no fedbasin maths.

Only the draws (cohorts, batches) are taken from fedbasin, so that both sides see the same.
"""

import numpy as np
import torch
from torch import nn

from fedbasin.core.expressions import parse
from fedbasin.local.batches import batches
from fedbasin.sim.loop import client_key
from fedbasin.sim.participation import draw_cohort
from fedbasin.testing import LAWS, check_method, toy_federation


def linear_federation(method, **settings):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Linear(4, 3)
    return toy_federation(method, module=module, **settings)


class NumpyClients:
    """Data, cohorts and gradients of a linear federation as NumPy arrays."""

    def __init__(self, federation):
        self.federation = federation
        self.population = federation.population
        self.start = federation.net.initial()[0].numpy()
        self.sizes = self.population.sizes
        self.count = len(self.sizes)

    def rows(self, client):
        shard = self.population.shard(client)
        return shard.inputs.numpy() / 255, shard.labels.numpy()

    def gradient(self, vector, inputs, labels):
        """Gradient of the mean cross-entropy of ``inputs @ W.T + b``; vector = (W, b)."""
        weight, bias = vector[:12].reshape(3, 4), vector[12:]
        logits = inputs @ weight.T + bias
        share = np.exp(logits - logits.max(1, keepdims=True))
        share /= share.sum(1, keepdims=True)
        share[np.arange(len(labels)), labels] -= 1
        share /= len(labels)
        return np.concatenate([(share.T @ inputs).reshape(-1), share.sum(0)])

    def loss(self, vector, inputs, labels):
        """Mean cross-entropy of ``inputs @ W.T + b``."""
        logits = inputs @ vector[:12].reshape(3, 4).T + vector[12:]
        return np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(len(labels)), labels])

    def cohort(self, round):
        f = self.federation
        return draw_cohort(f.participation, f.eligible, f.key, round).tolist()

    def steps(self, round, client):
        """Yield the rows of every local step."""
        plan = self.federation.schedule(round)
        inputs, labels = self.rows(client)
        key = client_key(self.federation.key, round, client).tensor()
        size = self.federation.trainer.batch
        for index in batches(key, plan, len(labels), size):
            yield inputs[index.numpy()], labels[index.numpy()]

    def descend(self, round, client, start, direction, sgd=None):
        """SGD from `start` along ``direction(v, inputs, labels)``; return the end and the steps."""
        v, speed, count = start.copy(), np.zeros_like(start), 0
        rho, decay = (sgd.momentum, sgd.weight_decay) if sgd else (0.0, 0.0)
        for inputs, labels in self.steps(round, client):
            speed = rho * speed + direction(v, inputs, labels) + decay * v
            v = v - self.lr(round) * speed
            count += 1
        return v, count

    def mean(self, vectors, clients, weighting):
        """Mean over some clients, by their rows or one vote each."""
        sizes = self.sizes[list(clients)] if weighting == "samples" else None
        return np.average(vectors, axis=0, weights=sizes)

    def lr(self, round):
        return self.federation.schedule(round).lr

    def sgd(self, round, server, *, momentum=0.0, decay=0.0, mu=0.0):
        """Train a cohort by plain SGD: models [C, P], sample counts [C] and steps [C]."""
        ends, sizes, steps = [], [], []
        for client in self.cohort(round):
            v, speed, k = server.copy(), np.zeros_like(server), 0
            for inputs, labels in self.steps(round, client):
                g = self.gradient(v, inputs, labels) + mu * (v - server)
                speed = momentum * speed + g + decay * v
                v, k = v - self.lr(round) * speed, k + 1
            ends.append(v)
            sizes.append(self.sizes[client])
            steps.append(k)
        return np.array(ends), np.array(sizes, dtype=float), np.array(steps)


def models(federation):
    """The models a federation sends, round by round."""
    server, states = federation.begin()
    return [s.send.numpy() for s, _ in federation.rounds_from(server, states)]


def rounds_of(federation):
    """Yield the server, its record and the clients' states after each round."""
    server, states = federation.begin()
    for after, record in federation.rounds_from(server, states):
        yield after, record, states


def close(ours, theirs, tolerance=1e-9):
    np.testing.assert_allclose(
        np.asarray(ours), np.asarray(theirs), rtol=tolerance, atol=tolerance * 1e-3
    )


def same_models(a, b, tolerance=1e-12):
    """Two methods send the same models, round by round."""
    for ours, theirs in zip(models(a), models(b), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)


def unit(vector):
    return vector / np.linalg.norm(vector)


def check_composed(source):
    """The laws that a wrapper or a further rule could break."""
    words = ("resume", "cohort", "payload", "text")
    laws = [law for law in LAWS if any(word in law.__name__ for word in words)]
    assert len(laws) == 4
    check_method(parse(source, "method"), laws)
