"""The server of the smallest app."""

from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp

from fedbasin.deploy import FedbasinStrategy, Handling, Records, Secure
from lean.client_app import model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds, or those that are left."""
    settings = context.run_config
    secure = Secure(clip=1.0, rows=100, threshold=0.5) if settings["secure"] else None
    strategy = FedbasinStrategy(
        settings["method"],
        records=Records(settings["folder"] or None),
        min_train_nodes=settings["min-replies"],
        min_available_nodes=settings["min-nodes"],
        fraction_evaluate=0.0,
        handling=Handling(patience=300.0),
        secure=secure,
    )
    strategy.start(
        grid,
        ArrayRecord(model().state_dict()),
        num_rounds=settings["rounds"],
        timeout=settings["timeout"],
        train_config=ConfigRecord({"lr": 0.1}),
    )
