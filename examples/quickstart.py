"""Compare three ways of merging on the digits images: half a minute on a CPU.

python examples/quickstart.py
"""

from fedbasin import Experiment, LocalConfig, PartitionConfig, SimConfig, compare

base = Experiment(
    model="mlp(widths=(64,))",
    rounds=40,
    partition=PartitionConfig(how="dirichlet(alpha=0.1, minimum=2)", clients=50),
    local=LocalConfig(lr=0.1, epochs=5, batch=10),
    sim=SimConfig(participation="fraction(rate=0.1)"),
)
methods = ["fedavg", "wima(fedavg, window=10)", "scaffold"]

if __name__ == "__main__":
    for summary in compare(base, methods, seeds=[0], out="runs/quickstart"):
        print(f"{summary['method']:25} {100 * summary['accuracy_mean_last10']:.2f} %")
