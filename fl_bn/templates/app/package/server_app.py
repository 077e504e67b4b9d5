"""Define the server's part: run the rounds, and print the metrics."""

from flwr.app import ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp

from fl_bn.flower import FBN

from .task import Net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds, and print loss and accuracy."""
    config = context.run_config
    strategy = FBN(Net())
    result = strategy.start(grid, num_rounds=config["num-server-rounds"], train_config=ConfigRecord({"lr": config["lr"]}))
    for number, metrics in result.evaluate_metrics_clientapp.items():
        print(f"round {number}: loss {metrics['loss']:.3f}, accuracy {100 * metrics['accuracy']:.1f} %")
