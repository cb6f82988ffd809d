"""FedJAX 0.0.17 on runs of the demo: one compiled `fed_avg` algorithm for all of them.

Its batches cross the ends of epochs, so a client takes no more steps than in fedbasin.
"""

import os

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import fedjax
import jax
import numpy as np
from fedjax.algorithms import fed_avg
from jax import numpy as jnp

from peers import demo


def outputs(weights, x):
    first, bias, second, last = weights
    return jax.nn.relu(x @ first.T + bias) @ second.T + last


def loss(weights, batch, rng):
    logits = jax.nn.log_softmax(outputs(weights, batch["x"]))
    return -jnp.take_along_axis(logits, batch["y"][:, None], 1).mean()


def prepared(work):
    settings = work.settings
    algorithm = fed_avg.federated_averaging(
        jax.grad(loss),
        fedjax.optimizers.sgd(settings.lr),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(
            batch_size=settings.batch, num_epochs=settings.epochs, drop_remainder=False
        ),
    )
    test, answers = jnp.asarray(work.test_inputs), jnp.asarray(work.test_labels.astype(np.int32))
    score = jax.jit(lambda weights: (outputs(weights, test).argmax(1) == answers).mean())

    def trained(run):
        clients = [
            fedjax.ClientDataset({"x": x, "y": y.astype(np.int32)})
            for x, y in zip(run.inputs, run.labels, strict=True)
        ]
        state = algorithm.init([jnp.asarray(part) for part in run.weights])
        rng = jax.random.PRNGKey(0)
        curve = []
        for cohort in run.cohorts:
            rng, use = jax.random.split(rng)
            keys = jax.random.split(use, len(cohort))
            chosen = [(int(i), clients[i], key) for i, key in zip(cohort, keys, strict=True)]
            state, _ = algorithm.apply(state, chosen)
            curve.append(float(score(state.params)))
        return curve

    return trained


if __name__ == "__main__":
    demo.serve(prepared)
