"""One federation after another, each method with all clients and with a sampled cohort."""

from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

import fedbasin.methods  # noqa: F401  (fills the catalogue)
from fedbasin.core.expressions import parse
from fedbasin.deploy import Records, first_arrays, strategy_of
from fedbasin.testing import toy_federation

app = ServerApp()
PARTICIPATION = ("fraction(rate=1.0)", "count(clients=3)")


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run them all; the folders are numbered."""
    methods = str(context.run_config["methods"]).split(";")
    for number, method in enumerate(methods):
        for share, participation in enumerate(PARTICIPATION):
            federation = toy_federation(
                parse(method, "method"), rounds=3, participation=participation
            )
            strategy = strategy_of(
                federation,
                seed=0,
                min_available_nodes=6,
                fraction_evaluate=0.0,
                records=Records(Path(str(context.run_config["folder"])) / f"{number}-{share}"),
            )
            strategy.start(grid, first_arrays(federation), num_rounds=3, timeout=300)
