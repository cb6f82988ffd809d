"""FedJAX 0.0.17: its `fed_avg` algorithm with compiled client steps, on one CPU thread."""

import importlib.metadata
import os

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import fedjax
import jax
import numpy as np
from fedjax.algorithms import fed_avg
from jax import lax
from jax import numpy as jnp

from peers import command, protocol
from peers.work import pixels


def convolution(x, kernel, bias):
    """Convolve images [B, H, W, C] with a kernel in torch's order."""
    made = lax.conv_general_dilated(
        x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "OIHW", "NHWC")
    )
    return jax.nn.relu(made + bias)


def pooled(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def flat(x):
    """Flatten in torch's order, so that the initial weights mean the same."""
    return x.transpose(0, 3, 1, 2).reshape(len(x), -1)


def dropped(x, p, rng):
    if rng is None:
        return x
    return jnp.where(jax.random.bernoulli(rng, 1 - p, x.shape), x / (1 - p), 0)


def fmnist_cnn(weights, x, rng):
    x = pooled(convolution(x, *weights[0:2]))
    x = flat(pooled(convolution(x, *weights[2:4])))
    for kernel, bias in (weights[4:6], weights[6:8]):
        x = jax.nn.relu(x @ kernel.T + bias)
    return x @ weights[8].T + weights[9]


def pfl_cnn(weights, x, rng):
    first, second = (None, None) if rng is None else jax.random.split(rng)
    x = convolution(convolution(x, *weights[0:2]), *weights[2:4])
    x = flat(dropped(pooled(x), 0.25, first))
    x = dropped(jax.nn.relu(x @ weights[4].T + weights[5]), 0.5, second)
    return x @ weights[6].T + weights[7]


def logistic(weights, x, rng):
    return flat(x) @ weights[0].T + weights[1]


NETWORKS = {"fmnist_cnn": fmnist_cnn, "pfl_cnn": pfl_cnn, "logistic": logistic}


class Jitted:
    """Rounds of FedJAX's federated averaging."""

    def __init__(self, work, options):
        shape, net = work.shape, NETWORKS[work.shape.model]

        def loss(weights, batch, rng):
            logits = jax.nn.log_softmax(net(weights, batch["x"], rng))
            return -jnp.take_along_axis(logits, batch["y"][:, None], 1).mean()

        def images(raw):
            return np.ascontiguousarray(np.moveaxis(pixels(raw), -3, -1))

        self.algorithm = fed_avg.federated_averaging(
            jax.grad(loss),
            fedjax.optimizers.sgd(shape.lr, shape.momentum or None),
            fedjax.optimizers.sgd(1.0),
            fedjax.ShuffleRepeatBatchHParams(
                batch_size=shape.batch, num_epochs=1, drop_remainder=False
            ),
        )
        self.clients = [
            fedjax.ClientDataset({"x": images(x), "y": y.astype(np.int32)})
            for x, y in zip(work.inputs, work.labels, strict=True)
        ]
        self.state = self.algorithm.init([jnp.asarray(part) for part in work.weights])
        self.test, self.answers = images(work.test_inputs), work.test_labels
        self.score = jax.jit(lambda weights, x: net(weights, x, None).argmax(1))
        self.cohorts, self.done, self.rng = work.cohorts, 0, jax.random.PRNGKey(0)
        names = ("fedjax", "jax")
        self.facts = {name: importlib.metadata.version(name) for name in names}

    def rounds(self, count):
        for _ in range(count):
            cohort = self.cohorts[self.done % len(self.cohorts)]
            self.rng, use = jax.random.split(self.rng)
            keys = jax.random.split(use, len(cohort))
            chosen = [(int(i), self.clients[i], key) for i, key in zip(cohort, keys, strict=True)]
            self.state, _ = self.algorithm.apply(self.state, chosen)
            self.done += 1
        jax.block_until_ready(self.state.params)

    def accuracy(self):
        parts = np.array_split(np.arange(len(self.test)), max(len(self.test) // 1000, 1))
        found = [np.asarray(self.score(self.state.params, self.test[part])) for part in parts]
        return float((np.concatenate(found) == self.answers).mean())


if __name__ == "__main__":
    protocol.serve(lambda: Jitted(*command.read()))
