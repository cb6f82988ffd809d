"""A task and a metric of your own: numbers with a log-cosh loss, and the share of close answers.

    python examples/own_task.py
    cd examples && fedbasin compare fedavg scaffold --set task=own_task.log_cosh \\
        --set data.name=diabetes --set partition.how=iid
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from torch.nn.functional import softplus

from fedbasin import DataConfig, Experiment, PartitionConfig, SimConfig, run
from fedbasin.core.catalogue import entry
from fedbasin.core.task import RowTask


@entry("task", name="log_cosh")
@dataclass(frozen=True)
class LogCosh(RowTask):
    """Numbers with the loss log cosh(error): squared near 0, absolute far away."""

    kind: ClassVar[str] = "numbers"  # mae, rmse and r2 fit
    usual_metrics: ClassVar[tuple[str, ...]] = ("close", "rmse", "loss")  # headline first

    def outputs(self, targets):
        """One output a column."""
        return targets.columns

    def each(self, outputs, targets):
        """Return log cosh of every error, in a form that does not overflow."""
        gap = targets.reshape(outputs.shape) - outputs
        return (gap + softplus(-2 * gap) - math.log(2)).mean(1)


@entry("metric")
def close(outputs, targets):
    """The share of rows that are predicted within half a standard deviation."""
    return (outputs[:, 0] - targets.reshape(-1)).abs() < 0.5


close.unit = "%"  # and close.higher_is_better = False, were less better


def main(out="runs/own_task", rounds=20):
    """Train on scikit-learn's diabetes data."""
    data = DataConfig(name="diabetes")
    split = PartitionConfig(how="iid", clients=5)
    sim = SimConfig(participation="fraction(rate=1)", metrics=("mae",))
    experiment = Experiment(task="log_cosh", rounds=rounds, data=data, partition=split, sim=sim)
    summary = run(experiment, out)
    print(f"close: {100 * summary['close_mean_last10']:.1f} %, rmse {summary['rmse_last']:.3f}")
    return summary


if __name__ == "__main__":
    main()
