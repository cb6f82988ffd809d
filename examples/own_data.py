"""Data and networks of your own: arrays, a module with BatchNorm and Dropout, a transformer.

python examples/own_data.py
"""

import numpy as np
from torch import nn

import fedbasin as fb


def make_signals(rng, count=1500):
    """Return signals [n, 12, 2], the kind of each, and which of 6 devices recorded it."""
    kinds, devices = rng.integers(0, 3, count), rng.integers(0, 6, count)
    time = np.arange(12)[None, :, None] * (1 + kinds)[:, None, None] / 2
    waves = np.sin(time + np.array([0, 1])) * (1 + devices / 5)[:, None, None]
    return waves + rng.normal(size=waves.shape), kinds, devices


def dense(shape, outputs):
    """Return a network with BatchNorm and Dropout."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(shape[0] * shape[1], 32),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(32, outputs),
    )


def attentive(shape, outputs):
    """Return a small transformer encoder over the steps of a signal."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    head = nn.Linear(shape[0] * 16, outputs)
    return nn.Sequential(nn.Linear(shape[1], 16), encoder, nn.Flatten(), head)


def main(out="runs/own_data", rounds=10, networks=(dense, attentive)):
    """Compare two methods with each network."""
    signals, kinds, devices = make_signals(np.random.default_rng(0))
    data = fb.data.from_arrays(signals, kinds, clients=devices)
    results = []
    for network in networks:
        result = fb.compare(
            data, ["fedavg", fb.scaffold()], seeds=[0], model=network, rounds=rounds,
            out=f"{out}/{network.__name__}", jobs=1,
        )  # fmt: skip
        print(f"{network.__name__}:\n{result}")
        results.append(result)
    return results


if __name__ == "__main__":
    main()
