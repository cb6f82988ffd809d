"""The toy network of `fedbasin.testing` in plain NumPy, with its gradient by hand.

Four inputs, five tanh features, a linear head of three classes; no fedbasin maths.
"""

import numpy as np
from methods.numpy_clients import NumpyClients

PARTS = ((5, 4), (5,), (3, 5), (3,))  # hidden weight and bias, head weight and bias


def parts(vector):
    found, done = [], 0
    for shape in PARTS:
        size = int(np.prod(shape))
        found.append(vector[done : done + size].reshape(shape))
        done += size
    return found


def flat(*tensors):
    return np.concatenate([np.asarray(t).reshape(-1) for t in tensors])


def forward(vector, inputs):
    """Return features and logits."""
    weight, bias, head, shift = parts(vector)
    features = np.tanh(inputs @ weight.T + bias)
    return features, features @ head.T + shift


def backward(vector, inputs, by_logits, by_features=0.0):
    """Return the gradient of a loss from its slopes in logits [B, 3] and (beside) features."""
    _, _, head, _ = parts(vector)
    features, _ = forward(vector, inputs)
    slope = (by_logits @ head + by_features) * (1 - features**2)
    return flat(slope.T @ inputs, slope.sum(0), by_logits.T @ features, by_logits.sum(0))


def softmax(logits):
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def one_hot(labels):
    return np.eye(3)[labels]


class NumpyNetworkClients(NumpyClients):
    """The clients of a toy federation with the default network."""

    def counts(self, client):
        return np.bincount(self.rows(client)[1], minlength=3)

    def gradient(self, vector, inputs, labels):
        _, logits = forward(vector, inputs)
        return backward(vector, inputs, (softmax(logits) - one_hot(labels)) / len(labels))
