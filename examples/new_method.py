"""A method of your own: the coordinate-wise median of the clients' models.

    python examples/new_method.py
    cd examples && fedbasin compare fedavg new_method.my_median --preset demo

Copy this to ``src/fedbasin/methods/`` to make it part of the library. The laws that every method
obeys are checked first; the one it cannot obey is named on its card, with the reason.
"""

from dataclasses import dataclass

import torch

from fedbasin import Experiment, run
from fedbasin.core.catalogue import entry
from fedbasin.core.method import Method, Served
from fedbasin.testing import check_method


@entry(
    "method",
    name="my_median",
    paper="Yin et al., ICML 2018",
    url="https://arxiv.org/abs/1803.01498",
    is_fedavg_when="never: a median is not a mean",
)
@dataclass(frozen=True)
class MyMedian(Method):
    """Coordinate-wise median: w+ = median_i y_i, over clients that hold data."""

    def aggregate(self, state, server, replies, context):
        """Take the median of each coordinate."""
        middle = replies.models[replies.weights > 0].quantile(0.5, dim=0)
        return Served(send=middle, score=middle), state


def main(out="runs/my_median", rounds=30):
    """Check the laws, then train."""
    check_method(MyMedian())
    summary = run(Experiment(method="my_median", model="mlp(widths=(64,))", rounds=rounds), out)
    print(f"my_median: {100 * summary['accuracy_mean_last10']:.2f} %")
    return summary


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
