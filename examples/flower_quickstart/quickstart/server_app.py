"""The server of an ordinary Flower app: one line is fedbasin's, and its import."""

from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp

from fedbasin.deploy import FedbasinStrategy
from quickstart.task import Net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the federation."""
    arrays = ArrayRecord(Net().state_dict())

    # It was: strategy = FedAvg(fraction_evaluate=context.run_config["fraction-evaluate"])
    strategy = FedbasinStrategy(
        context.run_config["method"], fraction_evaluate=context.run_config["fraction-evaluate"]
    )

    result = strategy.start(
        grid=grid,
        initial_arrays=arrays,
        train_config=ConfigRecord({"lr": context.run_config["learning-rate"]}),
        num_rounds=context.run_config["num-server-rounds"],
    )
    Net().load_state_dict(result.arrays.to_torch_state_dict())
